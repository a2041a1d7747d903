"""Failures of groups on GPUs: error reports, recovery of other ranks, and released memory."""

import gc
import time

import numpy as np
import pytest
from _cases.gpu_calls import lent_bytes
from _cases.jobs import run_job

from mpidist import ProcessGroup
from mpidist.errors import DistBackendError, ResourceExhaustedError

LENGTH = 1 << 16
PREPARED = """
    import sys
    sys.path.append({tests!r})
    from _cases import stand_in_cupy as cupy
    sys.modules["cupy"] = cupy
    import mpidist

    group = mpidist.init_process_group()
    array = cupy.zeros(1000, "f4")
"""


def within(limit_s, condition):
    """Wait for a condition. Return whether it holds before the time limit."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        gc.collect()
    return condition()


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


@pytest.fixture
def stand_in(xp):
    """Provide a stand-in for CuPy with devices that can fail."""
    if xp.__name__ == "cupy":
        pytest.skip("a device cannot be made to fail")
    yield xp
    xp.failure.clear()
    xp.longest.clear()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("later", [False, True])
def test_a_rank_whose_download_fails_can_join_the_others_later(group, stand_in, later):
    xp, array = stand_in, stand_in.ones((LENGTH, 2), "f4").T
    gc.collect()
    before = lent_bytes()
    if group.rank() == 1:
        xp.longest.append(10)
        with pytest.raises(ResourceExhaustedError, match=r"GPU 0 of rank 1 "):
            group.all_reduce(array, async_op=later)
        xp.longest.clear()
        assert within(5.0, lambda: lent_bytes() <= before)
    work = group.all_reduce(array, async_op=later)
    if later:
        work.wait()
    np.testing.assert_array_equal(xp.asnumpy(array), np.full((2, LENGTH), group.size()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("later", [False, True])
def test_a_rank_whose_upload_fails_keeps_its_group(group, stand_in, later):
    xp, array = stand_in, stand_in.ones((LENGTH, 2), "f4").T
    gc.collect()
    before = lent_bytes()
    work = group.all_reduce(array, async_op=True) if later else None

    def short(*_):
        raise xp.OutOfMemoryError("short")

    if group.rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xp, "empty", short)
            with pytest.raises(ResourceExhaustedError, match=r"GPU 0 of rank 0 .* short"):
                work.wait() if later else group.all_reduce(array)
    elif later:
        work.wait()
    else:
        group.all_reduce(array)
    del work
    # The watchdog holds polled operations until its next poll.
    assert within(5.0, lambda: lent_bytes() <= before)
    other = stand_in.ones(3, "f4")
    group.all_reduce(other)
    np.testing.assert_array_equal(xp.asnumpy(other), np.full(3, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_arrays_of_one_element_or_none(group, xp, shape):
    array = xp.ones(shape, "f4")
    group.all_reduce(array)
    group.all_reduce(array, async_op=True).wait()
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(shape, 4))
    array = xp.full(shape, group.rank() + 1, "f4")
    group.broadcast(array, 1)
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(shape, 2))
    outputs = [xp.zeros(shape, "f4") for _ in range(2)]
    group.all_gather(outputs, xp.full(shape, group.rank(), "f4"))
    for rank, output in enumerate(outputs):
        np.testing.assert_array_equal(xp.asnumpy(output), np.full(shape, rank))


@pytest.mark.ranks(2)
def test_a_lost_device_is_told_by_each_operation(group, stand_in):
    xp, array = stand_in, stand_in.ones(LENGTH, "f4")
    if group.rank() == 0:
        xp.cuda.get_current_stream().queue.add(lambda: xp.failure.append(719))
        for _ in range(2):
            with pytest.raises(DistBackendError, match=r"GPU 0 of rank 0 .*719.* must end"):
                group.all_reduce(array)
        xp.failure.clear()
    group.all_reduce(array)  # the others have waited
    np.testing.assert_array_equal(xp.asnumpy(array), np.full(LENGTH, 2))


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_ends_by_its_device_ends_those_who_wait(tmp_path, request, before):
    """Fail before rank 1's part of an operation, or in the next operation."""
    prepared = PREPARED.format(tests=str(request.config.rootpath / "tests"))
    failing = """
    if group.rank() == 1:
        cupy.cuda.get_current_stream().queue.add(lambda: cupy.failure.append(719))
    """
    operation = "    group.all_reduce(array{})\n"
    first = "" if before else "\n" + operation.format("")
    script = prepared + first + failing + operation.format("") + operation.format("")
    ended = run_job(tmp_path / "job", ["-n", "3"], script)
    assert ended.status == 1
    reason = [line for line in ended.err.splitlines() if "failed first" in line]
    assert len(reason) == 1, ended.err
    assert "rank 1 " in reason[0]
    assert "on GPU 0 of rank 1 " in reason[0]
    assert "the process must end" in reason[0]


MISSING = """
    import sys
    sys.path.append({tests!r})
    from _cases import stand_in_cupy as cupy, stand_in_nccl
    sys.modules["cupy"], sys.modules["cupy.cuda.nccl"] = cupy, stand_in_nccl
    import time
    from mpi4py import MPI
    import mpidist

    rank = mpidist.init_process_group().rank()
    with cupy.cuda.Device(rank):
        group = mpidist.ProcessGroup(MPI.COMM_WORLD.Dup(), "on GPUs", device=rank)
        array = cupy.ones(1000, "f4")
        if {connected}:
            group.all_reduce(array)
        if rank == 0:
            group.all_reduce(array, async_op=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("connected", "what"),
    [
        (True, "all_reduce number 2 of group 'on GPUs'"),
        (False, "making a communicator of NCCL of 2 ranks"),
    ],
)
def test_a_rank_that_does_not_come_to_nccl_ends_the_job(tmp_path, request, connected, what):
    script = MISSING.format(tests=str(request.config.rootpath / "tests"), connected=connected)
    env = {"MPIDIST_STALL_S": "0.5", "MPIDIST_STALL_ABORT_S": "1.5", "MPIDIST_DEBUG": "off"}
    ended = run_job(tmp_path / "job", ["-n", "2"], script, env=env)
    assert ended.status == 1
    assert f"{what} has waited for" in ended.err
    assert "the limit set by MPIDIST_STALL_ABORT_S" in ended.err
