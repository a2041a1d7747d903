"""Static sharding through a service: which worker takes what, and that nothing is lost."""

import threading
from collections import Counter, defaultdict

import pytest
from _cases.data_readers import numbers, read, reading

from dataservice import (
    SHARD_HINT,
    Dataset,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from dataservice.dataset.base import UNKNOWN_CARDINALITY
from mpidist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
BY_ELEMENTS = [DATA, FILE_OR_DATA, HINT]
WORKERS = [1, 2, 3, 5]


def any_worker(workers):
    return {"worker_addresses": ["localhost"] * workers}


def shared_out(dataset, policy):
    return dataset.shard(SHARD_HINT, SHARD_HINT) if policy is HINT else dataset


def with_task(element):
    """Beside an element, the id of the task that made it."""
    return element, int(threading.current_thread().name.rpartition("-")[2])


def by_task(elements):
    parts = defaultdict(list)
    for element, task in elements:
        parts[int(task)].append(element)
    return parts


def flat(lists):
    return [element for one in lists for element in one]


@pytest.fixture
def files(tmp_path):
    """``files(3)``: a dataset of three files of four lines each, and its elements by file."""

    def write(count):
        lines = [[f"{number}-{line}" for line in range(4)] for number in range(count)]
        paths = [tmp_path / f"{number:02}.txt" for number in range(count)]
        for path, content in zip(paths, lines, strict=True):
            path.write_text("\n".join(content) + "\n")
        return Dataset.from_files([str(path) for path in paths]), lines

    return write


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("policy", BY_ELEMENTS)
def test_each_worker_gives_every_nth_element(make_service, policy, workers):
    service = make_service(workers, **any_worker(workers))
    dataset = shared_out(Dataset.range(53), policy).map(with_task)
    parts = by_task(dataset.apply(distribute(policy, service.target)))
    assert sorted(parts.values()) == [list(range(i, 53, workers)) for i in range(workers)]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("policy", [FILE, FILE_OR_DATA])
def test_each_worker_reads_every_nth_file(make_service, files, policy, workers):
    service = make_service(workers, **any_worker(workers))
    dataset, lines = files(7)
    parts = by_task(dataset.map(with_task).apply(distribute(policy, service.target)))
    expected = [flat(lines[i::workers]) for i in range(workers)]
    assert sorted(list(map(str, part)) for part in parts.values()) == sorted(expected)


def test_fewer_files_than_workers_are_shared_by_elements(make_service, files):
    service = make_service(5, **any_worker(5))
    dataset, lines = files(3)
    parts = by_task(dataset.map(with_task).apply(distribute(FILE_OR_DATA, service.target)))
    expected = [flat(lines)[i::5] for i in range(5)]
    assert sorted(list(map(str, part)) for part in parts.values()) == sorted(expected)


# Which worker

LISTS = {
    "ports": ["localhost:7001", "localhost:7002", "localhost:7003"],
    "ports of a protocol": [f"inproc://localhost:{port}" for port in (7001, 7002, 7003)],
    "one port": ["localhost", "localhost:7002", "localhost:%port%"],
    "the last port": ["localhost:%port%", "localhost", "localhost:7003"],
}


@pytest.mark.parametrize("started", [(7001, 7002, 7003), (7003, 7001, 7002), (7002, 7003, 7001)])
@pytest.mark.parametrize("addresses", LISTS.values(), ids=LISTS)
def test_the_place_in_the_list_says_which_part(make_service, addresses, started):
    service = make_service(0, worker_addresses=addresses)
    for port in started:
        service.add_worker(port=port)
    dataset = Dataset.range(30).repeat().map(with_task)
    with reading(dataset.apply(distribute(DATA, service.target))) as [elements]:
        taken = set()
        while len({task for _, task in taken}) < 3:
            element, task = next(elements)
            taken.add((int(element) % 3, int(task)))
        tasks = [next(iter(worker._worker._tasks)) for worker in service.workers]
    place = {task: index for index, task in taken}
    assert sorted(place.values()) == [0, 1, 2]
    for task, port in zip(tasks, started, strict=True):
        named = [str(port) in one for one in addresses]
        assert not any(named) or named.index(True) == place[task]


def test_a_worker_that_is_not_in_the_list(make_service):
    service = make_service(0, worker_addresses=["localhost:7001", "elsewhere:%port%"])
    with pytest.raises(InvalidArgumentError, match=r"localhost:7002 is not in .*worker_addresses"):
        service.add_worker(port=7002)


@pytest.mark.parametrize("addresses", [["localhost"], ["localhost", "localhost:%port%"]])
def test_more_workers_than_in_the_list(make_service, addresses):
    service = make_service(len(addresses), worker_addresses=addresses)
    with pytest.raises(
        InvalidArgumentError, match="other workers of its host have taken all entries"
    ):
        service.add_worker()
    dataset = Dataset.range(20).apply(distribute(DATA, service.target))
    assert sorted(numbers(dataset)) == list(range(20))


@pytest.mark.parametrize("policy", [FILE, *BY_ELEMENTS])
def test_no_list(make_service, files, policy):
    service = make_service(2)
    dataset = shared_out(files(3)[0], policy).apply(
        distribute(policy, service.target, start_timeout_s=30)
    )
    with pytest.raises(NotFoundError, match=r"worker_addresses"):
        list(dataset)


@pytest.mark.parametrize("policy", BY_ELEMENTS)
def test_the_part_of_a_worker_that_comes_late_is_waited_for(make_service, policy):
    service = make_service(1, **any_worker(3))
    dataset = shared_out(Dataset.range(30), policy).apply(distribute(policy, service.target))
    with reading(dataset) as [elements]:
        assert numbers(read(elements, 10)) == list(range(0, 30, 3))
        service.add_worker()
        assert numbers(read(elements, 10)) == list(range(1, 30, 3))
        service.add_worker()
        assert numbers(elements) == list(range(2, 30, 3))


def test_a_worker_that_never_comes(make_service):
    service = make_service(1, **any_worker(2))
    dataset = Dataset.range(30).apply(distribute(DATA, service.target, start_timeout_s=0.3))
    with reading(dataset) as [elements]:
        assert numbers(read(elements, 15)) == list(range(0, 30, 2))
        with pytest.raises(UnavailableError, match="no data worker for the rest of the dataset"):
            next(elements)


# What is not to be had


@pytest.mark.parametrize(
    ("make", "policy", "error", "message"),
    [
        (lambda: Dataset.range(9), FILE, NotFoundError, "unshardable"),
        (lambda: Dataset.range(9), HINT, NotFoundError, r"needs shard\(SHARD_HINT"),
        (
            lambda: Dataset.range(9).shard(SHARD_HINT, SHARD_HINT),
            OFF,
            FailedPreconditionError,
            "HINT",
        ),
        (
            lambda: Dataset.range(9).shard(SHARD_HINT, SHARD_HINT),
            DATA,
            FailedPreconditionError,
            "HINT",
        ),
        (
            lambda: Dataset.range(9).shard(SHARD_HINT, SHARD_HINT),
            DYNAMIC,
            FailedPreconditionError,
            "HINT",
        ),
        (lambda: Dataset.range(9).shard(3, SHARD_HINT), HINT, InvalidArgumentError, "for both"),
        (lambda: Dataset.range(9).shard(SHARD_HINT, 0), HINT, InvalidArgumentError, "for both"),
    ],
)
def test_policies_that_do_not_fit(make_service, make, policy, error, message):
    service = make_service(2, **any_worker(2))
    with pytest.raises(error, match=message):
        list(make().apply(distribute(policy, service.target)))


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_files(make_service, files, count):
    service = make_service(5, **any_worker(5))
    with pytest.raises(InvalidArgumentError, match=f"{count} files, not enough for 5 workers"):
        list(files(count)[0].apply(distribute(FILE, service.target)))


# Shapes of datasets

SHAPES = {
    "map": lambda ds: ds.map(lambda x: x * 2),
    "filter": lambda ds: ds.filter(lambda x: x % 3 > 0),
    "batch": lambda ds: ds.batch(4),
    "shuffle": lambda ds: ds.shuffle(11, seed=3),
    "shuffle without a seed": lambda ds: ds.shuffle(11).map(lambda x: x + 1),
    "repeat": lambda ds: ds.repeat(3),
    "flat_map": lambda ds: ds.flat_map(lambda x: Dataset.range(int(x) % 4)),
    "interleave": lambda ds: ds.interleave(lambda x: Dataset.range(3), cycle_length=4),
    "concatenate": lambda ds: ds.concatenate(Dataset.range(100, 107)),
    "zip": lambda ds: Dataset.zip(ds, ds.skip(2)).map(lambda a, b: a + b),
    "take and skip": lambda ds: ds.skip(5).take(20),
    "cache": lambda ds: ds.map(lambda x: x + 1).cache(),
    "take_while": lambda ds: ds.take_while(lambda x: x < 30),
    "scan": lambda ds: ds.scan(0, lambda last, x: (x, last + x)),
    "unique": lambda ds: ds.map(lambda x: x // 2).unique(),
    "groups": lambda ds: ds.group_by_window(lambda x: x % 3, lambda key, g: g.batch(2), 4),
    "rebatch": lambda ds: ds.batch(4).rebatch(3),
    "empty": lambda ds: ds.take(0),
    "everything": lambda ds: ds.shuffle(9).repeat(2).map(lambda x: x + 1).batch(3).prefetch(2),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("policy", [DATA, HINT])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_comes_once(make_service, shape, policy, workers):
    service = make_service(workers, **any_worker(workers))
    dataset = shared_out(SHAPES[shape](Dataset.range(40)), policy)
    distributed = dataset.apply(distribute(policy, service.target))
    whole = Counter(numbers(SHAPES[shape](Dataset.range(40))))
    for _ in range(2):
        assert Counter(numbers(distributed)) == whole
    assert distributed.repeat(2).node.cardinality() in (UNKNOWN_CARDINALITY, 0)


@pytest.mark.parametrize("consumers", [2, 3])
def test_consumers_share_a_job(make_service, consumers):
    service = make_service(3, **any_worker(3))
    apply = distribute(DATA, service.target, "job")
    with reading(*(Dataset.range(1000).apply(apply) for _ in range(consumers))) as readers:
        assert sorted(n for reader in readers for n in numbers(reader)) == [*range(1000)]


def test_a_registered_dataset(make_service):
    service = make_service(3, **any_worker(3))
    name = register_dataset(service.target, Dataset.range(30))
    assert sorted(numbers(from_dataset_id(DATA, service.target, name))) == list(range(30))


@pytest.mark.parametrize("outer", [OFF, DATA])
def test_a_dataset_that_is_read_from_a_service(make_service, outer):
    inner, service = make_service(2), make_service(3, **any_worker(3))
    dataset = Dataset.range(30).apply(distribute(DYNAMIC, inner.target)).map(lambda x: x + 1)
    found = Counter(numbers(dataset.apply(distribute(outer, service.target))))
    if outer is OFF:
        assert found == dict.fromkeys(range(1, 31), 3)
    else:
        assert found.total() == 30


# Losses


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("policy", [FILE, *BY_ELEMENTS])
def test_others_go_on_with_the_part_of_a_lost_worker(make_service, files, policy, lost):
    service = make_service(3, **any_worker(3))
    dataset, lines = files(6)
    dataset = shared_out(dataset.repeat(300), policy).apply(distribute(policy, service.target))
    with reading(dataset) as [elements]:
        first = read(elements, 1)
        service.workers[lost].stop()
        found = Counter(map(str, [*first, *elements]))
    assert {line: found[line] for line in flat(lines)} == dict.fromkeys(flat(lines), 300)


@pytest.mark.parametrize("same_port", [True, False])
@pytest.mark.parametrize("policy", BY_ELEMENTS)
def test_workers_that_are_restarted(make_service, policy, same_port):
    service = make_service(2, **any_worker(2))
    dataset = shared_out(Dataset.range(9000), policy).apply(distribute(policy, service.target))
    with reading(dataset) as [elements]:
        found = read(elements, 10)
        for number in (0, 1, 0):
            service.restart_worker(number, same_port)
            found += read(elements, 500)
        assert sorted(numbers([*found, *elements])) == list(range(9000))
    # Each has its place again.
    assert sorted(numbers(dataset)) == list(range(9000))


@pytest.mark.parametrize("policy", BY_ELEMENTS)
@pytest.mark.parametrize("workers_too", [False, True])
def test_a_dispatcher_that_is_restarted(make_service, tmp_path, policy, workers_too):
    journal = {"work_dir": str(tmp_path), "fault_tolerant_mode": True}
    service = make_service(2, **any_worker(2), **journal)
    dataset = shared_out(Dataset.range(9000), policy).apply(distribute(policy, service.target))
    with reading(dataset) as [elements]:
        found = read(elements, 10)
        for _ in range(2):
            service.restart_dispatcher()
            if workers_too:
                service.restart_worker(1)
            found += read(elements, 500)
        assert sorted(numbers([*found, *elements])) == list(range(9000))
    assert sorted(numbers(dataset)) == list(range(9000))


@pytest.mark.parametrize("policy", BY_ELEMENTS)
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_state_has_the_parts_it_had(make_service, policy, after):
    def make(workers):
        service = make_service(workers, **any_worker(workers))
        return shared_out(Dataset.range(600), policy).apply(distribute(policy, service.target))

    with reading(make(3)) as [elements]:
        before = read(elements, 100)
        state = elements.get_state()
    with reading(make(after)) as [elements]:
        elements.set_state(state)
        assert sorted(numbers([*before, *elements])) == list(range(600))
