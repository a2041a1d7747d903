"""While ranks start MPI: those that wait say so, and end the job if one can never come."""

import pytest
from _cases.jobs import run_job, run_ranks

HEAD = """
import logging, os, pathlib, sys, time
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
SIGN = pathlib.Path(__file__).with_name("reminded")
import mpidist as dist
from mpidist.runtime import start
start._LOOK_PERIOD_S, start._REMINDER_S = 0.1, 0.4
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
    assert reasons[0].endswith("it waits for rank 1 to start MPI, whose script has ended")
