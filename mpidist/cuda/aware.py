"""Whether MPI may be given memory of GPUs: asked of the library, and proven by a trial."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpidist.config import config
from mpidist.errors import FailedPreconditionError
from mpidist.runtime import fork, together

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.cuda.trial import Outcome

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH and what is made from it
# What else libraries want that have the code: a word of their version, a variable, its value.
_WANTED = (("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "1"), ("MVAPICH2", "MV2_USE_CUDA", "1"))
# One of them is there where a driver has found a GPU: on hosts, under Windows, on Jetson boards.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")
_OVERRIDE = "MPIDIST_GPU_MPI=0 has MPI given host memory without a trial, and 1 memory of GPUs"


@dataclass(frozen=True)
class Awareness:
    """Whether this process may hand the addresses of device memory to MPI.

    Attributes:
        usable: Whether it may.
        reason: Why, or why not.
        remedy: What to do where the library says that it takes device memory, and does not; else
            empty.
    """

    usable: bool
    reason: str
    remedy: str = ""


def device_memory_by_mpi() -> Awareness:
    """Local. Whether this process may hand device memory to MPI; found once.

    ``MPIDIST_GPU_MPI`` decides where it is 0 or 1. Otherwise the library is asked, and where it
    says that it takes device memory, and there may be a GPU, two ranks of this host try it in
    processes of their own, which takes seconds, and up to a minute where they hang.

    Raises:
        FailedPreconditionError: MPI has not been started, has ended, or this process was forked.
    """
    if not _found:
        told = _without_trial()
        _found.append(_judged(*_tried()) if told is None else told)
    return _found[0]


def device_memory_by_mpi_on(node: MPI.Comm) -> Awareness:
    """Collective over a node's ranks. The same, but only one of them has it tried.

    Args:
        node: A communicator of ranks of one host.

    Returns:
        What holds for this rank, which may differ where their environments do.

    Raises:
        FailedPreconditionError: See :func:`device_memory_by_mpi`.
    """
    told = _found[0] if _found else _without_trial()
    with together("finding out whether MPI takes device memory", node.Get_group()):
        unknown = node.allgather(told is None)
        if True in unknown:
            first = unknown.index(True)
            tried = node.bcast(_tried() if node.rank == first else None, first)
            told = _judged(*tried) if told is None else told
    assert told is not None
    _found[:] = [told]
    return told


def claim(version: str, library: Any, kinds: str, env: Mapping[str, str]) -> tuple[bool, str]:
    """Local. Whether an MPI library says that it takes device memory, and how it says so.

    Args:
        version: What the library says of itself.
        library: It, loaded by ctypes, with MPI started: MPICH ends a process that asks before.
        kinds: The kinds of memory that it takes (MPI 4.1, 11.4.3); empty if it does not say.
        env: Usually ``os.environ``.
    """
    name = " ".join(version.partition("\n")[0].partition(",")[0].split())
    said = ""
    if "cuda" in [kind.partition(":")[0].strip() for kind in kinds.split(",")]:
        said = f"mpi_memory_alloc_kinds is {kinds}"
    elif hasattr(library, "MPIX_Query_cuda_support") and library.MPIX_Query_cuda_support() == 1:
        said = "MPIX_Query_cuda_support() is 1"
    elif hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        if library.MPIX_GPU_query_support(_CUDA, ctypes.byref(flag)) == 0 and flag.value == 1:
            said = "MPIX_GPU_query_support() says so"
    if not said:
        return False, f"{name} does not say that it takes device memory"
    for word, variable, value in _WANTED:
        if word in version.upper() and env.get(variable) != value:
            return False, f"{name} takes device memory only where {variable}={value}"
    return True, f"{name} says that it takes device memory ({said})"


_found: list[Awareness] = []
_trials: list[tuple[str, Outcome]] = []
_trying = threading.Lock()  # of two threads one has it tried


def _without_trial() -> Awareness | None:
    """What is known at once; None if it must be tried."""
    if config.gpu_mpi != "auto":
        return Awareness(config.gpu_mpi == "1", f"MPIDIST_GPU_MPI={config.gpu_mpi} says so")
    claims, said = _asked()
    if not claims:
        return Awareness(False, said)
    nothing = why_no_gpu(os.environ)
    return Awareness(False, f"{said}, but {nothing}") if nothing else None


def _asked() -> tuple[bool, str]:
    fork.check_mpi()
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise FailedPreconditionError(
            "whether MPI takes device memory can be asked only while it runs: make a group first"
        )
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return claim(MPI.Get_library_version(), ctypes.CDLL(MPI.__file__), kinds, os.environ)


def why_no_gpu(env: Mapping[str, str]) -> str:
    """Local. Why this process can use no GPU, without a look at CUDA; empty if it may."""
    if find_spec("cupy") is None:
        return "there is no CuPy"
    if env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    return "" if any(map(os.path.exists, _DRIVER_FILES)) else "there is no GPU"


def _tried() -> tuple[str, Outcome]:
    """What the library says, and what came of its trial."""
    from mpidist.cuda.trial import carry_out  # of use to few

    with _trying:
        if not _trials:
            _trials.append((_asked()[1], carry_out(os.environ)))
        return _trials[0]


def _judged(said: str, outcome: Outcome) -> Awareness:
    if outcome.right:
        return Awareness(True, f"{said}, and {outcome.text}")
    remedy = f"MPI is given host memory; see what it needs for GPUs; {_OVERRIDE}"
    return Awareness(False, f"{said}, but {outcome.text}", remedy)
