"""The rule by which a group chooses the backend for arrays on GPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpidist.gpu.kernels import MOST_ARRAYS

IPC_MIN_BYTES = 4 << 20
"""Smaller operations are staged: CUDA IPC needs several barriers on the host."""


@dataclass(frozen=True)
class GpuFacts:
    """The facts about the GPU of one member that the rule needs.

    Attributes:
        node: Node number of the member, equal for ranks of one host.
        bus_id: PCI bus id of the GPU, unique on its host.
        nccl_problem: The reason why this process cannot use NCCL; "" if it can.
    """

    node: int
    bus_id: str
    nccl_problem: str


@dataclass(frozen=True)
class GpuRule:
    """The backend for all_reduce and five other collectives on GPUs; ``print`` shows the rule.

    Attributes:
        backend: ``"nccl"``, ``"ipc"``, ``"mpi"`` or ``"staged"``.
        reason: The reason for a backend other than NCCL.
    """

    backend: Literal["nccl", "ipc", "mpi", "staged"]
    reason: str = ""

    def __str__(self) -> str:
        texts = {
            "nccl": "NCCL runs collectives of arrays on GPUs",
            "ipc": f"CUDA IPC runs collectives of arrays on GPUs from {IPC_MIN_BYTES >> 20} MiB, "
            "and smaller arrays are staged through pinned host memory",
            "mpi": "MPI takes the device memory of all_reduce, broadcast, send and recv, and other "
            "arrays on GPUs are staged through pinned host memory",
            "staged": "arrays on GPUs are staged through pinned host memory",
        }
        return texts[self.backend] + (f" ({self.reason})" if self.reason else "")


def choose(
    facts: Sequence[GpuFacts | None], ranks: Sequence[int], mpi_takes_gpu_memory: bool = False
) -> GpuRule:
    """Return the rule of a group; equal on all members.

    Args:
        facts: The facts of each member, by group rank; None for a member without a GPU.
        ranks: World rank of each member, for the reason.
        mpi_takes_gpu_memory: ``MPIDIST_GPU_MPI``.
    """
    if mpi_takes_gpu_memory:
        return GpuRule("mpi", "MPIDIST_GPU_MPI=1")
    gpus = [fact for fact in facts if fact is not None]
    if len(gpus) < len(facts):
        missing = ranks[list(facts).index(None)]
        return GpuRule("staged", f"rank {missing} has no GPU, no CuPy, or the backend 'mpi'")
    problem = _nccl_problem(gpus, ranks)
    if not problem:
        return GpuRule("nccl")
    if len({fact.node for fact in gpus}) > 1:
        return GpuRule("staged", f"{problem}; CUDA IPC needs all ranks on one host")
    if len(gpus) > MOST_ARRAYS:
        return GpuRule("staged", f"{problem}; CUDA IPC takes {MOST_ARRAYS} ranks at most")
    return GpuRule("ipc", problem)


def _nccl_problem(gpus: Sequence[GpuFacts], ranks: Sequence[int]) -> str:
    """Return the reason why a group cannot use NCCL; "" if it can."""
    (place, count), *_ = Counter((fact.node, fact.bus_id) for fact in gpus).most_common(1)
    if count > 1:
        first, second, *_ = (
            rank
            for rank, fact in zip(ranks, gpus, strict=True)
            if (fact.node, fact.bus_id) == place
        )
        return (
            f"no NCCL: ranks {first} and {second} share GPU {place[1]}; give each rank its own by "
            "device_id of init_process_group, if the host has as many"
        )
    for rank, fact in zip(ranks, gpus, strict=True):
        if fact.nccl_problem:
            return f"no NCCL: rank {rank}: {fact.nccl_problem}"
    return ""
