"""The hosts on which ``mpidist run`` starts ranks."""

import os
import socket
import threading
import time

import pytest

from mpidist.launcher.hosts import (
    assign_slots,
    most_ranks_on_a_host,
    parse_hosts,
    read_host_file,
    without_address,
)
from mpidist.launcher.vendors import VENDORS, Launcher, LauncherError

BY_NAME = {vendor.name: vendor for vendor in VENDORS}


@pytest.mark.parametrize(
    ("text", "ranks", "placed"),
    [
        ("a", 3, {"a": 3}),
        ("a,b", 3, {"a": 2, "b": 1}),
        ("b,a", 4, {"b": 2, "a": 2}),
        ("a,b,c", 2, {"a": 1, "b": 1}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b", 3, {"a": 2, "b": 1}),
        ("n[2,1]:2", 4, {"n2": 2, "n1": 2}),
        ("n[08-09],x:1", 3, {"n08": 1, "n09": 1, "x": 1}),
        ("a:1,b:1,a:1", 3, {"a": 2, "b": 1}),
        ("a:0,b:1", 1, {"b": 1}),
        ("a,b,a", 3, {"a": 2, "b": 1}),
        ("a, b", 3, {"a": 2, "b": 1}),
        (" a:2 ,b:1, ", 3, {"a": 2, "b": 1}),
        ("a:1,,b:2", 3, {"a": 1, "b": 2}),
        ("a:1 b:2", 3, {"a": 1, "b": 2}),
        ("a\tb\n", 2, {"a": 1, "b": 1}),
        ("n[1-2]:1, x:1", 3, {"n1": 1, "n2": 1, "x": 1}),
    ],
)
def test_places(text, ranks, placed):
    assert dict(assign_slots(parse_hosts(text), ranks)) == placed
    assert list(dict(assign_slots(parse_hosts(text), ranks))) == list(placed)


@pytest.mark.parametrize(
    "text",
    ["", " , ", "a:", "a:x", "a:-1", "n[1-", "a:\u0661", "a: 2", "a :2", "a:2:3", ":2", "a # b",
     "#a", "n [1-2]", "n[1, 2]", "a;b", "\ufeff", "a,\ufeffb"],
)  # fmt: skip
def test_no_hosts(text):
    with pytest.raises(ValueError, match="host"):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["a:1", "a:1,b:1"])
def test_too_little_room(text):
    with pytest.raises(ValueError, match=r"slots for [12] ranks, and the job has 3"):
        assign_slots(parse_hosts(text), 3)


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na:2\nb slots=3 max_slots=4\n\n c  # last\nd : 1\nn[1-2] slots=2\n")
    found = [("a", 2), ("b", 3), ("c", None), ("d", 1), ("n1", 2), ("n2", 2)]
    assert read_host_file(str(path)) == found
    for text in ("", "# nothing\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="names no hosts"):
            read_host_file(str(path))
    path.write_text("a:2\na b c\n")
    with pytest.raises(ValueError, match="'a b c' is neither"):
        read_host_file(str(path))
    path.write_text("a\n", encoding="utf-16")
    with pytest.raises(ValueError, match="cannot be read"):
        read_host_file(str(path))
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            read_host_file(str(missing))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\ufeffa:2\r\nb:1\r\n", [("a", 2), ("b", 1)]),
        ("\ta slots=2\t# comment\n#b:1\n \t \nc\tslots=1", [("a", 2), ("c", 1)]),
        ("\ufeff# comment\na:2#comment\n", [("a", 2)]),
        ("a\tslots = 2\tmax-slots=4\n", [("a", 2)]),
        ("a,\nb, c\n", None),
        ("a,b,\n", [("a", None), ("b", None)]),
        ("a:2,\nb slots=1 ,\n", [("a", 2), ("b", 1)]),
        ("a:2,b:1\n", None),
        ("a:,\n", None),
        ("a:2 b:1\n", None),
        ("a slots=x\n", None),
        ("a slots=2 junk\n", None),
        ("a max_slots=x\n", None),
        ("a;b\n", None),
        ("n[1 -2]\n", None),
        ("-a:2\n", None),
        ("a:2 // comment\n", None),
        ("a\0:2\n", None),
    ],
)
def test_forms_of_lines_in_host_files(tmp_path, text, found):
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    if found is not None:
        assert read_host_file(str(path)) == found
        return
    with pytest.raises(ValueError, match=f"--hostfile {path}: .*(neither|not a host|not a name)"):
        read_host_file(str(path))


@pytest.mark.parametrize(("vendor", "flag"), [("mpich", "-hosts"), ("openmpi", "--host")])
def test_commands(vendor, flag, monkeypatch):
    launcher = Launcher("mpiexec", BY_NAME[vendor])
    slots = [("b", 2), ("a", 1)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    words = launcher.command(3, slots=slots)
    assert words[words.index(flag) + 1] == "b:2,a:1"
    assert "--oversubscribe" not in words
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    crowded = launcher.command(3, slots=slots)
    assert ("--oversubscribe" in crowded) == (vendor == "openmpi")


@pytest.mark.parametrize(
    ("environ", "ranks", "slots", "together"),
    [
        ({}, 8, (), 8),
        ({}, 8, (("a", 5), ("b", 3)), 5),
        ({"SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_JOB_NODELIST": "n[1-8]"}, 8, (), 1),
        ({"SLURM_TASKS_PER_NODE": "64(x8)", "SLURM_JOB_NODELIST": "n[1-8]"}, 8, (), 8),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_NODELIST": "n[1-4]"}, 7, (), 2),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_NODELIST": "n[1-4]"}, 40, (), 10),
        ({"SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_JOB_NODELIST": "n[1-8]"}, 8, (("a", 8),), 8),
        ({"LSB_MCPU_HOSTS": "a 4 b 2"}, 6, (), 4),
        ({"PBS_NODEFILE": "nodes"}, 3, (), 2),
        ({"PBS_NODEFILE": "none"}, 3, (), 3),
    ],
)
def test_how_many_ranks_share_a_host(tmp_path, monkeypatch, environ, ranks, slots, together):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    monkeypatch.chdir(tmp_path)
    assert most_ranks_on_a_host(ranks, slots, environ) == together


def test_a_launcher_whose_way_is_not_known():
    with pytest.raises(LauncherError, match="leave out --hosts"):
        Launcher("mpiexec", BY_NAME["intelmpi"]).command(1, slots=[("a", 1)])


def test_names_without_an_address(monkeypatch):
    ended = threading.Event()

    def look_up(name, port):
        if name == "slow":
            ended.wait()
        if name == "x" * 64:
            raise UnicodeError("label too long")
        if name != "there":
            raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = ["slow", "there", "nowhere", "x" * 64, "no", "nowhere"]
    began = time.monotonic()
    found = without_address(names, limit_s=2.0)
    assert time.monotonic() - began < 20
    ended.set()
    assert found == {"nowhere": "not known", "x" * 64: "label too long", "no": "not known"}
    assert list(found) == ["nowhere", "x" * 64, "no"]
    assert without_address([]) == {}


def test_this_host_has_an_address():
    assert without_address(["localhost", "127.0.0.1"]) == {}
