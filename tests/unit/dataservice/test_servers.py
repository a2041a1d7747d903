import gc
import queue
import socket
import threading

import pytest
from _cases.endpoints import wait_until

from dataservice import (
    Dataset,
    DispatcherConfig,
    DispatchServer,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from dataservice.calls import RpcClient
from dataservice.dispatch.registry import Registry
from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.task import Task
from mpidist import LATER, Reply, open_endpoint
from mpidist.errors import (
    AlreadyExistsError,
    CancelledError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)


@pytest.mark.parametrize("protocol", [None, "inproc", "grpc", "grpc+local", "tcp"])
def test_protocols_are_kept_in_the_target(protocol):
    with DispatchServer(port=0, protocol=protocol) as dispatcher:
        scheme, address = dispatcher.target.split("://")
        assert scheme == protocol or (protocol is None and scheme == "inproc")
        with WorkerServer(port=0, dispatcher_address=address, protocol=protocol):
            dataset = Dataset.range(3).apply(distribute("parallel_epochs", dispatcher.target))
            assert list(dataset) == [0, 1, 2]


@pytest.mark.parametrize("protocol", ["http", "udp"])
def test_protocols_that_there_are_not(protocol):
    with pytest.raises(ValueError, match=protocol):
        DispatchServer(port=0, protocol=protocol)


def test_servers_without_a_name_stay_started():
    """Check that only atexit handlers stop unreferenced servers."""

    def start():
        dispatcher = DispatchServer(4805, "inproc")
        WorkerServer(4806, "localhost:4805", protocol="inproc")
        return dispatcher.target

    stops = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atexit.register", stops.append)
        target = start()
    gc.collect()
    try:
        dataset = Dataset.range(3).apply(distribute("parallel_epochs", target))
        assert list(dataset) == [0, 1, 2]
        with pytest.raises(AlreadyExistsError):
            DispatchServer(4805, "inproc")
    finally:
        for stop in reversed(stops):
            stop()
    DispatchServer(4805, "inproc").stop()


def test_both_call_styles():
    for make_dispatcher in (
        lambda: DispatchServer(4801, "inproc"),
        lambda: DispatchServer(DispatcherConfig(port=4801, protocol="inproc")),
        lambda: DispatchServer(config=DispatcherConfig(port=4801, protocol="inproc")),
    ):
        dispatcher = make_dispatcher()
        assert dispatcher.target == "inproc://localhost:4801"
        for make_worker in (
            lambda: WorkerServer(4802, "localhost:4801"),
            lambda: WorkerServer(WorkerConfig("localhost:4801", port=4802)),
            lambda: WorkerServer(config=WorkerConfig(dispatcher_address="inproc://localhost:4801")),
            lambda: WorkerServer(0, "localhost:4801", worker_address="localhost:%port%"),
        ):
            worker = make_worker()
            dataset = Dataset.range(2).apply(distribute("parallel_epochs", dispatcher.target))
            assert list(dataset) == [0, 1]
            worker.stop()
        dispatcher.stop()


def a_free_port():
    with socket.create_server(("localhost", 0)) as listening:
        return listening.getsockname()[1]


@pytest.mark.parametrize("protocol", ["inproc", "tcp", "grpc"])
def test_a_port_in_use(protocol):
    port = a_free_port()
    with DispatchServer(port=port, protocol=protocol) as first:
        with pytest.raises(AlreadyExistsError, match="in use"):
            DispatchServer(port=port, protocol=protocol)
        with WorkerServer(dispatcher_address=first.target):
            dataset = Dataset.range(3).apply(distribute("parallel_epochs", first.target))
            assert list(dataset) == [0, 1, 2]


def test_a_port_that_there_is_not():
    with pytest.raises(InvalidArgumentError, match="1 to 65535, not 70000"):
        DispatchServer(port=70000)


def test_who_names_a_port_is_found_there_by_others():
    address = f"localhost:{a_free_port()}"
    with DispatchServer(port=int(address.rpartition(":")[2])) as dispatcher:
        assert dispatcher.target == f"tcp://{address}"
        with socket.create_connection(address.split(":"), timeout=10):
            pass
        with WorkerServer(dispatcher_address=address):
            for service in (address, f"grpc://{address}", dispatcher.target):
                dataset = Dataset.range(3).apply(distribute("parallel_epochs", service))
                assert list(dataset) == [0, 1, 2]


def test_starting_and_stopping():
    dispatcher = DispatchServer(port=4804, protocol="inproc", start=False)
    for use in (dispatcher.join, lambda: dispatcher.target):
        with pytest.raises(FailedPreconditionError, match="started"):
            use()
    dispatcher.start()
    dispatcher.start()
    dispatcher.stop()
    dispatcher.stop()
    dispatcher.join()
    with pytest.raises(FailedPreconditionError, match="cannot be started after stopped"):
        dispatcher.start()
    with DispatchServer(port=4804, protocol="inproc"):  # the port is free again
        pass


def test_a_server_that_was_never_started_can_be_stopped():
    dispatcher = DispatchServer(start=False)
    dispatcher.stop()
    with pytest.raises(FailedPreconditionError, match="after stopped"):
        dispatcher.start()


def test_a_worker_joins_until_stopped():
    with DispatchServer() as dispatcher:
        worker = WorkerServer(dispatcher_address=dispatcher.target)
        joined = threading.Thread(target=worker.join)
        joined.start()
        worker.stop()
        joined.join(10)
        assert not joined.is_alive()


def test_a_worker_without_a_dispatcher():
    config = WorkerConfig("localhost:4805", dispatcher_timeout_ms=50)
    with pytest.raises(UnavailableError, match=r"no dispatcher answers at localhost:4805.*0\.05 s"):
        WorkerServer(config)
    with pytest.raises(ValueError, match="dispatcher_address"):
        WorkerServer(port=0)


@pytest.mark.parametrize(
    "address", ["nonsense", "localhost:x", "localhost:\u0663", "http://localhost:4805"]
)
def test_an_address_that_is_none(address):
    with pytest.raises(ValueError, match=r"is not an address|unknown protocol 'http'"):
        WorkerServer(dispatcher_address=address)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"fault_tolerant_mode": True}, ValueError),
        ({"worker_addresses": "a:1"}, ValueError),
        ({"worker_addresses": ["a", ""]}, ValueError),
        ({"worker_addresses": ["a:1", "b", "a:1"]}, ValueError),
        ({"worker_timeout_ms": 0}, ValueError),
        ({"job_gc_timeout_ms": -2}, ValueError),
        ({"worker_max_concurrent_snapshots": -1}, ValueError),
        ({"worker_max_concurrent_snapshots": 1.5}, ValueError),
    ],
)
def test_dispatcher_settings(arguments, error):
    with pytest.raises(error):
        DispatcherConfig(**arguments)


@pytest.mark.parametrize(
    "given",
    [
        {"data_transfer_protocol": "grpc"},
        {"data_transfer_protocol": "tcp", "protocol": "tcp"},
        {"data_transfer_address": "localhost:%dts_port%"},
        {"data_transfer_address": "n1:%dts_port%", "worker_address": "n1:%port%"},
    ],
)
def test_elements_travel_as_calls_do(given):
    WorkerConfig("localhost:1", **given)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"data_transfer_protocol": "mpi", "protocol": "tcp"}, "data_transfer_protocol='mpi'"),
        ({"data_transfer_protocol": "grpc+rdma"}, "the protocol of the service"),
        ({"data_transfer_address": "n2:%dts_port%"}, "'n2:%dts_port%'.*'localhost:%port%'"),
        ({"data_transfer_address": "n1:1", "worker_address": "n1:2"}, "'n1:1'.*'n1:2'"),
    ],
)
def test_other_ways_for_elements(given, what):
    with pytest.raises(ValueError, match=what):
        WorkerConfig("localhost:1", **given)


def test_no_garbage_collection_of_jobs():
    DispatcherConfig(job_gc_timeout_ms=-1)


def test_a_negative_port():
    with pytest.raises(ValueError, match="-1"):
        DispatchServer(port=-1)


def test_a_worker_that_was_given_up_registers_again(caplog):
    config = DispatcherConfig(job_gc_check_interval_ms=1, worker_timeout_ms=1)
    with DispatchServer(config) as dispatcher:
        worker = WorkerConfig(dispatcher.target, heartbeat_interval_ms=30)
        with WorkerServer(worker), WorkerServer(worker):
            # The heartbeat of one worker expires the other. Its own heartbeat registers it again.
            deadline = threading.Event()
            while caplog.text.count("registers again") < 2:
                assert not deadline.wait(0.01)


def task_threads():
    return [t for t in threading.enumerate() if t.name.startswith("dataservice-task")]


def test_a_dispatcher_that_starts_at_the_address_of_another(caplog):
    caplog.set_level("INFO", "dataservice.dispatch.dispatcher")

    def endless(first):
        return Dataset.range(first, first + 3).repeat().apply(apply)

    apply = distribute("parallel_epochs", "inproc://localhost:4806")
    config = WorkerConfig("localhost:4806", heartbeat_interval_ms=20)
    with DispatchServer(port=4806, protocol="inproc") as first, WorkerServer(config):
        before = iter(endless(0))
        assert next(before) == 0
        first.stop()
        with DispatchServer(port=4806, protocol="inproc"):
            wait_until(lambda: caplog.text.count("registered") == 2)
            after = iter(endless(100))
            assert [int(next(after)) for _ in range(4)] == [100, 101, 102, 100]
            with pytest.raises((UnavailableError, NotFoundError)):
                list(before)
            # The worker has given up the task of the first dispatcher's consumer.
            wait_until(lambda: len(task_threads()) == 1)
            after.close()


class Dispatcher:
    """A simulated dispatcher. It knows no worker and holds registrations until the test answers."""

    def __init__(self, endpoint):
        self.registrations = queue.Queue()
        handlers = {
            "WorkerHeartbeat": self._forget,
            "RegisterWorker": self._hold,
            "GetTask": self._forget,
        }
        endpoint.register("dispatcher", handlers)
        endpoint.serve_in_thread()

    def _forget(self, request):
        raise NotFoundError("who are you?")

    def _hold(self, request):
        self.registrations.put(request)
        return LATER


@pytest.fixture
def registering():
    """Provide a worker that registers again, its old id, and the second dispatcher."""
    config = WorkerConfig("localhost:4807", heartbeat_interval_ms=20)
    with DispatchServer(port=4807, protocol="inproc") as first:
        worker = WorkerServer(config)
        worker_id = worker._worker._worker_id
        first.stop()
    with worker, open_endpoint("inproc", 4807) as endpoint:
        yield worker, worker_id, Dispatcher(endpoint)


def begin(endpoint, worker, task_id):
    """Tell a worker to begin a task, as the dispatcher does."""
    body = pb.TasksUpdate(begin=[task_id]).SerializeToString()
    endpoint.notify(worker._endpoint.address, "data_worker/UpdateTasks", body)


def test_a_worker_that_is_stopped_while_a_task_asks_the_dispatcher(monkeypatch):
    def close(task, error, close=Task.close):
        task.thread.join(10)  # keep the task in close(), the worst moment for a stop
        close(task, error)

    monkeypatch.setattr(Task, "close", close)
    with open_endpoint("inproc", 4808) as endpoint:
        asked, held = threading.Event(), []

        def hold(request):
            held.append(request)
            asked.set()
            return LATER

        reply = Reply(pb.RegisterWorkerReply(worker_id=1).SerializeToString())
        handlers = {"RegisterWorker": lambda request: reply, "GetTask": hold}
        endpoint.register("dispatcher", handlers)
        endpoint.serve_in_thread()
        with WorkerServer(dispatcher_address="localhost:4808") as worker:
            begin(endpoint, worker, 1)
            body = pb.GetElementRequest(task_id=1, hold=True).SerializeToString()
            work = endpoint.call(worker._endpoint.address, "data_worker/GetElement", body)
            assert asked.wait(10)
        with pytest.raises(CancelledError, match=r"data worker inproc://localhost:\d+ was stopped"):
            work.result(10)


def test_a_task_that_is_over_asks_for_its_dataset_no_longer():
    with open_endpoint("inproc", 4810) as endpoint:
        asked, held = threading.Event(), []

        def hold(request):
            held.append(request)
            asked.set()
            return LATER

        register = Reply(pb.RegisterWorkerReply(worker_id=1).SerializeToString())
        task = Reply(pb.Task(dataset_id=1).SerializeToString())
        handlers = {
            "RegisterWorker": lambda request: register,
            "WorkerHeartbeat": lambda request: Reply(),
            "GetTask": lambda request: task,
            "GetDataset": hold,
        }
        endpoint.register("dispatcher", handlers)
        endpoint.serve_in_thread()
        with WorkerServer(dispatcher_address="localhost:4810") as worker:
            begin(endpoint, worker, 1)
            address = worker._endpoint.address
            body = pb.GetElementRequest(task_id=1, hold=True).SerializeToString()
            work = endpoint.call(address, "data_worker/GetElement", body)
            assert asked.wait(10)
            body = pb.TasksUpdate(forget=[1]).SerializeToString()
            endpoint.notify(address, "data_worker/UpdateTasks", body)
            wait_until(lambda: not task_threads())
            with pytest.raises(CancelledError):
                work.result(10)


def test_requests_wait_until_the_dispatcher_says_whether_the_task_is_the_workers():
    with open_endpoint("inproc", 4811) as endpoint:
        asked, answers = threading.Event(), queue.Queue()

        def beat(request):
            held = pb.WorkerRequest.FromString(request.body).task_ids
            update = pb.TasksUpdate(forget=[1], begin=[2]) if {1, 2} <= {*held} else None
            return Reply(b"" if update is None else update.SerializeToString())

        def get_task(request):
            answers.put(pb.TaskRequest.FromString(request.body).task_id)
            asked.set()
            return LATER

        register = Reply(pb.RegisterWorkerReply(worker_id=1).SerializeToString())
        handlers = {
            "RegisterWorker": lambda request: register,
            "WorkerHeartbeat": beat,
            "GetTask": get_task,
        }
        endpoint.register("dispatcher", handlers)
        endpoint.serve_in_thread()
        config = WorkerConfig("localhost:4811", heartbeat_interval_ms=20)
        with WorkerServer(config) as worker:
            works = []
            for task_id in (1, 2):
                body = pb.GetElementRequest(task_id=task_id, hold=True).SerializeToString()
                works.append(
                    endpoint.call(worker._endpoint.address, "data_worker/GetElement", body)
                )
            with pytest.raises(CancelledError, match="the task was given up"):
                works[0].result(10)
            assert asked.wait(10)
            assert answers.get() == 2
            assert not works[1].is_completed()
        with pytest.raises(CancelledError, match=r"data worker .* was stopped"):
            works[1].result(10)


def test_nobody_at_an_address_is_unavailable():
    with open_endpoint("inproc") as endpoint:
        caller = RpcClient(endpoint, "localhost:4809", "dispatcher", lambda: False)
        with pytest.raises(UnavailableError, match="nothing serves inproc://localhost:4809"):
            caller.start("dispatcher/GetTask", pb.TaskRequest())


def test_a_worker_that_is_stopped_while_it_registers_again(registering):
    worker, _, dispatcher = registering
    dispatcher.registrations.get(timeout=10)
    worker.stop()  # an error on the worker's thread would be a warning, hence a failure


def test_late_word_of_the_last_dispatcher_is_not_about_the_next(registering):
    worker, old, dispatcher = registering
    request = dispatcher.registrations.get(timeout=10)
    with open_endpoint("inproc") as endpoint:
        body = pb.WorkerRequest(worker_id=old).SerializeToString()
        endpoint.notify(worker._endpoint.address, "data_worker/DispatcherStopped", body)
        request.reply(pb.RegisterWorkerReply(worker_id=old + 1).SerializeToString())
        begin(endpoint, worker, 1)
        body = pb.GetElementRequest(task_id=1, hold=True).SerializeToString()
        work = endpoint.call(worker._endpoint.address, "data_worker/GetElement", body)
        # The worker asks the dispatcher for the task, instead of refusing the task.
        with pytest.raises(CancelledError, match=r"who are you\?"):
            work.result(10)


def test_a_dispatcher_with_nothing_to_do_is_at_rest(tmp_path, monkeypatch):
    looks = []
    ended_saves = Registry.ended_saves
    monkeypatch.setattr(Registry, "ended_saves", lambda self: looks.append(1) or ended_saves(self))
    config = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher, WorkerServer(dispatcher_address=dispatcher.target):
        told = threading.Event()
        threading.Timer(1.0, told.set).start()
        before = len(looks)
        assert told.wait(10)
        assert len(looks) - before < 50  # about four a second, and one for each message
