"""The dispatcher's journal: commits survive all failures of the process."""

import os
import shutil
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.dispatch import journal as module
from dataservice.dispatch.journal import Journal
from mpidist.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

KEYS = st.integers(-(2**63), 2**63 - 1)
NAMES = st.tuples(
    st.sampled_from(["dataset", "split", "Split", "", "ü\0"]), st.one_of(st.integers(0, 3), KEYS)
)
VALUES = st.one_of(st.none(), st.binary(max_size=9000), st.just(bytes(70_000)))
CHANGES = st.dictionaries(NAMES, VALUES, max_size=8)


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
            elif step == "crash":  # the state that a killed process leaves
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
    assert sorted(bytes_of(directory)) == ["lock", "state"]


def test_a_commit_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor, fsync=os.fsync):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    with closing(Journal(tmp_path)) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        journal.commit({("a", 1): b"x"})
        assert synced == ["state.new", tmp_path.name]
        synced.clear()
        journal.commit({("a", 1): bytes(100_000)})
        assert synced == ["file-1", tmp_path.name, "state.new", tmp_path.name]


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
            ({("b", 2**63): b""}, ValueError, "out of range"),
            ({("b", 1): "text"}, TypeError, "str"),
            (
                {("b", 1): b"more than ten"},
                InvalidArgumentError,
                "13 bytes, more than the 10",
            ),
        ):
            with pytest.raises(error, match=match):
                journal.commit({("a", 1): None, ("a", 2): b"y", **wrong})
        assert journal.load() == {"a": {1: b"x"}}
        journal.commit({("a", 2): b"y"})
        assert journal.load() == {"a": {1: b"x", 2: b"y"}}


def test_the_files_shrink_with_what_they_hold(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        small = sum(bytes_of(tmp_path).values())
        large = {("split", key): bytes(1000) for key in range(2000)}
        journal.commit(large | {("dataset", key): bytes(200_000) for key in range(5)})
        assert sum(bytes_of(tmp_path).values()) > 3e6
        journal.commit({("dataset", key): b"small now" for key in range(4)})
        assert len(bytes_of(tmp_path)) == 3
        journal.commit(dict.fromkeys(large) | {("dataset", key): None for key in range(5)})
        assert sum(bytes_of(tmp_path).values()) == small


def test_large_values_are_not_written_again(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("dataset", 1): bytes(100_000)})
        before = (tmp_path / "file-1").stat()
        journal.commit({("split", 1): b"x"})
        assert (tmp_path / "file-1").stat() == before
        assert bytes_of(tmp_path)["state"] < 200
        journal.commit({("dataset", 1): bytes(200_000)})
        assert sorted(bytes_of(tmp_path)) == ["file-2", "lock", "state"]
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("dataset", 2): bytes(300_000)})
        assert journal.load() == {
            "dataset": {1: bytes(200_000), 2: bytes(300_000)},
            "split": {1: b"x"},
        }


def test_a_start_that_was_killed(tmp_path):
    (tmp_path / "state.new").write_bytes(b"the beginning of something")
    (tmp_path / "lock").touch()
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("a", 1): b"x"})
        assert journal.load() == {"a": {1: b"x"}}
    assert sorted(bytes_of(tmp_path)) == ["lock", "state"]
    (tmp_path / "lock").write_text("process 1 on host gone, and a long name of it")
    (tmp_path / "file-7").write_bytes(b"of a commit that was killed")
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {"a": {1: b"x"}}
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on host ")
        assert "gone" not in (tmp_path / "lock").read_text()
    assert sorted(bytes_of(tmp_path)) == ["lock", "state"]


def test_other_versions_and_other_programs(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("a", 1): b"x"})
    path = tmp_path / "state"
    written = path.read_bytes()
    for version in (1, 4):
        other = written[:8] + version.to_bytes(4, "little") + written[12:]
        path.write_bytes(other)
        match = f"format {version}, and this version of mpidist reads format 3; go on with the ver"
        with pytest.raises(FailedPreconditionError, match=match):
            Journal(tmp_path)
        assert path.read_bytes() == other
    path.write_bytes(b"Here is a text of another program." * 9)
    with pytest.raises(DataLossError, match="state is not a dispatcher's"):
        Journal(tmp_path)
    # Version 0.1 left this file.
    path.rename(tmp_path / "journal.sqlite")
    with pytest.raises(DataLossError, match=r"state is missing: .* mpidist 0.1 wrote the journal"):
        Journal(tmp_path)
