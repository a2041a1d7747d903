"""deterministic=True: one order for any number of workers and consumers, and after failures."""

import itertools

import numpy as np
import pytest
from _cases.data_readers import numbers, read, reading

from dataservice import Dataset, distribute

SHARDS = 4
LENGTH = 4000


def pieces(x):
    return Dataset.range(int(x), int(x) + int(x) % 4)


PIPELINES = {
    "map": lambda ds: ds.map(lambda x: x * 3),
    "batch": lambda ds: ds.batch(4),
    "batch without a remainder": lambda ds: ds.batch(7, drop_remainder=True),
    "shuffled batches": lambda ds: ds.shuffle(LENGTH, seed=7).batch(4),
    "batches of what is left": lambda ds: ds.filter(lambda x: x % 5 < 2).batch(4),
    "filter": lambda ds: ds.filter(lambda x: x % 5 < 2),
    "filter that leaves parts empty": lambda ds: ds.filter(lambda x: x % 4 == 1),
    "filter at the end": lambda ds: ds.filter(lambda x: x < 300 or x % 4 == 2),
    "flat_map": lambda ds: ds.flat_map(pieces),
    "interleave": lambda ds: ds.interleave(pieces, cycle_length=3),
    "unbatch": lambda ds: ds.map(lambda x: np.full(x % 3, x)).unbatch(),
    "rebatch": lambda ds: ds.batch(3).rebatch(2),
    "shuffle": lambda ds: ds.shuffle(50, seed=7),
    "shuffles of a repeat": lambda ds: ds.shuffle(50, seed=7).repeat(2),
    "repeat": lambda ds: ds.filter(lambda x: x % 4 > 1).repeat(3),
    "repeated": lambda ds: ds.filter(lambda x: x % 4 > 1),
    "cache": lambda ds: ds.map(lambda x: x + 1, 2).cache().shuffle(50, seed=7).repeat(2),
    "windows": lambda ds: ds.window(5, 2, drop_remainder=True).flat_map(lambda w: w.batch(5)),
    "groups": lambda ds: ds.group_by_window(lambda x: x % 3, lambda key, g: g.batch(2), 5),
    "empty": lambda ds: ds.filter(lambda x: x < 0),
    "all": lambda ds: ds.filter(lambda x: x % 3).shuffle(9, seed=1).flat_map(pieces).batch(3),
}
# Pipelines with the same order for any number of shards.
WHOLE = ["map", "batch", "batch without a remainder", "windows"]
# Pipelines with an order that differs from the order of the parts in turn.
DIFFERENT = ["shuffle", "shuffles of a repeat", "shuffled batches", "cache", "all", "rebatch"]
DIFFERENT += WHOLE[1:]
CHURN = ["filter", "flat_map", "repeat", "cache", "windows", "groups", "rebatch", "all"]


def consumers(name, target, count, length=LENGTH, shards=SHARDS, **options):
    """Return one distributed dataset for each consumer."""
    dataset = PIPELINES[name](Dataset.range(length))
    options |= {"deterministic": True, "num_shards": shards}
    return [
        dataset.apply(distribute("distributed_epoch", target, "job", index, count, **options))
        for index in range(count)
    ]


def in_turn(readers, count=None):
    """Read one element from each reader in turn, ``count`` in all. None reads to the end."""
    got = []
    while count is None or len(got) < count:
        try:
            got.append(next(readers[len(got) % len(readers)]))
        except StopIteration:
            # All readers end together.
            assert all(next(reader, None) is None for reader in readers)
            break
    return [np.asarray(element).tolist() for element in got]


ALONE = {}  # results of this process, which are the same in every run


def alone(make_service, name, **options):
    """Return the order of elements with a single worker and consumer."""
    key = name, *sorted(options.items())
    if key not in ALONE:
        with reading(*consumers(name, make_service(1).target, 1, **options)) as readers:
            ALONE[key] = in_turn(readers)
    return ALONE[key]


def model(name, length, shards):
    """Return the specified order: one element in turn from every part that has more.

    A pass of a repeat continues in the part after the last element of the previous pass.
    """
    make, indices = PIPELINES[name], np.arange(length)
    if name == "repeat":
        make, indices = PIPELINES["repeated"], np.tile(indices, 3)
    parts = []
    for part in range(shards):
        source = Dataset.from_tensor_slices(indices[part::shards])
        parts.append([np.asarray(element).tolist() for element in make(source)])
    longest = max(map(len, parts))
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", PIPELINES)
def test_any_number_of_workers_and_consumers(make_service, name, workers, count):
    expected = alone(make_service, name, length=400)
    with reading(*consumers(name, make_service(workers).target, count, length=400)) as readers:
        assert in_turn(readers) == expected


@pytest.mark.parametrize("shards", [1, 2, 5, 16])
@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in DIFFERENT])
def test_the_order_is_that_of_the_parts_in_turn(make_service, name, shards):
    assert alone(make_service, name, length=300, shards=shards) == model(name, 300, shards)


@pytest.mark.parametrize("shards", [1, 2, 5, 16])
@pytest.mark.parametrize("name", WHOLE)
def test_the_order_is_that_of_one_process(make_service, name, shards):
    assert alone(make_service, name, length=300, shards=shards) == model(name, 300, 1)


@pytest.mark.parametrize("shards", [2, 5, 16])
def test_a_shuffle_of_all_does_not_depend_on_the_parts(make_service, shards):
    name = "shuffled batches"
    order = alone(make_service, name, length=300, shards=shards)
    assert order == alone(make_service, name, length=300, shards=1)
    assert sorted(itertools.chain(*order)) == list(range(300))
    assert set(map(len, order)) == {4}


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_short_sources(make_service, length, count):
    target = make_service(2).target
    with reading(*consumers("map", target, count, length=length)) as readers:
        assert in_turn(readers) == [3 * x for x in range(length)]


@pytest.mark.parametrize("limit", [1, 2, 16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["map", "filter at the end", "all"])
def test_few_requests_at_a_time(make_service, name, count, limit):
    expected = alone(make_service, name, length=200)
    datasets = consumers(
        name, make_service(2).target, count, length=200, max_outstanding_requests=limit
    )
    with reading(*datasets) as readers:
        assert in_turn(readers) == expected


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["map", "filter", "flat_map"])
def test_repeat_after_it(make_service, name, count):
    expected = alone(make_service, name, length=100)
    datasets = [each.repeat(3) for each in consumers(name, make_service(2).target, count, 100)]
    with reading(*datasets) as readers:
        got = [numbers(reader) for reader in readers]
    # Each consumer gets its own positions in every repetition.
    assert got == [expected[index::count] * 3 for index in range(count)]


# Workers that stop and start

EVENTS = {
    "add": lambda service, number: service.add_worker(),
    "stop": lambda service, number: service.workers[number].stop(),
    "restart": lambda service, number: service.restart_worker(number % 2),
    "restart elsewhere": lambda service, number: service.restart_worker(number % 2, False),
    "stop and add": lambda service, number: (service.workers[number].stop(), service.add_worker()),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("name", CHURN)
def test_workers_come_and_go(make_service, name, count, event):
    expected = alone(make_service, name)
    service = make_service(4)
    with reading(*consumers(name, service.target, count)) as readers:
        got = []
        for number in range(3):
            got += in_turn(readers, len(expected) // (7 * count) * count)
            EVENTS[event](service, number)
        got += in_turn(readers)
    assert got == expected


@pytest.mark.parametrize("worker_too", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CHURN)
def test_the_dispatcher_is_restarted(make_service, tmp_path, name, count, worker_too):
    expected = alone(make_service, name)
    service = make_service(2, work_dir=str(tmp_path), fault_tolerant_mode=True)
    with reading(*consumers(name, service.target, count)) as readers:
        got = []
        for number in range(3):
            got += in_turn(readers, len(expected) // (7 * count) * count)
            service.restart_dispatcher()
            if worker_too:
                service.restart_worker(number % 2)
        got += in_turn(readers)
    assert got == expected


@pytest.mark.parametrize("name", CHURN)
def test_no_worker_for_a_while(make_service, name):
    expected = alone(make_service, name)
    service = make_service(1)
    with reading(*consumers(name, service.target, 2)) as readers:
        got = in_turn(readers, 500)
        service.workers[0].stop()
        service.add_worker()
        got += in_turn(readers, 500)
        service.workers[1].stop()
        service.add_worker()
        got += in_turn(readers)
    assert got == expected


@pytest.mark.parametrize("name", CHURN)
def test_one_consumer_is_done_before_the_others_begin(make_service, name):
    expected = alone(make_service, name, length=500)
    service = make_service(2)
    with reading(*consumers(name, service.target, 3, 500)) as readers:
        got = [[np.asarray(element).tolist() for element in reader] for reader in readers]
    assert got == [expected[index::3] for index in range(3)]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", CHURN)
def test_a_state_is_good_for_other_numbers(make_service, name, event):
    expected = alone(make_service, name)
    service = make_service(3)
    with reading(*consumers(name, service.target, 3)) as readers:
        in_turn(readers, 600)
        EVENTS[event](service, 0)
        in_turn(readers, 300)
        state = readers[1].get_state()
    service = make_service(2)
    with reading(*consumers(name, service.target, 2)) as readers:
        for reader in readers:
            reader.set_state(state)
        first = read(readers[0], 1)
        EVENTS[event](service, 0)
        rest = in_turn([readers[1], readers[0]])
    assert [np.asarray(first[0]).tolist(), *rest] == expected[900:]


def test_who_comes_again_when_all_has_been_used_is_told_so(make_service, caplog):
    """Warn consumers of a completed job, for example in a new run with an old journal."""
    service = make_service(2)
    with reading(*consumers("map", service.target, 2, length=4)) as readers:
        assert in_turn(readers, 4) == [0, 3, 6, 9]
    with reading(*consumers("map", service.target, 2, length=4)) as readers:
        assert [list(reader) for reader in readers] == [[], []]
    told = [
        record for record in caplog.records if "was over before this consumer" in record.message
    ]
    assert [record.levelname for record in told] == ["WARNING", "WARNING"]


def test_consumers_for_whom_there_is_nothing_are_told_nothing(make_service, caplog):
    with reading(*consumers("map", make_service(2).target, 5, length=3)) as readers:
        assert in_turn(readers) == [0, 3, 6]
    assert not caplog.records
