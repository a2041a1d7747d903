"""Temporary folders removed at the end of a command, and files left in /dev/shm by MPI."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.launcher.leftovers import no_shared_files, temporary_folder

FOLDER = Path("/dev/shm")
PREFIX = f"test-{os.getpid()}-"
ABANDON = """
import os
from mpidist.launcher.leftovers import temporary_folder
with temporary_folder("job-") as folder:
    print(folder, flush=True)
    os._exit(0)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Set the parent folder of temporary folders, and return it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("parent")
def test_the_folder_of_a_running_command_is_kept():
    with temporary_folder("job-") as folder:
        with temporary_folder("job-") as other:
            assert folder.is_dir()
        assert not other.exists()
    assert not folder.exists()


@pytest.mark.usefixtures("parent")
def test_the_folder_of_a_killed_command_is_removed():
    command = [sys.executable, "-c", ABANDON]
    folder = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout[:-1])
    (folder / "file").touch()
    with temporary_folder("job-"):
        assert not folder.exists()


def test_other_files_are_left_alone(parent):
    with temporary_folder("job-") as folder:
        prefix = folder.name[:-8]
    (parent / f"{prefix}abcdefgh").touch()
    (parent / "kept").mkdir()
    (parent / f"{prefix}abcdefgi").symlink_to(parent / "kept")
    (parent / f"{prefix}of-the-user").mkdir()
    (parent / "job-0-abcdefgh").mkdir()  # made on another host
    before = sorted(parent.iterdir())
    with temporary_folder("job-"):
        pass
    assert sorted(parent.iterdir()) == before


@pytest.mark.usefixtures("parent")
def test_a_folder_removed_before_it_was_locked_is_made_again(monkeypatch):
    lock = fcntl.flock

    def remove_first(handle, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        os.rmdir(os.readlink(f"/proc/self/fd/{handle}"))
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with temporary_folder("job-") as folder:
        assert folder.is_dir()


@pytest.fixture
def earlier():
    """Yield a file of an earlier job, which must stay."""
    path = FOLDER / f"{PREFIX}earlier"
    path.touch()
    yield path
    path.unlink()


def test_files_without_a_process_are_removed(earlier):
    path = FOLDER / f"{PREFIX}segment"
    with no_shared_files([PREFIX]):
        path.touch()
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
    path = FOLDER / f"{PREFIX}segment"
    program = f"import mmap, sys; {hold}; print(flush=True); input()"
    command = [sys.executable, "-c", program, str(path)]
    with no_shared_files([PREFIX]):
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
            no_shared_files([PREFIX]),
        ):
            other.stdout.readline()
        assert path.exists()
    assert not path.exists()
