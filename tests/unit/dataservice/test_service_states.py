"""States of passes that a service reads: what comes after them is what would have come."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dataservice import Dataset, distribute
from dataservice.work.task import Task
from mpidist.errors import InvalidArgumentError, NotFoundError


def numbers(elements):
    return [int(n) for element in elements for n in np.ravel(element)]


def read(iterator, count):
    return [next(iterator) for _ in range(count)]


PIPELINES = {
    "plain": lambda ds: ds,
    "map": lambda ds: ds.map(lambda x: x * 3),
    "filter": lambda ds: ds.filter(lambda x: x % 3 != 1),
    "batch": lambda ds: ds.batch(4),
    "shuffle": lambda ds: ds.shuffle(13, seed=5),
    "unseeded shuffle": lambda ds: ds.shuffle(13),
    "repeat": lambda ds: ds.repeat(2),
    "cache": lambda ds: ds.map(lambda x: x * 3).cache().shuffle(9, seed=5).repeat(2),
    "windows": lambda ds: ds.window(5, 2).flat_map(lambda w: w.batch(5)),
    "groups": lambda ds: ds.group_by_window(lambda x: x % 3, lambda key, group: group.batch(2), 5),
    "rebatch": lambda ds: ds.batch(5).rebatch(3),
    "all": lambda ds: ds.shuffle(9).map(lambda x: x + 1).batch(3).prefetch(2),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("taken", [0, 1, 17, 40])
def test_the_rest_comes_in_the_same_order(make_service, pipeline, taken):
    service = make_service(2)
    apply = distribute("distributed_epoch", service.target, deterministic=True, num_shards=5)
    dataset = PIPELINES[pipeline](Dataset.range(200)).apply(apply)
    with iter(dataset) as elements:
        read(elements, taken)
        state = elements.get_state()
        rest = numbers(elements)
    other = make_service(3)
    apply = distribute("distributed_epoch", other.target, deterministic=True, num_shards=5)
    with iter(PIPELINES[pipeline](Dataset.range(200)).apply(apply)) as elements:
        elements.set_state(state)
        assert numbers(elements) == rest


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_rest_of_a_stream_of_our_own_is_complete(make_service, mode, pipeline):
    service = make_service(2)

    def make(target):
        return PIPELINES[pipeline](Dataset.range(200)).apply(distribute(mode, target))

    expected = Counter(numbers(make(service.target)))
    with iter(make(service.target)) as elements:
        before = read(elements, 23)
        state = elements.get_state()
    with iter(make(make_service(3).target)) as elements:
        elements.set_state(state)
        # Batches may be cut elsewhere, the numbers in them are the same.
        assert Counter(numbers([*before, *elements])) == expected


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 4)])
def test_another_number_of_consumers(make_service, before, after):
    def make(target, index, consumers):
        apply = distribute(
            "distributed_epoch", target, "job", index, consumers, deterministic=True, num_shards=4
        )
        return iter(Dataset.range(101).map(lambda x: x * 2).apply(apply))

    target = make_service(2).target
    readers = [make(target, index, before) for index in range(before)]
    steps = [read(reader, 7) for reader in readers]
    given = [int(step[i]) for i in range(7) for step in steps]
    assert given == [2 * i for i in range(7 * before)]
    states = [reader.get_state() for reader in readers]
    for reader in readers:
        reader.close()
    # Any of the states will do for all of them.
    target = make_service(3).target
    readers = [make(target, index, after) for index in range(after)]
    for index, reader in enumerate(readers):
        reader.set_state(states[index % before])
    rests = [numbers(reader) for reader in readers]
    expected = [2 * i for i in range(7 * before, 101)]
    assert rests == [expected[index::after] for index in range(after)]


def test_the_same_service_goes_back(make_service):
    service = make_service(2)
    apply = distribute("distributed_epoch", service.target, "job", 0, 1, deterministic=True)
    dataset = Dataset.range(100).apply(apply)
    elements = iter(dataset)
    read(elements, 10)
    state = elements.get_state()
    read(elements, 20)
    # As a trainer that is started again while the service has not noticed that it had died.
    for _ in range(2):
        again = iter(dataset)
        again.set_state(state)
        assert numbers(read(again, 5)) == [10, 11, 12, 13, 14]
    again.close()
    elements.close()


def test_a_state_at_the_end_means_the_next_epoch(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, deterministic=True)
    dataset = Dataset.range(20).apply(apply).repeat(2)
    with iter(dataset) as elements:
        read(elements, 20)
        state = elements.get_state()
    with iter(dataset) as elements:
        elements.set_state(state)
        assert numbers(elements) == list(range(20))


def test_a_state_of_another_dataset(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target)
    with iter(Dataset.range(20).apply(apply)) as elements:
        state = elements.get_state()
    with (
        iter(Dataset.range(21).apply(apply)) as elements,
        pytest.raises(InvalidArgumentError, match=r"range\(0, 20, 1\).*range\(0, 21, 1\)"),
    ):
        elements.set_state(state)


def test_a_worker_whose_part_has_not_begun_does_not_say_that_it_is_at_the_beginning():
    dispatcher = SimpleNamespace(endpoint=None, peer="", what="", stopped=lambda: False)
    task = Task(7, dispatcher, 1.0, lambda *_: None, "data worker x", 0)
    with pytest.raises(NotFoundError, match="data worker x, task 7 has not begun"):
        task.checkpoint(30_000)
    assert task.progress() is None
