"""TCP endpoints between processes on different hosts, and network failures."""

import time

import pytest

LIMIT_S = 60
SECRET = {"MPIDIST_SECRET": "a secret"}

SERVER = """
    import sys
    from _cases.endpoints import Service
    from mpidist import open_endpoint

    endpoint = open_endpoint("tcp")
    service = Service(endpoint)
    endpoint.on_peer_lost(lambda process: print("lost", flush=True))
    print(endpoint.address, flush=True)
    endpoint.serve_in_thread()
    sys.stdin.readline()
    print(service.counter, flush=True)
    endpoint.close()
"""
CLIENT = """
    import select, sys
    from _cases.endpoints import CASES, ask, pattern
    from mpidist import errors, open_endpoint

    client, address = open_endpoint("tcp"), sys.argv[1]

    def say(*words):
        print(*words, flush=True)

    def fail(method, timeout):
        try:
            client.call(address, method, timeout=timeout).wait()
        except errors.Error as error:
            say(type(error).__name__, error)
"""
ASK_ONCE = """
    fail("test/Count", 30)
"""
ASK_ALL_THE_TIME = """
    from mpidist.rpc.tcp_connection import Connection

    connections = []
    connect = Connection._connect
    Connection._connect = lambda connection: connections.append(1) or connect(connection)
    answered, more = 0, 20
    while more:
        buffers = [pattern(20_000)]
        works = [client.call(address, "test/Count", b"", buffers, timeout=60) for _ in range(10)]
        for work in works:
            work.wait()
        if answered == 0:
            say("going")
        answered += len(works)
        if more < 20 or select.select([sys.stdin], [], [], 0)[0]:
            more -= 1
    say(answered, len(connections))
"""


@pytest.fixture
def server(start):
    process = start("node1", SERVER, env=SECRET)
    process.address = process.stdout.readline().strip()
    return process


@pytest.fixture
def cable(hosts):
    """Provide the network cable of node2, and reconnect it after the test."""
    yield hosts
    hosts.mend("node2")


def end(process):
    """End a process successfully and return its output lines."""
    out, _ = process.communicate("end\n", timeout=LIMIT_S)
    assert process.returncode == 0, out
    return out.splitlines()


def test_cases(start, server):
    """Run the cases of all transports against the address that the server reports."""
    assert server.address.startswith("tcp://node1:")
    source = """
    for case in CASES:
        case(client, address, b"key")
    say("all")
    """
    assert end(start("node2", CLIENT + source, server.address, env=SECRET)) == ["all"]


def test_without_a_secret_other_hosts_are_not_spoken_to(start, server):
    client = start("node2", CLIENT + ASK_ONCE, server.address)
    (said,) = end(client)
    assert said.startswith("PermissionDeniedError tcp://node1:")
    assert "set MPIDIST_SECRET there and here" in said
    assert end(server) == ["0"]


def test_without_a_secret_other_hosts_are_not_listened_to(start):
    server = start("node1", SERVER)
    address = server.stdout.readline().strip()
    assert address.startswith("tcp://localhost:")
    address = address.replace("localhost", "node1")
    source = """
    import socket
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), 30)
    except ConnectionRefusedError:
        say("refused")
    fail("test/Count", 1)
    """
    refused, said = end(start("node2", CLIENT + source, address, env=SECRET))
    assert refused == "refused"
    assert said.startswith("DeadlineExceededError no reply to test/Count from tcp://node1:")
    assert end(server) == ["0"]


def test_another_secret_is_refused(start, server):
    other = {"MPIDIST_SECRET": "another"}
    client = start("node2", CLIENT + ASK_ONCE, server.address, env=other)
    (said,) = end(client)
    assert said.startswith("UnavailableError ")
    assert "the secrets (MPIDIST_SECRET) differ" in said
    assert end(server) == ["0"]


def test_a_server_that_is_killed(start, server):
    source = """
    ask(client, address, "Echo", b"hello")
    say("there")
    fail("test/Never", 60)
    """
    client = start("node2", CLIENT + source, server.address, env=SECRET)
    assert client.stdout.readline() == "there\n"
    server.kill()
    (said,) = end(client)
    assert said.startswith("UnavailableError no reply to test/Never from tcp://node1:")
    assert "the connection has been broken for 5 s" in said


def test_a_client_that_is_killed(start, server):
    source = """
    ask(client, address, "Count")
    say("there")
    fail("test/Never", 60)
    """
    victim = start("node2", CLIENT + source, server.address, env=SECRET)
    assert victim.stdout.readline() == "there\n"
    victim.kill()
    assert server.stdout.readline() == "lost\n"
    source = """
    say(ask(client, address, "Count").body.decode())
    """
    assert end(start("node3", CLIENT + source, server.address, env=SECRET)) == ["2"]


@pytest.mark.parametrize(("outage_s", "breaks"), [(2.0, False), (8.0, True)])
def test_a_cable_that_is_pulled_and_put_back(start, server, cable, outage_s, breaks):
    """Check that requests are answered and executed exactly once, even if a connection breaks."""
    client = start("node2", CLIENT + ASK_ALL_THE_TIME, server.address, env=SECRET)
    assert client.stdout.readline() == "going\n"
    cable.cut("node2")
    time.sleep(outage_s)  # the duration of the accident, not a wait for an event
    cable.mend("node2")
    (said,) = end(client)
    answered, connections = map(int, said.split())
    assert answered >= 200
    assert (connections > 1) == breaks
    assert int(end(server)[-1]) == answered


def test_a_server_whose_cable_comes_later(start, server, cable):
    """Check that a client retries without growing pauses."""
    source = """
    work = client.call(address, "test/Count", timeout=12)
    say("asked")
    say(work.result().body.decode())
    """
    cable.cut("node2")
    client = start("node2", CLIENT + source, server.address, env=SECRET)
    assert client.stdout.readline() == "asked\n"
    time.sleep(7.5)  # the kernel itself would retry after 1, 3, 7, and then 15 s
    cable.mend("node2")
    assert end(client) == ["1"]


def test_a_cable_that_stays_away(start, server, cable):
    source = """
    ask(client, address, "Count")
    say("there")
    sys.stdin.readline()
    fail("test/Count", 0.5)
    fail("test/Count", 60)
    say("over")
    sys.stdin.readline()
    say(ask(client, address, "Echo", b"again").body.decode())
    """
    client = start("node2", CLIENT + source, server.address, env=SECRET)
    assert client.stdout.readline() == "there\n"
    cable.cut("node2")
    client.stdin.write("cut\n")
    client.stdin.flush()
    soon, late = client.stdout.readline(), client.stdout.readline()
    assert soon.startswith("DeadlineExceededError no reply to test/Count from tcp://node1:")
    assert "within 0.5 s" in soon
    assert late.startswith("UnavailableError no reply to test/Count from tcp://node1:")
    assert "the connection has been broken for 5 s" in late
    assert server.stdout.readline() == "lost\n"
    assert client.stdout.readline() == "over\n"
    cable.mend("node2")
    assert end(client) == ["again"]
