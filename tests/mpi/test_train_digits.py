"""The main job: it learns, it continues, and it ends cleanly after every accident."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from _cases.leftovers import abandoned, shared_files
from safetensors.numpy import load_file

from strategy import ParameterServerStrategy

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "train_digits.py"
LAYOUT = ("--ps", "1", "--worker", "2", "--data", "1")
TASKS = ("ps 0", "worker 0", "worker 1", "data 0")  # by rank
END_S = 15.0

# Runs the main job with an accident on one rank, some seconds after the first checkpoint: an
# exception in a thread, or sys.exit in the main thread.
ACCIDENT = f"""
import os, runpy, signal, sys, threading, time
what, rank, delay, flag = sys.argv[1:5]
del sys.argv[1:5]

def leave(*_):
    sys.exit(3)

def wait():
    # One that is being written has a longer name.
    while not (os.path.isdir(flag) and any(n[5:].isdigit() for n in os.listdir(flag))):
        time.sleep(0.01)
    time.sleep(float(delay))
    if what == "raise":
        raise RuntimeError("an accident")
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

if rank in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    signal.signal(signal.SIGUSR1, leave)
    threading.Thread(target=wait, daemon=True).start()
sys.argv[0] = {str(SCRIPT)!r}
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(*words, launcher=(), timeout_s=120):
    """Run the script to its end and return its output."""
    command = [*launcher, *words, "--quiet"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_command(*layout):
    return (sys.executable, "-m", "mpidist", "run", *layout)


def accuracy(output):
    (line,) = [line for line in output.splitlines() if line.startswith("accuracy ")]
    return float(line.split()[1])


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        (("--ps", "1", "--worker", "2", "--data", "1"), ()),
        (("--ps", "2", "--worker", "3", "--data", "1"), ()),
        (("--ps", "1", "--worker", "2"), ("--data", "0")),
    ],
)
def test_learns_and_continues(layout, arguments, tmp_path):
    words = (str(SCRIPT), "--output-dir", str(tmp_path), *arguments)
    output = train(*words, "--epochs", "15", launcher=run_command(*layout))
    assert accuracy(output) > 0.95
    results = json.loads((tmp_path / "results.json").read_text())
    steps = [point["step"] for point in results["curve"]]
    assert steps == sorted(steps)
    assert results["step"] == 15 * 45  # 1,437 images in batches of 32, on any worker
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    train(*words, "--epochs", "17", launcher=run_command(*layout))
    resumed = json.loads((tmp_path / "results.json").read_text())
    assert resumed["curve"][0]["epoch"] == 16
    assert resumed["step"] == 17 * 45


def test_plain_process(tmp_path):
    output = train(sys.executable, str(SCRIPT), "--epochs", "15", "--output-dir", str(tmp_path))
    assert accuracy(output) > 0.95


def test_under_the_vendors_own_launcher(tmp_path):
    mpiexec = str(Path(sys.prefix) / "bin" / "mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True)
    open_mpi = "prterun" in version.stdout or "Open MPI" in version.stdout
    flags = ["--allow-run-as-root", "--oversubscribe"] if open_mpi else []
    words = (
        str(SCRIPT),
        "--ps",
        "1",
        "--data",
        "1",
        "--epochs",
        "3",
        "--output-dir",
        str(tmp_path),
    )
    output = train(*words, launcher=(mpiexec, *flags, "-n", "4", sys.executable))
    assert accuracy(output) > 0.8


def test_begins_anew(tmp_path):
    words = (sys.executable, str(SCRIPT), "--epochs", "2", "--output-dir", str(tmp_path))
    for anew, epochs in ([], [1, 2]), ([], []), (["--anew"], [1, 2]):
        train(*words, *anew)
        curve = json.loads((tmp_path / "results.json").read_text())["curve"]
        assert [point["epoch"] for point in curve] == epochs


class Accident:
    """A run of the main job that fails."""

    def __init__(self, folder, what, rank, delay):
        self.folder, self.what, self.rank = folder, what, rank
        self.checkpoints = folder / "out" / "checkpoints"
        self.shared = shared_files()
        script = folder / "accident.py"
        script.write_text(ACCIDENT)
        own = ("exit", "raise")
        where = str(rank) if what in own else "none"
        words = (str(script), what, where, str(delay), str(self.checkpoints))
        options = ("--epochs", "1000", "--checkpoint-every", "1", "--quiet")
        self.process = subprocess.Popen(
            [*run_command("--run-dir", str(folder / "run"), *LAYOUT), *words, *options,
             "--output-dir", str(folder / "out")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if what not in own:
            self.wait_for_checkpoint()
            # This sleep sets the random moment of the accident. Nothing waits for it.
            time.sleep(delay)
            if what == "kill":
                os.kill(self.pids()[rank], signal.SIGKILL)
            else:
                self.process.send_signal(signal.SIGINT)

    def wait_for_checkpoint(self):
        deadline = time.monotonic() + 60
        while not ParameterServerStrategy.latest_checkpoint(str(self.checkpoints)):
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)

    def pids(self):
        records = sorted((self.folder / "run").glob("rank-*.json"))
        return {r["rank"]: r["pid"] for r in (json.loads(p.read_text()) for p in records)}

    def end(self):
        """Wait for the end. Return the seconds that it took, and the error output."""
        begin = time.monotonic()
        pids = {}
        if self.what in ("exit", "raise"):
            self.wait_for_checkpoint()
            _, err = self.process.communicate(timeout=60)
            failure = json.loads((self.folder / "run" / f"failure-{self.rank}.json").read_text())
            took = time.time() - failure["time"]
        else:
            pids = self.pids()
            _, err = self.process.communicate(timeout=60)
            took = time.monotonic() - begin
        assert not [pid for pid in pids.values() if alive(pid)]
        assert abandoned(self.shared) == set()
        return took, err


def alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "python" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def check_restores(checkpoints):
    """Check that the last checkpoint is complete: every weight is finite and has its slots."""
    latest = ParameterServerStrategy.latest_checkpoint(str(checkpoints))
    files = json.loads((Path(latest) / "index.json").read_text())["files"]
    tensors = {}
    for name in files:
        tensors.update(load_file(Path(latest) / name))
    for name in ("hidden/weights", "hidden/biases", "digits/weights", "digits/biases"):
        for part in ("data", "slot:Adam/m", "slot:Adam/v"):
            assert np.isfinite(tensors[f"{name}:{part}"]).all()


ACCIDENTS = [
    *(("kill", rank) for rank in (0, 1, 2, 3)),
    *(("raise", rank) for rank in (0, 1, 3)),
    ("exit", 2),
    ("interrupt", -1),
]


def suffer(what, rank, delay, folder):
    accident = Accident(folder, what, rank, delay)
    try:
        took, err = accident.end()
    finally:
        accident.process.send_signal(signal.SIGTERM)  # no effect on an ended process
    last = err.strip().splitlines()[-1].lstrip("\0")
    assert took < END_S, (took, err)
    assert last.startswith("mpidist run: "), err
    status = accident.process.returncode
    if what == "interrupt":
        assert status == 130, err
    else:
        assert TASKS[rank] in last, err
        expected = {
            "kill": (137, "SIGKILL"),
            "raise": (1, "an accident"),
            "exit": (3, "SystemExit(3)"),
        }
        assert (status, expected[what][1] in last) == (expected[what][0], True), err
    check_restores(accident.checkpoints)


@pytest.mark.parametrize(("what", "rank"), ACCIDENTS)
def test_accident(what, rank, tmp_path):
    suffer(what, rank, random.Random(what + str(rank)).uniform(0, 0.3), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("what", "rank"), ACCIDENTS)
@pytest.mark.parametrize("seed", range(20))
def test_many_accidents(what, rank, seed, tmp_path):
    suffer(what, rank, random.Random(seed).uniform(0, 1.5), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", [LAYOUT, ("--ps", "2", "--worker", "3", "--data", "1")])
@pytest.mark.parametrize("seed", range(1, 11))
def test_accuracy(layout, seed, tmp_path):
    words = (str(SCRIPT), "--seed", str(seed), "--output-dir", str(tmp_path))
    assert accuracy(train(*words, launcher=run_command(*layout))) >= 0.97
