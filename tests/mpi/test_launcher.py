"""``mpidist run`` on real ranks: forwarded signals and arguments, and the end of failing jobs."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from _cases.leftovers import abandoned, remaining, shared_files

END_S = 15.0

HEAD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1")))
HERE = Path(__file__).parent

def tell():
    path = HERE / f"up-{RANK}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
"""
WORLD = HEAD + "from mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.barrier()\ntell()\n"
WAIT = "time.sleep(60)\n"


class Job:
    """A running ``mpidist run`` with a script in a separate folder."""

    started: ClassVar[list] = []

    def __init__(self, folder, script, *words, arguments=(), **popen):
        self.folder = folder
        self._shared = shared_files()
        path = folder / "script.py"
        path.write_text(script)
        command = [sys.executable, "-m", "mpidist", "run", *words, str(path), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **{**pipes, **popen})
        self.out = self.err = ""
        self.started.append(self)

    def up(self, ranks):
        """Wait until the ranks have reported that they are up. Return their process ids."""
        deadline = time.monotonic() + 30
        paths = [self.folder / f"up-{rank}" for rank in range(ranks)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, "the ranks did not start"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return [int(path.read_text()) for path in paths]

    def end(self, timeout_s=30.0):
        """Wait for the end, check that nothing remains, and return the exit status."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.out, self.err = self.process.communicate(timeout=20)
            pytest.fail(f"still there after {timeout_s} s\n{self.err}")
        assert remaining(str(self.folder)) == []
        assert abandoned(self._shared) == set()
        return self.process.returncode

    @property
    def last(self):
        """The last line on standard error."""
        return self.err.splitlines()[-1].strip(" \0")  # Open MPI ends its own text with these


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test():
    yield
    while Job.started:
        process = Job.started.pop().process
        process.terminate()
        process.communicate(timeout=20)


def test_what_ranks_get(tmp_path):
    script = WORLD + (
        "facts = {n: os.environ.get(n) for n in ('MPIDIST_JOBS', 'OMP_NUM_THREADS')}\n"
        "facts |= {'arguments': sys.argv[1:], 'size': world.size, 'rank': world.rank,\n"
        "          'folder': os.path.isdir(os.environ['MPIDIST_RUN_DIR'])}\n"
        "(HERE / f'facts-{world.rank}').write_text(json.dumps(facts))\n"
        "print(f'out {world.rank}')\nprint(f'err {world.rank}', file=sys.stderr)\n"
    )
    words = ("--data", "1", "--worker", "1", "--ps", "1")
    job = Job(tmp_path, script, *words, arguments=["--ps", "9", "a b"])
    assert job.end() == 0
    for rank in range(3):
        facts = json.loads((tmp_path / f"facts-{rank}").read_text())
        assert facts == {
            "MPIDIST_JOBS": "ps=1,worker=1,data=1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
            "arguments": ["--ps", "9", "a b"],
            "size": 3,
            "rank": rank,
            "folder": True,
        }
        assert f"out {rank}" in job.out
        assert f"err {rank}" in job.err
    assert "mpidist run:" not in job.err


def test_labelled_output(tmp_path):
    script = WORLD + (
        "print(f'out {world.rank}\\nmore')\nprint(f'err {world.rank}', file=sys.stderr)\n"
        "world.barrier()\nif world.rank == 1: os._exit(3)\n" + WAIT
    )
    job = Job(tmp_path, script, "--label", "--ps", "1", "--worker", "2")
    assert job.end(10) == 3
    names = ("ps 0", "worker 0", "worker 1")
    lines = job.out.splitlines()
    for rank, name in enumerate(names):
        assert lines[lines.index(f"[{name}] out {rank}") + 1 :].count(f"[{name}] more") == 1
        assert f"[{name}] err {rank}" in job.err.splitlines()
    assert not [line for line in lines if line.startswith(("out", "more", "err"))]
    assert job.last.startswith("mpidist run: worker 0 (rank 1, pid ")


def test_output_comes_live(tmp_path):
    script = WORLD + "sys.stdout.write('now\\n')\ninput() if RANK == 0 else None\n"
    job = Job(tmp_path, script, "-n", "2", "--stdin", stdin=subprocess.PIPE)
    assert job.process.stdout.readline().strip() == "now"
    assert job.process.poll() is None
    job.process.stdin.write("go on\n")
    job.process.stdin.flush()
    assert job.end() == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_rank(tmp_path, victim):
    job = Job(tmp_path, WORLD + "world.barrier() if RANK else None\n" + WAIT, "--ps", "1",
              "--worker", "2")  # fmt: skip
    pid = job.up(3)[victim]
    os.kill(pid, signal.SIGKILL)
    assert job.end(END_S) == 128 + signal.SIGKILL
    name = ("ps 0", "worker 0", "worker 1")[victim]
    assert job.last == (
        f"mpidist run: {name} (rank {victim}, pid {pid} on {os.uname().nodename}) failed first: "
        "killed by signal 9 (SIGKILL); all 3 ranks were ended"
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_before_mpi_starts(tmp_path, victim):
    script = HEAD + f"if RANK == {victim}: os.kill(os.getpid(), 9)\n" + WORLD + WAIT
    job = Job(tmp_path, script, "-n", "2")
    assert job.end(10) == 128 + signal.SIGKILL
    assert job.last.startswith(f"mpidist run: rank {victim} (pid ")


def kill_at_random(folder, seed):
    """Kill a rank at a random moment of its start or run."""
    rng = random.Random(seed)
    victim, delay = rng.randrange(3), rng.uniform(0.0, 0.6)
    kill = f"import threading\nif RANK == {victim}:\n    threading.Timer({delay}, os.kill, (os.getpid(), 9)).start()\n"  # noqa: E501
    job = Job(folder, HEAD + kill + WORLD + WAIT, "--worker", "3")
    assert job.end(20) == 128 + signal.SIGKILL
    assert job.last.startswith(f"mpidist run: worker {victim} (rank {victim}, ")


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment(tmp_path, seed):
    kill_at_random(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 43))
def test_killed_at_many_random_moments(tmp_path, seed):
    kill_at_random(tmp_path, seed)


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("os._exit(3)", 3, "exited with status 3"),
        ("os.kill(os.getpid(), 11)", 139, "killed by signal 11 (SIGSEGV)"),
        ("os.kill(os.getpid(), 15)", 143, "killed by signal 15 (SIGTERM)"),
    ],
)
def test_rank_that_ends_badly(tmp_path, end, status, reason):
    script = WORLD + f"if RANK == 1: {end}\n" + WAIT
    job = Job(tmp_path, script, "--worker", "2")
    assert job.end(10) == status
    assert job.last.startswith("mpidist run: worker 1 (rank 1, pid ")
    assert f"failed first: {reason}; all 2 ranks were ended" in job.last


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "import mpidist\nmpidist.init_process_group('nccl')",
            "ValueError: backend 'nccl' is not one of this package",
        ),
        ("import mpidist\nmpidist.barrier()", "ValueError: there is no default group"),
        ("import mpidist\nmpidist.Server\nimport no_such_module", "ModuleNotFoundError: No module"),
    ],
)
def test_what_fails_before_mpi_is_started_is_the_reason(tmp_path, script, reason):
    job = Job(tmp_path, script, "-n", "2")
    assert job.end(10) == 1
    assert re.search(rf"rank [01] \(pid \d+ on \S+\) failed first: {reason}", job.last), job.last


def test_one_traceback_of_many_ranks_is_printed_once(tmp_path):
    script = """
import mpidist
mpidist.init_process_group()
mpidist.barrier()
raise ValueError("no such file")
"""
    job = Job(tmp_path, script, "-n", "3")
    assert job.end(10) == 1
    assert job.err.count("Traceback (most recent call last)") == 1, job.err
    assert "failed first: ValueError: no such file; " in job.last


def test_a_cluster_in_which_all_tasks_join(tmp_path):
    script = """
import logging, os
os.environ["MPIDIST_STALL_S"] = "0.5"
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver

class Stop(logging.Handler):
    def emit(self, record):
        if "are in join()" in record.getMessage():
            print(record.getMessage())
            server.stop()

logging.getLogger("mpidist").addHandler(Stop())
resolver = MPIClusterResolver({"ps": 1, "worker": -1})
server = mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
server.start()
server.join()
"""
    job = Job(tmp_path, script, "--ps", "1", "--worker", "1")
    assert job.end(20) == 0, job.err
    assert "call join() on ps and data tasks only" in job.out


CHILD = """
import mpidist, multiprocessing, os
mpidist.Server

def fail():
    raise RuntimeError("of a child alone")

if __name__ == "__main__":
    for kind in ("spawn", "fork"):
        child = multiprocessing.get_context(kind).Process(target=fail)
        child.start()
        child.join()
        assert child.exitcode == 1
    pid = os.fork()
    if not pid:
        raise RuntimeError("of a child alone")
    assert os.waitpid(pid, 0)[1] == 256
"""


def test_what_fails_in_a_child_is_no_failure_of_the_rank(tmp_path):
    job = Job(tmp_path, CHILD, "-n", "2")
    assert job.end(30) == 0
    assert "of a child alone" in job.err


def test_rank_that_leaves_without_ending_mpi(tmp_path):
    job = Job(tmp_path, WORLD + "if RANK == 1: os._exit(0)\n" + WAIT, "-n", "2", "--timeout", "15")
    assert job.end(20) != 0
    assert "after rank 1 had left with status 0" in job.last


def test_abort(tmp_path):
    job = Job(tmp_path, WORLD + "if RANK == 1: world.Abort(7)\n" + WAIT, "-n", "2")
    assert job.end(10) == 7
    assert job.last.startswith("mpidist run: ")


def test_script_that_does_not_start(tmp_path):
    job = Job(tmp_path, "import nowhere_at_all\n", "-n", "2")
    assert job.end(10) == 1
    assert "No module named 'nowhere_at_all'" in job.err
    assert "failed first: ModuleNotFoundError: No module named 'nowhere_at_all'" in job.last


def test_the_reason_that_a_rank_wrote(tmp_path):
    # The ranks keep waiting, and MPI's launcher knows of no failure, so the command ends the job.
    script = WORLD + (
        "if RANK == 1:\n"
        "    facts = dict(rank=1, pid=os.getpid(), host='h', job='worker', task=1, exit_code=4,\n"
        "                 reason='ValueError: bad', traceback='', time=time.time())\n"
        "    path = Path(os.environ['MPIDIST_RUN_DIR']) / 'failure-1.json'\n"
        "    path.with_suffix('.new').write_text(json.dumps(facts))\n"
        "    path.with_suffix('.new').rename(path)\n"
    )
    job = Job(tmp_path, script + WAIT, "--worker", "2")
    job.up(2)
    assert job.end(END_S) == 4
    assert "worker 1 (rank 1, pid" in job.last
    assert "failed first: ValueError: bad; all 2 ranks were ended" in job.last


def test_an_interrupt_after_a_failure(tmp_path):
    script = WORLD + (
        "if RANK == 1:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a rank that is ending\n"
        "    facts = dict(rank=1, pid=os.getpid(), host='h', exit_code=4, time=time.time(),\n"
        "                 reason='ValueError: bad')\n"
        "    path = Path(os.environ['MPIDIST_RUN_DIR']) / 'failure-1.json'\n"
        "    path.with_suffix('.new').write_text(json.dumps(facts))\n"
        "    path.with_suffix('.new').rename(path)\n"
        "    tell()\n"
    )
    # Rank 1 is up when its record exists.
    script = script.replace("barrier()\ntell()\n", "barrier()\nif RANK == 0: tell()\n")
    job = Job(tmp_path, script + WAIT, "--worker", "2")
    job.up(2)
    job.process.send_signal(signal.SIGINT)
    assert job.end(END_S) == 4, job.err
    assert "failed first: ValueError: bad; all 2 ranks were ended" in job.last


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize(("number", "name"), [(2, "Ctrl-C"), (15, "signal 15 (SIGTERM)")])
def test_interrupted(tmp_path, number, name, stubborn):
    ignore = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n" if stubborn else ""
    job = Job(tmp_path, HEAD + ignore + WORLD + WAIT, "--worker", "2")
    job.up(2)
    job.process.send_signal(number)
    assert job.end(END_S) == 128 + number
    assert job.last == f"mpidist run: interrupted by {name}; all 2 ranks were ended"


def test_interrupted_twice(tmp_path):
    ignore = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    job = Job(tmp_path, HEAD + ignore + WORLD + WAIT, "--worker", "2")
    job.up(2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    job.process.send_signal(signal.SIGINT)
    assert job.end(END_S) == 130


def test_a_signal_that_the_ranks_know(tmp_path):
    """Forward a signal that the ranks handle. Batch systems send one before the time limit."""
    catch = """
times = []
signal.signal(signal.SIGUSR1, lambda *_: times.append(1))
"""
    wait = """
for count in (1, 2):
    while len(times) < count:
        time.sleep(0.01)
    (HERE / f"told-{count}-{RANK}").touch()
while not (HERE / "go").exists():
    time.sleep(0.01)
assert times == [1, 1]
"""
    job = Job(tmp_path, HEAD + catch + WORLD.removeprefix(HEAD) + wait, "-n", "2")
    job.up(2)
    deadline = time.monotonic() + 30
    for count in (1, 2):
        job.process.send_signal(signal.SIGUSR1)
        while not all((tmp_path / f"told-{count}-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (tmp_path / "go").touch()
    assert job.end() == 0, job.err


def test_what_was_to_be_ignored_is(tmp_path):
    wait = 'while not (HERE / "go").exists():\n    time.sleep(0.01)\n'
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    job = Job(tmp_path, WORLD + wait, "-n", "2", **ignore)
    job.up(2)
    job.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert job.end() == 0, job.err


def test_a_script_that_removes_the_jobs_folder(tmp_path):
    remove = """
world.barrier()
import shutil
if RANK == 0:
    shutil.rmtree(os.environ["MPIDIST_RUN_DIR"])
"""
    job = Job(tmp_path, WORLD + remove, "-n", "2", "--run-dir", str(tmp_path / "run"))
    assert job.end() == 0, job.err


def test_orphans_do_not_stay_as_zombies(tmp_path):
    script = """
for _ in range(20):
    os.system("true &")
def orphans(pid):  # running ones, too: they become zombies
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    text, _, rest = file.read().rpartition(")")
            except OSError:
                continue
            is_orphan = text.rpartition("(")[2] in ("true", "sh")
            found += is_orphan and int(rest.split()[1]) == pid
    return found
pid = int((HERE / "launcher").read_text())
deadline = time.monotonic() + 20
while (left := orphans(pid)) and time.monotonic() < deadline:
    time.sleep(0.05)
assert not left
"""
    job = Job(
        tmp_path,
        HEAD + 'while not (HERE / "launcher").exists():\n    time.sleep(0.01)\n' + script,
        *("-n", "1"),
    )
    (tmp_path / "launcher.new").write_text(str(job.process.pid))
    (tmp_path / "launcher.new").rename(tmp_path / "launcher")
    assert job.end() == 0, job.err


def test_what_a_rank_waits_for_is_told_when_it_is_interrupted(tmp_path):
    script = """
import mpidist, numpy as np
group = mpidist.init_process_group()
if RANK == 0:
    group.recv(np.zeros(1), 1)
written = Path(os.environ["MPIDIST_RUN_DIR"]) / "state-0.json"
while not written.exists() or "recv from" not in written.read_text():
    time.sleep(0.01)
tell()
"""
    job = Job(tmp_path, HEAD + script + WAIT, "--worker", "2")
    deadline = time.monotonic() + 60
    while not (tmp_path / "up-1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.process.send_signal(signal.SIGINT)
    assert job.end(END_S) == 130
    (line,) = [line for line in job.err.splitlines() if "was waiting for" in line]
    assert line.startswith("mpidist run: worker 0 (rank 0) was waiting for ")
    assert "recv from rank 1 of group" in line


def test_timeout(tmp_path):
    job = Job(tmp_path, WORLD + WAIT, "-n", "2", "--timeout", "2.5")
    assert job.end(2.5 + END_S) == 124
    assert job.last == (
        "mpidist run: the job ran longer than --timeout 2.5 s; all 2 ranks were ended"
    )


@pytest.mark.alone  # the next job would remove the leftovers
def test_nothing_outlives_a_killed_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed command leaves its folder
    before = shared_files()
    job = Job(tmp_path, WORLD + WAIT, "-n", "2")
    job.up(2)
    job.process.kill()
    job.process.communicate(timeout=10)
    assert remaining(str(tmp_path), END_S) == []
    assert list(tmp_path.glob("mpidist-run-*"))
    # The next command removes the folder. MPICH leaves a file in /dev/shm unless its runtime
    # removes the name, and this script has no runtime.
    assert Job(tmp_path, "pass", "-n", "1").end() == 0
    assert not list(tmp_path.glob("mpidist-run-*"))
    for name in abandoned(before):
        assert name.startswith("mpich_shm_")
        (Path("/dev/shm") / name).unlink()


def test_what_a_job_leaves_behind_is_killed(tmp_path):
    daemon = "subprocess.Popen(['sleep', '1000.0625'], start_new_session=True)\n"
    job = Job(tmp_path, WORLD + "if RANK == 1: " + daemon, "-n", "2")
    assert job.end(10) == 0
    assert job.last == "mpidist run: killed 1 process that the job left behind"
    assert remaining("1000.0625") == []


def test_folder_that_is_given_is_kept(tmp_path):
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    (folder / "failure-0.json").write_text("from an earlier job")
    script = WORLD + "(Path(os.environ['MPIDIST_RUN_DIR']) / f'mine-{RANK}').touch()\n"
    job = Job(tmp_path, script, "-n", "2", "--run-dir", os.path.relpath(folder))
    assert job.end() == 0
    kept = {path.name for path in folder.iterdir()}
    assert {"mine-0", "mine-1"} <= kept
    assert "failure-0.json" not in kept


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path, closed):
    script = tmp_path / "script.py"
    script.write_text(WORLD)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(script)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "up-1").exists()


def test_a_run_dir_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    job = Job(tmp_path, "pass", "-n", "1", "--run-dir", str(tmp_path / "file"))
    assert job.end() == 2
    assert job.last.startswith("mpidist run: --run-dir must be a folder that you can write (")
