"""The folder in shared memory that a job has, and the watch over what is made beside it."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.launcher import keeper
from mpidist.launcher.shared_files import SharedFiles

FOLDER = Path("/dev/shm")
PREFIX = f"test-{os.getpid()}-"


@pytest.fixture
def shared_files():
    made = SharedFiles([PREFIX])
    yield made
    if Path(made.folder).exists():
        made.close()


def test_the_folder_goes_with_what_is_in_it(shared_files):
    (Path(shared_files.folder) / "segment").write_bytes(b"x")
    assert shared_files.close() == []
    assert not Path(shared_files.folder).exists()


def test_a_living_commands_folder_is_kept(shared_files):
    SharedFiles([]).close()
    assert Path(shared_files.folder).is_dir()


ABANDON = """
import pathlib, sys
from mpidist.launcher import shared_files
shared_files._FOLDER = pathlib.Path(sys.argv[1])
print(shared_files.SharedFiles([]).folder)
"""


def test_a_killed_commands_folder_is_removed(tmp_path, monkeypatch):
    """In a place where no other command looks for abandoned ones."""
    monkeypatch.setattr("mpidist.launcher.shared_files._FOLDER", tmp_path)
    command = [sys.executable, "-c", ABANDON, str(tmp_path)]  # ends without close()
    folder = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout[:-1])
    assert folder.is_dir()
    SharedFiles([]).close()
    assert not folder.exists()


def test_what_is_no_folder_of_a_command_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("mpidist.launcher.shared_files._FOLDER", tmp_path)
    (tmp_path / "mpidist-shm-file").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "mpidist-shm-link").symlink_to(tmp_path / "kept")
    SharedFiles([]).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kept",
        "mpidist-shm-file",
        "mpidist-shm-link",
    ]


def test_without_a_watch_it_looks_when_it_is_asked(monkeypatch):
    monkeypatch.setattr("mpidist.launcher.shared_files._watch_of", lambda folder: None)
    made = SharedFiles([PREFIX])
    assert made.handle is None
    path = Path(f"/dev/shm/{PREFIX}{os.getpid()}-late")
    child = subprocess.Popen(
        [sys.executable, "-c", f"file = open({str(path)!r}, 'w'); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    made.look()
    child.communicate()
    assert made.close() == [path.name]


def test_a_folder_removed_before_it_was_locked_is_made_again(monkeypatch):
    lock = fcntl.flock

    def remove_first(handle, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        os.rmdir(os.readlink(f"/proc/self/fd/{handle}"))
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    made = SharedFiles([])
    assert Path(made.folder).is_dir()
    made.close()


def test_files_that_this_job_makes_beside_the_folder(shared_files):
    path = FOLDER / f"{PREFIX}segment"
    with path.open("wb") as file:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    shared_files.look()
    assert shared_files.close() == [path.name]
    assert not path.exists()
    holder.communicate(timeout=10)


def test_files_of_other_jobs_are_left_alone(shared_files):
    path = FOLDER / f"{PREFIX}segment"
    command = f"sleep 60 > {path} & echo $!"  # its parent ends: it is nobody's descendant
    shell = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True)
    shared_files.look()
    assert shared_files.close() == []
    assert path.exists()
    os.kill(int(shell.stdout), signal.SIGKILL)
    path.unlink()


def test_files_whose_makers_died_before_they_were_seen(shared_files):
    path = FOLDER / f"{PREFIX}segment"
    path.touch()
    assert shared_files.close() == [path.name]


def test_ranks_elsewhere_do_without_the_folder(tmp_path):
    shown = "import os; print([os.environ.get(n) for n in ('HERE', 'GONE', 'MPIDIST_RUN_SHARED')])"
    environment = {
        "MPIDIST_RUN_DIR": str(tmp_path),
        "MPIDIST_RUN_SHARED": "HERE,GONE,ABSENT",
        "HERE": str(tmp_path),
        "GONE": str(tmp_path / "gone"),
        "RANK": "0",
    }
    command = [sys.executable, "-I", keeper.__file__, "RANK", sys.executable, "-c", shown]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"['{tmp_path}', None, None]\n"
