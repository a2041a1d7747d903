"""Requirements on every data service: copies, epochs, jobs, elements, errors and silence."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataservice import Dataset, ShardingPolicy, distribute
from mpidist.errors import InvalidArgumentError, UnimplementedError

OFF, DYNAMIC = MODES = ["parallel_epochs", "distributed_epoch"]
EVENTS = {}


def event(name):
    """Return an event shared by all copies of a function, which is pickled for the worker."""
    return EVENTS.setdefault(name, threading.Event())


def values(dataset):
    return [int(element) for element in dataset]


def together(count, function):
    """Run ``function(i)`` on ``count`` threads and return the results."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, range(count)))


def tasks(service):
    """Return the number of tasks on all workers."""
    return sum(len(worker._worker._tasks) for worker in service.workers)


def iterations(service):
    return len(service.dispatcher._dispatcher._registry.jobs.iterations)


# 1. Orders and copies


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, 1, 3])
def test_one_worker_gives_the_dataset_in_order(make_service, mode, limit):
    apply = distribute(mode, make_service(1).target, max_outstanding_requests=limit)
    assert values(Dataset.range(200).apply(apply)) == list(range(200))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_n_workers_give_n_copies(make_service, workers, consumers):
    target = make_service(workers).target
    name = "j" if consumers > 1 else None

    def read(_):
        return values(Dataset.range(60).apply(distribute(OFF, target, job_name=name)))

    found = Counter(element for own in together(consumers, read) for element in own)
    assert found == dict.fromkeys(range(60), workers)


@pytest.mark.parametrize("seed", [None, 7])
def test_workers_shuffle_apart_unless_there_is_a_seed(make_service, seed):
    target = make_service(2).target
    dataset = Dataset.range(64).shuffle(64, seed)
    dataset = dataset.map(lambda i: (i, threading.current_thread().name))
    orders = {}
    for number, task in dataset.apply(distribute(OFF, target)):
        orders.setdefault(str(task), []).append(int(number))
    one, two = orders.values()
    assert sorted(one) == sorted(two) == list(range(64))
    assert (one == two) == (seed is not None)


# 2. Epochs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [None, "j"])
def test_every_pass_is_a_new_epoch(make_service, mode, name):
    dataset = Dataset.range(20).apply(distribute(mode, make_service(1).target, job_name=name))
    assert [values(dataset) for _ in range(3)] == [list(range(20))] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_repeat_after_distribute(make_service, mode, count):
    workers = 2
    dataset = Dataset.range(20).apply(distribute(mode, make_service(workers).target)).repeat(count)
    copies = count * (workers if mode == OFF else 1)
    assert Counter(values(dataset)) == Counter({i: copies for i in range(20) if copies})


@pytest.mark.parametrize("mode", MODES)
def test_concurrent_passes_are_independent(make_service, mode):
    dataset = Dataset.range(50).apply(distribute(mode, make_service(1).target))
    assert together(4, lambda _: values(dataset)) == [list(range(50))] * 4
    pairs = Dataset.zip(dataset, dataset)
    assert [(int(a), int(b)) for a, b in pairs] == [(i, i) for i in range(50)]


# 3. and 4. Jobs with a name


@pytest.mark.parametrize("mode", MODES)
def test_consumers_of_a_name_pair_their_passes(make_service, mode):
    target = make_service(1).target

    def read(_):
        dataset = Dataset.range(90).apply(distribute(mode, target, job_name="j"))
        return [values(dataset) for _ in range(5)]

    for epoch in zip(*together(2, read), strict=True):
        assert sorted(epoch[0] + epoch[1]) == list(range(90))


@pytest.mark.parametrize("mode", MODES)
def test_who_comes_late_gets_what_is_left(make_service, mode):
    service = make_service(1)
    apply = distribute(mode, service.target, job_name="j")
    first = values(Dataset.range(10).apply(apply))
    late = Dataset.range(10).apply(apply)
    # Until the dispatcher has heard of the end, an element in use may count as open.
    assert values(late) == []
    assert first == values(late) == list(range(10))  # its second pass is the job's second


def test_an_empty_pass_does_not_end_a_repeated_stream(make_service):
    target = make_service(1).target
    apply = distribute(DYNAMIC, target, job_name="j")
    early = Dataset.range(10).apply(apply)
    assert values(early) == values(early) == list(range(10))
    # Two passes of the job are over; the stream goes on with the third.
    with iter(Dataset.range(10).apply(apply).repeat()) as late:
        assert [int(next(late)) for _ in range(20)] == 2 * list(range(10))


def test_other_names_are_other_jobs(make_service):
    target = make_service(1).target

    def read(i):
        return values(Dataset.range(40).apply(distribute(DYNAMIC, target, job_name=f"j{i}")))

    assert together(3, read) == [list(range(40))] * 3


OTHERS = {
    "existing DYNAMIC over .* new OFF": {"processing_mode": OFF},
    "new DYNAMIC, target ANY": {"target_workers": "ANY"},
    "new DYNAMIC, delivery AT_LEAST_ONCE": {"delivery": "at_least_once"},
    "new DYNAMIC, consumption DETERMINISTIC": {
        "deterministic": True,
        "consumer_index": 0,
        "num_consumers": 1,
    },
}


@pytest.mark.parametrize("message", OTHERS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_name_belongs_to_its_parameters(make_service, tmp_path, message, restarted):
    service = make_service(1, work_dir=str(tmp_path), fault_tolerant_mode=True)
    terms = {"processing_mode": DYNAMIC, "service": service.target, "job_name": "j"}
    dataset = Dataset.range(5).apply(distribute(**terms))
    assert values(dataset) == list(range(5))
    if restarted:
        service.restart_dispatcher()
    other = Dataset.range(5).apply(distribute(**(terms | OTHERS[message])))
    with pytest.raises(
        InvalidArgumentError, match=f"job 'j' with different parameters: .*{message}"
    ):
        list(other)
    assert values(dataset) == list(range(5))


# 5. Empty and small datasets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("dataset", "elements"),
    [
        (Dataset.range(0), 0),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(3).batch(100, drop_remainder=True), 0),
        (Dataset.range(3).batch(100), 1),
        (Dataset.range(3).filter(lambda i: False), 0),
    ],
)
def test_nothing_and_little(make_service, mode, workers, dataset, elements):
    found = list(dataset.apply(distribute(mode, make_service(workers).target)))
    if mode == OFF:
        assert len(found) == elements * workers
    else:
        assert sum(np.size(one) for one in found) == 3 * elements


# 6. Elements


Point = __import__("collections").namedtuple("Point", "x y")

ELEMENTS = {
    "8 MB": np.arange(1 << 20, dtype=np.int64),
    "a dict": {"a": np.int8(1), "b": {"c": np.ones((2, 0), np.float16)}},
    "tuples": (np.bool_(True), (np.complex64(1j), np.str_("ä"), np.bytes_(b"\0b"))),
    "a named tuple": Point(np.arange(3), {"z": np.uint64(2**64 - 1)}),
    "strings": np.array(["a", "", "ccc"]),
    "ragged": np.array([np.arange(2), np.arange(5)], dtype=object),
    "Fortran's order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "a date": np.datetime64("2020-02-29T12:00:00.5"),
    "a record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "None": None,
    "a set": frozenset({1, 2}),
}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return type(one) is type(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        if one.dtype == object:
            return all(map(same, one, other))
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("consumers", [1, 2])
def test_elements_arrive_as_they_are(make_service, name, consumers):
    element = ELEMENTS[name]
    target = make_service(1).target

    def read(_):
        dataset = Dataset.from_source([element] * 6)
        return list(dataset.apply(distribute(DYNAMIC, target, "j" if consumers > 1 else None)))

    found = [one for own in together(consumers, read) for one in own]
    assert len(found) == 6
    assert all(same(element, one) for one in found)


# 7. Services of services


@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("same_service", [True, False])
def test_distribute_can_nest(make_service, inner, same_service):
    first = make_service(2)
    second = first if same_service else make_service(1)
    dataset = Dataset.range(20).apply(distribute(inner, first.target)).map(lambda i: i + 1)
    dataset = dataset.apply(distribute(OFF, second.target))
    copies = (2 if inner == OFF else 1) * (2 if same_service else 1)
    assert Counter(values(dataset)) == dict.fromkeys(range(1, 21), copies)
    with pytest.raises(UnimplementedError, match="reads from a data service, and cannot be split"):
        dataset.apply(distribute(ShardingPolicy.DYNAMIC, second.target))
