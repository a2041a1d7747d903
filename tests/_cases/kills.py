"""A training job that is killed at random, and what must hold afterwards.

As a program, it kills a job many times, and prints the times from each death to the next step::

    python -m _cases.kills {digits,words,words-async} NUMBER_OF_KILLS [SEED]   # in the folder tests
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

from _cases.leftovers import remaining

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
KINDS = ("rank", "several", "child", "terminate", "full disk")
LIMIT_S = 240.0
GRACE_S = 5.0
# The script of the job, with the time of every step, and a pause, so that kills come in the middle.
LOGGED = """
import os, runpy, sys, time
from mpidist.checkpoints.manager import CheckpointManager
log = open(os.path.join(os.environ["STEPS"], f"steps-{os.getpid()}"), "a", buffering=1)
step = CheckpointManager.step

def logged(manager):
    log.write(f"{time.time()}\\n")
    time.sleep(float(os.environ["PAUSE_S"]))
    step(manager)

CheckpointManager.step = logged
sys.path.insert(0, os.path.dirname(sys.argv[1]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL_WORDS = ("--files", "12", "--words", "500", "--dimensions", "16", "--epochs", "1")
JOBS = {
    "digits": (
        ("--ps", "1", "--worker", "2", "--data", "1"),
        ("train_digits.py", "--mode", "sync", "--epochs", "4", "--checkpoint-every", "0.15"),
    ),
    "words": (
        ("--ps", "2", "--worker", "2"),
        ("train_words.py", "--mode", "sync", "--checkpoint-every", "5", *SMALL_WORDS),
    ),
    "words-async": (
        ("--ps", "1", "--worker", "1"),
        ("train_words.py", "--checkpoint-every", "5", *SMALL_WORDS),
    ),
}


class Job:
    """A training job that is started again until it ends.

    Args:
        folder: Folder of all files.
        name: One of ``JOBS``.
        pause_s: Pause in each step.

    Attributes:
        delays: Time from each kill to the first step of another process, in seconds.
        starts: Number of times that the command was started.
        attempts: Number of attempts of all these starts.
    """

    def __init__(self, folder, name, pause_s=0.02):
        self.folder = Path(folder)
        self.layout, (script, *arguments) = JOBS[name]
        self.words = [str(SCRIPTS / script), *arguments, "--quiet"]
        self.words += ["--output-dir", str(self.folder / "out")]
        launcher = [sys.executable, "-m", "mpidist", "run", "--restarts", "3", *self.layout]
        self.command = [*launcher, str(self.folder / "logged.py"), *self.words]
        (self.folder / "out").mkdir(parents=True)
        (self.folder / "logged.py").write_text(LOGGED)
        self.environment = {
            **os.environ, "STEPS": str(self.folder), "PAUSE_S": str(pause_s), "OMP_NUM_THREADS": "1"
        }  # fmt: skip
        self.kills, self.delays, self.starts, self.attempts = [], [], 0, 0

    def run(self, kinds=(), draw=None):
        """Run the job to its end, with a kill of each kind after some steps."""
        kinds = list(kinds)
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.starts += 1
            with open(self.folder / "output", "ab") as output:
                process = subprocess.Popen(
                    self.command, stdout=output, stderr=output, env=self.environment
                )
                try:
                    status = self._suffer(process, kinds, draw, deadline)
                finally:
                    process.kill()
                    process.wait()
            text = (self.folder / "output").read_text(errors="replace")
            assert not remaining(str(self.folder / "logged.py"), 10.0)
            if status == 0:
                break
            # 143: SIGTERM came before the first step of an attempt.
            assert status in (75, 143), (status, text[-3000:])
        logs = [log.read_text().split() for log in self.folder.glob("steps-*")]
        firsts = [float(log[0]) for log in logs if log]
        for killed in self.kills:
            self.delays.append(min((t for t in firsts if t > killed), default=killed) - killed)
        self.attempts = self.starts + text.count(" begins (")

    def _suffer(self, process, kinds, draw, deadline):
        """Kill the job now and then. Return its exit status."""
        while True:
            steps = len(self.times()) + (draw.randrange(1, 30) if kinds else 0)
            while len(self.times()) < steps or not kinds:
                if process.poll() is not None:
                    return process.returncode
                assert time.monotonic() < deadline, (self.folder / "output").read_text()[-3000:]
                time.sleep(0.01)
            kind = kinds.pop()
            time.sleep(draw.uniform(0, 0.1))
            if kind == "full disk":
                self._fill_disk()
                continue
            self.kills.append(time.time())
            if kind == "terminate":
                process.send_signal(signal.SIGTERM)
                return process.wait(GRACE_S)
            self._kill(process, kind, draw)

    def _fill_disk(self):
        """Let saves fail for a while. The training goes on."""
        filler = self.folder / "out" / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(1)
        filler.unlink()

    def _kill(self, process, kind, draw):
        children = _children()
        launchers = children.get(process.pid, [])
        below, waiting = [], list(launchers)
        while waiting:
            pid = waiting.pop()
            below.append(pid)
            waiting += children.get(pid, [])
        ranks = [pid for pid in below if _is_rank(pid)]
        if kind == "child":
            victims = launchers
        elif kind == "several":
            victims = draw.sample(ranks, min(2, len(ranks)))
        else:
            victims = draw.sample(ranks, min(1, len(ranks)))
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def times(self):
        """Return the times of all steps of all workers."""
        lines = [line for log in self.folder.glob("steps-*") for line in log.read_text().split()]
        return sorted(map(float, lines))

    def tensors(self):
        """Return the bytes of all tensors of the last checkpoint, and the states in it."""
        checkpoints = list((self.folder / "out" / "checkpoints").glob("step-*[0-9]"))
        last = max(
            checkpoints, key=lambda path: json.loads((path / "index.json").read_text())["saved_ns"]
        )
        found = {}
        for path in sorted(last.iterdir()):
            if path.suffix == ".safetensors":
                for name, tensor in load_file(path).items():
                    found[path.name, name] = tensor.tobytes()
            elif path.name == "data":  # the rest has the random name of the job's data
                found[path.name] = path.read_bytes().partition(b" ")[0]
            elif path.name != "index.json":
                found[path.name] = path.read_bytes()
        return found


def _saved_ns(path):
    return json.loads((path / "index.json").read_text())["saved_ns"]


@contextlib.contextmanager
def small_disk(folder):
    """Mount a file system of 8 MiB on a folder. This needs root."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


def _children():
    """Return the processes of this host by the id of their parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                rest = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found.setdefault(int(rest[1]), []).append(int(name))
    return found


def _is_rank(pid):
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.endswith(b"mpidist/runner.py") for word in words[:2])


def main(name, kills, seed=0):
    """Kill a job many times, and compare it with one that was not killed."""
    draw = random.Random(int(seed))
    with tempfile.TemporaryDirectory() as folder:
        whole = Job(Path(folder, "whole"), name, 0)
        whole.run()
        expected, left, runs, delays = whole.tensors(), int(kills), 0, []
        while left:
            runs += 1
            job = Job(Path(folder, f"run-{runs}"), name)
            kinds = [draw.choice(KINDS) for _ in range(min(left, 3))]
            with small_disk(job.folder / "out"):
                job.run(kinds, draw)
                same = job.tensors() == expected
            left -= len(job.kills)
            delays += job.delays
            print(runs, kinds, len(job.kills), same, [round(d, 2) for d in job.delays], flush=True)
            assert same
    print(f"{len(delays)} kills, {statistics.median(delays):.2f} s, at most {max(delays):.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
