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
