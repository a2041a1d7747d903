"""Groups that ranks make in different orders, so that every rank waits for another one."""

from _cases.jobs import run_job

CYCLE = """\
    import mpidist as dist
    rank = dist.init_process_group().rank()
    orders = {0: [[0, 1], [2, 0]], 1: [[1, 2], [0, 1]], 2: [[2, 0], [1, 2]]}
    for ranks in orders[rank]:
        dist.new_group(ranks, timeout=2, group_desc="-".join(map(str, sorted(ranks))))
"""
LATE = """\
    import time
    import mpidist as dist
    dist.init_process_group()
    if dist.get_rank():
        time.sleep(2)
    dist.new_group(timeout=0.5).barrier()
"""


def test_a_cycle_ends_after_the_time_limit(tmp_path):
    job = run_job(tmp_path, ["-n", "3"], CYCLE, timeout_s=60, env={"MPIDIST_STALL_S": "1"})
    assert job.status != 0
    assert "the creation of group '" in job.err, job.err
    assert any(
        f"the creation of group '{pair[0]}-{pair[1]}' of the ranks {pair[0]}, {pair[1]} has waited "
        "for 2 s, and the time limit of the group is 2 s" in job.err
        for pair in ("01", "12", "02")
    ), job.err
    assert "make all groups in the same order on all ranks" in job.err


def test_a_late_rank_is_no_cycle(tmp_path):
    job = run_job(tmp_path, ["-n", "2"], LATE, timeout_s=60, env={"MPIDIST_STALL_S": "20"})
    assert job.status == 0, job.err
