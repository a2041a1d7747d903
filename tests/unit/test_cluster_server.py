"""Servers in a plain process."""

import gc
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist
from mpidist import Server, errors, open_endpoint
from mpidist.cluster.membership import check_single_process
from mpidist.proto.mpidist_pb2 import ConfigProto

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(threading.enumerate())
    yield
    left = Server.current()
    if left is not None:
        left.stop()
    assert left is None
    assert set(threading.enumerate()) <= before


def fails_to_start(*args, error=errors.FailedPreconditionError, match=None, **kwargs):
    with pytest.raises(error, match=match):
        Server(*args, **kwargs)


def test_a_local_server():
    config = ConfigProto(allow_soft_placement=True)
    with Server.create_local_server(config) as server:
        assert Server.current() is server
        assert (server.job_name, server.task_index) == ("local", 0)
        assert server.target == "grpc+local://localhost:0"
        assert server.cluster_spec == {"local": {0: "localhost:0"}}
        assert server.server_def.default_session_config == config
        assert server.own_tasks == [("local", 0)]
    config = ConfigProto(intra_op_parallelism_threads=3)
    server = Server.create_local_server(config=config, start=False)
    assert server.server_def.job_name == "local"
    assert server.server_def.default_session_config == config
    assert Server.current() is None


def test_what_is_given_out_is_a_copy():
    server = Server(CLUSTER, "worker", start=False)
    server.server_def.job_name = "other"
    server.server_def.cluster.job[0].tasks[7] = "x"
    assert server.server_def.job_name == "worker"
    assert server.cluster_spec == mpidist.ClusterSpec(CLUSTER)


def test_starting_twice_and_stopping_twice():
    server = Server(CLUSTER, "worker", start=False)
    assert Server.current() is None
    server.start()
    endpoint = server.endpoint
    server.start()
    assert server.endpoint is endpoint
    server.stop()
    server.stop()
    server.join()
    for use in (server.start, lambda: server.endpoint):
        with pytest.raises(errors.FailedPreconditionError):
            use()


def test_before_it_starts():
    server = Server(CLUSTER, "worker", start=False)
    for use in (server.join, lambda: server.endpoint):
        with pytest.raises(errors.FailedPreconditionError, match=r"is not running; start\(\) it"):
            use()
    server.stop()
    with pytest.raises(errors.FailedPreconditionError, match="make a new one"):
        server.start()


def test_one_server_at_a_time():
    with Server(CLUSTER, "worker") as first:
        fails_to_start({"a": ["h:9005"]}, error=errors.AlreadyExistsError, match=first.target)
        assert Server.current() is first
    with Server({"a": ["h:9005"]}) as second:
        assert Server.current() is second


def starts_a_server():
    """Start a Server to which the caller gets no reference."""
    Server({"a": ["h:9005"]})


def starts_a_server_in_a_cycle():
    """Start a Server that is part of a reference cycle, and return no reference."""
    server = Server({"a": ["h:9005"]})
    server.on_drain(lambda: server.target)


def starts_a_server_that_a_failed_call_holds():
    """Start a Server that stays in the frames of a handled exception, and return no reference."""
    server = Server({"a": ["h:9005"]})
    with pytest.raises(ValueError, match="no such job"):
        server.task_address("b", 0)


LEFT_BEHIND = [
    starts_a_server,
    starts_a_server_in_a_cycle,
    starts_a_server_that_a_failed_call_holds,
]


@pytest.mark.parametrize("start", LEFT_BEHIND)
@pytest.mark.parametrize("displayed", [False, True])
def test_a_server_stays_started_until_it_is_stopped(start, displayed):
    """A Server needs no references. A notebook that displays the Server keeps a reference."""
    start()
    cells = [Server.current()] if displayed else []
    gc.collect()
    endpoint = Server.current().endpoint
    for _ in range(2):
        fails_to_start(
            {"b": ["h:1"]},
            error=errors.AlreadyExistsError,
            match=r"already: inproc://h:9005; stop it first: .*Server\.current\(\)\.stop\(\)",
        )
    assert Server.current().endpoint is endpoint
    assert not cells or cells[0] is Server.current()
    Server.current().stop()
    with Server({"b": ["h:1"]}) as second:
        assert Server.current() is second
        with pytest.raises(errors.CancelledError, match="is closed"):
            endpoint.call(second.endpoint.address, "a/B")


@pytest.mark.parametrize("create", [Server.create_local_server, lambda: Server(CLUSTER, "worker")])
def test_every_way_to_start_meets_the_started_one(create):
    starts_a_server()
    with pytest.raises(errors.AlreadyExistsError):
        create()
    later = Server({"b": ["h:1"]}, start=False)
    with pytest.raises(errors.AlreadyExistsError), later:
        pass
    Server.current().stop()


def test_a_started_server_is_drained_when_it_is_stopped():
    drained = []

    def script():
        server = Server({"a": ["h:9005"]})
        server.on_drain(lambda: drained.append(server.target))

    script()
    gc.collect()
    assert drained == []
    Server.current().stop()
    assert drained == ["inproc://h:9005"]


def test_threads_that_start_servers_at_once():
    begin, outcomes = threading.Barrier(8), []

    def start(number):
        begin.wait(30)
        try:
            outcomes.append(Server({"a": [f"h:{9000 + number}"]}))
        except errors.AlreadyExistsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (server,) = [one for one in outcomes if isinstance(one, Server)]
    assert len(outcomes) == 8
    assert Server.current() is server
    server.stop()


def test_stopping_a_server_leaves_a_later_one_started():
    first = Server({"a": ["h:9005"]})
    first.stop()
    with Server({"b": ["h:1"]}) as second:
        first.stop()
        assert Server.current() is second


def test_stopping_a_server_while_it_joins():
    begun = threading.Event()

    class Waiting(Server):
        def join(self):
            begun.set()
            super().join()

    joined = threading.Thread(target=lambda: Waiting({"a": ["h:9005"]}).join())
    joined.start()
    assert begun.wait(30)
    fails_to_start({"b": ["h:1"]}, error=errors.AlreadyExistsError, match="stop it first")
    Server.current().stop()
    joined.join(30)
    assert not joined.is_alive()


def test_a_server_whose_services_run_stays_started(services):
    Server(CLUSTER, "worker")
    fails_to_start({"b": ["h:1"]}, error=errors.AlreadyExistsError, match="stop it first")
    ask(Server.current())
    Server.current().stop()
    assert services == ["made", "closed"]


def test_a_server_that_is_left_at_the_end_of_a_script():
    script = "import mpidist; mpidist.Server({'a': ['h:1']})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"worker": ["a:1", "b:2"]}, "mpidist run --worker 2 SCRIPT"),
        ({"ps": ["a:1"], "worker": ["b:1"]}, "mpidist run --ps 1 --worker 1 SCRIPT"),
        ({"x": [], "chief": ["a:1"], "worker": ["b:1"]}, "run --job chief=1 --worker 1 SCRIPT"),
    ],
)
def test_a_cluster_of_several_hosts_needs_a_launcher(cluster, line):
    fails_to_start(cluster, "worker", 0, match=f"the cluster has 2 tasks.*{line}")
    assert Server.current() is None


@pytest.mark.parametrize("job", ["ps", "worker", "chief"])
def test_two_tasks_of_a_job_at_one_address(job):
    cluster = {**CLUSTER, job: ["localhost:0"] * 2}
    fails_to_start(cluster, "worker", 0, error=ValueError, match=f"job '{job}' have the same")


@pytest.mark.parametrize("cluster", [{"w": {1: "b:1", 4: "b:1", 2: "c:1"}}, {"w": ["b:1", "b:01"]}])
def test_two_tasks_of_a_job_at_one_address_elsewhere(cluster):
    fails_to_start(
        {"ps": ["a:1"], **cluster},
        "ps",
        0,
        error=errors.InvalidArgumentError,
        match=r"tasks \[., .\] of job 'w' have the same address b:1: give each its own",
    )
    assert Server.current() is None


@pytest.mark.parametrize(
    "address",
    [
        "garbage",
        "",
        "a:",
        ":1",
        "a:x",
        "a:-1",
        "a:²",
        "a:1 ",
        "a:1\n",
        " a:1",
        "a,b:1",
        "a b:1",
        "\ta:1",
        "a:" + "1" * 5000,
    ],
)
def test_addresses_without_a_port(address):
    for cluster, job in (({"w": [address]}, "w"), ({"a": ["h:1"], "w": [address]}, "a")):
        fails_to_start(
            cluster,
            job,
            0,
            error=errors.InvalidArgumentError,
            match=re.escape(f"the address {address!r} of w 0 has no host or no port: give each"),
        )


def test_an_endpoint_number_in_use():
    with open_endpoint("inproc", 77):
        fails_to_start(
            {"a": ["localhost:77"]},
            error=errors.AlreadyExistsError,
            match="a 0 cannot start: inproc://localhost:77 is in use already; close that endpoint",
        )
    with Server({"a": ["localhost:77"]}) as server:
        assert server.endpoint.address.port == 77


def test_without_mpi(monkeypatch):
    def world():
        raise errors.DistBackendError("mpi4py finds no MPI library")

    monkeypatch.setattr("mpidist.cluster.server.world", world)
    fails_to_start({"a": ["h:1"]}, protocol="mpi", match="a 0 cannot start: mpi4py finds no MPI")
    assert Server.current() is None


def test_all_jobs_of_one_process():
    with Server({**CLUSTER, "chief": ["localhost:0"]}, "worker") as server:
        assert server.own_tasks[0] == ("worker", 0)
        assert sorted(server.own_tasks[1:]) == [("chief", 0), ("ps", 0)]
        assert server.own_index("chief") == 0
        with pytest.raises(errors.NotFoundError, match="no task of job 'data'"):
            server.own_index("data")
        assert server.task_address("ps", 0) == str(server.endpoint.address)
        with pytest.raises(ValueError, match="no such job"):
            server.task_address("data", 0)
        segment = server.memory.allocate(100)
        segment.memory[-1] = 7
        server.memory.sync()
        assert server.memory.map(0, segment.reference)[-1] == 7
        with pytest.raises(ValueError, match="no such job"):
            server.job_group("data")


class Service:
    """A service that logs its creation and its end."""

    log: list[str]

    def __init__(self, server):
        self.log.append("made")
        if "broken" in self.log:
            raise errors.InternalError("the service is broken")
        server.endpoint.register("thing", {"Ask": lambda request: None})

    def close(self):
        self.log.append("closed")
        if "stuck" in self.log:
            raise errors.InternalError("the disk is full")


@pytest.fixture
def services(monkeypatch):
    """Install a service for ps tasks, and return its log."""
    log = []
    service = type("Logged", (Service,), {"log": log})
    points = [SimpleNamespace(name="ps", load=lambda: service)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    return log


def ask(server):
    with open_endpoint("inproc") as client:
        return client.call(server.endpoint.address, "thing/Ask").result(30)


def test_services_run_beside_the_script(services):
    with Server(CLUSTER, "worker") as server:
        assert services == ["made"]
        ask(server)
    assert services == ["made", "closed"]


def test_a_service_that_cannot_start(services):
    services.append("broken")
    fails_to_start(CLUSTER, "worker", error=errors.InternalError, match="broken")
    assert Server.current() is None
    services.clear()
    with Server(CLUSTER, "worker"):
        pass


def test_a_service_that_cannot_be_closed(services):
    server = Server(CLUSTER, "worker")
    endpoint = server.endpoint
    services.append("stuck")
    with pytest.raises(errors.InternalError, match="the disk is full"):
        server.stop()
    assert Server.current() is None
    with pytest.raises(errors.CancelledError, match="is closed"):
        endpoint.call(endpoint.address, "thing/Ask")


def test_a_service_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    fails_to_start(CLUSTER, "worker", error=errors.NotFoundError, match="serves ps 0.*install")
    assert Server.current() is None


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_stop_ends_join(monkeypatch, job):
    with Server(CLUSTER, job) as server:
        begun, serve = threading.Event(), server.endpoint.serve
        monkeypatch.setattr(server.endpoint, "serve", lambda until: begun.set() or serve(until))
        joined = threading.Thread(target=server.join)
        joined.start()
        assert begun.wait(30)
        ask(server)  # join() itself serves this call if the script is the ps task
        assert joined.is_alive()
        server.stop()
        joined.join(30)
        assert not joined.is_alive()


def test_it_is_drained_before_anything_is_closed(services):
    with Server(CLUSTER, "worker") as server:
        server.on_drain(lambda: services.append("drained"))
        server.on_drain(lambda: ask(server))
    assert services == ["made", "drained", "closed"]


def test_a_drain_that_fails_leaves_nothing_running(services):
    server = Server(CLUSTER, "worker")
    server.on_drain(lambda: np.zeros(1)[5])
    with pytest.raises(IndexError):
        server.stop()
    assert services == ["made", "closed"]
    assert Server.current() is None
    server.stop()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_closes_it_without_draining(services, error):
    def script():
        with Server(CLUSTER, "worker") as server:
            server.on_drain(lambda: services.append("drained"))
            raise error

    with pytest.raises(error):
        script()
    assert services == ["made", "closed"]
    assert Server.current() is None


@pytest.mark.parametrize(("code", "drained"), [(None, True), (0, True), (1, False)])
def test_leaving_by_sys_exit(services, code, drained):
    def script():
        with Server(CLUSTER, "worker") as server:
            server.on_drain(lambda: services.append("drained"))
            raise SystemExit(code)

    with pytest.raises(SystemExit):
        script()
    assert ("drained" in services) == drained
    assert services[-1] == "closed"


def test_a_protocol_for_one_process_in_a_launched_world():
    spec = mpidist.ClusterSpec({"worker": ["a:1", "b:2"]})
    with pytest.raises(errors.FailedPreconditionError, match="2 tasks, and this protocol is"):
        check_single_process(spec, ("worker", 0), launched=True)
    with pytest.raises(errors.FailedPreconditionError, match="mpidist run --worker 2"):
        check_single_process(spec, ("worker", 0), launched=False)
