"""``element_spec`` computes one element, here, and changes nothing."""

import os
import subprocess
import sys

import numpy as np
import pytest

from dataservice import ArraySpec, Dataset, distribute, service_status
from dataservice.dataset import processes

SCALAR = ArraySpec((), np.int64)
STEPS = {
    "map": lambda d: d.map(lambda x: x + 100),
    "map behind batch": lambda d: d.batch(2).map(lambda x: x[0]),
    "map behind skip": lambda d: d.skip(1).map(lambda x: x),
    "map behind zip": lambda d: Dataset.zip((d, d)).map(lambda x, y: x),
    "map behind concatenate": lambda d: d.concatenate(d).map(lambda x: x),
    "flat_map": lambda d: d.flat_map(lambda x: Dataset.range(3)),
    "interleave": lambda d: d.interleave(lambda x: Dataset.range(3), cycle_length=2),
    "filter": lambda d: d.filter(lambda x: x > 2).map(lambda x: x),
    "scan": lambda d: d.scan(0, lambda state, x: (state, x)),
    "repeat": lambda d: d.repeat().map(lambda x: x),
    "prefetch": lambda d: d.prefetch(2).map(lambda x: x),
    "shuffle": lambda d: d.shuffle(3).map(lambda x: x),
    "cache": lambda d: d.cache().map(lambda x: x),
    "ignore_errors": lambda d: d.map(lambda x: x).ignore_errors(),
}
JOBS = {
    "shared": {"job_name": "train"},
    "private": {},
    "in order": {"deterministic": True},
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("step", STEPS)
def test_the_spec_behind_distribute_takes_nothing_from_the_job(make_service, step, job):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, **JOBS[job])
    dataset = STEPS[step](Dataset.range(6).map(lambda x: x * 1).apply(apply))
    assert dataset.element_spec == SCALAR
    assert service_status(service.target).jobs == ()
    if step == "map":
        assert sorted(int(x) for x in dataset) == list(range(100, 106))
        assert [job.repetition for job in service_status(service.target).jobs] in ([], [0])


def test_the_spec_without_a_dispatcher(make_service):
    service = make_service(0)
    apply = distribute("distributed_epoch", service.target, job_name="train")
    dataset = Dataset.range(6).apply(apply).map(lambda x: x)
    service.dispatcher.stop()
    assert dataset.element_spec == SCALAR


@pytest.mark.parametrize(
    "step",
    [
        lambda d: d.shuffle(20_000),
        lambda d: d.shuffle(20_000).map(lambda x: x).batch(8),
        lambda d: d.shuffle(100).shuffle(100).map(lambda x: x),
        lambda d: d.prefetch(50).map(lambda x: x),
        lambda d: Dataset.zip((d, d.shuffle(100))).map(lambda x, y: y),
    ],
)
def test_the_spec_computes_one_element(step):
    made = []

    def make(x):
        made.append(x)
        return x

    assert step(Dataset.range(100_000).map(make)).element_spec is not None
    assert len(made) <= 3


def _parallel(d):
    return d.map(lambda *x: x[-1], num_parallel_calls=4)


# The number of elements that a spec needs: a function behind a window, a batch or a group gets all
# of its elements, because their number is a length of the function's result.
NEEDED = {
    "map in threads": (lambda d, f: d.map(f, num_parallel_calls=4), 1),
    "map in any order": (lambda d, f: d.map(f, num_parallel_calls=4, deterministic=False), 1),
    "map and shuffle": (lambda d, f: d.map(f, num_parallel_calls=4).shuffle(100), 1),
    "map behind map": (lambda d, f: _parallel(d.map(f, num_parallel_calls=4)), 1),
    "window": (lambda d, f: d.map(f).shuffle(100).window(3), 1),
    "window and flat_map": (lambda d, f: d.map(f).window(3).flat_map(lambda w: w.batch(3)), 3),
    "window of a parallel map": (
        lambda d, f: _parallel(d.map(f, num_parallel_calls=4).window(3).flat_map(lambda w: w)),
        3,
    ),
    "interleave": (
        lambda d, f: d.interleave(lambda x: Dataset.range(9).map(f, num_parallel_calls=4)),
        1,
    ),
    "interleave ahead": (
        lambda d, f: d.interleave(
            lambda x: Dataset.range(9).map(f), block_length=4, num_parallel_calls=4
        ),
        1,
    ),
    "flat_map": (lambda d, f: d.flat_map(lambda x: Dataset.range(9).map(f).shuffle(9)), 1),
    "prefetch": (lambda d, f: _parallel(d.map(f, num_parallel_calls=4).prefetch(9)), 1),
    "batch": (lambda d, f: d.map(f, num_parallel_calls=4).batch(5), 1),
    "map behind batch": (lambda d, f: _parallel(d.map(f, num_parallel_calls=4).batch(5)), 5),
    "padded_batch": (lambda d, f: d.map(f, num_parallel_calls=4).padded_batch(5), 1),
    "bucket": (
        lambda d, f: d.map(f, num_parallel_calls=4).bucket_by_sequence_length(
            lambda x: 1, [2], [5, 5]
        ),
        1,
    ),
    "group_by_window": (
        lambda d, f: d.map(f, num_parallel_calls=4).group_by_window(
            lambda x: 0, lambda key, group: group.batch(3), window_size=3
        ),
        3,
    ),
    "map in group_by_window": (
        lambda d, f: d.group_by_window(
            lambda x: 0,
            lambda key, group: group.map(f, num_parallel_calls=4).shuffle(9),
            window_size=9,
        ),
        1,
    ),
    "zip": (lambda d, f: _parallel(Dataset.zip((d, d.map(f, num_parallel_calls=4)))), 1),
    "concatenate": (lambda d, f: d.map(f, num_parallel_calls=4).concatenate(d), 1),
    "map behind concatenate": (
        lambda d, f: _parallel(d.map(f, num_parallel_calls=4).concatenate(d)),
        1,
    ),
    "choose_from_datasets": (
        lambda d, f: _parallel(
            Dataset.choose_from_datasets(
                [d, d], Dataset.range(2).repeat().map(f, num_parallel_calls=4)
            )
        ),
        1,
    ),
    "rejection_resample": (
        lambda d, f: d.map(f, num_parallel_calls=4).rejection_resample(lambda x: 0, [1.0]),
        1,
    ),
    "map behind rejection_resample": (
        lambda d, f: (
            d.map(f, num_parallel_calls=4)
            .rejection_resample(lambda x: 0, [1.0])
            .map(lambda label, x: x)
        ),
        1,
    ),
}


@pytest.mark.parametrize("case", NEEDED)
def test_the_spec_computes_no_element_that_it_does_not_need(case):
    made = []

    def make(x):
        made.append(x)
        return x

    step, needed = NEEDED[case]
    dataset = step(Dataset.range(1000), make)
    spec = dataset.element_spec
    assert len(made) == needed
    element = next(iter(dataset))
    if isinstance(element, tuple):
        assert isinstance(spec, tuple)
    elif isinstance(element, Dataset):
        assert spec is Dataset
    else:
        assert (len(spec.shape), spec.dtype) == (element.ndim, element.dtype)


def test_the_spec_of_a_map_in_processes_computes_one_element(tmp_path):
    def make(x):
        (tmp_path / str(int(x))).touch()
        return x

    dataset = Dataset.range(1000).map(make, num_parallel_calls=2, processes=True).shuffle(100)
    assert dataset.element_spec == SCALAR
    assert os.listdir(tmp_path) == ["0"]


def test_the_spec_of_a_window_has_a_dataset_for_each_array():
    dataset = Dataset.range(5).map(lambda x: {"a": x, "b": (x, [x, x])}).window(2)
    assert dataset.element_spec == {"a": Dataset, "b": (Dataset, Dataset)}
    with pytest.raises(ValueError, match="no element that could describe"):
        _ = dataset.unbatch().take(0).map(lambda x: x).window(2).element_spec


@pytest.mark.parametrize("job", JOBS)
def test_the_spec_takes_no_choices_from_a_job(make_service, job):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, **JOBS[job])
    choices = Dataset.range(2).repeat(3).apply(apply)
    several = [Dataset.range(9), Dataset.range(9)]
    dataset = Dataset.choose_from_datasets(several, choices).map(lambda x: x)
    assert dataset.element_spec == SCALAR
    assert service_status(service.target).jobs == ()


@pytest.mark.parametrize("path", ["", "cache"])
def test_the_spec_leaves_caches_alone(tmp_path, path):
    made = []

    def make(x):
        made.append(x)
        return x

    path = path and str(tmp_path / path)
    dataset = Dataset.range(5).map(make).cache(path).map(lambda x: x)
    assert dataset.element_spec == SCALAR
    assert os.listdir(tmp_path) == []
    for _ in range(2):
        assert [int(x) for x in dataset] == list(range(5))
    assert len(made) <= 6


READER = """
import os, signal, sys
from dataservice import Dataset

def square(x):
    if x == 4:
        os.kill({pid}, signal.{name})
    return [0] * 1_000_000

dataset = Dataset.range(100).map(square, num_parallel_calls=2, processes=True)
for _ in dataset:
    pass
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_helper_processes_end_silently_when_their_reader_is_killed(name):
    # The pipe to standard error ends with the last process that has it.
    script = READER.format(pid="os.getppid()", name=name)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode < 0
    assert ended.stderr == ""


def test_helper_processes_that_get_no_function_end_silently():
    ended = subprocess.run(
        [sys.executable, "-c", processes._MAIN],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
