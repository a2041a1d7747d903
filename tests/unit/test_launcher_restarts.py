"""Restarts after the end of an attempt."""

import pytest

from mpidist.launcher.job import Result
from mpidist.launcher.report import TIMEOUT_STATUS
from mpidist.launcher.restarts import Restarts


@pytest.mark.parametrize(
    ("had_failed", "status", "expected"), [(True, 1, True), (False, TIMEOUT_STATUS, False)]
)
def test_a_time_limit_that_passes_while_a_failed_attempt_ends(
    tmp_path, had_failed, status, expected
):
    # The wait before the next attempt then reports the time limit.
    restarts = Restarts(1, 0.0)
    restarts.add(tmp_path, status, "rank 0 failed first", [])
    result = Result(status, signal=0, timed_out=True, had_failed=had_failed, killed=0, alive=0)
    assert restarts.may_go_on(tmp_path, result) is expected
