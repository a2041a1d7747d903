"""The hosts of the attempts of a job, with a stand-in for the launcher."""

import os
import threading
from pathlib import Path

import pytest

from mpidist.launcher import host_pool
from mpidist.launcher.host_pool import HostPool
from mpidist.launcher.hosts import parse_hosts
from mpidist.launcher.vendors import VENDORS, Launcher

BY_NAME = {vendor.name: vendor for vendor in VENDORS}
# Hosts "off..." fail as ssh does, hosts "mute..." never answer, and hosts "once..." fail once.
LAUNCHER = """#!/bin/sh
[ "$1" = -hosts ] || exit 3
case "$2" in
    off*) echo "ssh: no route"; exit 255;;
    mute*) exec /bin/sleep 600;;
    once*) [ -e "$ONCE" ] || { : > "$ONCE"; exit 255; }; shift 4; exec "$@";;
    *) shift 4; exec "$@";;
esac
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Provide a maker of pools with a stand-in for the launcher."""
    monkeypatch.setattr(host_pool, "_PROBE_S", 3.0)
    path = tmp_path / "mpiexec"
    path.write_text(LAUNCHER)
    path.chmod(0o755)

    def make(hosts, ranks, spare=0, vendor="mpich"):
        launcher = Launcher(str(path), BY_NAME[vendor])
        return HostPool(launcher, parse_hosts(hosts) if hosts else [], ranks, spare)

    return make


@pytest.mark.parametrize(
    ("hosts", "ranks", "spare", "first", "lost", "second"),
    [
        ("a,b,c", 4, 1, "a:2 b:2", [], "a:2 b:2"),
        ("a,off,c", 4, 1, "a:2 off:2", ["off"], "a:2 c:2"),
        ("a,off,mute,d", 4, 2, "a:2 off:2", ["off", "mute"], "a:2 d:2"),
        ("a,off,c", 6, 0, "a:2 off:2 c:2", ["off"], "a:3 c:3"),
        ("a:2,off:2,c:4", 4, 0, "a:2 off:2", ["off"], "a:2 c:2"),
        ("off:1,a:1,off:1,a:1", 2, 0, "off:2", ["off"], "a:2"),
        ("a,b,c,off", 3, 1, "a:1 b:1 c:1", ["off"], "a:1 b:1 c:1"),
        ("off", 2, 0, "off:2", [], "off:2"),  # one host is not asked: this one starts the ranks
    ],
)
def test_hosts_of_two_attempts(pool, hosts, ranks, spare, first, lost, second):
    hosts = pool(hosts, ranks, spare)
    assert [f"{host}:{count}" for host, count in hosts.assign()] == first.split()
    hosts.find_lost({}, set(), lambda: False)
    assert list(hosts.lost) == lost
    assert [f"{host}:{count}" for host, count in hosts.assign()] == second.split()


def test_the_hosts_of_a_batch_job(pool, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2],off")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3)")
    assert pool("", 4, spare=1).assign() == (("n1", 2), ("n2", 2))
    hosts = pool("", 4)
    assert hosts.assign() == ()  # the launcher places the ranks, perhaps not on all hosts
    assert hosts.find_lost({}, set(), lambda: False) == []
    assert pool("", 4, vendor="intelmpi").assign() == ()


@pytest.mark.parametrize(
    ("hosts", "spare", "message"),
    [
        ("", 1, "--spare needs the names of the hosts: give --hosts or --hostfile"),
        ("a,b", 2, "--spare 2 leaves no host for the ranks: there are 2"),
        ("a:2,b:2", 1, "the hosts without the 1 spare ones have too few slots for 4 ranks"),
    ],
)
def test_too_few_hosts(pool, hosts, spare, message):
    with pytest.raises(ValueError, match=message):
        pool(hosts, 4, spare).assign()


def test_a_launcher_that_starts_nothing_loses_no_host(pool, capfd):
    hosts = pool("off1,off2", 2)
    hosts.assign()
    assert hosts.find_lost({}, set(), lambda: False) == []
    assert capfd.readouterr().err == (
        "mpidist run: cannot look for lost hosts: no host answers (ssh: no route)\n"
    )


def test_a_search_that_fails_loses_no_host(pool, monkeypatch, capfd):
    def memfd_create(name):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    hosts = pool("a,off", 2)
    hosts.assign()
    assert hosts.find_lost({}, set(), lambda: False) == []
    assert "Too many open files" in capfd.readouterr().err


def test_a_search_is_cancelled(pool, monkeypatch):
    monkeypatch.setattr(host_pool, "_PROBE_S", 600.0)
    hosts = pool("a,mute", 2)
    hosts.assign()
    seen = []

    def is_cancelled():
        seen.extend(children().split())
        return bool(seen)

    assert hosts.find_lost({}, set(), is_cancelled) == list(hosts.lost) == []
    assert seen
    assert not children()


def children():
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


def test_a_host_that_answers_the_second_time_is_not_lost(pool, tmp_path):
    hosts = pool("a,once", 2)
    hosts.assign()
    assert hosts.find_lost({"ONCE": str(tmp_path / "asked")}, set(), lambda: False) == []
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("silent", "alive", "lost"),
    [
        ([2, 3], [0, 1], ["off2"]),
        ([1, 2, 3], [0], ["off1", "off2"]),
        ([1, 3], [0], ["off1", "off2"]),  # rank 2 has ended
        ([], [0, 1, 2, 3], []),
    ],
)
def test_a_host_with_a_rank_that_answers_is_not_lost(pool, silent, alive, lost):
    hosts = pool("a:1,off1:2,off2:1,off3:1", 4)
    hosts.assign()
    assert hosts.find_lost_of({}, set(), silent, alive, lambda: False) == lost


def test_batch_systems_look_for_lost_hosts_themselves(pool, monkeypatch):
    hosts = pool("a,off", 2)
    hosts.assign()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,off")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    assert hosts.find_lost_of({}, set(), [1], [0], lambda: False) == []
    assert hosts.find_lost({}, set(), lambda: False) == ["off"]
