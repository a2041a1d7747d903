"""Servers that are stopped while clients leave, while servers start, or by a bug."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from _cases.data_process import Process

from dataservice import (
    Dataset,
    DispatcherConfig,
    DispatchServer,
    WorkerConfig,
    WorkerServer,
    distribute,
    distributed_save,
    from_dataset_id,
    register_dataset,
    service_status,
)
from dataservice.dispatch import dispatcher as dispatcher_module
from dataservice.dispatch.dispatcher import Answers
from dataservice.snapshot import metadata
from dataservice.work import worker as worker_module
from mpidist.errors import CancelledError, FailedPreconditionError, InternalError, OpError

LIMIT_S = 30


def test_workers_that_leave_while_the_dispatcher_stops(make_service, monkeypatch):
    service = make_service(4)
    tell, leaving = Answers.notify, list(service.workers)

    def slow(self, worker, method, body):
        if method == "DispatcherStopped" and leaving:
            leaving.pop().stop()
        tell(self, worker, method, body)

    monkeypatch.setattr(Answers, "notify", slow)
    service.dispatcher.stop()
    service.dispatcher.join()


@pytest.mark.parametrize("role", ["dispatcher", "worker"])
def test_a_stop_that_fails_ends_the_server_all_the_same(make_service, monkeypatch, role):
    service = make_service(1)
    server = service.dispatcher if role == "dispatcher" else service.workers[0]
    inner = server._dispatcher if role == "dispatcher" else server._worker
    close = inner.close

    def broken():
        close()
        raise ValueError("a bug")

    monkeypatch.setattr(inner, "close", broken)
    endpoint = server._endpoint
    with pytest.raises(ValueError, match="a bug"):
        server.stop()
    server.join()
    server.stop()
    with pytest.raises(Exception, match="closed"):
        endpoint.call(service.target, "dispatcher/GetStatus").wait(LIMIT_S)


def test_a_worker_that_is_stopped_while_it_starts():
    config = WorkerConfig(
        dispatcher_address="localhost:59999", protocol="tcp", dispatcher_timeout_ms=3_600_000
    )
    worker, ends = WorkerServer(config, start=False), []

    def start():
        try:
            worker.start()
        except CancelledError as error:
            ends.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    worker.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    worker.join()
    assert worker.stopped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("role", ["dispatcher", "worker"])
def test_a_bug_ends_a_server_with_its_reason(make_service, monkeypatch, role):
    service = make_service(1)

    def broken(*_):
        raise ZeroDivisionError("a bug")

    if role == "dispatcher":
        server = service.dispatcher
        monkeypatch.setattr(server._dispatcher, "_check_timeouts", broken)
    else:
        server = service.workers[0]
        monkeypatch.setattr(server._worker, "_beat", broken)
    with pytest.raises(InternalError, match="a bug"):
        server.join()
    assert server.stopped
    if role == "dispatcher":
        apply = distribute("distributed_epoch", service.target, start_timeout_s=1)
        with pytest.raises(OpError):
            list(Dataset.range(3).apply(apply))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_fails_at_its_end_is_an_error_of_the_save(
    make_service, monkeypatch, tmp_path, caplog
):
    service = make_service(1)
    read, path = metadata.read_facts, tmp_path / "saved"

    def stale(folder, name):
        if threading.current_thread().name == "dataservice-dispatcher":
            raise OSError(116, "Stale file handle")
        return read(folder, name)

    monkeypatch.setattr(metadata, "read_facts", stale)
    distributed_save(Dataset.range(10), path, service.target)
    with pytest.raises(OpError, match="Stale file handle"):
        list(Dataset.load(path, wait=True))
    # The dispatcher continues.
    dataset = Dataset.range(5).apply(distribute("distributed_epoch", service.target))
    assert sorted(int(x) for x in dataset) == list(range(5))


def test_a_save_without_workers_is_refused(make_service, tmp_path):
    service = make_service(0)
    with pytest.raises(FailedPreconditionError, match="start the workers"):
        distributed_save(Dataset.range(10), tmp_path / "saved", service.target)
    for _ in range(2):
        service.add_worker()
    distributed_save(Dataset.range(10), tmp_path / "saved", service.target)
    assert sorted(int(x) for x in Dataset.load(tmp_path / "saved", wait=True)) == list(range(10))
    assert len(os.listdir(tmp_path / "saved" / "streams")) == 2


def test_ids_that_are_in_the_journal_are_not_given_again(tmp_path, monkeypatch):
    import itertools

    config = DispatcherConfig(
        port=0, protocol="tcp", work_dir=str(tmp_path), fault_tolerant_mode=True
    )
    for name, first in (("A", 0), ("B", 50)):
        monkeypatch.setattr(dispatcher_module, "_IDS", itertools.count(100))
        with DispatchServer(config) as dispatcher:
            register_dataset(dispatcher.target, Dataset.range(first, first + 3), dataset_id=name)
            if name == "B":
                with WorkerServer(dispatcher_address=dispatcher.target):
                    read = from_dataset_id("parallel_epochs", dispatcher.target, "A")
                    assert [int(x) for x in read] == [0, 1, 2]


BROKEN = """
import sys
from dataservice.dispatch.dispatcher import Dispatcher
from dataservice.__main__ import main
def broken(self, now):
    raise ZeroDivisionError("a bug")
Dispatcher._check_timeouts = broken
sys.exit(main(["dispatcher"]))
"""


def test_a_dispatcher_process_ends_with_the_reason_of_a_bug():
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "a bug" in ended.stderr.splitlines()[-1], ended.stderr


@pytest.fixture
def far(tmp_path):
    """Provide a dispatcher in its own process. Its journal lets it stop without telling workers."""
    work_dir = str(tmp_path / "journal")
    config = DispatcherConfig(protocol="tcp", work_dir=work_dir, fault_tolerant_mode=True)
    process = Process("dispatcher", tmp_path, "dispatcher", config)
    yield process
    process.end()


def far_worker(far, **config):
    """Return a worker with rare heartbeats, so that no heartbeat detects a lost dispatcher."""
    address = f"tcp://localhost:{far.port}"
    return WorkerServer(WorkerConfig(address, heartbeat_interval_ms=60_000, **config))


def stopped_in(server):
    begin = time.monotonic()
    server.stop()
    return time.monotonic() - begin


@pytest.mark.parametrize("how", ["stopped", "killed", "stopped before"])
def test_a_worker_whose_dispatcher_is_gone_ends_at_once(far, caplog, how):
    worker = far_worker(far)
    if how == "killed":
        far.end()
    else:
        far.stop()
    if how == "stopped before":
        time.sleep(0.5)
    assert stopped_in(worker) < 2
    assert caplog.messages == []


def test_a_worker_does_not_wait_for_a_dispatcher_that_is_stuck(far, caplog):
    worker = far_worker(far)
    far.signal(signal.SIGSTOP)
    assert stopped_in(worker) < 4
    assert caplog.messages == []


def test_a_worker_that_is_stopped_while_it_registers_leaves_no_worker_behind(far):
    address = f"tcp://localhost:{far.port}"
    with WorkerServer(WorkerConfig(address)):  # the connection is open
        far.signal(signal.SIGSTOP)
        worker, ends = WorkerServer(WorkerConfig(address), start=False), []

        def start():
            try:
                worker.start()
            except CancelledError as error:
                ends.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        time.sleep(0.5)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        time.sleep(0.3)
        far.signal(signal.SIGCONT)
        starting.join(LIMIT_S)
        stopping.join(LIMIT_S)
        assert len(ends) == 1
        assert len(service_status(address).workers) == 1


BEGAN, GO_ON = threading.Event(), threading.Event()


def held(x):
    BEGAN.set()
    assert GO_ON.wait(LIMIT_S)
    return x


def test_a_worker_names_the_function_that_holds_its_end_up(make_service, monkeypatch, caplog):
    monkeypatch.setattr(worker_module, "_CLOSE_S", 0.2)
    service = make_service(1)
    dataset = Dataset.range(3).map(held).apply(distribute("parallel_epochs", service.target))
    reading = threading.Thread(target=lambda: next(iter(dataset), None))
    reading.start()
    assert BEGAN.wait(LIMIT_S)
    service.workers[0].stop()
    GO_ON.set()
    service.add_worker()
    reading.join(LIMIT_S)
    (message,) = [text for text in caplog.messages if "is still running" in text]
    assert "dataservice-task-" in message
    assert "a function, a source or a write of its dataset has not returned" in message
