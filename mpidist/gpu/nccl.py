"""CuPy's module for NCCL, and communicators."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from typing import Any

import numpy as np

from mpidist.config import config
from mpidist.errors import DeadlineExceededError, DistBackendError, FailedPreconditionError
from mpidist.gpu.cupy_api import cupy, make_current
from mpidist.gpu.streams import logger


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


def connect(size: int, unique: bytes, rank: int, device: int, where: str) -> Any:
    """Collective. Return a communicator of NCCL.

    Args:
        size: Number of ranks.
        unique: See :func:`unique_id`.
        rank: Rank of this process.
        device: Index of its GPU.
        where: The owner, for messages.

    Raises:
        DeadlineExceededError: Some ranks did not connect within ``MPIDIST_STALL_ABORT_S``.
        DistBackendError: NCCL or CUDA failed.
    """
    results: list[Any] = []

    def create() -> None:
        try:
            make_current(device)
            results.append(_communicator(size, unique, rank))
        except BaseException as error:  # raised below, on the caller's thread
            results.append(error)

    # On a thread, because NCCL has no time limit for this call.
    thread = threading.Thread(target=create, name="mpidist-nccl", daemon=True)
    thread.start()
    waited = 0.0
    for limit in sorted((config.stall_s, config.stall_abort_s)):
        thread.join(min(limit - waited, threading.TIMEOUT_MAX))
        waited = limit
        if not thread.is_alive():
            break
        if limit == config.stall_abort_s:
            raise DeadlineExceededError(
                f"{where}: some ranks have not connected after {limit:.0f} s, the limit set by "
                "MPIDIST_STALL_ABORT_S"
            )
        logger.warning("%s: some ranks have not connected after %.0f s", where, limit)
    (result,) = results
    if isinstance(result, BaseException):
        raise DistBackendError(
            f"{where}: the communicator cannot be created: {result}; each rank needs a device of "
            "its own (NCCL_DEBUG=WARN prints more)"
        ) from result
    return result


def _communicator(size: int, unique: bytes, rank: int) -> Any:
    # CuPy 14 takes the id as bytes, older versions as a tuple of numbers, the oldest signed.
    make = _module().NcclCommunicator
    try:
        return make(size, unique, rank)
    except TypeError:
        numbers = np.frombuffer(unique, np.uint8)
    try:
        return make(size, tuple(numbers.tolist()), rank)
    except OverflowError:
        return make(size, tuple(numbers.view(np.int8).tolist()), rank)


def _module() -> Any:
    name = "cupy.cuda.nccl"
    if name in sys.modules:
        return sys.modules[name]
    with warnings.catch_warnings():  # CuPy warns if the library is missing
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
