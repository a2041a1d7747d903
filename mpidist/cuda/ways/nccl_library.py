"""NCCL as CuPy has it, where it has it, and communicators."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from typing import Any

import numpy as np

from mpidist.config import config
from mpidist.cuda.library import cupy, make_current
from mpidist.cuda.streams import logger
from mpidist.errors import DeadlineExceededError, DistBackendError, FailedPreconditionError


def why_not() -> str | None:
    """Local. Why NCCL cannot be used in this process; None if it can."""
    try:
        cupy()
        if _nccl().available:
            return None
        importlib.import_module("cupy_backends.cuda.libs.nccl")
    except (FailedPreconditionError, ImportError) as error:
        reason = str(error)
    else:
        reason = "it was built without"
    return (
        f"CuPy has no NCCL ({reason}): pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, of CuPy's "
        "version of CUDA"
    )


def unique_id() -> bytes:
    """Local. What makes the ranks of one communicator find each other; of one rank, for all.

    Raises:
        FailedPreconditionError: See :func:`why_not`.
        DistBackendError: NCCL failed.
    """
    nccl = usable()
    try:
        return bytes(number & 0xFF for number in nccl.get_unique_id())  # signed, before CuPy 13
    except nccl_errors(nccl) as error:
        raise DistBackendError(f"NCCL cannot make an id for a communicator: {error}") from error


def usable() -> Any:
    """Local. CuPy's module.

    Raises:
        FailedPreconditionError: See :func:`why_not`.
    """
    reason = why_not()
    if reason is not None:
        raise FailedPreconditionError(reason)
    return _nccl()


def nccl_errors(nccl: Any) -> tuple[type[Exception], ...]:
    """Local. What CuPy raises where NCCL fails: it has no names for the newer statuses."""
    return nccl.NcclError, KeyError


def connected(size: int, unique: bytes, rank: int, device: int, where: str) -> Any:
    """Collective. A communicator of NCCL, for the device.

    Args:
        size: How many ranks there are.
        unique: See :func:`unique_id`.
        rank: Of this process.
        device: Its number.
        where: Whose it is, for messages.

    Raises:
        DeadlineExceededError: Not all ranks came before ``MPIDIST_STALL_ABORT_S``.
        DistBackendError: NCCL or CUDA failed.
    """
    made: list[Any] = []

    def make() -> None:
        try:
            make_current(device)
            made.append(_communicator(size, unique, rank))
        except BaseException as error:  # it is raised where somebody can take it
            made.append(error)

    # On a thread: nothing bounds how long NCCL waits.
    thread = threading.Thread(target=make, name="mpidist-nccl", daemon=True)
    thread.start()
    waited = 0.0
    for limit in sorted((config.stall_s, config.stall_abort_s)):
        thread.join(min(limit - waited, threading.TIMEOUT_MAX))
        waited = limit
        if not thread.is_alive():
            break
        if limit == config.stall_abort_s:
            raise DeadlineExceededError(
                f"{where}: not all ranks have come after {limit:.0f} s, the limit set by "
                "MPIDIST_STALL_ABORT_S"
            )
        logger.warning("%s: not all ranks have come after %.0f s", where, limit)
    (result,) = made
    if isinstance(result, BaseException):
        raise DistBackendError(
            f"{where}: the communicator cannot be made: {result}; each rank needs a device of its "
            "own (NCCL_DEBUG=WARN says more)"
        ) from result
    return result


def _communicator(size: int, unique: bytes, rank: int) -> Any:
    """CuPy 14 takes the id as bytes, older ones as a tuple of numbers, signed ones at first."""
    make = _nccl().NcclCommunicator
    try:
        return make(size, unique, rank)
    except TypeError:
        numbers = np.frombuffer(unique, np.uint8)
    try:
        return make(size, tuple(numbers.tolist()), rank)
    except OverflowError:
        return make(size, tuple(numbers.view(np.int8).tolist()), rank)


def _nccl() -> Any:
    name = "cupy.cuda.nccl"
    if name in sys.modules:
        return sys.modules[name]
    with warnings.catch_warnings():  # where there is no library CuPy warns, and goes on
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
