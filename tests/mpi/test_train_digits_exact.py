"""The main job uses every image once an epoch, in one order, after any interruption.

Each worker logs the images of its batches. The used batches of a run are the batches before the
checkpoint from which the next run continues.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _cases.data_command import Command
from _cases.leftovers import remaining
from safetensors.numpy import load_file

from strategy import ParameterServerStrategy

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "scripts"
EPOCHS = 3
PER_EPOCH = 45
LIMIT_S = 120.0
GONE_S = 20.0

# The main job, with a log of the numbers of its batches and the rows in them. In a given round,
# one worker may wait for a file, or kill the launcher, its group and itself. After a kill, no rank
# gets past the next checkpoint.
LOGGED = f"""
import json, os, signal, sys, threading, time
from pathlib import Path
folder, what, worker, round_, delay = sys.argv[1:6]
del sys.argv[1:6]
sys.path.insert(0, {str(SCRIPTS)!r})
import cloudpickle
import train_digits as job

cloudpickle.register_pickle_by_value(job)  # as if it were __main__: data workers do not have it
folder = Path(folder)
training, _ = job.load_data()
rows = {{image.tobytes(): row for row, image in enumerate(training.images)}}
rounds = job.Feed.rounds
count = 0

def kill():
    time.sleep(float(delay))
    os.killpg(int((folder / "group").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

def gate():
    (folder / "reached").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)

def logged(feed):
    global count
    with open(folder / f"log-{{feed.index}}", "a") as log:
        first = feed.used
        for batch in rounds(feed):
            number, first = first + feed.index, feed.used
            if batch is not None:
                log.write(json.dumps([number, [rows[one.tobytes()] for one in batch[0]]]) + "\\n")
                log.flush()
            if what != "none" and feed.index == int(worker) and count == int(round_):
                if what == "gate":
                    gate()
                elif float(delay):
                    threading.Thread(target=kill, daemon=True).start()
                else:
                    kill()
            count += 1
            yield batch

job.Feed.rounds = logged
job.main()
"""


class Job:
    """A training job, in as many runs as necessary.

    Args:
        folder: Folder of all files.
        options: Options of the script in every run.

    Attributes:
        runs: The first batch of each run, and the log of its workers.
    """

    def __init__(self, folder, *options):
        self.folder = folder
        self.checkpoints = folder / "out" / "checkpoints"
        self.runs = []
        self._options = ("--epochs", str(EPOCHS), "--checkpoint-every", "0.15", *options)
        (folder / "logged.py").write_text(LOGGED)

    @property
    def latest(self):
        """The path of the newest checkpoint, or None."""
        return ParameterServerStrategy.latest_checkpoint(str(self.checkpoints))

    @property
    def place(self):
        """The number of used batches at the newest checkpoint."""
        if self.latest is None:
            return 0
        return int((Path(self.latest) / "data").read_bytes().partition(b" ")[0])

    def run(self, workers, data, *, accident=(), beside=None, options=()):
        """Start or continue the training. Return whether it has completed.

        Args:
            workers: Number of workers.
            data: Number of data tasks.
            accident: The kind ("kill" or "gate"), the index of the worker, the number of the round,
                and a delay in seconds.
            beside: Function to call while the job waits at the gate.
            options: Options of the script in this run.
        """
        logs, begin = self.folder / f"run-{len(self.runs)}", self.place
        logs.mkdir()
        layout = ["--ps", "1", "--worker", str(workers), "--data", str(data)]
        words = [str(logs), *map(str, accident or ("none", 0, 0, 0))]
        words += ["--quiet", "--data", str(data), "--output-dir", str(self.folder / "out")]
        command = [sys.executable, "-m", "mpidist", "run", *layout, str(self.folder / "logged.py")]
        process = subprocess.Popen(
            [*command, *words, *self._options, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        (logs / "group").write_text(str(process.pid))
        try:
            if beside is not None:
                _wait_for(logs / "reached", process)
                beside()
                (logs / "go").touch()
            out, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # No process writes a checkpoint any more.
        assert not remaining(str(self.folder / "logged.py"), GONE_S)
        assert process.returncode in (0, -signal.SIGKILL), out
        assert process.returncode == 0 or accident[0] == "kill", out
        lines = [line for log in logs.glob("log-*") for line in log.read_text().splitlines(True)]
        # The last line of a killed worker may be incomplete.
        self.runs.append((begin, dict(json.loads(line) for line in lines if line.endswith("\n"))))
        return process.returncode == 0

    def used(self):
        """Return the rows of all used batches by number. Check that each batch counts once."""
        ends = [begin for begin, _ in self.runs[1:]] + [self.place]
        used = {}
        for (begin, logged), end in zip(self.runs, ends, strict=True):
            assert min(logged, default=begin) >= begin
            counted = {number: rows for number, rows in logged.items() if number < end}
            assert sorted(counted) == list(range(begin, end))
            used |= counted
        return used

    def tensors(self):
        """Return all tensors of the servers at the newest checkpoint."""
        return load_file(Path(self.latest) / "ps-0-of-1.safetensors")


def _wait_for(path, process):
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def check_epochs(used):
    """Check that every epoch has every image once, in a new order."""
    assert sorted(used) == list(range(EPOCHS * PER_EPOCH))
    orders = []
    for first in range(0, EPOCHS * PER_EPOCH, PER_EPOCH):
        orders.append([row for n in range(first, first + PER_EPOCH) for row in used[n]])
        assert sorted(orders[-1]) == list(range(1437))
    assert len(set(map(tuple, orders))) == EPOCHS


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Run a training in mode sync on two workers without accidents."""
    job = Job(tmp_path_factory.mktemp("uninterrupted"), "--mode", "sync")
    assert job.run(2, 1)
    check_epochs(job.used())
    return job


def suffer(seed, folder, uninterrupted):
    """Kill a training twice at random moments. Expect the batches of an uninterrupted training."""
    draw = random.Random(seed)
    mode = ("sync", "async")[seed % 2]
    job = Job(folder, "--mode", mode)
    for kills_left in (2, 1, 0):
        # In mode sync, two workers get the same weights, to the last bit.
        workers = 2 if mode == "sync" else draw.randint(1, 3)
        rounds = (EPOCHS * PER_EPOCH - job.place) // workers
        moment = (draw.randrange(workers), draw.randrange(max(rounds, 1)), draw.uniform(0, 0.05))
        if job.run(workers, draw.randint(1, 2), accident=("kill", *moment) if kills_left else ()):
            break
    assert job.used() == uninterrupted.used()
    for _, logged in job.runs:  # lost work, too
        assert logged.items() <= uninterrupted.used().items()
    if mode == "sync":
        expected = uninterrupted.tensors()
        tensors = job.tensors()
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(seed, tmp_path, uninterrupted):
    suffer(seed, tmp_path, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 20))
def test_killed_at_many_random_moments(seed, tmp_path, uninterrupted):
    suffer(seed, tmp_path, uninterrupted)


def test_goes_on_within_an_epoch_on_other_numbers_of_workers(tmp_path, uninterrupted):
    job = Job(tmp_path)
    # In the middle of the first epoch, and of the second.
    assert not job.run(3, 1, accident=("kill", 0, 8, 0))
    assert not job.run(1, 2, accident=("kill", 0, 45, 0))
    assert all(begin % PER_EPOCH for begin, _ in job.runs[1:])
    assert job.run(2, 2)
    assert job.used() == uninterrupted.used()


def test_more_epochs_go_on_where_the_last_one_ended(tmp_path, uninterrupted):
    job = Job(tmp_path, "--mode", "sync")
    assert job.run(2, 1, options=("--epochs", "1"))
    assert job.place == PER_EPOCH  # two workers cannot divide this number
    assert job.run(3, 1)
    assert job.used() == uninterrupted.used()


def test_without_a_service(tmp_path):
    (tmp_path / "whole").mkdir()
    whole = Job(tmp_path / "whole")
    assert whole.run(1, 0)
    check_epochs(whole.used())
    job = Job(tmp_path)
    assert not job.run(2, 0, accident=("kill", 1, 30, 0))
    assert job.place % PER_EPOCH
    assert job.run(3, 0)
    assert job.used() == whole.used()


@pytest.fixture
def service():
    """Start a dispatcher and two workers outside the world."""
    with (
        Command("dispatcher") as dispatcher,
        Command("worker", "--dispatcher", dispatcher.said) as first,
        Command("worker", "--dispatcher", dispatcher.said) as second,
    ):
        yield dispatcher.said, [first, second]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_outside_the_world_is_killed(mode, tmp_path, service, uninterrupted):
    target, (_, worker) = service
    job = Job(tmp_path, "--mode", mode, "--data-service", target)

    def kill():
        assert worker.stop(signal.SIGKILL) == -signal.SIGKILL

    assert job.run(2, 0, accident=("gate", 0, 30, 0), beside=kill)
    assert job.used() == uninterrupted.used()
    if mode == "sync":
        expected = uninterrupted.tensors()
        assert all(t.tobytes() == expected[n].tobytes() for n, t in job.tensors().items())


def test_goes_on_with_a_service_that_outlives_it(tmp_path, service, uninterrupted):
    job = Job(tmp_path, "--data-service", service[0])
    assert not job.run(2, 0, accident=("kill", 0, 30, 0))
    assert job.run(3, 0)
    assert job.used() == uninterrupted.used()
