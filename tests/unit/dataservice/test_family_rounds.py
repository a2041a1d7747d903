"""Coordinated reads through a service: in every round, all consumers read from the same part."""

import threading
from collections import Counter

import numpy as np
import pytest
from _cases.data_readers import numbers, read, reading

from dataservice import CrossTrainerCache, Dataset, ShardingPolicy, distribute
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
MANY = 1_000_000


def with_task(element):
    """Return the element and the id of the task that made it."""
    return element, int(threading.current_thread().name.rpartition("-")[2])


def consumers(dataset, target, count, num_shards=None, policy=OFF, **options):
    """Return one distributed dataset for each consumer."""
    return [
        dataset.apply(
            distribute(policy, target, "job", index, count, num_shards=num_shards, **options)
        )
        for index in range(count)
    ]


def rounds(readers, count):
    """Return the elements of all consumers, by round. The first consumer reads each round first."""
    return [[next(reader) for reader in readers] for _ in range(count)]


def expected(count, width, shards, start=0, length=MANY):
    """Return the expected rounds if every part has the whole range."""
    return [
        [(number // shards * width + lane) % length for lane in range(width)]
        for number in range(start, start + count)
    ]


def endless():
    return Dataset.range(MANY).repeat()


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("width", "shards"),
    [(1, 1), (2, 1), (3, 1), (15, 1), (1, 2), (2, 2), (15, 2), (1, 16), (3, 16)],
)
def test_the_parts_come_in_turn(make_service, workers, width, shards):
    target = make_service(workers).target
    dataset = Dataset.range(101).repeat()
    datasets = consumers(dataset, target, width, shards, max_outstanding_requests=64)
    with reading(*datasets) as readers:
        assert rounds(readers, 40) == expected(40, width, shards, length=101)


@pytest.mark.parametrize("policy", [OFF, DYNAMIC, DATA])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("width", [2, 5])
def test_a_round_is_of_one_task_and_every_element_comes_once(make_service, policy, workers, width):
    target = make_service(workers).target
    datasets = consumers(endless().map(with_task), target, width, 4, policy)
    with reading(*datasets) as readers:
        got = rounds(readers, 100)
    tasks = [{int(task) for _, task in each} for each in got]
    assert all(len(each) == 1 for each in tasks)
    assert tasks[:4] * 25 == tasks
    found = Counter(int(element) for each in got for element, _ in each)
    assert set(found.values()) == {4 if policy is OFF else 1}


@pytest.mark.parametrize(
    # A window may cross the border of two parts of the source, so it needs the whole source.
    ("kind", "policy"),
    [("bucket_by_sequence_length", OFF), ("bucket_by_sequence_length", DYNAMIC), ("window", OFF)],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_round_is_of_one_bucket(make_service, kind, workers, policy):
    width = 15
    dataset = Dataset.range(MANY)
    if kind == "window":
        dataset = dataset.map(lambda x: x // width % 3 + 1).window(width, drop_remainder=True)
        dataset = dataset.flat_map(lambda window: window)
    else:
        dataset = dataset.map(lambda x: np.ones(x % 3 + 1))
        dataset = dataset.bucket_by_sequence_length(len, [2, 3], [2 * width] * 3)
        dataset = dataset.unbatch().batch(2)
    target = make_service(workers).target
    datasets = consumers(dataset.repeat(), target, width, 4, policy, max_outstanding_requests=20)
    with reading(*datasets) as readers:
        got = rounds(readers, 40)
    shapes = [{str(np.shape(x) or int(x)) for x in each} for each in got]
    assert all(len(each) == 1 for each in shapes)
    assert len(set.union(*shapes)) == 3


# Workers that stop and start


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("added", [1, 3, 10])
@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
def test_workers_are_added_inside_a_round(make_service, width, added, policy):
    service = make_service(1)
    datasets = consumers(endless(), service.target, width, 4, policy, max_outstanding_requests=64)
    with reading(*datasets) as readers:
        got = rounds(readers, 3)
        first = numbers(next(reader) for reader in readers[:-1])
        for _ in range(added):
            service.add_worker()
        got.append([*first, int(next(readers[-1]))])
        got += rounds(readers, 800)
    check(got, width, 4, policy)


def check(got, width, shards, policy):
    if policy is OFF:
        assert got == expected(len(got), width, shards)
    else:
        flat = numbers(number for each in got for number in each)
        assert len(set(flat)) == len(flat)
        # Each round comes from one split in order, except where a round spans two splits.
        apart = [each for each in got if np.ptp(each) != width - 1]
        assert len(apart) < len(got) / 10


@pytest.mark.parametrize("how", ["stop", "restart", "restart elsewhere", "stop and add"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
def test_workers_are_lost_inside_a_round(make_service, how, width, policy):
    service = make_service(4)
    datasets = consumers(endless(), service.target, width, 6, policy, max_outstanding_requests=64)
    with reading(*datasets) as readers:
        got = []
        for number in range(3):
            got += rounds(readers, 400)
            first = [next(reader) for reader in readers[: width // 2]]
            if how.startswith("restart"):
                service.restart_worker(number, same_port=how == "restart")
            else:
                service.workers[number].stop()
            if how == "stop and add":
                service.add_worker()
            got.append([*first, *(next(reader) for reader in readers[width // 2 :])])
        got += rounds(readers, 400)
    check(got, width, 6, policy)


@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
@pytest.mark.parametrize("worker_too", [False, True])
def test_the_dispatcher_is_restarted_inside_a_round(make_service, tmp_path, policy, worker_too):
    service = make_service(2, work_dir=str(tmp_path), fault_tolerant_mode=True)
    datasets = consumers(endless(), service.target, 3, 4, policy, max_outstanding_requests=64)
    with reading(*datasets) as readers:
        got = []
        for _ in range(2):
            got += rounds(readers, 400)
            first = next(readers[0])
            service.restart_dispatcher()
            if worker_too:
                service.restart_worker(1)
            got.append([first, *(next(reader) for reader in readers[1:])])
        got += rounds(readers, 400)
    check(got, 3, 4, policy)


@pytest.mark.parametrize("limit", [1, 2, 7, None])
def test_a_consumer_may_run_ahead(make_service, limit):
    target = make_service(2).target
    datasets = consumers(endless(), target, 2, 3, max_outstanding_requests=limit)
    with reading(*datasets) as (first, second):
        ahead = read(first, 6)  # two elements a consumer are made ahead of the slowest
        got = list(map(list, zip(ahead, read(second, 6), strict=True)))
        got += rounds([first, second], 50)
    assert got == expected(56, 2, 3)


# Consumers that restart


def test_a_consumer_without_its_state_cannot_come_again(make_service):
    target = make_service(2).target
    with reading(*consumers(endless(), target, 2, 2)) as readers:
        rounds(readers, 20_000)
        readers[0].close()
        # The other consumers report their progress to the workers with their next requests.
        with (
            reading(consumers(endless(), target, 2, 2)[0]) as [again],
            pytest.raises(FailedPreconditionError, match=r"has been used .*set_state"),
        ):
            next(again)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("taken", [0, 1, 7, 1500])
def test_all_consumers_go_on_from_a_state(make_service, workers, taken):
    limit = {"max_outstanding_requests": 64}
    with reading(*consumers(endless(), make_service(2).target, 3, 4, **limit)) as readers:
        rounds(readers, taken)
        states = [reader.get_state() for reader in readers]
        rounds(readers, 10)
    with reading(*consumers(endless(), make_service(workers).target, 3, 4, **limit)) as readers:
        # Any consumer's state fits every consumer.
        for reader, state in zip(readers, reversed(states), strict=True):
            reader.set_state(state)
        assert rounds(readers, 50) == expected(50, 3, 4, start=taken)


def test_consumers_take_the_job_back(make_service):
    target = make_service(2).target
    with reading(*consumers(endless(), target, 2, 4)) as readers:
        rounds(readers, 10)
        state = readers[0].get_state()
        rounds(readers, 10)
        with reading(*consumers(endless(), target, 2, 4)) as again:
            for reader in again:
                reader.set_state(state)
            assert rounds(again, 50) == expected(50, 2, 4, start=10)
            with pytest.raises(NotFoundError, match="back to a state"):
                rounds(readers, MANY)


def test_a_state_of_some_consumers_only(make_service):
    with reading(*consumers(endless(), make_service(1).target, 2, 4)) as readers:
        rounds(readers, 10)
        state = readers[0].get_state()
    with reading(*consumers(endless(), make_service(1).target, 2, 4)) as (first, second):
        first.set_state(state)
        next(first)
        with pytest.raises(InvalidArgumentError, match="set the same state in all of them"):
            next(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((3, 4), "num_consumers=2, but this one has num_consumers=3"),
        ((1, 4), "num_consumers=2"),
        ((2, 5), "num_shards=4, but this one has num_shards=5"),
        ((2, 2), "num_shards=4"),
    ],
)
def test_a_state_of_another_number_of_consumers_or_parts(make_service, change, message):
    with reading(*consumers(endless(), make_service(1).target, 2, 4)) as readers:
        rounds(readers, 10)
        state = readers[0].get_state()
    with (
        reading(*consumers(endless(), make_service(1).target, *change)) as readers,
        pytest.raises(InvalidArgumentError, match=message),
    ):
        readers[0].set_state(state)


def test_the_same_consumer_twice(make_service):
    target = make_service(1).target
    with reading(*consumers(endless(), target, 2)) as readers:
        rounds(readers, 1)
        with (
            reading(consumers(endless(), target, 2)[1]) as [again],
            pytest.raises(AlreadyExistsError, match="'job' is already reading"),
        ):
            next(again)


@pytest.mark.parametrize("change", [{"count": 3}, {"num_shards": 3}, {"policy": DATA}])
def test_consumers_must_agree(make_service, change):
    target = make_service(1).target
    terms = {"count": 2, "num_shards": 4, "policy": OFF}
    with reading(consumers(endless(), target, **terms)[0]) as [first]:
        next(first)
        with (
            reading(consumers(endless(), target, **terms | change)[1]) as [second],
            pytest.raises(InvalidArgumentError, match=r"different parameters.*existing .*new"),
        ):
            next(second)


# Unsupported combinations


@pytest.mark.parametrize("dataset", [Dataset.range(9), Dataset.range(9).repeat(3)])
def test_a_dataset_that_is_known_to_end(make_service, dataset):
    with pytest.raises(FailedPreconditionError, match=f"has {dataset.node.cardinality()} elements"):
        consumers(dataset, make_service(0).target, 2)


@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_that_turns_out_to_end(make_service, policy, workers):
    dataset = Dataset.range(20).filter(lambda x: x % 2)
    datasets = consumers(dataset, make_service(workers).target, 2, 2, policy)
    with reading(*datasets) as readers:
        for reader in readers:
            with pytest.raises(FailedPreconditionError, match=r"infinite .* ended after \d+"):
                read(reader, 20)


class NotHere:
    def __reduce__(self):
        return int, ("not a number",)


def test_all_consumers_hear_of_a_dataset_that_workers_cannot_read(make_service):
    not_here = NotHere()
    dataset = endless().map(lambda x: (not_here, x)[1])
    with reading(*consumers(dataset, make_service(1).target, 3)) as readers:
        for reader in readers:
            with pytest.raises(ValueError, match="invalid literal"):
                next(reader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_workers": "LOCAL"}, "'LOCAL' does not go with num_consumers"),
        ({"cross_trainer_cache": CrossTrainerCache("t")}, "does not go with num_consumers"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        consumers(endless(), "inproc://localhost:4711", 2, **options)
