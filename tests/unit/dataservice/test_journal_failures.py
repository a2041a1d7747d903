"""The dispatcher's journal under killed processes, full disks and unusable directories."""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dataservice.dispatch.journal import Journal
from mpidist.errors import (
    FailedPreconditionError,
    PermissionDeniedError,
    ResourceExhaustedError,
)

NOBODY = 65534


@contextmanager
def forked(work):
    """Run ``work(pipe)`` in a fork. Return its process id and the other end of the pipe.

    The fork is killed at the end of the context.
    """
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            mine.close()
            work(its)
            its.send(b"end")
        except BaseException as error:
            its.send(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    its.close()
    with mine:
        try:
            yield child, mine
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# One at a time


def test_another_object_of_the_process(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        who = f"process {os.getpid()} on host {socket.gethostname()}"
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match=f"{who}, uses the.* in {tmp_path}:"):
                Journal(tmp_path)
        journal.commit({("a", 1): b"x"})
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {"a": {1: b"x"}}


def test_another_process_until_it_is_killed(tmp_path):
    def hold(pipe):
        journal = Journal(tmp_path)
        journal.commit({("a", 1): b"x"})
        pipe.send(b"has it")
        pipe.recv(1)

    with forked(hold) as (child, pipe):
        assert pipe.recv(100) == b"has it"
        match = f"another dispatcher, process {child} on host {socket.gethostname()}, uses .*stop"
        with pytest.raises(FailedPreconditionError, match=match):
            Journal(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {"a": {1: b"x"}}


def test_a_fork_of_the_process_neither_has_nor_holds_it(tmp_path):
    journal = Journal(tmp_path)
    journal.commit({("a", 1): b"x"})

    def use(pipe):
        try:
            journal.commit({("a", 1): b"of the fork"})
        except FailedPreconditionError as error:
            pipe.send(str(error).encode())
        pipe.recv(1)
        journal.close()

    with forked(use) as (child, pipe):
        assert f"closed in process {child}" in pipe.recv(1000).decode()
        journal.commit({("a", 2): b"y"})
        pipe.send(b".")
        assert pipe.recv(100) == b"end"
        journal.commit({("a", 3): b"z"})
        journal._lock.close()  # as a killed process leaves it, while its fork lives
        with closing(Journal(tmp_path)) as again:
            assert again.load() == {"a": {1: b"x", 2: b"y", 3: b"z"}}
    os.close(journal._folder)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(FailedPreconditionError, match=r"No locks.*a file system with locks"):
        Journal(tmp_path)


# Killed


def changes(number):
    """Return the changes of commit ``number`` (1, 2, ...). They are the same in every run."""
    draw = random.Random(number)
    made = {("split", draw.randrange(40)): draw.randbytes(draw.randrange(9000)) for _ in range(4)}
    if number % 3 == 0:
        made["dataset", draw.randrange(3)] = draw.randbytes(draw.randrange(200_000))
    return made | {("split", draw.randrange(40)): None, ("count", 0): b"%d" % number}


def test_killed_at_random_moments(tmp_path):
    directory = tmp_path / "journal"

    def write(pipe):
        journal = Journal(directory)
        number = int(journal.load().get("count", {}).get(0, b"0"))
        while True:
            number += 1
            journal.commit(changes(number))
            pipe.send(b".")

    states = [{}]
    known = 0
    for seed in range(20):
        draw = random.Random(seed)
        with forked(write) as (_, pipe):
            for _ in range(draw.choice([0, 1, 30, 150])):
                assert pipe.recv(1) == b"."
                known += 1
            time.sleep(draw.uniform(0, 0.003))
            pipe.settimeout(None)
            # The copy of the pipe receives the reports up to the death of the child.
            reports = pipe.dup()
        with reports:
            while report := reports.recv(1 << 16):
                assert report == b"." * len(report)
                known += len(report)
        copy = shutil.copytree(directory, tmp_path / f"copy {seed}") if directory.exists() else None
        if copy is None:
            continue
        with closing(Journal(copy)) as journal:
            tables = journal.load()
        found = int(tables.get("count", {}).get(0, b"0"))
        assert known <= found <= known + 1
        while len(states) <= found:
            states.append(states[-1] | changes(len(states)))
        state = {name: value for name, value in states[found].items() if value is not None}
        assert {(kind, key): v for kind in tables for key, v in tables[kind].items()} == state
        known = found
    assert known > 100


# Full disks


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [-1, 0, 100, 50_000, 1_000_000])
def test_a_limit_on_files(tmp_path, room):
    with closing(Journal(tmp_path)) as journal:
        journal.commit({("a", key): bytes(3000) for key in range(20)})
        before = journal.load()
        size = (tmp_path / "state").stat().st_size
        with largest_file(size + room):
            for _ in range(2):
                with pytest.raises(ResourceExhaustedError, match=r"ulimit -f.*make room"):
                    journal.commit({("a", 1): b"", ("b", 1): bytes(4_000_000), ("a", 2): None})
                with pytest.raises(ResourceExhaustedError, match=r"ulimit -f.*make room"):
                    journal.commit({("b", key): bytes(60_000) for key in range(20)})
                assert journal.load() == before
                assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "state"]
        journal.commit({("a", 1): b"there is room", ("b", 1): bytes(4_000_000), ("a", 2): None})
        after = before["a"] | {1: b"there is room"}
        del after[2]
        assert journal.load() == {"a": after, "b": {1: bytes(4_000_000)}}
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {"a": after, "b": {1: bytes(4_000_000)}}


def test_a_limit_on_files_at_the_start(tmp_path):
    for size in (0, 10):
        with largest_file(size), pytest.raises(ResourceExhaustedError, match="make room"):
            Journal(tmp_path)
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {}


def on_file_system(tmp_path, mount, script):
    """Run a script in a folder that is another file system, in a private mount namespace."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    words = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a process mount a file system")
    words += [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_full_disk(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from dataservice.dispatch.journal import Journal
        from mpidist.errors import ResourceExhaustedError

        directory, filler = Path(sys.argv[1], "journal"), Path(sys.argv[1], "filler")

        def refused(do, *arguments):
            try:
                do(*arguments)
            except ResourceExhaustedError as error:
                assert str(directory) in str(error) and "make room" in str(error)
                return True

        def fill():
            with filler.open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

        fill()
        assert refused(Journal, directory)
        filler.unlink()
        journal, state = Journal(directory), {}
        for round in range(5):
            journal.commit({("kept", round): bytes(5000)})
            state[round] = bytes(5000)
            fill()
            for key in range(round, round + 9):
                if refused(journal.commit, {("kept", key): bytes(9000), ("kept", 0): None}):
                    break
                state |= {key: bytes(9000)}
                state.pop(0, None)
            else:
                raise SystemExit("never full")
            assert journal.load() == {"kept": state}
            if round % 2:
                journal.close()
                # Where there is no room, starting may be refused, too; nothing is lost.
                assert refused(Journal, directory) in (True, None)
            filler.unlink()
            if round % 2:
                journal = Journal(directory)
            assert journal.load() == {"kept": state}
        journal.commit({("kept", 99): b"good"})
        assert journal.load() == {"kept": state | {99: b"good"}}
        journal.close()
        print("good")
    """
    mount = f"mount -t tmpfs -o size=300k tmpfs '{tmp_path}'"
    assert on_file_system(tmp_path, mount, script) == "good\n"


# Directories


def test_things_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    for path, what in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "x", "Not a dir")):
        with pytest.raises(FailedPreconditionError, match=f"{path}: .*{what}.*; give a directory"):
            Journal(path)
    for name in ("lock", "state"):
        directory = tmp_path / name
        (directory / name).mkdir(parents=True)
        with pytest.raises((FailedPreconditionError, PermissionDeniedError), match=str(directory)):
            Journal(directory)


@contextmanager
def as_nobody():
    if os.geteuid() != 0:
        yield
    else:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)


def test_directories_without_permission():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        directory = Path(folder, "journal")
        Journal(directory).close()
        closed = [directory, directory / "below"]
        for mode in (0o000, 0o444, 0o555):
            directory.chmod(mode)
            for path in closed[: 1 if mode == 0o555 else 2]:
                with as_nobody(), pytest.raises(PermissionDeniedError, match=f"{path}.*; let this"):
                    Journal(path)
        directory.chmod(0o777)
        (directory / "lock").chmod(0o666)
        (directory / "state").chmod(0o000)
        with (
            as_nobody(),
            pytest.raises(PermissionDeniedError, match=r"Permission.*; let this user"),
        ):
            Journal(directory)
        (directory / "state").chmod(0o644)
        directory.chmod(0o755)
        Journal(directory).close()


def test_a_read_only_file_system(tmp_path):
    Journal(tmp_path).close()
    script = """
        import sys
        from dataservice.dispatch.journal import Journal
        from mpidist.errors import PermissionDeniedError
        for path in (sys.argv[1], sys.argv[1] + "/new"):
            try:
                Journal(path)
            except PermissionDeniedError as error:
                print(error)
    """
    mount = f"mount --bind '{tmp_path}' '{tmp_path}' && mount -o remount,ro,bind '{tmp_path}'"
    said = on_file_system(tmp_path, mount, script)
    assert said.count("Read-only file system") == said.count("; let this user") == 2
