"""Endpoints over TCP: the cases of every transport, and faulty networks, peers and bytes."""

import errno
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pytest
import zmq
from _cases.data_process import Process
from _cases.endpoints import CASES, LIMIT_S, NAMES, Service, ask, pattern, wait_until
from _cases.footprint import resident
from _cases.garbage import frames_of
from _cases.proxy import Proxy
from _cases.second_answers import HANDLERS, answer_of, check_answer, check_log, serve

from mpidist import Address, DistNetworkError, Endpoint, Reply, errors, open_endpoint
from mpidist.config import config
from mpidist.proto.mpidist_pb2 import Hello, Memory
from mpidist.rpc import codec, tcp_connection
from mpidist.rpc.codec import decode, encode
from mpidist.rpc.message import ACK, CLOSE, HELLO, HELLO_ACK, REQUEST, RESUME, Message
from mpidist.rpc.tcp import TcpTransport
from mpidist.rpc.tcp_connection import PROTOCOL, hello_message


@pytest.fixture
def transports():
    made = [TcpTransport(None), TcpTransport(None)]  # one per process, as with two processes
    yield made
    for transport in made:
        transport.close()


@pytest.fixture
def pair(transports):
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        server.service = Service(server)
        _ = server.address
        server.serve_in_thread()
        yield server, client


@pytest.fixture
def proxy(pair):
    made = Proxy(pair[0].address.port)
    yield made
    made.close()


@pytest.fixture
def between_hosts(monkeypatch):
    """Disable shared memory, as between two hosts."""
    monkeypatch.setattr(tcp_connection, "_open_offered", lambda reference: None)


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(tcp_connection, "GRACE_S", 0.3)


def raw_socket(server):
    """Return a ZeroMQ context and a raw socket connected to the server's endpoint."""
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.rcvtimeo = int(1000 * LIMIT_S)
    made.connect(f"tcp://127.0.0.1:{server.address.port}")
    return context, made


def hello(process=b"p" * 16, connection=0, socket=0, kind=HELLO, unanswered=(), memory=None):
    """Return the first message of a socket as a frame."""
    message = hello_message(process, memory)
    message.kind, message.sender, message.id = kind, connection, socket
    message.acks = unanswered
    return encode(message)[0]


def request(number, method="test/Count"):
    """Return a request as a frame."""
    return encode(Message(REQUEST, number, method=method))[0]


def heard(stranger):
    """Return the next message received by a raw socket."""
    return decode(stranger.recv(), None)[0]


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_second_answer_is_logged(transports, caplog, handler):
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        peers = serve(server, handler)
        check_answer(handler, answer_of(client, server.address))
        check_log(caplog, handler, peers[0])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(pair, case):
    server, client = pair
    case(client, server.address, b"key")
    case(client, str(server.address), b"other key")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_endpoint_that_calls_itself(transports, case):
    with Endpoint(transports[0]) as endpoint:
        Service(endpoint)
        address = endpoint.address
        endpoint.serve_in_thread()
        case(endpoint, address, b"key")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_with_a_secret(case, between_hosts):
    transports = [TcpTransport("a secret"), TcpTransport("a secret")]
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        Service(server)
        assert server.address.host == socket.gethostname()
        server.serve_in_thread()
        case(client, Address("tcp", "127.0.0.1", server.address.port), b"key")
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("secret", [None, "another"])
def test_other_secrets_get_nowhere(secret, short_grace):
    transports = [TcpTransport("a secret"), TcpTransport(secret)]
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        service = Service(server)
        server.serve_in_thread()
        address = Address("tcp", "127.0.0.1", server.address.port)
        with pytest.raises(errors.UnavailableError, match=r"the secrets \(MPIDIST_SECRET\) differ"):
            client.call(address, "test/Count", timeout=LIMIT_S).wait()
        assert service.counter == 0
    for transport in transports:
        transport.close()


def test_without_a_secret_only_this_host_is_spoken_to(pair):
    server, client = pair
    assert server.address.host == "localhost"
    with pytest.raises(errors.PermissionDeniedError, match="set MPIDIST_SECRET there and here"):
        client.call("tcp://192.0.2.1:4711", "test/Echo")
    outside = socket.create_connection(("127.0.0.1", server.address.port))
    assert outside.getpeername()[0] == "127.0.0.1"
    outside.close()


def test_ports():
    with open_endpoint("tcp") as client, open_endpoint("tcp") as server:
        assert client._name != server._name
        address = server.address
        assert server.address == address
        with pytest.raises(DistNetworkError, match=f"cannot listen at .*:{address.port}"):
            open_endpoint("tcp", address.port)
    with open_endpoint("tcp", address.port) as again:
        assert again.address == address


def test_is_connected(pair, proxy):
    server, client = pair

    def is_gone(address):
        client.progress()
        return not client.is_connected(address)

    through = f"tcp://localhost:{proxy.port}"
    assert not client.is_connected(through)  # the question opens no connection
    assert ask(client, through, "Echo", b"1").body == b"1"
    assert client.is_connected(through)
    proxy.close()
    wait_until(lambda: is_gone(through))
    assert ask(client, server.address, "Echo", b"2").body == b"2"
    address = server.address
    assert client.is_connected(address)
    server.close()
    wait_until(lambda: is_gone(address))


REFUSED = """
import sys, time
from mpidist import open_endpoint
endpoint = open_endpoint("tcp")
endpoint.notify(f"tcp://localhost:{sys.argv[1]}", "service/Method")
time.sleep(0.5)
endpoint.progress()
print(time.monotonic(), flush=True)
"""


def test_a_process_does_not_wait_at_its_end_for_an_address_that_refuses():
    with socket.socket() as unused:  # bound, but not listening
        unused.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", REFUSED, str(unused.getsockname()[1])]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert time.monotonic() - float(ended.stdout) < 1.5


def test_requests_before_there_is_a_server(transports):
    with Endpoint(transports[1]) as client:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        work = client.call(Address("tcp", "localhost", port), "test/Echo", b"early")
        with Endpoint(transports[0], port) as server:
            Service(server)
            server.serve_in_thread()
            assert work.result(LIMIT_S).body == b"early"


def test_nobody_at_the_address(transports):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Endpoint(transports[1]) as client:
        work = client.call(Address("tcp", "localhost", port), "test/Echo", timeout=0.2)
        with pytest.raises(errors.DeadlineExceededError, match=r"no reply .* within 0\.2 s"):
            work.wait()


def test_a_connection_that_breaks_comes_back_and_nothing_is_done_twice(pair, proxy):
    server, client = pair
    address = Address("tcp", "localhost", proxy.port)
    rng = random.Random(1)
    works = []
    for number in range(300):
        works.append((number, client.call(address, "test/Count", b"%d" % number)))
        if rng.random() < 0.1:
            works.pop(rng.randrange(len(works)))[1].wait(LIMIT_S)
        if rng.random() < 0.05:
            proxy.cut()
    for _, work in works:
        work.wait(LIMIT_S)
    assert proxy.connections > 3
    assert server.service.counter == 300


@pytest.mark.parametrize("kept", [10, 1000, 100_000])
def test_a_connection_that_breaks_inside_a_payload(between_hosts, pair, proxy, kept):
    _, client = pair
    address = Address("tcp", "localhost", proxy.port)
    ask(client, address, "Echo", b"hello")
    data = pattern(300_000)
    proxy.cut_after(kept)
    reply = client.call(address, "test/Echo", b"x", [data]).result(LIMIT_S)
    np.testing.assert_array_equal(reply.buffers[0], data)
    assert proxy.connections == 2


def test_a_connection_that_cannot_be_opened_again(pair, proxy, monkeypatch):
    _, client = pair
    address = Address("tcp", "localhost", proxy.port)
    ask(client, address, "Echo", b"hello")
    work = client.call(address, "test/Never")
    with monkeypatch.context() as patch:
        patch.setattr(tcp_connection, "_Socket", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
        proxy.cut()
        with pytest.raises(errors.UnavailableError, match="cannot be opened again: Too many open"):
            work.wait(LIMIT_S)
    assert ask(client, address, "Echo", b"again").body == b"again"


def is_in_shared_memory(array):
    """Return whether an array lies in memory shared by processes."""
    start = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= start < last:
            return "memfd:mpidist-shared" in line
    raise AssertionError(f"{start:#x} is not mapped")


def where(request):
    """Reply with the buffers, and with one flag per buffer: whether it is in shared memory."""
    return Reply(bytes(map(is_in_shared_memory, request.buffers)), request.buffers)


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_large_buffers_need_no_socket(secret):
    transports = [TcpTransport(secret), TcpTransport(secret)]
    with Endpoint(transports[0]) as server, Endpoint(transports[1]) as client:
        Service(server)
        server.register("memory", {"Where": where})
        address = Address("tcp", "127.0.0.1", server.address.port)
        server.serve_in_thread()
        ask(client, address, "Echo", b"memory is shared once the hello is acknowledged")
        data = [pattern(100_000), pattern(5), np.zeros((0, 3)), np.ones((30, 70))]
        into = [np.zeros(array.nbytes, np.uint8) for array in data]
        for target in (None, into):
            work = client.call(address, "memory/Where", b"", data, into=target)
            reply = work.result(LIMIT_S)
            assert reply.body == bytes([1, 1, 1, 1])
            for got, sent in zip(reply.buffers, data, strict=True):
                assert is_in_shared_memory(got) == (target is None)
                np.testing.assert_array_equal(got, sent.reshape(-1).view(np.uint8))
        small = client.call(address, "memory/Where", b"", [pattern(16_384)]).result(LIMIT_S)
        assert small.body == b"\0"
        assert not is_in_shared_memory(small.buffers[0])
    kept = reply.buffers[0].copy()
    for transport in transports:
        transport.close()
    np.testing.assert_array_equal(reply.buffers[0], kept)


def test_what_finds_no_room_goes_by_the_socket(pair, monkeypatch):
    monkeypatch.setattr(tcp_connection, "config", replace(config, credit_bytes=16 << 10))  # 8 KiB
    server, client = pair
    server.register("memory", {"Where": where})
    ask(client, server.address, "Echo", b"hello")
    reply = client.call(server.address, "memory/Where", b"", [pattern(20_000)]).result(LIMIT_S)
    assert reply.body == b"\0"
    monkeypatch.setattr(tcp_connection, "config", replace(config, credit_bytes=1 << 20))  # 512 KiB
    other = Address("tcp", "127.0.0.1", server.address.port)  # another connection
    ask(client, other, "Echo", b"hello")
    data = pattern(400_000)
    kept = [client.call(other, "memory/Where", b"", [data]).result(LIMIT_S) for _ in range(20)]
    assert {reply.body for reply in kept} == {b"\1"}  # requests are freed, replies are kept
    assert {is_in_shared_memory(reply.buffers[0]) for reply in kept} == {True, False}
    for reply in kept:
        np.testing.assert_array_equal(reply.buffers[0], data)


def test_large_buffers_over_connections_that_break(pair, proxy):
    """Messages lost with a connection are sent again, and its memory is freed."""
    _, client = pair
    address = Address("tcp", "localhost", proxy.port)
    rng = random.Random(2)
    ask(client, address, "Echo", b"hello")
    memory, works = resident(), []
    for number in range(300):
        data = np.full(200_000, number % 251, np.uint8)
        works.append((data, client.call(address, "test/Echo", b"%d" % number, [data])))
        if len(works) > 5:
            check_echo(*works.pop(rng.randrange(len(works))))
        if rng.random() < 0.05:
            proxy.cut()
    for work in works:
        check_echo(*work)
    assert proxy.connections > 3
    assert resident() - memory < 64 << 20


def check_echo(data, work):
    np.testing.assert_array_equal(work.result(LIMIT_S).buffers[0], data)


LENDER = """
import os, sys, numpy as np
from mpidist import Reply, open_endpoint
server = open_endpoint("tcp")
server.register("test", {"Give": lambda request: Reply(b"", [np.full(1 << 20, 5, np.uint8)])})
print(server.address, flush=True)
server.serve_in_thread()
sys.stdin.read()
"""


def test_what_a_killed_server_has_sent_stays(transports, short_grace):
    with Endpoint(transports[1]) as client:
        command = [sys.executable, "-c", LENDER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as server:
            address = server.stdout.readline().decode().strip()
            client.call(address, "test/Give").wait(LIMIT_S)
            reply = client.call(address, "test/Give").result(LIMIT_S)
            server.kill()
        assert is_in_shared_memory(reply.buffers[0])
        assert (reply.buffers[0] == 5).all()
        with pytest.raises(errors.UnavailableError):
            client.call(address, "test/Give").wait(LIMIT_S)
        assert (reply.buffers[0] == 5).all()


def test_wrong_references_to_shared_memory(pair):
    server, client = pair
    for number, offer in enumerate(
        (Memory(pid=1, descriptor=1, token=b"x"), Memory(pid=os.getpid(), descriptor=0))
    ):
        context, stranger = raw_socket(server)
        stranger.send(hello(connection=number, memory=offer))
        assert heard(stranger).body == b""
        there = encode(
            Message(REQUEST, 5, method="test/Count", buffers=[pattern(50_000)]), lambda b: 9
        )
        stranger.send(there[0])
        stranger.send_multipart([there[0], b"x"])
        stranger.send(request(6))
        assert heard(stranger).id == 6
        context.destroy(0)
    assert server.service.counter == 2
    assert ask(client, server.address, "Echo", b"x").body == b"x"


def test_a_connection_that_stays_away(pair, proxy, short_grace):
    server, client = pair
    address = Address("tcp", "localhost", proxy.port)
    lost = []
    server.on_peer_lost(lost.append)
    ask(client, address, "Echo", b"hello")
    work = client.call(address, "test/Never")
    proxy.close()
    with pytest.raises(errors.UnavailableError, match=r"the connection has been broken for 0\.3 s"):
        work.wait(LIMIT_S)
    wait_until(lambda: lost)
    assert lost == [client._transport._context.process.hex()]
    with pytest.raises(errors.DeadlineExceededError):
        client.call(address, "test/Echo", timeout=0.1).wait()
    assert ask(client, server.address, "Echo", b"still there").body == b"still there"


def test_a_body_that_is_too_large(pair, monkeypatch):
    server, client = pair
    monkeypatch.setattr(codec, "_MAX_BODY_BYTES", 1000)
    work = client.call(server.address, "test/Echo", bytes(1001))
    with pytest.raises(ValueError, match=r"a body of 1001 bytes .* send it as a buffer"):
        work.wait(LIMIT_S)
    assert ask(client, server.address, "Echo", bytes(1000)).body == bytes(1000)


def test_a_server_that_is_closed(pair):
    server, client = pair
    work = client.call(server.address, "test/Never")
    ask(client, server.address, "Echo", b"the request before is there")
    server.close()
    with pytest.raises(errors.UnavailableError, match="was closed"):
        work.wait(LIMIT_S)


def test_a_call_that_waits_for_credit_when_its_connection_is_lost(pair):
    server, client = pair
    client._client._flow_control._limit = 1000
    first = client.call(server.address, "test/Never", bytes(800))
    second = client.call(server.address, "test/Never", bytes(800))
    (connection,) = client._transport._connections.values()
    connection.loss = "the network is gone"
    client.notify(server.address, "test/Note", b"key:text")  # replaces the connection
    for work in (first, second):
        with pytest.raises(errors.UnavailableError, match="the network is gone"):
            work.wait(LIMIT_S)


def test_a_connection_that_the_server_has_closed_is_not_opened_again(pair):
    server, client = pair
    ask(client, server.address, "Echo", b"hello")
    (connection,) = client._transport._connections.values()
    socket = connection._socket
    server.close()
    wait_until(lambda: client.progress() or connection.loss)
    for _ in range(20):
        time.sleep(0.02)
        connection.check()
    assert connection._socket is socket
    assert connection.loss == "the server's endpoint was closed"


def test_the_server_does_not_keep_the_reply_with_a_large_body(pair):
    server, client = pair
    body = bytes(1 << 20)
    assert ask(client, server.address, "Echo", body).body == body
    (listener,) = server._transport._listeners.values()
    (session,) = sessions(listener)
    wait_until(lambda: client.progress() or not session.replies)


def test_a_client_that_says_goodbye(pair, transports):
    server, client = pair
    lost = []
    server.on_peer_lost(lost.append)
    processes = []
    server.register("who", {"Am": lambda request: processes.append(request.process)})
    client.call(server.address, "who/Am").wait(LIMIT_S)
    client.close()  # the last endpoint of its process
    wait_until(lambda: lost)
    assert lost == processes == [transports[1]._context.process.hex()]


def test_a_process_that_has_connected_once_more_is_not_lost(pair):
    server, _ = pair
    lost = []
    server.on_peer_lost(lost.append)
    (context, first), (other, second) = raw_socket(server), raw_socket(server)
    for number, stranger in enumerate((first, second)):
        stranger.send(hello(connection=number))
        stranger.recv()
    listener = server._transport._listeners[server._number]
    process = (b"p" * 16).hex()
    first.send(encode(Message(CLOSE))[0])
    wait_until(lambda: sum(session.process == process for session in sessions(listener)) == 1)
    assert not lost
    second.send(encode(Message(CLOSE))[0])
    wait_until(lambda: lost)
    assert lost == [process]
    context.destroy(0)
    other.destroy(0)


def sessions(listener):
    return list(listener._sessions.values())


def test_nothing_is_heard_after_a_goodbye(pair):
    server, _ = pair
    lost = []
    server.on_peer_lost(lost.append)
    context, stranger = raw_socket(server)
    stranger.send(hello())
    stranger.recv()
    for kind in (CLOSE, ACK, REQUEST):
        stranger.send(encode(Message(kind, 5, method="test/Count"))[0])
    wait_until(lambda: lost)
    assert lost == [(b"p" * 16).hex()]
    assert server.service.counter == 0
    context.destroy(0)


def test_a_server_that_was_started_anew(transports):
    with Endpoint(transports[1]) as client:
        first = TcpTransport(None)
        server = Endpoint(first)
        Service(server)
        port = server.address.port
        server.serve_in_thread()
        proxy = Proxy(port)
        address = Address("tcp", "localhost", proxy.port)
        work = client.call(address, "test/Never")
        ask(client, address, "Echo", b"hello")
        proxy.cut()
        first.close()
        with Endpoint(transports[0], port) as server:
            Service(server)
            server.serve_in_thread()
            with pytest.raises(errors.UnavailableError, match=r"started anew|has been broken"):
                work.wait(LIMIT_S)
            assert ask(client, address, "Echo", b"again").body == b"again"
        proxy.close()


CLIENT = """
import sys, numpy as np
from mpidist import open_endpoint
client = open_endpoint("tcp")
client.call(sys.argv[1], "test/Echo", b"hello").wait()
works = [client.call(sys.argv[1], "test/Never", b"", [np.zeros(50 << 20, np.uint8)])]
print("sending", flush=True)
works[0].wait()
"""


def test_a_client_that_is_killed_while_it_sends(pair, short_grace):
    server, client = pair
    lost = []
    server.on_peer_lost(lost.append)
    command = [sys.executable, "-c", CLIENT, str(server.address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout.readline() == b"sending\n"
        victim.send_signal(signal.SIGKILL)
    wait_until(lambda: lost)
    assert len(lost) == 1
    assert ask(client, server.address, "Echo", b"alive").body == b"alive"


def test_clocks_that_jump(pair, monkeypatch):
    server, client = pair
    now = time.time
    work = client.call(server.address, "test/Never", timeout=0.3)
    for jump in (1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        ask(client, server.address, "Echo", b"x")
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError):
        work.wait()
    assert time.monotonic() - begin < LIMIT_S


def test_requests_without_a_hello_are_not_executed(pair):
    server, _ = pair
    context, stranger = raw_socket(server)
    stranger.send(request(5))
    stranger.send(hello())
    assert heard(stranger).kind == HELLO_ACK
    stranger.send(request(6))
    assert heard(stranger).id == 6
    assert server.service.counter == 1
    context.destroy(0)


def test_a_session_that_is_resumed(pair):
    """A repeated request gets its earlier reply. All other replies are dropped."""
    server, _ = pair
    (context, first), (other, second) = raw_socket(server), raw_socket(server)
    first.send(hello(socket=1))
    assert heard(first).kind == HELLO_ACK
    for number in (5, 6):
        first.send(request(number))
        assert heard(first).body == b"%d" % (number - 4)
    second.send(hello(kind=RESUME, socket=2, unanswered=[6, 7]))
    assert heard(second).failure is None
    for number, body in ((6, b"2"), (7, b"3")):
        second.send(request(number))
        assert heard(second).body == body
    (session,) = [
        one for one in sessions(server._transport._listeners[server._number]) if one.number == 2
    ]
    assert sorted(session.replies) == [6, 7]
    first.send(request(8))  # arrives late, through the replaced socket
    first.send(hello(socket=1))
    second.send(encode(Message(ACK, acks=[6, 7]))[0])
    second.send(request(9))
    assert heard(second).body == b"4"
    assert list(session.replies) == [9]
    context.destroy(0)
    other.destroy(0)


def test_a_server_that_does_not_know_the_session_executes_nothing(pair):
    """A restarted server cannot tell which of the client's requests have run."""
    server, _ = pair
    context, stranger = raw_socket(server)
    stranger.send(hello(kind=RESUME, unanswered=[5]))
    stranger.send(request(5))
    refused = heard(stranger)
    assert refused.failure.code == errors.FailedPreconditionError.code
    assert "the server was started anew" in refused.failure.message
    stranger.send(hello())
    assert heard(stranger).failure is None
    assert server.service.counter == 0
    context.destroy(0)


def test_a_request_that_many_others_of_its_process_overtake(pair, transports):
    """A request that waits for credit runs even while another endpoint sends requests."""
    server, client = pair
    client._client._flow_control._limit = 1
    first = client.call(server.address, "test/Later", b"k")
    waiting = client.call(server.address, "test/Count")
    with Endpoint(transports[1]) as other:
        for _ in range(20_000):
            ask(other, server.address, "Echo", b"x")
        wait_until(lambda: server.service.waiting[b"k"])
        ask(other, server.address, "Release", b"k")
    first.wait(LIMIT_S)
    waiting.wait(LIMIT_S)
    assert server.service.counter == 1


def say_hello(state, port):
    """Replace the connection of the client process with a new one, and say hello on it."""
    import zmq

    context = state.setdefault("context", zmq.Context())
    state["socket"] = context.socket(zmq.DEALER)
    state["socket"].connect(f"tcp://127.0.0.1:{port}")
    state["socket"].send(hello(os.urandom(16)))


@pytest.fixture
def listening(transports, tmp_path):
    """Yield a listener polled by the test, a process for its clients, and the server's port."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Endpoint(transports[0]) as server:
        port = server.address.port
        strangers = Process("strangers", tmp_path, "plain")
        yield transports[0]._listeners[server._number], strangers, port
        strangers.end()


def sessions_of(listener, count):
    """Wait for ``count`` sessions and return them. No thread checks for lost clients."""

    def are_there():
        listener.receive()
        return len(listener._sessions) == count

    wait_until(are_there)
    return sessions(listener)


def test_a_connection_does_not_end_with_the_one_that_had_its_descriptor(listening):
    listener, strangers, port = listening
    strangers.run(say_hello, port)
    (first,) = sessions_of(listener, 1)
    (handle,) = listener._accepted
    strangers.run(lambda state: state["socket"].close(0))
    wait_until(lambda: not Path(f"/proc/self/fd/{handle}").exists())
    strangers.run(say_hello, port)
    _, second = sessions_of(listener, 2)
    assert list(listener._accepted) == [handle]
    listener.check()
    assert first.lost_at is not None
    assert second.lost_at is None


def test_a_client_that_is_gone_before_its_hello_is_heard(listening, short_grace):
    listener, strangers, port = listening
    before = set(os.listdir("/proc/self/fd"))
    strangers.run(say_hello, port)
    wait_until(listener._socket.has_arrived)
    strangers.end()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) < len(before))  # the pipe closes, too
    sessions_of(listener, 1)
    wait_until(listener.check)
    assert not listener._sessions


def test_another_version_is_refused(pair):
    server, _ = pair
    context, stranger = raw_socket(server)
    body = Hello(protocol=99, version="9.9").SerializeToString()
    stranger.send(encode(Message(HELLO, body=body))[0])
    expected = f"protocol {PROTOCOL} and the client 99 (mpidist 9.9)"
    assert expected in heard(stranger).failure.message
    context.destroy(0)


def test_a_hello_that_cannot_be_read(pair):
    server, client = pair
    context, stranger = raw_socket(server)
    stranger.send(encode(Message(HELLO, body=b"\xff\xff"))[0])
    assert ask(client, server.address, "Echo", b"x").body == b"x"
    stranger.send(hello())
    assert heard(stranger).kind == HELLO_ACK
    context.destroy(0)


def test_a_client_of_another_version_is_told(pair, monkeypatch):
    server, client = pair

    def older(*arguments):
        message = hello_message(*arguments)
        hello = Hello.FromString(message.body)
        hello.protocol -= 1
        message.body = hello.SerializeToString()
        return message

    monkeypatch.setattr(tcp_connection, "hello_message", older)
    with pytest.raises(errors.UnavailableError, match="install the same version of mpidist on bo"):
        client.call(server.address, "test/Echo").wait(LIMIT_S)


@pytest.mark.parametrize("count", [5000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_garbage(pair, count):
    """Malformed frames of every kind do no harm, and correct clients are served meanwhile."""
    server, client = pair
    context, stranger = raw_socket(server)
    rng = random.Random(count)
    stranger.send(hello())
    for number in range(count):
        stranger.send_multipart(frames_of(rng, sealed=True))
        if number % 500 == 0:
            assert ask(client, server.address, "Echo", b"%d" % number).body == b"%d" % number
            while stranger.poll(0):
                stranger.recv_multipart()
        if number == count // 5:
            memory = resident()
    assert resident() - memory < 32 << 20
    assert ask(client, server.address, "Echo", b"end").body == b"end"
    context.destroy(0)


def test_bytes_that_are_not_even_zeromq(pair):
    server, client = pair
    rng = random.Random(7)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.address.port)) as stranger:
            stranger.sendall(rng.randbytes(rng.randrange(1, 2000)))
    assert ask(client, server.address, "Echo", b"x").body == b"x"


def descriptors():
    gc.collect()  # unanswered requests of earlier tests are in reference cycles
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_clients_leave_nothing(pair, transports):
    server, client = pair
    for _ in range(2):  # hellos and their follow-up messages have arrived after the second reply
        ask(client, server.address, "Echo", b"warm")
    before = descriptors()
    clients = [Endpoint(transports[1]) for _ in range(1000)]
    assert descriptors() == before
    for number, one in enumerate(clients):
        assert ask(one, server.address, "Echo", b"%d" % number).body == b"%d" % number
    for one in clients:
        one.close()
    assert descriptors() == before
    assert list(transports[1]._receivers) == [client._number]


def test_ten_thousand_requests_leave_nothing(pair):
    server, client = pair
    data = pattern(100_000)
    for _ in range(200):
        ask(client, server.address, "Echo", b"", [data])
    memory, handles = resident(), descriptors()
    for number in range(10_000):
        ask(client, server.address, "Echo", b"x" * 1000, [data] if number % 10 == 0 else ())
    assert resident() - memory < 32 << 20
    assert descriptors() == handles
    assert not client._client._pending
    (connection,) = client._transport._connections.values()
    assert not connection._unanswered


def test_a_server_is_not_flooded(pair, monkeypatch):
    """Requests beyond the credit stay with the caller until earlier requests are answered."""
    server, client = pair
    client._client._flow_control._limit = 1 << 20
    works = [client.call(server.address, "test/Later", b"k", [pattern(400_000)]) for _ in range(20)]
    wait_until(lambda: len(server.service.waiting.get(b"k", ())) >= 2)
    ask(client, Address("tcp", "127.0.0.1", server.address.port), "Echo", b"x")
    assert len(server.service.waiting[b"k"]) == 2
    released = 0
    while not all(work.is_completed() for work in works):
        address = Address("tcp", "127.0.0.1", server.address.port)  # another connection
        released += int(ask(client, address, "Release", b"k").body or 0)


def test_the_address_of_a_closed_endpoint_opens_nothing():
    asked, silent = open_endpoint("tcp"), open_endpoint("tcp")
    address = asked.address
    for endpoint in (asked, silent):
        endpoint.close()
    assert asked.address == address
    with pytest.raises(errors.CancelledError, match="is closed"):
        _ = silent.address
