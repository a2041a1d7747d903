"""A service with a dispatcher on a disk that is full for a while."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from _cases.endpoints import wait_until

from dataservice import Dataset, distribute, from_dataset_id, register_dataset
from dataservice.dispatch import dispatcher as dispatcher_module
from dataservice.dispatch.journal import Journal
from mpidist.errors import ResourceExhaustedError

OFF = "parallel_epochs"


class Disk:
    """A disk with or without room for commits. ``tries`` counts the failed commits."""

    def __init__(self):
        self.tries = 0
        self._room = threading.Event()
        self._room.set()

    def fill(self):
        self.tries = 0
        self._room.clear()

    def make_room(self):
        self._room.set()

    def commit(self, journal, changes, commit=Journal.commit):
        if not self._room.is_set():
            self.tries += 1
            raise ResourceExhaustedError("the disk is full")
        commit(journal, changes)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(Journal, "commit", lambda journal, changes: disk.commit(journal, changes))
    yield disk
    disk.make_room()


@pytest.fixture
def make_journaled(make_service, tmp_path):
    """Provide ``make_journaled(n, **config)``: n workers, and a dispatcher with a journal."""
    return lambda workers, **config: make_service(
        workers, work_dir=str(tmp_path), fault_tolerant_mode=True, **config
    )


@pytest.mark.parametrize("job_name", [None, "shared"])
def test_consumers_go_on_when_there_is_room_again(make_journaled, disk, job_name):
    service = make_journaled(2)
    apply = distribute("distributed_epoch", service.target, job_name=job_name)
    with (
        iter(Dataset.range(5000).apply(apply)) as elements,
        ThreadPoolExecutor(1) as reader,
    ):
        read = [int(next(elements))]
        disk.fill()
        rest = reader.submit(lambda: [int(element) for element in elements])
        wait_until(lambda: disk.tries >= 3)
        assert not rest.done()
        disk.make_room()
        assert sorted(read + rest.result(30)) == list(range(5000))


def test_nobody_who_waits_for_room_counts_as_silent(make_journaled, disk):
    service = make_journaled(1)
    dispatcher = service.dispatcher._dispatcher
    with iter(Dataset.range(3).repeat().apply(distribute(OFF, service.target))) as elements:
        next(elements)
        disk.fill()
        with ThreadPoolExecutor(1) as registering:
            name = registering.submit(register_dataset, service.target, Dataset.range(4))
            wait_until(lambda: dispatcher._answers.waits_for_disk)
            with dispatcher._lock:
                known = set(dispatcher._registry.workers), set(dispatcher._registry.clients)
                dispatcher._check_timeouts(time.monotonic() + 10_000)
                assert known == (
                    set(dispatcher._registry.workers),
                    set(dispatcher._registry.clients),
                )
            disk.make_room()
            assert name.result(30)


def test_questions_that_change_nothing_are_answered_meanwhile(make_journaled, disk):
    service = make_journaled(1)
    name = register_dataset(service.target, Dataset.range(3))
    disk.fill()
    with ThreadPoolExecutor(1) as registering:
        other = registering.submit(register_dataset, service.target, Dataset.range(4))
        wait_until(lambda: disk.tries >= 1)
        assert from_dataset_id(OFF, service.target, name).element_spec is not None
        assert not other.done()
        disk.make_room()
        assert other.result(30)


def test_the_next_dispatcher_answers_who_waits_for_room(make_journaled, disk):
    service = make_journaled(0)
    disk.fill()
    with ThreadPoolExecutor(1) as registering:
        name = registering.submit(register_dataset, service.target, Dataset.range(4))
        wait_until(lambda: disk.tries >= 1)
        started = time.monotonic()
        service.dispatcher.stop()
        assert time.monotonic() - started < 5  # long before there is room or the request times out
        disk.make_room()
        service.restart_dispatcher()
        service.add_worker()
        elements = from_dataset_id(OFF, service.target, name.result(30))
        assert [int(element) for element in elements] == [0, 1, 2, 3]


def test_a_disk_that_stays_full(make_journaled, disk, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_PATIENCE_S", 0.5)
    service = make_journaled(1)
    disk.fill()
    for number in (3, 4):
        with pytest.raises(ResourceExhaustedError, match="the disk is full"):
            register_dataset(service.target, Dataset.range(number))
    assert disk.tries >= 2
    disk.make_room()
    name = register_dataset(service.target, Dataset.range(3))
    elements = from_dataset_id(OFF, service.target, name)
    assert [int(element) for element in elements] == [0, 1, 2]
