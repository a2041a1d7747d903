"""The dispatcher's journal: what was committed is there, whatever happens to the process."""

import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.dispatch import journal as module
from dataservice.dispatch.journal import Journal
from mpidist.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
)

KEYS = st.integers(-(2**63), 2**63 - 1)
NAMES = st.tuples(
    st.sampled_from(["dataset", "split", "Split", "", "ü\0"]), st.one_of(st.integers(0, 3), KEYS)
)
CHANGES = st.dictionaries(NAMES, st.one_of(st.none(), st.binary(max_size=9000)), max_size=8)


def apply(state, changes):
    for name, value in changes.items():
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value


def read(journal):
    return {(kind, key): v for kind, table in journal.load().items() for key, v in table.items()}


def bytes_of(directory):
    return {path.name: path.stat().st_size for path in directory.iterdir()}


@given(steps=st.lists(st.one_of(CHANGES, st.sampled_from(["open again", "crash"])), max_size=12))
def test_it_holds_what_a_dict_would(steps):
    state = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "0")
        journal = Journal(directory)
        for number, step in enumerate(steps, 1):
            if step == "open again":
                journal.close()
                journal = Journal(directory)
            elif step == "crash":  # what a killed process would have left
                directory = shutil.copytree(directory, Path(folder, str(number)))
                journal.close()
                journal = Journal(directory)
            else:
                journal.commit(step)
                apply(state, step)
            assert read(journal) == state
        journal.close()


def test_what_load_gives(tmp_path):
    directory = tmp_path / "a" / "b"
    with closing(Journal(str(directory))) as journal:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert journal.load() == {}
        journal.commit({})
        journal.commit({("job", 1): b"one", ("task", -5): b"", ("job", 2): b"two"})
        journal.commit({("job", 1): b"1", ("job", 2): None, ("job", 3): None})
        assert journal.load() == {"job": {1: b"1"}, "task": {-5: b""}}
        journal.commit({("task", -5): None})
        assert journal.load() == {"job": {1: b"1"}}
    assert sorted(bytes_of(directory)) == ["commits", "journal.sqlite", "lock"]


def test_a_commit_waits_for_the_disk(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        settings = [
            journal._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        ]
    assert settings == ["wal", 2]


def test_any_thread_uses_it(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        thread = threading.Thread(target=journal.commit, args=({("a", 1): b"x"},))
        thread.start()
        thread.join()
        assert journal.load() == {"a": {1: b"x"}}
        thread = threading.Thread(target=journal.close)
        thread.start()
        thread.join()
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {"a": {1: b"x"}}


def test_a_closed_one(tmp_path):
    journal = Journal(tmp_path)
    journal.close()
    journal.close()
    for use in (journal.load, lambda: journal.commit({}), lambda: journal.commit({("a", 1): b""})):
        with pytest.raises(FailedPreconditionError, match=f"{tmp_path} is closed"):
            use()


def test_changes_that_cannot_be_made_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGEST_RECORD_BYTES", 10)
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("a", 1): b"x"})
        for wrong, error, match in (
            ({("b", 2**63): b""}, OverflowError, "too big"),
            ({("b", 1): "text"}, TypeError, "bytes-like"),
            (
                {("b", 1): b"more than ten"},
                InvalidArgumentError,
                "13 bytes, more than the 10",
            ),
            ({("b", 2**63): None}, OverflowError, "too large"),
        ):
            with pytest.raises(error, match=match):
                journal.commit({("a", 1): None, ("a", 2): b"y", **wrong})
        assert journal.load() == {"a": {1: b"x"}}
        journal.commit({("a", 2): b"y"})
        assert journal.load() == {"a": {1: b"x", 2: b"y"}}


def test_another_program_that_writes(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        journal._connection.execute("PRAGMA busy_timeout = 0")
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(AbortedError, match=r"locked .SQLITE_BUSY.*end that program"):
                journal.commit({("a", 1): b"x"})
            other.execute("ROLLBACK")
        assert journal.load() == {}
        journal.commit({("a", 1): b"x"})


def test_the_files_shrink_with_what_they_hold(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        small = bytes_of(tmp_path)["journal.sqlite"]
        journal.commit({("split", key): bytes(1000) for key in range(20_000)})
        assert bytes_of(tmp_path)["journal.sqlite"] > 20e6
        journal.commit({("split", key): None for key in range(20_000)})
        journal.commit({("split", 1): b""})
        sizes = bytes_of(tmp_path)
        assert sizes["journal.sqlite"] <= 2 * small
        assert sizes["journal.sqlite-wal"] <= 4 << 20
    assert sum(bytes_of(tmp_path).values()) < 1e5


def test_the_files_do_not_grow_with_commits(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        for number in range(3000):
            journal.commit({("split", number): bytes(2000), ("split", number - 5): None})
        assert sum(bytes_of(tmp_path).values()) < 5e6
        assert sorted(journal.load()["split"]) == list(range(2995, 3000))


def test_a_start_that_was_killed(tmp_path):
    for name in ("journal.sqlite", "commits"):
        (tmp_path / f"{name}.new").write_bytes(b"the beginning of something")
    (tmp_path / "lock").write_text("process 1 on host gone, and a long name of it")
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("a", 1): b"x"})
        assert journal.load() == {"a": {1: b"x"}}
        assert "gone" not in (tmp_path / "lock").read_text()
    assert sorted(bytes_of(tmp_path)) == ["commits", "journal.sqlite", "lock"]


def test_other_versions_and_other_programs(tmp_path):
    Journal(tmp_path).close()
    path = tmp_path / "journal.sqlite"
    for version in (1, 3):
        with closing(sqlite3.connect(path)) as other:
            other.execute(f"PRAGMA user_version = {version}")
        before = path.read_bytes()
        match = f"format {version}, and this version of mpidist reads format 2; go on with the ver"
        with pytest.raises(FailedPreconditionError, match=match):
            Journal(tmp_path)
        assert path.read_bytes() == before
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE records (kind, key, value)")
    before = path.read_bytes()
    with pytest.raises(FailedPreconditionError, match="is another program's database; give"):
        Journal(tmp_path)
    assert path.read_bytes() == before
