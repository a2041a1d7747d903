"""Promises of the data service that 0.1 did not keep."""

import itertools
import threading
import time

import numpy as np
import pytest

from dataservice import Dataset, distribute
from mpidist.errors import DataLossError, OpError


class Unpickled:
    """A function that counts how often it is unpickled, and takes its time for that."""

    count = itertools.count()
    made = 0

    def __call__(self, x):
        return x

    def __setstate__(self, state):
        Unpickled.made = next(self.count) + 1
        threading.Event().wait(0.2)

    def __getstate__(self):
        return {"any": 0}


def test_a_worker_fetches_a_dataset_once(make_service):
    service = make_service(1)
    dataset = (
        Dataset.range(160)
        .map(Unpickled())
        .apply(distribute("distributed_epoch", service.target, deterministic=True))
    )
    Unpickled.count, Unpickled.made = itertools.count(), 0
    assert len(list(dataset)) == 160
    assert Unpickled.made == 1


def test_the_calls_of_all_shards_of_a_worker_share_threads(make_service):
    """A shard has one thread, because its source may block; what it runs ahead has none."""
    service = make_service(1)

    def slow(x):
        time.sleep(1e-3)
        return x

    dataset = (
        Dataset.range(1600)
        .map(slow, num_parallel_calls=4)
        .prefetch(2)
        .apply(distribute("distributed_epoch", service.target, deterministic=True, num_shards=16))
    )
    before = set(threading.enumerate())
    with iter(dataset) as elements:
        for _ in range(100):
            next(elements)
        new = [thread.name for thread in set(threading.enumerate()) - before]
    tasks = [name for name in new if name.startswith("dataservice-task")]
    assert len(tasks) == 16
    # Four for map, eight for prefetch, and the thread of the consumer. 0.1 had 80.
    assert len(new) - len(tasks) <= 13, new


def test_a_flipped_bit_in_a_cache_file_is_an_error(tmp_path):
    path = tmp_path / "cache"
    values = np.arange(4000, dtype="i8").reshape(4, 1000)
    dataset = Dataset.from_tensor_slices(values).cache(str(path))
    list(dataset)
    data = bytearray(path.read_bytes())
    data[9000] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(DataLossError):
        list(dataset)


@pytest.mark.parametrize("differs", ["arrays", "functions"])
def test_the_state_of_another_dataset_is_refused(differs):
    shift = 50 if differs == "arrays" else 0
    factor = 2 if differs == "functions" else 1
    one = iter(Dataset.from_tensor_slices(np.arange(5)).map(lambda v: v * 1))
    next(one)
    other = iter(Dataset.from_tensor_slices(np.arange(5) + shift).map(lambda v: v * factor))
    with pytest.raises((OpError, ValueError)):
        other.set_state(one.get_state())


def test_trainers_of_one_job_with_different_functions_are_refused(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, "job")
    with iter(Dataset.range(8).map(lambda x: x + 100).apply(apply)) as first:
        next(first)
        with (
            pytest.raises((OpError, ValueError)),
            iter(Dataset.range(8).map(lambda x: x + 500).apply(apply)) as second,
        ):
            next(second)


LOWEST = []


def noted(x):
    LOWEST.append(int(x))
    return x


@pytest.mark.parametrize("position", [3_000, 20_000])
def test_few_elements_are_made_again_after_set_state(make_service, position):
    """The times are those of ``scripts/bench_dataservice.py --only states``."""
    apply = distribute("distributed_epoch", make_service(1).target, deterministic=True)
    dataset = Dataset.range(1_000_000).map(noted).apply(apply)
    with iter(dataset) as elements:
        for _ in range(position):
            next(elements)
        state = elements.get_state()
    with iter(dataset) as elements:
        LOWEST.clear()
        elements.set_state(state)
        assert next(elements) == position
        assert position - min(LOWEST) <= 1_000
