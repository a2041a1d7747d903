"""Temporary folders that go with their command, and files that MPI leaves in /dev/shm."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.launcher.files import (
    locked_folder,
    remove_abandoned,
    remove_shared_files,
    shared_files,
)

FOLDER = Path("/dev/shm")
PREFIX = f"test-{os.getpid()}-"
ABANDON = """
import pathlib, sys
from mpidist.launcher.files import locked_folder
print(locked_folder(pathlib.Path(sys.argv[1]), "job-")[0])
"""


def test_the_folder_of_a_running_command_is_kept(tmp_path):
    folder, lock = locked_folder(tmp_path, "job-")
    remove_abandoned(tmp_path, "job-")
    assert Path(folder).is_dir()
    os.close(lock)
    remove_abandoned(tmp_path, "job-")
    assert not Path(folder).exists()


def test_the_folder_of_a_killed_command_is_removed(tmp_path):
    command = [sys.executable, "-c", ABANDON, str(tmp_path)]
    folder = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout[:-1])
    (folder / "file").touch()
    remove_abandoned(tmp_path, "job-")
    assert not folder.exists()


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "job-abcdefgh").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "job-abcdefgi").symlink_to(tmp_path / "kept")
    (tmp_path / "job-of-the-user").mkdir()
    before = sorted(tmp_path.iterdir())
    remove_abandoned(tmp_path, "job-")
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock = fcntl.flock

    def remove_first(handle, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        os.rmdir(os.readlink(f"/proc/self/fd/{handle}"))
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    folder, handle = locked_folder(tmp_path, "job-")
    assert Path(folder).is_dir()
    os.close(handle)


@pytest.fixture
def earlier():
    """The file of an earlier job, which is left alone."""
    path = FOLDER / f"{PREFIX}earlier"
    path.touch()
    yield path
    path.unlink()


def test_files_without_a_process_are_removed(earlier):
    before = shared_files([PREFIX])
    path = FOLDER / f"{PREFIX}segment"
    path.touch()
    assert remove_shared_files([PREFIX], before) == [path.name]
    assert not path.exists()
    assert earlier.exists()


@pytest.mark.parametrize(
    "hold",
    [
        "file = open(sys.argv[1], 'wb')",
        "file = open(sys.argv[1], 'w+b'); file.truncate(9); m = mmap.mmap(file.fileno(), 9);"
        "file.close()",
    ],
    ids=["open", "mapped"],
)
def test_files_of_other_jobs_are_left_alone(hold):
    before = shared_files([PREFIX])
    path = FOLDER / f"{PREFIX}segment"
    program = f"import mmap, sys; {hold}; print(flush=True); input()"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert remove_shared_files([PREFIX], before) == []
        assert path.exists()
        other.send_signal(signal.SIGKILL)
    assert remove_shared_files([PREFIX], before) == [path.name]
