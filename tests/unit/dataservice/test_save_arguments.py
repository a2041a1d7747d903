"""Dataset.save with shard_func and checkpoint_args, and Dataset.load with reader_func."""

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from dataservice import ArraySpec, Dataset, distribute
from dataservice.snapshot.save import save
from dataservice.snapshot.writer import StreamWriter
from mpidist.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnknownError,
)


def shards_of(path):
    """Return the elements of each shard."""
    found = []

    def read(shards):
        found.extend(list(shard) for shard in shards)
        return Dataset.range(1)

    Dataset.load(path, reader_func=read)
    return found


# shard_func


def test_shards_that_a_function_chooses(tmp_path):
    dataset = Dataset.range(20)
    dataset.save(tmp_path / "a", shard_func=lambda i: 100 * (i % 3))
    assert shards_of(tmp_path / "a") == [list(range(k, 20, 3)) for k in range(3)]
    dataset.save(tmp_path / "b", 4, shard_func=lambda i: np.int32(i % 3))
    assert shards_of(tmp_path / "b") == [*(list(range(k, 20, 3)) for k in range(3)), []]
    pairs = Dataset.zip(dataset, dataset.skip(1))
    pairs.save(tmp_path / "c", shard_func=lambda i, j: int(j > 10))
    assert shards_of(tmp_path / "c") == [
        [(i, i + 1) for i in range(10)],
        [(i, i + 1) for i in range(10, 19)],
    ]
    dataset.take(0).save(tmp_path / "d", shard_func=lambda i: i)
    assert shards_of(tmp_path / "d") == [[]]


@pytest.mark.parametrize("wrong", [-1, 2, 1.5, "0", None])
def test_a_function_that_returns_no_shard(tmp_path, wrong):
    with pytest.raises(InvalidArgumentError, match="save returned"):
        Dataset.range(3).save(tmp_path / "s", 2, shard_func=lambda i: wrong)
    with pytest.raises(InvalidArgumentError, match="has failed"):
        Dataset.load(tmp_path / "s")


def test_a_reader_that_waits_sees_new_shards(tmp_path):
    read = threading.Semaphore(0)

    def slow(i):
        if i:
            assert read.acquire(timeout=20)
        return i

    dataset = Dataset.range(6).map(slow)
    path = tmp_path / "s"
    saving = threading.Thread(
        target=save,
        args=(dataset, path, None, lambda i: i),
        kwargs={"checkpoints": True, "interval": 1},
    )
    saving.start()
    got = []
    with iter(Dataset.load(path, wait=True)) as elements:
        for element in elements:
            got.append(int(element))
            read.release()
    saving.join()
    assert got == [0, 1, 2, 3, 4, 5]


# reader_func


def test_shards_are_read_as_a_function_says(tmp_path):
    path = tmp_path / "s"
    Dataset.range(12).save(path, 3)
    in_turn = Dataset.load(path, reader_func=lambda shards: shards.interleave(lambda one: one))
    assert list(in_turn) == list(range(12))
    one_by_one = Dataset.load(path, reader_func=lambda shards: shards.flat_map(lambda one: one))
    expected = [i for k in range(3) for i in range(k, 12, 3)]
    assert list(one_by_one) == expected

    def shuffled(shards):
        assert shards.cardinality() == 3
        return shards.shuffle(3, seed=1).flat_map(lambda one: one)

    dataset = Dataset.load(path, reader_func=shuffled)
    epochs = [list(dataset) for _ in range(8)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1

    with iter(one_by_one) as elements:
        before = list(itertools.islice(elements, 5))
        state = elements.get_state()
    later = iter(one_by_one)
    later.set_state(state)
    assert [*before, *later] == expected
    sizes = Dataset.load(path, reader_func=lambda shards: shards.map(lambda one: len(one)))
    assert list(sizes) == [4, 4, 4]
    spec = ArraySpec((), np.int64)
    again = Dataset.load(path, element_spec=spec, reader_func=lambda s: s.flat_map(lambda one: one))
    assert (list(again), again.element_spec) == (expected, spec)


def test_workers_share_the_shards(tmp_path, make_service):
    Dataset.range(40).save(tmp_path / "s", 5)
    dataset = Dataset.load(
        tmp_path / "s", reader_func=lambda shards: shards.interleave(lambda one: one)
    )
    there = dataset.apply(distribute("distributed_epoch", make_service(2).target))
    assert sorted(there) == list(range(40))


def test_wrong_readers(tmp_path):
    Dataset.range(3).save(tmp_path / "s")
    with pytest.raises(TypeError, match="needs a function as reader_func"):
        Dataset.load(tmp_path / "s", reader_func=3)
    with pytest.raises(TypeError, match="load returned list, not a Dataset"):
        Dataset.load(tmp_path / "s", reader_func=list)
    with pytest.raises(ValueError, match="either reader_func or wait=True"):
        Dataset.load(tmp_path / "s", True, reader_func=lambda shards: shards)


# checkpoint_args


class Stop(BaseException):
    """An interruption of the save."""


def interrupted_at(monkeypatch, number, after):
    """Interrupt commit ``number`` of a save, before or after its effect."""
    commit, count = StreamWriter.commit, itertools.count()

    def commit_or_stop(self, state):
        stops = next(count) == number
        if stops and not after:
            raise Stop
        commit(self, state)
        if stops:
            raise Stop

    monkeypatch.setattr(StreamWriter, "commit", commit_or_stop)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "arguments", [{}, {"num_shards": 3}, {"shard_func": lambda i: i % 3 if i > 9 else 7}]
)
def test_a_save_that_is_interrupted_goes_on(tmp_path, monkeypatch, arguments, after):
    for number in range(60):
        path = tmp_path / str(number)
        # Without a seed, only the saved state knows the order.
        dataset = Dataset.range(25).shuffle(10)

        def save(dataset=dataset, path=path):
            dataset.save(path, checkpoint_args={"checkpoint_interval": 4}, **arguments)

        for step in range(4):  # interrupt the resumed save, too
            with monkeypatch.context() as patch:
                interrupted_at(patch, max(number - step, 0), after)
                try:
                    save()
                except Stop:
                    continue
            break
        else:
            save()
        assert sorted(Dataset.load(path)) == list(range(25))
        if not step:
            break  # there are no more commits
    assert number > 6


def test_a_killed_save_goes_on_in_another_process(tmp_path):
    path = tmp_path / "s"
    program = (
        "import os, sys\n"
        "from dataservice import Dataset\n"
        "def check(i):\n"
        "    if i == int(sys.argv[2]):\n"
        "        os._exit(9)\n"
        "    return i\n"
        "Dataset.range(50).map(check).save(sys.argv[1], 2,"
        " checkpoint_args={'checkpoint_interval': 10, 'directory': 'unused', 'max_to_keep': 3})\n"
    )

    def save(kill_at):
        command = [sys.executable, "-c", program, str(path), str(kill_at)]
        return subprocess.run(command, check=False, timeout=120).returncode

    assert [save(12), save(37), save(5)] == [9, 9, 0]
    assert list(Dataset.load(path, reader_func=lambda s: s.interleave(lambda one: one))) == [
        *range(50)
    ]


def test_elements_are_computed_again_for_two_intervals_at_most(tmp_path):
    calls = []

    def note(i):
        calls.append(int(i))
        if len(calls) == 47:
            raise RuntimeError("once")
        return i

    dataset = Dataset.range(60).map(note)
    arguments = {"checkpoint_args": {"checkpoint_interval": 10}}
    with pytest.raises(RuntimeError, match="once"):
        dataset.save(tmp_path / "s", **arguments)
    dataset.save(tmp_path / "s", **arguments)
    assert list(Dataset.load(tmp_path / "s")) == list(range(60))
    assert calls[47:] == [0, *range(30, 60)]  # the first call is for the element_spec
    with pytest.raises(AlreadyExistsError, match="DONE"):
        dataset.save(tmp_path / "s", **arguments)


def test_checkpoints_by_size(tmp_path):
    dataset = Dataset.range(40).map(lambda i: np.full(1000, i))
    save(dataset, tmp_path / "s", 2, checkpoints=True, chunk_bytes=50_000)
    assert len(os.listdir(tmp_path / "s" / "chunks")) > 4
    assert [row[0] for row in Dataset.load(tmp_path / "s")] != []
    assert sorted(row[0] for row in Dataset.load(tmp_path / "s")) == list(range(40))


def failing():
    def fail(i):
        if i == 15:
            raise RuntimeError("stop")
        return i

    return Dataset.range(20).map(fail)


def unfinished(path, **arguments):
    with pytest.raises(RuntimeError, match="stop"):
        failing().save(path, **arguments)


def test_saves_that_cannot_be_resumed(tmp_path):
    arguments = {"checkpoint_args": {"checkpoint_interval": 4}}
    path = tmp_path / "a"
    unfinished(path, **arguments)
    with pytest.raises(AlreadyExistsError, match="being saved"):
        Dataset.range(20).save(path)
    with pytest.raises(InvalidArgumentError, match=r"is of the dataset .*map.*, not of range"):
        Dataset.range(20).save(path, **arguments)
    with pytest.raises(InvalidArgumentError, match="has 1 shards, not 2"):
        failing().save(path, 2, **arguments)

    unfinished(tmp_path / "b")  # marked as failed
    with pytest.raises(UnknownError, match="has failed: RuntimeError: stop"):
        Dataset.range(20).save(tmp_path / "b", **arguments)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "file").touch()
    with pytest.raises(AlreadyExistsError, match="no snapshot"):
        Dataset.range(20).save(tmp_path / "c", **arguments)


def test_an_unfinished_save_without_checkpoints(tmp_path, monkeypatch):
    path = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr("dataservice.snapshot.metadata.finish", lambda path: 1 / 0)
        patch.setattr("dataservice.snapshot.metadata.fail", lambda path, error: None)
        with pytest.raises(ZeroDivisionError):
            Dataset.range(20).save(path)
    with pytest.raises(FailedPreconditionError, match="begun without checkpoint_args"):
        Dataset.range(20).save(path, checkpoint_args={})


def test_a_later_save_ends_an_earlier_one(tmp_path):
    begun, later = threading.Event(), threading.Event()

    def wait(i):
        if i == 10 and not begun.is_set():
            begun.set()
            assert later.wait(20)
        return i

    dataset = Dataset.range(20).map(wait)
    errors = []

    def save():
        try:
            dataset.save(tmp_path / "s", checkpoint_args={"checkpoint_interval": 4})
        except AbortedError as error:
            errors.append(error)

    earlier = threading.Thread(target=save)
    earlier.start()
    assert begun.wait(20)
    save()
    later.set()
    earlier.join()
    assert len(errors) == 1
    assert list(Dataset.load(tmp_path / "s")) == list(range(20))


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"checkpoint": 1}, ValueError, "no key 'checkpoint': the keys are checkpoint_interval"),
        ({"checkpoint_interval": 0}, ValueError, "at least 1, not 0"),
        ({"checkpoint_interval": 1.5}, TypeError, "whole number as checkpoint_interval"),
        (10, TypeError, "needs a dict as checkpoint_args"),
    ],
)
def test_wrong_checkpoint_args(tmp_path, wrong, error, match):
    with pytest.raises(error, match=match):
        Dataset.range(3).save(tmp_path / "s", checkpoint_args=wrong)
    assert not (tmp_path / "s").exists()


def test_wrong_shard_func(tmp_path):
    with pytest.raises(TypeError, match="needs a function as shard_func"):
        Dataset.range(3).save(tmp_path / "s", shard_func=3)
    with pytest.raises(ValueError, match="at least 1 stream"):
        Dataset.range(3).save(tmp_path / "s", 0, shard_func=abs)
