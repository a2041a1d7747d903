"""CuPy's module for NCCL, and communicators."""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from mpidist.errors import DistBackendError, FailedPreconditionError
from mpidist.gpu.cupy_api import cupy


def nccl_problem() -> str:
    """Return the reason why this process cannot use NCCL; "" if it can."""
    try:
        cupy()
        if _module().available:
            return ""
        importlib.import_module("cupy_backends.cuda.libs.nccl")
    except (FailedPreconditionError, ImportError) as error:
        reason = str(error)
    else:
        reason = "CuPy was built without NCCL"
    return (
        f"CuPy has no NCCL ({reason}): pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, of CuPy's "
        "version of CUDA"
    )


def unique_id() -> bytes:
    """Return the id by which the ranks of a new communicator find each other.

    Raises:
        FailedPreconditionError: See :func:`nccl_problem`.
        DistBackendError: NCCL failed.
    """
    nccl = nccl_module()
    try:
        return bytes(number & 0xFF for number in nccl.get_unique_id())  # signed before CuPy 13
    except nccl_errors(nccl) as error:
        raise DistBackendError(f"NCCL cannot make an id for a communicator: {error}") from error


def nccl_module() -> Any:
    """Return CuPy's module for NCCL.

    Raises:
        FailedPreconditionError: See :func:`nccl_problem`.
    """
    reason = nccl_problem()
    if reason:
        raise FailedPreconditionError(reason)
    return _module()


def nccl_errors(nccl: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that CuPy raises if NCCL fails.

    CuPy has no names for the newer statuses of NCCL, and raises KeyError for them.
    """
    return nccl.NcclError, KeyError


def connect(size: int, unique: bytes, rank: int, where: str) -> Any:
    """Collective. Return a communicator of NCCL for the current device.

    Args:
        size: Number of ranks.
        unique: See :func:`unique_id`.
        rank: Rank of this process.
        where: The owner, for messages.

    Raises:
        DistBackendError: NCCL or CUDA failed.
    """
    make = nccl_module().NcclCommunicator
    signed = tuple(np.frombuffer(unique, np.int8).tolist())
    try:
        # CuPy 14 takes the id as bytes, older versions as a tuple of numbers, the oldest signed.
        for form in (unique, tuple(unique)):
            with suppress(TypeError, OverflowError):
                return make(size, form, rank)
        return make(size, signed, rank)
    except Exception as error:
        raise DistBackendError(
            f"{where}: the communicator cannot be created: {error}; each rank needs a device of "
            "its own (NCCL_DEBUG=WARN prints more)"
        ) from error


def _module() -> Any:
    name = "cupy.cuda.nccl"
    if name in sys.modules:
        return sys.modules[name]
    with warnings.catch_warnings():  # CuPy warns if the library is missing
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
