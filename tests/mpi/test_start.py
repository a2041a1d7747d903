"""The start of MPI: waiting ranks report it, and end the job if a rank can never come."""

import os
import subprocess
import sys

import pytest
from _cases.jobs import run_job, run_ranks
from _cases.leftovers import abandoned, shared_files

from mpidist.launcher.vendors import find_launcher

HEAD = """
import logging, os, pathlib, sys, time
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
SIGN = pathlib.Path(__file__).with_name("reminded")
import mpidist as dist
from mpidist.mpi import startup
startup._LOOK_PERIOD_S, startup._REMINDER_S = 0.1, 0.4
"""


@pytest.fixture(params=["run", "mpiexec"])
def run(request, tmp_path):
    def start(source):
        if request.param == "run":
            return run_job(tmp_path, ("-n", "2"), source)
        return run_ranks(tmp_path, 2, source)

    return start


def test_a_rank_that_is_late_is_waited_for(run):
    ended = run(HEAD + """
class Sign(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        SIGN.touch()
logging.getLogger("mpidist").addHandler(Sign())
deadline = time.monotonic() + 20
while RANK == 1 and not SIGN.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
group = dist.init_process_group()
group.barrier()
""")  # fmt: skip
    assert ended.status == 0, ended.err
    assert ended.err.startswith("rank 0 has waited 0 s for the other ranks to start MPI: every ")
    assert "ends the job" not in ended.err


def test_a_rank_that_ended_before_is_not_waited_for(run):
    ended = run(HEAD + """
if RANK == 1:
    sys.exit(0)
dist.init_process_group()
""")  # fmt: skip
    assert ended.status == 1, ended.err
    reasons = [line for line in ended.err.splitlines() if "ends the job: " in line]
    assert len(reasons) == 1, ended.err
    assert reasons[0].startswith("mpidist: rank 0 on ")
    assert reasons[0].endswith("this rank waits in MPI_Init for rank 1, whose script has ended")


HELLO = "import mpidist as dist; print(dist.init_process_group().size())"


@pytest.fixture
def hello():
    """Provide a runner of one rank as another library's mpiexec would start it."""
    mpich = find_launcher().vendor.name == "mpich"
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK") if mpich else ("PMI_SIZE", "PMI_RANK")

    def hello(size, **more):
        before = shared_files()
        done = subprocess.run(
            [sys.executable, "-c", HELLO], capture_output=True, text=True, timeout=30, check=False,
            env={**os.environ, names[0]: str(size), names[1]: str(size - 1), **more},
        )  # fmt: skip
        assert abandoned(before, 5.0) == set()
        return done

    hello.mpich = mpich
    hello.name = names[0]
    return hello


def test_a_rank_of_another_librarys_mpiexec_is_refused(hello):
    done = hello(3)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    refused = "mpidist.errors.DistBackendError: rank 2 is alone in a world of 1, but its launcher "
    assert last.startswith(f"{refused}started 3 ranks ({hello.name}=3): ")
    assert "the mpiexec of the library that mpi4py loads" in last


def test_one_rank_of_another_librarys_mpiexec_is_right(hello):
    done = hello(1)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_mpich_is_refused_by_pmix_before_it_ends_the_process(hello):
    if not hello.mpich:
        pytest.skip("Open MPI speaks PMIx")
    done = hello(2, PMIX_NAMESPACE="job", PMIX_RANK="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Open MPI's launcher started rank 1 of 2, but the MPI library is MPICH" in done.stderr
    assert "Aborting" not in done.stderr


CHILD = """
import os
from mpi4py import MPI
# As of a job around this one.
os.environ.update(dict.fromkeys(("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"), "7"))
import mpidist as dist
parent = MPI.Comm.Get_parent()
parent.send(dist.init_process_group().size(), dest=0)
parent.Disconnect()
"""
PARENT = """
import sys
from pathlib import Path
from mpi4py import MPI
child = MPI.COMM_SELF.Spawn(sys.executable, [str(Path(__file__).with_name("child.py"))], 1)
print(child.recv(source=0))
child.Disconnect()
"""


def test_a_child_of_another_process_may_be_alone(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    ended = run_ranks(tmp_path, 1, PARENT)
    assert (ended.status, ended.out) == (0, "1\n"), ended.err


@pytest.mark.parametrize("when", ["before the rank", "after the rank"])
def test_a_process_of_multiprocessing_is_no_rank(tmp_path, when):
    source = f"""\
        import multiprocessing, sys
        import mpidist as dist

        def child(results):
            try:
                dist.init_process_group()
            except Exception as error:
                results.put(f"{{type(error).__name__}}: {{error}}")

        if __name__ == "__main__":
            if {when == "after the rank"}:
                dist.init_process_group()
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            process = context.Process(target=child, args=(results,))
            process.start()
            print(results.get(timeout=20))
            process.join()
            dist.init_process_group() if dist.group.WORLD is None else None
            dist.barrier()
    """
    ended = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert ended.status == 0, ended.err
    assert ended.out.count("DistBackendError: a process that multiprocessing has started") == 2
