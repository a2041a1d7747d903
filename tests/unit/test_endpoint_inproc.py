"""Addresses, protocol names, and the state that endpoints leave behind."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _cases.endpoints import Service
from _cases.leaks import check_leaks, serve_footprint
from hypothesis import given
from hypothesis import strategies as st

from mpidist import LATER, Address, Reply, errors, open_endpoint
from mpidist.rpc import check_protocol, transport_of

LIMIT_S = 30
PROTOCOLS = ["mpi", "tcp", "inproc", "grpc", "grpc+verbs", "grpc+local"]


@pytest.fixture
def pair():
    """Yield a server with some methods, and a client."""
    kept = []
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        server.register(
            "test",
            {
                "Echo": lambda request: Reply(request.body, request.buffers),
                "Never": lambda request: kept.append(request) or LATER,
                "Nothing": lambda request: None,
            },
        )
        server.serve_in_thread()
        yield server, client


def test_is_connected(pair):
    server, client = pair
    assert client.is_connected(server.address)
    assert client.is_connected(str(server.address))
    server.close()
    assert not client.is_connected(server.address)


hosts = st.text(st.characters(categories=["L", "N"], include_characters=".-"), min_size=1)


@given(st.sampled_from(PROTOCOLS), hosts, st.integers(0, (1 << 32) - 1), st.sampled_from(PROTOCOLS))
def test_addresses(protocol, host, port, default):
    address = Address(protocol, host, port)
    assert Address.of(str(address), default) == address
    assert Address.of(f"{host}:{port}", default) == Address(default, host, port)


def test_hosts_with_colons():
    assert Address.of("[::1]:80", "mpi") == Address("mpi", "[::1]", 80)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":5", "host:x", "host:-1", "mpi://", "h:1/", "h:4294967296"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=r"expected \[protocol://\]host:port"):
        Address.of(text, "mpi")


@pytest.mark.parametrize("name", ["", "MPI", "http", "grpc+mpi"])
def test_unknown_protocols(name):
    for use in (
        check_protocol,
        lambda name: Address.of(f"{name}://h:1", "mpi"),
        lambda name: Address.of("h:1", name),
        lambda name: transport_of(name, launched=True),
    ):
        with pytest.raises(ValueError, match="; the known ones are ") as info:
            use(name)
        assert f"unknown protocol {name!r}" in str(info.value)
        assert all(repr(known) in str(info.value) for known in PROTOCOLS)


@pytest.mark.parametrize(
    ("protocol", "alone", "launched"),
    [
        (None, "inproc", "mpi"),
        ("mpi", "mpi", "mpi"),
        ("inproc", "inproc", "inproc"),
        ("grpc", "tcp", "mpi"),
        ("grpc+verbs", "tcp", "mpi"),
        ("grpc+local", "inproc", "inproc"),
        ("tcp", "tcp", "tcp"),
    ],
)
def test_what_protocols_mean(protocol, alone, launched):
    assert transport_of(protocol, launched=False) == alone
    assert transport_of(protocol, launched=True) == launched


def test_ten_thousand_requests_leave_nothing(pair):
    server, client = pair
    threads = set(threading.enumerate())

    def ask(n):
        work = client.call(server.address, "test/Echo", b"%d" % n)
        assert work.result(LIMIT_S).body == b"%d" % n

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(ask, range(10_000)))) == 10_000
    assert client._client._pending == server._client._pending == {}
    assert set(threading.enumerate()) <= threads


def test_ten_thousand_requests_of_every_kind_leave_nothing():
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        Service(server)
        serve_footprint(server)
        server.serve_in_thread()
        check_leaks(client, server.address)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("inproc://localhost:99999", "test/Echo"), errors.DistNetworkError),
        (("nowhere", "test/Echo"), ValueError),
        ((None, "test/Echo", b"", [np.zeros((4, 4)).T[1:]]), ValueError),
        ((None, "test/Echo", "no bytes"), TypeError),
    ],
)
def test_calls_that_cannot_be_sent_leave_nothing(pair, arguments, error):
    server, client = pair
    address, *rest = arguments
    with pytest.raises(error):
        client.call(address or server.address, *rest)
    assert client._client._pending == {}


def test_calls_that_time_out_or_fail_leave_nothing(pair):
    server, client = pair
    for method, error in (
        ("test/Never", errors.DeadlineExceededError),
        ("test/Unknown", errors.UnimplementedError),
    ):
        with pytest.raises(error):
            client.call(server.address, method, timeout=0.01 if "Never" in method else None).wait()
    assert client._client._pending == {}


def test_a_handler_may_answer_with_nothing(pair):
    server, client = pair
    assert client.call(server.address, "test/Nothing").result(LIMIT_S) == Reply()


def test_serving_beside_a_serving_thread(pair):
    server, client = pair
    rounds = []

    def until():
        rounds.append(client.call(server.address, "test/Echo").result(LIMIT_S))
        return len(rounds) == 3

    assert server.serve(until)
    assert not server.serve(lambda: False, deadline=0.0)
    assert len(rounds) == 3


def test_the_thread_serves_again_after_others_have(pair):
    server, client = pair
    server.serve(lambda: True)
    assert client.call(server.address, "test/Echo", b"x").result(LIMIT_S).body == b"x"
    server.close()
    name = f"mpidist-endpoint-{server.address.port}"
    assert name not in [thread.name for thread in threading.enumerate()]


def test_the_thread_that_is_about_to_serve_may_close_it():
    """The same happens if the endpoint is garbage-collected at this moment."""
    server = open_endpoint("inproc")
    problems = []

    def close(frame, event, argument):
        if frame.f_code.co_name == "serve":
            sys.setprofile(None)
            try:
                server.close()
            except RuntimeError as error:
                problems.append(error)

    threading.setprofile(close)
    try:
        server.serve_in_thread()
    finally:
        threading.setprofile(None)
    for thread in threading.enumerate():
        if thread.name == f"mpidist-endpoint-{server.address.port}":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert problems == []


def test_errors_of_notices_are_logged(pair, caplog):
    server, client = pair

    def fail(request):
        raise KeyError("lost")

    server.register("bad", {"Note": fail})
    client.notify(server.address, "bad/Note")
    client.call(server.address, "test/Echo").wait(LIMIT_S)
    assert "bad/Note failed" in caplog.text
    assert "KeyError: 'lost'" in caplog.text


def test_who_takes_the_name_of_one_that_has_left_is_not_taken_for_it():
    happened = []
    with open_endpoint("inproc") as server:
        server.register("test", {"Note": lambda request: happened.append(request.body.decode())})
        server.on_peer_lost(lambda process: happened.append(f"{process} is gone"))
        for name in ("first", "second"):
            with open_endpoint("inproc", 4321) as client:
                client.notify(str(server.address), "test/Note", name.encode())
        server.serve(lambda: len(happened) == 4)
    gone = "inproc://localhost:4321 is gone"
    assert happened == ["first", gone, "second", gone]
