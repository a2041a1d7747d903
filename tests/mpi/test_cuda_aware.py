"""Whether MPI takes device memory, asked of real libraries and tried by real ranks.

The device memory of the stand-in for CuPy is memory of the host, so that every MPI takes it.
"""

import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from _cases.leftovers import remaining

from mpidist import ProcessGroup
from mpidist.cuda import aware, trial
from mpidist.cuda.aware import Awareness, device_memory_by_mpi, device_memory_by_mpi_on

TESTS = str(Path(__file__).resolve().parent.parent)
STAND_IN = f"""
import sys
sys.path.append({TESTS!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
"""
WRONG = """
import numpy as np
stand_in_cupy.asnumpy = lambda array: np.add(getattr(array, "_host", array), 1)
"""
UNKNOWN_TO_MPI = """
import types
stand_in_cupy.ndarray.data = property(lambda _: types.SimpleNamespace(ptr=4096, device_id=0))
"""
DYING = """
import os
stand_in_cupy.asnumpy = lambda _: os.abort()
"""
HANGING = """
import threading
stand_in_cupy.asnumpy = lambda _: threading.Event().wait()
"""


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Has processes find a CuPy, of which a test may spoil a part."""

    def spoiled(how=""):
        (tmp_path / "cupy.py").write_text(textwrap.dedent(STAND_IN + how))
        return trial.carry_out(os.environ)

    monkeypatch.syspath_prepend(str(tmp_path))
    return spoiled


@pytest.mark.ranks(1, 2)
def test_the_wheels_say_no_at_once(world, monkeypatch):
    monkeypatch.setattr(aware, "_found", [])
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(trial, "carry_out", None)
    found = device_memory_by_mpi_on(world)
    assert found == device_memory_by_mpi()
    assert not found.usable
    assert found.reason.endswith("does not say that it takes device memory")
    assert "cupy" not in sys.modules


@pytest.mark.ranks(2)
def test_one_rank_of_a_node_has_it_tried_by_a_job_of_its_own(world, monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text(STAND_IN)
    trials = []

    def carry_out(env):
        trials.append(env)
        return trial_itself(env)

    trial_itself = trial.carry_out
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setattr(aware, "_found", [])
        patch.setattr(aware, "_trials", [])
        patch.setattr(aware, "_asked", lambda: (True, "the library says so"))
        patch.setattr(aware, "why_no_gpu", lambda env: "")
        patch.setattr(trial, "carry_out", carry_out)
        found = device_memory_by_mpi_on(world)
        told = "two ranks of this host sent and reduced it, and got the right values"
        assert found.reason == f"the library says so, and {told}"
        assert found == Awareness(True, found.reason)
        assert device_memory_by_mpi() == found
    assert world.allreduce(len(trials)) == 1
    sums = np.ones(1)
    ProcessGroup(world.Dup(), "test").all_reduce(sums)  # the job around it goes on
    assert sums == 2


@pytest.mark.ranks(2)
def test_ranks_of_a_node_that_are_told_different_things(world, monkeypatch):
    told = Awareness(False, "told so") if world.rank == 0 else None
    monkeypatch.setattr(aware, "_found", [])
    monkeypatch.setattr(aware, "_without_trial", lambda: told)
    monkeypatch.setattr(aware, "_tried", lambda: (f"by {world.rank}", trial.Outcome(True, "right")))
    expected = told or Awareness(True, "by 1, and right")
    assert device_memory_by_mpi_on(world) == expected


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (WRONG, "1 numbers by Sendrecv are wrong: number 0 is "),
        (UNKNOWN_TO_MPI, "two ranks of this host tried, and failed: "),
        (DYING, "SIGABRT"),
    ],
)
def test_what_goes_wrong_ends_only_those_who_try(trials, how, text):
    outcome = trials(how)
    assert not outcome.right
    assert text in outcome.text


def test_those_who_hang_are_ended(trials, monkeypatch):
    monkeypatch.setattr(trial, "_LIMIT_S", 6.0)
    outcome = trials(HANGING)
    assert not outcome.right
    assert "did not end within 6 s" in outcome.text
    assert not remaining(str(trial._SCRIPT), 5.0)


def test_one_rank_tries_it_where_no_two_begin(trials, monkeypatch):
    run = trial._run

    def no_launcher(command, env):
        if "mpidist" in command:
            return trial._Ended(2, "", "mpidist run: error: no mpiexec beside this Python\n")
        return run(command, env)

    monkeypatch.setattr(trial, "_run", no_launcher)
    outcome = trials()
    assert outcome.right
    assert outcome.text.startswith("one rank, with messages to itself, sent and reduced it")
    assert "no mpiexec beside this Python" in outcome.text
    assert not trials(WRONG).right
