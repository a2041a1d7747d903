"""The test bed itself: hosts that know nothing of each other, and leave nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from _cases.hosts import Hosts, _below_tmp, problem

TESTS = str(Path(__file__).resolve().parent.parent)
LOOK = """
    import json, os, socket
    print(json.dumps({
        "name": socket.gethostname(),
        "processes": [int(name) for name in os.listdir("/proc") if name.isdigit()],
        "shm": os.listdir("/dev/shm"),
        "tmp": os.listdir("/tmp"),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "peers": {name: socket.gethostbyname(name) for name in ("node1", "node2", "node3")},
    }))
"""
MAKE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from _cases.hosts import Hosts

    hosts = Hosts()
    print(hosts.folder, *(host.pid for host in hosts.nodes.values()), flush=True)
    sys.stdin.read()
    hosts.close()
"""


def test_each_host_is_a_world_of_its_own(hosts, start, tmp_path):
    hosts.nodes["node1"].path("/dev/shm/a").touch()
    hosts.nodes["node1"].path("/tmp/of-node1").touch()
    (tmp_path / "c").touch()
    for name in hosts.nodes:
        source = LOOK + f"    print(os.path.exists({str(tmp_path / 'c')!r}))\n"
        facts, shared = start(name, source).communicate()[0].splitlines()
        facts = json.loads(facts)
        assert facts["name"] == name != os.uname().nodename
        assert len(facts["processes"]) == 2  # the first, and itself
        assert facts["interfaces"] == ["eth0", "lo"]
        assert facts["peers"] == {one.name: one.address for one in hosts.nodes.values()}
        assert (facts["shm"], "of-node1" in facts["tmp"]) == (
            (["a"], True) if name == "node1" else ([], False)
        )
        assert shared == "True"
    hosts.clear()
    assert hosts.remains() == []


def test_two_beds_side_by_side(hosts, start):
    other = Hosts()
    try:
        assert other.folder != hosts.folder
        other.cut("node1")
        source = """
        import socket
        with socket.create_server(("", 5000)) as server:
            print("up", flush=True)
            with server.accept()[0] as connection:
                print(connection.recv(10).decode())
        """
        server = start("node1", source)
        assert server.stdout.readline() == "up\n"
        source = 'import socket; socket.create_connection(("node1", 5000), 10).send(b"hello")'
        assert start("node2", source).wait(20) == 0
        assert server.communicate(timeout=20)[0] == "hello\n"
    finally:
        other.close()


def gone(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_bed_dies_with_its_maker(number):
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKE), TESTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder, *pids = maker.stdout.readline().split()
    namespace = os.stat(f"/proc/{pids[0]}/ns/net").st_ino
    everybody = [
        int(path.parent.parent.name)
        for path in Path("/proc").glob("[0-9]*/ns/net")
        if os.stat(path).st_ino == namespace
    ]
    assert len(everybody) == 2  # who keeps the namespaces, and the host's first process
    maker.send_signal(number)
    maker.communicate()
    gone(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [*pids, *everybody]))
    Hosts().close()
    assert not Path(folder).exists()


def test_there_can_be_a_bed(monkeypatch):
    assert problem() == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install iproute2 and util-linux" in problem()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run it as root" in problem()


def test_folders_that_a_private_tmp_would_hide():
    given = ["/tmp/b/c", "/usr", "/tmp/a", "/tmp/b", "/tmp/a/d/e", "/tmpx"]
    assert _below_tmp(given) == [Path("/tmp/a"), Path("/tmp/b")]
