"""The hooks that mpidist sets in a process, and how to turn them off."""

import subprocess
import sys

import pytest
from _cases.jobs import run_job, run_ranks

HEAD = """
import builtins, os, signal, sys, threading, time
import numpy as np
def state():
    return {
        "excepthook": sys.excepthook,
        "thread hook": threading.excepthook,
        "stdout": sys.stdout.line_buffering,
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
    }
def builtin_exits():
    return sys.exit, builtins.exit, builtins.quit
before, exits_before = state(), builtin_exits()
import mpidist as dist
def say(*words):  # in one piece, whatever the other ranks write
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def say_what_differs():
    now = state()
    say("differ:", *(name for name in now if now[name] != before[name]))
    assert builtin_exits() == exits_before
"""
GROUP = (
    HEAD
    + """
group = dist.init_process_group()
rank = group.rank()
group.barrier()
"""
)
SERVER = (
    HEAD
    + """
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver({"worker": -1})
with dist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id):
    say_what_differs()
"""
)
OFF = {"MPIDIST_HOOKS": "0"}


def reason_of(ended):
    """Return the only line with which a rank ended the job."""
    lines = [line for line in ended.err.splitlines() if "ends the job: " in line]
    assert len(lines) == 1, ended.err
    return lines[0]


def test_hooks_are_set_by_default(tmp_path):
    ended = run_ranks(tmp_path, 2, GROUP + "say_what_differs()\n")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "differ: excepthook thread hook stdout\n" * 2


def test_a_process_without_a_launcher_is_left_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GROUP + "say_what_differs()\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "differ:\n", "")


@pytest.mark.parametrize(
    ("source", "env"),
    [
        (GROUP + "say_what_differs()\n", OFF),
        (GROUP.replace("group()", "group(hooks=False)") + "say_what_differs()\n", {}),
        (SERVER, OFF),
    ],
    ids=["environment", "argument", "Server"],
)
@pytest.mark.parametrize("launcher", ["mpiexec", "run"])
def test_hooks_can_be_turned_off(tmp_path, launcher, source, env):
    if launcher == "run":  # this launcher sets a hook before the script begins
        ended = run_job(tmp_path, ("-n", "2"), source, env=env)
    else:
        ended = run_ranks(tmp_path, 2, source, env=env)
    assert (ended.status, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == ["differ:"] * 2


def test_the_argument_wins_over_the_environment(tmp_path):
    source = GROUP.replace("group()", "group(hooks=True)") + "say_what_differs()\n"
    ended = run_ranks(tmp_path, 2, source, env=OFF)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == "differ: excepthook thread hook stdout\n" * 2


def test_the_hooks_cannot_be_changed_after_the_start(tmp_path):
    source = (
        GROUP
        + """
dist.destroy_process_group()
try:
    dist.init_process_group(hooks=False)
except ValueError as error:
    say(error)
dist.init_process_group(hooks=True).barrier()
"""
    )
    ended = run_ranks(tmp_path, 2, source)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("hooks=False comes too late: MPI was started with hooks=True") == 2


def test_the_hook_of_the_program_sees_its_exceptions(tmp_path):
    source = """
import sys
sys.excepthook = lambda kind, error, trace: sys.stderr.write(f"mine: {error}\\n")
""" + GROUP + """
if rank == 1:
    raise ValueError("no such luck")
group.recv(np.zeros(1), 1)
"""  # fmt: skip
    ended = run_ranks(tmp_path, 2, source, env=OFF)
    assert ended.status == 1, ended.err
    assert ended.err.count("mine: no such luck") == 1
    assert reason_of(ended).startswith("mpidist: rank 0 on ")
    assert "recv from rank 1 of group 'world' waits for rank 1, whose script" in reason_of(ended)


def test_without_hooks_a_thread_that_fails_ends_alone(tmp_path):
    source = (
        GROUP
        + """
def fail():
    raise KeyError("lost")
if rank == 1:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
group.barrier()
say("goes on")
"""
    )
    ended = run_ranks(tmp_path, 2, source, env=OFF)
    assert (ended.status, ended.out) == (0, "goes on\n" * 2), ended.err
    assert ended.err.count("KeyError: 'lost'") == 1


@pytest.mark.parametrize(("end", "status"), [("1 / 0", 1), ("raise SystemExit(3)", 3)])
def test_without_hooks_mpidist_run_still_names_the_rank(tmp_path, end, status):
    source = f"{GROUP}if rank == 1:\n    {end}\ngroup.recv(np.zeros(1), 1 - rank)\n"
    ended = run_job(tmp_path, ("-n", "2"), source, env=OFF)
    assert ended.status == status, ended.err
    assert "mpidist run: rank 1 (pid " in ended.err
    assert "failed first: " in ended.err
