"""The rule that chooses a backend for arrays on GPUs."""

import sys
import types

import pytest

from mpidist.errors import FailedPreconditionError
from mpidist.gpu.nccl import connect, nccl_problem, unique_id
from mpidist.group.gpu_rule import GpuFacts, choose


def facts(*gpus, problem=""):
    """One member for each (node, bus id)."""
    return [GpuFacts(node, bus_id, problem) for node, bus_id in gpus]


def test_each_rank_has_a_gpu_of_its_own():
    rule = choose(facts((0, "a"), (0, "b"), (1, "a")), (0, 1, 2))
    assert rule.backend == "nccl"
    assert str(rule) == "NCCL runs collectives of arrays on GPUs"


def test_ranks_that_share_a_gpu():
    rule = choose(facts((0, "a"), (0, "b"), (0, "b")), (4, 7, 9))
    assert rule.backend == "ipc"
    assert "from 4 MiB" in str(rule)
    assert "ranks 7 and 9 share GPU b" in str(rule)
    assert "device_id" in str(rule)


def test_ranks_of_several_hosts_that_share_gpus():
    rule = choose(facts((0, "a"), (0, "a"), (1, "a")), (0, 1, 2))
    assert rule.backend == "staged"
    assert "CUDA IPC needs all ranks on one host" in str(rule)


def test_a_rank_without_nccl():
    rule = choose(facts((0, "a"), (0, "b"), problem="no library"), (0, 1))
    assert rule.backend == "ipc"
    assert "rank 0: no library" in rule.reason


def test_a_rank_without_a_gpu():
    rule = choose([*facts((0, "a")), None], (0, 5))
    assert rule.backend == "staged"
    assert "rank 5 has no GPU" in str(rule)


def test_more_ranks_than_a_kernel_reduces():
    rule = choose(facts(*[(0, "a")] * 65), range(65))
    assert rule.backend == "staged"
    assert "64 ranks at most" in str(rule)


def test_mpi_that_takes_gpu_memory():
    assert choose(facts((0, "a"), (1, "a")), (0, 1), True).backend == "mpi"
    assert "MPIDIST_GPU_MPI=1" in str(choose([None], (0,), True))


def test_without_nccl_the_remedy_is_told(xp, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", types.SimpleNamespace(available=False))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nccl", None)
    assert "pip install nvidia-nccl-cu12" in nccl_problem()
    with pytest.raises(FailedPreconditionError, match="CuPy has no NCCL"):
        unique_id()


def test_without_cupy_there_is_no_nccl(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "extras cuda13 and cuda12" in nccl_problem()


@pytest.mark.parametrize("takes", [bytes, tuple, "signed"])
def test_ids_as_each_cupy_takes_them(xp, monkeypatch, takes):
    """Before version 14 they were tuples of numbers, in some signed."""
    if xp.__name__ == "cupy":
        pytest.skip("there is one CuPy")
    taken = []

    def make(size, unique, rank):
        if not isinstance(unique, bytes if takes is bytes else tuple):
            raise TypeError(f"not a {type(unique)}")
        if takes == "signed" and max(unique) > 127:
            raise OverflowError
        taken.append(unique)
        return "a communicator"

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "NcclCommunicator", make)
    assert connect(1, bytes(range(128, 256)), 0, "here") == "a communicator"
    expected = range(-128, 0) if takes == "signed" else range(128, 256)
    assert list(taken[0]) == list(expected)
