"""What the parent of a rank writes down: real processes, and signals to one of them or both."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mpidist.cli import keeper

RANK = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(3)"


@pytest.fixture
def rank(tmp_path):
    """A keeper with its rank, which exits with status 3 once its input ends."""
    words = [sys.executable, "-I", "-S", keeper.__file__, "NUMBER", sys.executable, "-c", RANK]
    process = subprocess.Popen(
        words,
        env={**os.environ, "NUMBER": "5", "MPIDIST_RUN_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield process
    process.kill()
    process.communicate()


def record(process, folder):
    process.communicate(timeout=30)
    return json.loads((folder / "exit-5.json").read_text())


def wait_for_zombie(pid):
    deadline = time.monotonic() + 30
    while True:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return
        assert time.monotonic() < deadline


def test_an_exit(rank, tmp_path):
    pid = int(rank.stdout.readline())
    left = record(rank, tmp_path)
    assert (left["rank"], left["pid"], left["exit_code"], left["signal"]) == (5, pid, 3, None)
    assert not left["asked"]
    assert rank.returncode == 3


def test_killed(rank, tmp_path):
    os.kill(int(rank.stdout.readline()), signal.SIGKILL)
    left = record(rank, tmp_path)
    assert (left["exit_code"], left["signal"], left["asked"]) == (None, signal.SIGKILL, False)
    assert rank.returncode == -signal.SIGKILL


def test_told_to_end(rank, tmp_path):
    rank.stdout.readline()
    rank.send_signal(signal.SIGTERM)
    left = record(rank, tmp_path)
    assert (left["exit_code"], left["signal"], left["asked"]) == (None, signal.SIGTERM, True)


@pytest.mark.parametrize(("first", "asked"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_the_keeper_is_told_to_end_after_its_rank(rank, tmp_path, first, asked):
    pid = int(rank.stdout.readline())
    os.kill(pid, first)
    wait_for_zombie(pid)
    rank.send_signal(signal.SIGTERM)
    left = record(rank, tmp_path)
    assert (left["signal"], left["asked"]) == (first, asked)
