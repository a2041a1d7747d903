"""Names of backends, as in torch.distributed, and which of them are available."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, get_args

from mpidist.gpu.nccl import nccl_problem

BackendName = Literal["mpi", "cpu:mpi", "cpu:mpi,cuda:nccl"]
"""A backend that groups can have. The last one gives each rank a GPU."""

BACKENDS: Final = get_args(BackendName)
WITH_GPUS: Final = "cpu:mpi,cuda:nccl"

_LOADS_MPI = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"
_LOAD_S = 60.0


class Backend(str):
    """The name of a backend, in lower case.

    ``Backend("MPI")`` is ``"mpi"``. As in torch, any name can be parsed, and the names of torch's
    backends are attributes, so that scripts can compare ``get_backend()`` with them. Groups of
    this package have the backends ``"mpi"`` and ``"cpu:mpi,cuda:nccl"``.

    Args:
        name: Name, in upper or lower case.

    Raises:
        ValueError: The name is not a string.
    """

    __slots__ = ()

    GLOO: Final = "gloo"
    NCCL: Final = "nccl"
    UCC: Final = "ucc"
    MPI: Final = "mpi"
    XCCL: Final = "xccl"
    FAKE: Final = "fake"

    def __new__(cls, name: str) -> Backend:
        """Parse a name."""
        if not isinstance(name, str):
            raise ValueError(  # noqa: TRY004 (torch's choice)
                f"the name of a backend is a string, not {name!r}"
            )
        return super().__new__(cls, name.lower())


_OTHER_BACKENDS = (Backend.GLOO, Backend.NCCL, Backend.UCC, Backend.XCCL, "hccl", Backend.FAKE)
_DEFAULTS: dict[str, BackendName] = {"cpu": "mpi", "cuda": WITH_GPUS}


def check_options(backend: str | None = None, **options: Any) -> None:
    """Raise ValueError if groups cannot have a backend, or if an option of torch is given."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning here: leave it None")
    if backend is None or (isinstance(backend, str) and backend.lower() in BACKENDS):
        return
    known = ", ".join(BACKENDS)
    if any(name in str(backend).lower() for name in _OTHER_BACKENDS):
        raise ValueError(
            f"backend {backend!r} is not one of this package, which runs on MPI: leave it out (the "
            f"known ones are {known})"
        )
    raise ValueError(f"unknown backend {backend!r}: leave it out; the known ones are {known}")


def get_default_backend_for_device(device: Any) -> BackendName:
    """Return the backend that serves the arrays of a device, for :func:`init_process_group`.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, or a ``torch.device``.

    Returns:
        ``"mpi"`` for the CPU, ``"cpu:mpi,cuda:nccl"`` for GPUs. torch says ``"nccl"`` for GPUs,
        which serves no arrays on the host.

    Raises:
        ValueError: Groups take no arrays of the device.
    """
    kind, _, number = str(device).lower().partition(":")
    if kind not in _DEFAULTS or (number and not number.isdecimal()):
        raise ValueError(
            f"there is no backend for device {device!r}: use 'cpu' or 'cuda', with or without a "
            "number"
        )
    return _DEFAULTS[kind]


def is_mpi_available() -> bool:
    """Return whether mpi4py finds an MPI library. MPI is not started."""
    return "mpi4py.MPI" in sys.modules or _loads_mpi()


def is_nccl_available() -> bool:
    """Return whether CuPy has NCCL, which the backend ``"cpu:mpi,cuda:nccl"`` uses on GPUs."""
    return not nccl_problem()


def is_gloo_available() -> bool:
    """Return False: this package has no backend gloo. The backend ``"mpi"`` serves CPUs."""
    return False


_AVAILABLE: dict[str, Callable[[], bool]] = {
    Backend.MPI: is_mpi_available,
    Backend.NCCL: is_nccl_available,
}


def is_backend_available(backend: str) -> bool:
    """Return whether a backend is available in this process.

    Args:
        backend: Name of a backend, or pairs of device and backend: ``"cpu:mpi,cuda:nccl"``. All
            pairs must be available.

    Raises:
        ValueError: The text is no list of pairs of device and backend.
    """
    names = [Backend(backend)]
    if ":" in backend:
        pairs = [pair.split(":") for pair in backend.lower().split(",")]
        devices = [pair[0] for pair in pairs]
        if any(len(pair) != 2 for pair in pairs) or len(set(devices)) < len(devices):
            raise ValueError(
                f"backend {backend!r} is no list of devices, each with its backend: write it as "
                f"{WITH_GPUS!r}"
            )
        names = [Backend(name) for _, name in pairs]
    return all(name in _AVAILABLE and _AVAILABLE[name]() for name in names)


@cache
def _loads_mpi() -> bool:
    # In a process of its own: mpi4py starts MPI when its library is loaded, unless told otherwise,
    # and a program that imports mpi4py later expects a started MPI.
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADS_MPI], capture_output=True, timeout=_LOAD_S, check=False
    )
    return loaded.returncode == 0
