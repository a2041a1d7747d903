"""The wrapper of a rank: real processes, and signals to the wrapper, to the rank, or to both."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mpidist.launcher import rank_wrapper
from mpidist.launcher.report import first_failure

WRAPPER = [sys.executable, "-I", "-S", rank_wrapper.__file__, "NUMBER", sys.executable]
RANK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print(os.getpid(), flush=True)
signal.sigwait([signal.SIGUSR1])
sys.exit(3)
"""


@pytest.fixture
def rank(tmp_path):
    """Yield the process of a wrapper. The wrapper's rank exits with status 3 on SIGUSR1."""
    words = [*WRAPPER, "-c", RANK]
    process = subprocess.Popen(
        words,
        env={**os.environ, "NUMBER": "5", "MPIDIST_RUN_DIR": str(tmp_path)},
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
    os.kill(pid, signal.SIGUSR1)
    left = record(rank, tmp_path)
    assert (left["rank"], left["pid"], left["exit_code"], left["signal"]) == (5, pid, 3, None)
    assert not left["terminated"]
    assert rank.returncode == 3


def test_killed(rank, tmp_path):
    os.kill(int(rank.stdout.readline()), signal.SIGKILL)
    left = record(rank, tmp_path)
    assert (left["exit_code"], left["signal"], left["terminated"]) == (None, signal.SIGKILL, False)
    assert rank.returncode == -signal.SIGKILL


def begin_attempt(folder, number):
    part = folder / "job.json.new"
    part.write_text(json.dumps({"pid": 7, "host": "n1", "attempt": number}))
    part.replace(folder / "job.json")


def test_a_rank_ends_without_a_record_when_a_later_attempt_begins(tmp_path):
    begin_attempt(tmp_path, 0)
    child = "subprocess.Popen(['sleep', '600'])"
    program = f"import subprocess, time; print({child}.pid, flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [*WRAPPER, "-c", program],
        env={**os.environ, "NUMBER": "5", "MPIDIST_RUN_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    try:
        pid = int(process.stdout.readline())
        begin_attempt(tmp_path, 1)
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    wait_for_end(pid)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json"]


def wait_for_end(pid):
    deadline = time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline


def test_signals_that_the_rank_may_know(tmp_path):
    """Launchers send these signals to the process group. The wrapper itself ignores them."""
    program = """
import signal, sys
signals = (signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
while signal.sigwait(signals) == signal.SIGUSR1:
    print("one", flush=True)
sys.exit(4)
"""
    words = [*WRAPPER, "-c", program]
    env = {**os.environ, "NUMBER": "5", "MPIDIST_RUN_DIR": str(tmp_path)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, process_group=0)
    assert process.stdout.readline() == b"ready\n"
    for _ in range(3):
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == b"one\n"
    process.send_signal(signal.SIGUSR2)
    os.killpg(process.pid, signal.SIGUSR2)
    left = record(process, tmp_path)
    assert (left["exit_code"], left["terminated"], process.returncode) == (4, False, 4)


def test_a_record_that_cannot_be_written(tmp_path):
    program = "import os, shutil; shutil.rmtree(os.environ['MPIDIST_RUN_DIR'])"
    words = [*WRAPPER, "-c", program]
    env = {**os.environ, "NUMBER": "5", "MPIDIST_RUN_DIR": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr.startswith("mpidist run: cannot record how rank 5 ended (")


def test_told_to_end(rank, tmp_path):
    rank.stdout.readline()
    rank.send_signal(signal.SIGTERM)
    left = record(rank, tmp_path)
    assert (left["exit_code"], left["signal"], left["terminated"]) == (None, signal.SIGTERM, True)


@pytest.mark.parametrize(("first", "terminated"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_the_wrapper_is_told_to_end_after_its_rank(rank, tmp_path, first, terminated):
    pid = int(rank.stdout.readline())
    rank.send_signal(signal.SIGSTOP)  # so the wrapper has not seen the end of its rank
    os.kill(pid, first)
    wait_for_zombie(pid)
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGCONT)
    left = record(rank, tmp_path)
    assert (left["signal"], left["terminated"]) == (first, terminated)


GATE = "import sys\ngate = open(sys.argv[1])\n"


def run_labelled(folder, program, labels="ps:1,worker:1", rank=1, **popen):
    words = [*WRAPPER, "-uc"]
    gate = folder / "gate"
    os.mkfifo(gate)
    labels = {"MPIDIST_RUN_LABELS": labels, "NUMBER": str(rank)}
    return subprocess.Popen(
        [*words, program, str(gate)],
        env={**os.environ, **labels, "MPIDIST_RUN_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **popen,
    )


def test_labelled_lines(tmp_path):
    program = (
        "import os, sys\n"
        "print('one\\n\\ntwo')\nos.write(2, b'bad \\xff')\nprint('x' * 300_000)\n"
        "print(os.environ.get('MPIDIST_RUN_LABELS'))\nsys.exit(4)"
    )
    process = run_labelled(tmp_path, program)
    out, err = process.communicate(timeout=30)
    long = b"x" * 300_000
    lines = [b"one", b"", b"two", long, b"None"]
    assert out == b"".join(b"[worker 0] " + line + b"\n" for line in lines)
    assert err == b"[worker 0] bad \xff\n"
    assert process.returncode == 4


@pytest.mark.parametrize(
    ("labels", "rank", "label"),
    [
        ("ps:2,worker:3", 0, "ps 0"),
        ("ps:2,worker:3", 1, "ps 1"),
        ("ps:2,worker:3", 2, "worker 0"),
        ("ps:2,worker:3", 4, "worker 2"),
        (":4", 3, "rank 3"),
        ("a-b.c:20000", 19999, "a-b.c 19999"),
    ],
)
def test_labels(tmp_path, labels, rank, label):
    process = run_labelled(tmp_path, "print('x')", labels, rank)
    assert process.communicate(timeout=30)[0] == f"[{label}] x\n".encode()


def test_a_question_is_handed_on_before_its_line_ends(tmp_path):
    program = GATE + "print('well? ', end='')\nprint('so ' + gate.readline(), end='')"
    process = run_labelled(tmp_path, program)
    with open(tmp_path / "gate", "w") as gate:
        assert process.stdout.readline() == b"[worker 0] well? \n"
        gate.write("yes\n")
    out, _ = process.communicate(timeout=30)
    assert out == b"[worker 0] so yes\n"


def test_the_rank_says_itself_which_task_it_is(tmp_path):
    program = (
        f"{GATE}import json, os\nprint('early')\ngate.readline()\n"
        "path = os.environ['MPIDIST_RUN_DIR'] + '/rank-1.json'\n"
        "for job in (None, 'data'):\n"
        "    with open(path, 'w') as file:\n"
        "        json.dump({'job': job, 'task': job and 7}, file)\n"
        "    print('line')\n    gate.readline()\n"
    )
    process = run_labelled(tmp_path, program)
    with open(tmp_path / "gate", "w", buffering=1) as gate:
        for line in (b"[worker 0] early", b"[worker 0] line", b"[data 7] line"):
            assert process.stdout.readline() == line + b"\n"
            gate.write("\n")
    assert process.wait(30) == 0
    process.communicate()


def test_output_that_another_process_holds_open_ends_with_the_rank(tmp_path):
    program = "import subprocess\nprint(subprocess.Popen(['sleep', '100']).pid)"
    process = run_labelled(tmp_path, program)
    other = int(process.stdout.readline().split()[-1])
    try:
        assert process.wait(30) == 0
    finally:
        os.kill(other, signal.SIGKILL)
        process.communicate()


def test_labelled_output_with_a_slow_reader(tmp_path):
    process = run_labelled(tmp_path, "for n in range(12_000): print(n)")
    time.sleep(2.5)
    out, _ = process.communicate(timeout=30)
    assert out == b"".join(b"[worker 0] %d\n" % n for n in range(12_000))
    assert process.returncode == 0


def test_labelled_output_without_a_reader(tmp_path):
    process = run_labelled(tmp_path, f"{GATE}gate.readline()\nwhile True: print('on and on')")
    process.stdout.close()
    (tmp_path / "gate").write_text("\n")
    assert process.wait(30) == 1  # BrokenPipeError, as without labels
    assert b"BrokenPipeError" in process.stderr.read()
    process.stderr.close()


def test_standard_input_of_another_host(tmp_path):
    """The recorded failure says that rank 0 must run on the host of ``mpidist run``."""
    words = [*WRAPPER, "-c", "pass"]
    env = {"NUMBER": "0", "MPIDIST_RUN_DIR": str(tmp_path), "MPIDIST_RUN_STDIN": "not-there"}
    done = subprocess.run(words, env={**os.environ, **env}, timeout=60, check=False)
    assert done.returncode == 1
    failure = first_failure(tmp_path)
    assert (failure["rank"], failure["exit_code"]) == (0, 1)
    assert failure["reason"].startswith("--stdin needs rank 0 on the host of mpidist run; put that")
