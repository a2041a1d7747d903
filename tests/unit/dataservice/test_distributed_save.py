"""Datasets that the workers of a service write to disk."""

import threading

import numpy as np
import pytest
from _cases.endpoints import wait_until

from dataservice import (
    Dataset,
    DispatcherConfig,
    DispatchServer,
    WorkerConfig,
    WorkerServer,
    distribute,
    distributed_save,
)
from mpidist.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnknownError,
)

_EVENTS = {}


def event(name):
    return _EVENTS.setdefault(name, threading.Event())


_ACTIVE, _COUNTS, _LOCK = set(), [], threading.Lock()


def pass_by(name, i):
    """Record the saves in progress, and hold all elements but the first until the event "go".

    The first element is evaluated for the element_spec.
    """
    with _LOCK:
        _ACTIVE.add(name) if 0 < i < 9 else _ACTIVE.discard(name)
        _COUNTS.append(len(_ACTIVE))
    assert i == 0 or event("go").wait(30)


@pytest.fixture(autouse=True)
def no_events():
    _EVENTS.clear()
    _ACTIVE.clear()
    _COUNTS.clear()


def values(dataset):
    return sorted(int(element) for element in dataset)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda ds: ds,
        lambda ds: ds.shuffle(7),
        lambda ds: ds.shuffle(7).take(100),
        lambda ds: ds.flat_map(lambda x: Dataset.range(2).map(lambda i, x=x: 2 * x + i)),
        lambda ds: ds.take_while(lambda x: x < 70).scan(0, lambda last, x: (x, last + x)).unique(),
        lambda ds: ds.group_by_window(lambda x: x % 3, lambda key, group: group.shuffle(4), 5),
        lambda ds: ds.batch(7).rebatch(3).unbatch(),
    ],
)
def test_every_element_is_saved_once(make_service, tmp_path, workers, make):
    service = make_service(workers)
    dataset = make(Dataset.range(100))
    distributed_save(dataset, tmp_path / "saved", service.target)
    loaded = Dataset.load(tmp_path / "saved", wait=True)
    expected = values(dataset)
    assert values(loaded) == expected
    done = Dataset.load(tmp_path / "saved")
    assert len(done) == len(expected)
    assert done.element_spec == dataset.element_spec
    # The workers of a service can read the saved dataset together.
    assert values(done.apply(distribute("distributed_epoch", service.target))) == expected


@pytest.mark.parametrize("compression", ["AUTO", None, "LZ4", "SNAPPY", "ZSTD"])
def test_compression(make_service, tmp_path, compression):
    if compression not in ("AUTO", None):
        pytest.importorskip("cramjam")
    service = make_service(2)
    dataset = Dataset.range(20).map(lambda i: {"a": np.full(5000, i), "b": (i, str(i))})
    distributed_save(dataset, tmp_path / "saved", service.target, compression)
    loaded = sorted(Dataset.load(tmp_path / "saved", wait=True), key=lambda each: each["b"][0])
    assert [each["b"] for each in loaded] == [(i, str(i)) for i in range(20)]
    assert all((each["a"] == i).all() for i, each in enumerate(loaded))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert (size < 400_000) == (compression not in ("AUTO", None))


def test_another_worker_goes_on_with_a_stream(make_service, tmp_path):
    service = make_service(2)

    def wait_late(i):
        if i > 50:
            event("somebody waits").set()
            assert event("one has been stopped").wait(30)
        return i

    distributed_save(Dataset.range(100).map(wait_late), tmp_path / "saved", service.target)
    assert event("somebody waits").wait(10)
    stopping = threading.Thread(target=service.workers[0].stop)
    stopping.start()
    wait_until(lambda: len(service.dispatcher._dispatcher._registry.workers) == 1)
    event("one has been stopped").set()
    assert values(Dataset.load(tmp_path / "saved", wait=True)) == list(range(100))
    stopping.join()


@pytest.mark.parametrize(("limit", "most"), [(0, 3), (1, 1), (2, 2)])
def test_a_worker_writes_few_snapshots_at_a_time(tmp_path, limit, most):
    def of(name):
        def see(i):
            pass_by(name, i)
            return i

        return Dataset.range(10).map(see)

    config = DispatcherConfig(worker_max_concurrent_snapshots=limit)
    with (
        DispatchServer(config) as dispatcher,
        WorkerServer(WorkerConfig(dispatcher.target, heartbeat_interval_ms=20)),
    ):
        for number in range(5):
            distributed_save(of(number), tmp_path / str(number), dispatcher.target)
        wait_until(lambda: len(_ACTIVE) == most)
        (worker,) = dispatcher._dispatcher._registry.workers.values()
        heartbeats = set()
        wait_until(lambda: heartbeats.add(worker.last_seen) or len(heartbeats) > 5)
        event("go").set()
        for number in range(5):
            assert values(Dataset.load(tmp_path / str(number), wait=True)) == list(range(10))
        assert max(_COUNTS) == most


def test_a_dispatcher_that_is_started_again(tmp_path):
    config = DispatcherConfig(
        port=4821, protocol="inproc", work_dir=str(tmp_path / "journal"), fault_tolerant_mode=True
    )

    def wait(i):
        if i:  # the first element is evaluated for the element_spec
            event("begun").set()
            assert event("again").wait(30)
        return i

    worker = WorkerConfig("localhost:4821", heartbeat_interval_ms=20)
    with DispatchServer(config) as first, WorkerServer(worker):
        distributed_save(Dataset.range(50).map(wait), tmp_path / "saved", first.target)
        assert event("begun").wait(10)
        first.stop()
        with DispatchServer(config):
            event("again").set()
            assert values(Dataset.load(tmp_path / "saved", wait=True)) == list(range(50))


def test_an_error_is_raised_at_load(make_service, tmp_path):
    service = make_service(2)

    def fail(i):
        if i == 7:
            raise ValueError("seven")
        return i

    distributed_save(Dataset.range(10).map(fail), tmp_path / "saved", service.target)
    with pytest.raises(UnknownError, match="ValueError: seven"):
        list(Dataset.load(tmp_path / "saved", wait=True))
    # The service still works.
    distributed_save(Dataset.range(10), tmp_path / "next", service.target)
    assert values(Dataset.load(tmp_path / "next", wait=True)) == list(range(10))


@pytest.mark.parametrize("error", [NotFoundError, AbortedError, CancelledError])
def test_errors_that_servers_use_themselves_are_told_too(make_service, tmp_path, error):
    service = make_service(2)

    def fail(i):
        if i:
            raise error("mine")
        return i

    distributed_save(Dataset.range(10).map(fail), tmp_path / "saved", service.target)
    with pytest.raises(error, match="mine"):
        list(Dataset.load(tmp_path / "saved", wait=True))


def test_wrong_arguments(make_service, tmp_path):
    service = make_service(1)
    distributed_save(Dataset.range(3), tmp_path / "saved", service.target)
    with pytest.raises(AlreadyExistsError, match="name another folder"):
        distributed_save(Dataset.range(3), tmp_path / "saved", service.target)
    with pytest.raises(InvalidArgumentError, match="is infinite and cannot be saved"):
        distributed_save(Dataset.range(3).repeat(), tmp_path / "endless", service.target)
    with pytest.raises(ValueError, match="'GZIP'"):
        distributed_save(Dataset.range(3), tmp_path / "other", service.target, "GZIP")
    with pytest.raises(ValueError, match="host:port"):
        distributed_save(Dataset.range(3), tmp_path / "other", "nowhere")
    wait_until(lambda: (tmp_path / "saved" / "DONE").exists())


def test_no_dispatcher(tmp_path, monkeypatch):
    monkeypatch.setattr("dataservice.client._PATIENCE_S", 0.05)
    with pytest.raises(UnavailableError, match="no dispatcher answers"):
        distributed_save(Dataset.range(3), tmp_path / "saved", "inproc://localhost:4822")
