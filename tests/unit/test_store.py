"""Stores of threads and of processes, and the cases common to all stores."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from _cases.stores import CALLS, CASES, LIMIT_S, NAMES, check_like_model, counted, in_threads
from hypothesis import given, settings

from mpidist import DistStoreError, FileStore, HashStore, PrefixStore, Store

MAKERS = {
    "hash": lambda path: HashStore(),
    "file": FileStore,
    "prefix of hash": lambda path: PrefixStore("p", HashStore()),
    "prefix of prefix of file": lambda path: PrefixStore("p", PrefixStore("", FileStore(path))),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def store(request, tmp_path):
    made = request.param(tmp_path / "store")
    made.set_timeout(LIMIT_S)
    return made


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(store, case):
    case(store)


def test_counted(store):
    counted(store)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(calls=CALLS)
@settings(max_examples=60, deadline=None)
def test_like_a_dict(make, calls):
    with tempfile.TemporaryDirectory() as folder:
        check_like_model(make(Path(folder) / "store"), calls)


def test_limit_by_default(store):
    fresh = HashStore()
    assert fresh.timeout == timedelta(seconds=300)
    assert fresh.has_extended_api()
    with pytest.raises(TypeError, match="abstract"):
        Store()


# Prefixes


def test_prefixes():
    below = HashStore()
    below.set("x/other", "1")
    inner = PrefixStore("b", below)
    store = PrefixStore("a", inner)
    store.set("k", "v")
    store.queue_push("q", "1")
    assert below.get("b/a/k") == b"v"
    assert below.queue_pop("b/a/q") == b"1"
    assert inner.list_keys() == ["a/k"]
    assert store.list_keys() == ["k"]
    assert PrefixStore("b/", below).list_keys() == []
    assert store.num_keys() == below.num_keys() == 2
    assert store.underlying_store is inner
    assert repr(store) == "PrefixStore('a', PrefixStore('b', HashStore()))"
    store.set_timeout(7)
    assert below.timeout == store.timeout == timedelta(seconds=7)
    with pytest.raises(TypeError, match="prefix must be a str"):
        PrefixStore(1, below)
    with pytest.raises(TypeError, match="needs a Store"):
        PrefixStore("a", {})


# Files

ADDS = """
import sys
from mpidist import FileStore

store = FileStore(sys.argv[1])
store.set_timeout(30)
store.queue_push("started", sys.argv[2])
while not store.check(["stop"]):
    store.add("n", 1)
    store.queue_push("noted", sys.argv[2])
"""


@pytest.fixture
def adders():
    processes = []

    def start(path, name):
        process = subprocess.Popen([sys.executable, "-c", ADDS, str(path), name])
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_killed_processes_leave_whole_entries(tmp_path, adders):
    store = FileStore(tmp_path / "store")
    store.set_timeout(LIMIT_S)
    survivor = adders(store.path, "survivor")
    noted = 0
    for round_ in range(5):
        doomed = adders(store.path, "doomed")
        while store.queue_pop("started") != b"doomed":
            pass
        noted += 1
        while store.queue_pop("noted") != b"doomed":  # the process is adding
            noted += 1
        doomed.kill()
        doomed.wait()
        assert store.add("mine", 1) == round_ + 1
    before = store.add("n", 0)
    while store.add("n", 0) < before + 10:  # the survivor goes on
        pass
    store.set("stop", "1")
    assert survivor.wait(LIMIT_S) == 0
    connection = sqlite3.connect(store.path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    noted += store.queue_len("noted")
    # A killed process may have added a number without noting it.
    assert noted <= store.add("n", 0) <= noted + 5


def test_every_add_of_processes_counts(tmp_path):
    path = tmp_path / "store"
    code = (
        "import sys; from mpidist import FileStore; s = FileStore(sys.argv[1]);"
        "s.set_timeout(30); s.barrier('start', 3); [s.add('n', 1) for _ in range(100)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert FileStore(path).get("n") == b"300"


def test_a_fork_goes_on_with_the_file(tmp_path):
    store = FileStore(tmp_path / "store")
    store.set_timeout(LIMIT_S)
    child = os.fork()
    if child == 0:
        store.set("of child", "1")
        os._exit(0)
    assert store.get("of child") == b"1"
    assert os.waitpid(child, 0)[1] == 0


def test_names_of_files(tmp_path):
    for name in ("ü ?#%20.db", "plain"):
        FileStore(str(tmp_path / name)).set("a", name)
        assert FileStore(os.fsencode(tmp_path / name)).get("a") == name.encode()
    assert {path.name for path in tmp_path.iterdir()} == {"ü ?#%20.db", "plain"}
    empty = tmp_path / "empty"
    empty.touch()
    assert FileStore(empty).num_keys() == 0


def test_the_last_removes_the_file(tmp_path):
    path = tmp_path / "store"
    first, second, free = FileStore(path, 2), FileStore(path, 2), FileStore(path)
    copy = first.clone()
    for store in (copy, free, first, first):
        store.close()
        assert path.exists()
    with pytest.raises(DistStoreError, match="is closed"):
        first.get("a")
    with second:
        second.set("a", "1")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DistStoreError, match="store"):
        second.clone().num_keys()


def test_a_file_that_vanishes(tmp_path):
    store = FileStore(tmp_path / "store")
    os.unlink(store.path)
    with pytest.raises(DistStoreError, match="unable to open"):
        store.set("a", "1")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_stores(tmp_path):
    text = tmp_path / "text"
    text.write_text("this is no database\n" * 100)
    other = tmp_path / "other"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE entries (key, value)")
    connection.commit()
    connection.close()
    for path, match in ((text, "text'.*not a database"), (other, "other'.*another program's")):
        before = path.read_bytes()
        with pytest.raises(DistStoreError, match=match):
            FileStore(path)
        assert path.read_bytes() == before
    with pytest.raises(DistStoreError, match=r"missing does not exist; make it first"):
        FileStore(tmp_path / "missing" / "store")
    for path in (tmp_path, "/dev/null", f"{tmp_path}/nul\0b"):
        with pytest.raises(DistStoreError, match="not a regular file; give another path"):
            FileStore(path)


def test_a_file_that_somebody_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("mpidist.store.local_stores._SHORTEST_LOCK_S", 0.05)
    store = FileStore(tmp_path / "store")
    store.set_timeout(0.1)
    holds = sqlite3.connect(store.path, isolation_level=None)
    holds.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DistStoreError, match=r"store'.*locked.*0\.1 s"):
        store.set("a", "1")
    holds.execute("ROLLBACK")
    holds.close()
    store.set("a", "1")


def test_threads_that_open_one_file(tmp_path):
    path = tmp_path / "store"
    in_threads(*[lambda: FileStore(path).add("n", 1)] * 8)
    assert FileStore(path).get("n") == b"8"
