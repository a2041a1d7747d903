"""Contiguous arrays to pass to MPI for arrays of any strides and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.buffers.host_view import Array, check_array, host_view
from mpidist.gpu import HostStaging, layout_of

OnComplete = Callable[[], None] | None

# Element types of the arrays that MPI takes without conversion. Type characters are not unique: the
# float8_e4m3b11fnuz of ml_dtypes has the character of uint64. Complex long doubles move as bytes,
# because MPICH 5.0.2 aborts while it gathers them over four ranks.
NATIVE: frozenset[type] = frozenset(np.dtype(char).type for char in "bBhHiIlLqQfdgFD")


def with_upload(view: Array, on_complete: OnComplete = None) -> OnComplete:
    """Return the function to call when MPI has written an array.

    Args:
        view: The array, see :func:`host_view`.
        on_complete: A function to call before the upload, or None.

    Returns:
        ``on_complete``, followed by the upload if ``view`` is the staging copy of an array on a
        GPU.
    """
    if view.__class__ is np.ndarray or not isinstance(view, HostStaging):
        return on_complete
    return UploadCallback(view, on_complete)


class UploadCallback:
    """A callback that copies a result to a GPU.

    Args:
        view: The copy on the host.
        before: A function to call before the copy, or None.
    """

    def __init__(self, view: HostStaging, before: OnComplete) -> None:
        self._view = view
        self._before = before

    @property
    def layout(self) -> Array:
        """The layout of the array on the GPU; see :func:`mpidist.gpu.layout_of`."""
        return layout_of(self._view)

    def __call__(self) -> None:
        """Run the earlier callback and start the copy."""
        if self._before is not None:
            self._before()
        self._view.upload()


def is_mpi_array(array: Any) -> bool:
    """Return whether MPI takes an array as it is: contiguous, aligned, of a native dtype."""
    if array.__class__ is not np.ndarray:
        return False
    dtype = array.dtype
    return is_contiguous(array) and dtype.type in NATIVE and dtype.isnative


def is_contiguous(array: Array) -> bool:
    """Return whether an array is contiguous and aligned."""
    flags = array.flags
    return flags.carray or (flags.c_contiguous and flags.aligned)  # one look for writable ones


def as_mpi_buffer(array: Any, *, write: bool) -> tuple[Array, OnComplete]:
    """Return a contiguous array to pass to MPI for an array.

    Args:
        array: An array as :func:`host_view` takes it, of any strides and of any dtype without
            Python objects.
        write: Whether MPI writes all of the array.

    Returns:
        The array for MPI, and a function to call when the operation has ended, or None.

    Raises:
        TypeError: See :func:`host_view`; also for dtype object.
        ValueError: The array receives but is read-only.
    """
    if is_mpi_array(array) and (not write or array.flags.writeable):
        return array, None
    view = host_view(array, read=not write)
    if is_mpi_array(view) and (not write or view.flags.writeable):
        return view, None
    check_array(view, write)
    direct = view if view.flags.c_contiguous else np.asarray(view, order="C")
    on_complete = None
    if write and direct is not view:
        on_complete = copy_back(view, direct)
    if write:
        on_complete = with_upload(view, on_complete)
    if direct.dtype.type not in NATIVE or not direct.dtype.isnative or not direct.flags.aligned:
        direct = direct.reshape(-1).view(np.uint8)
    return direct, on_complete


def copy_if_overlapping(source: Array, target: Array) -> Array:
    """Return the source, or a copy if it may overlap the target, which MPI forbids."""
    if source.base is None and target.base is None and source is not target:  # both own memory
        return source
    return source.copy() if np.may_share_memory(source, target) else source


def as_mpi_input(array: Array) -> Array:
    """Return a contiguous array that MPI can read; a view if the array is contiguous."""
    return array if is_mpi_array(array) else as_mpi_buffer(array, write=False)[0]


def copy_back(target: Array, source: Array, divisor: int | None = None) -> OnComplete:
    """Return a callback that divides the result of MPI and copies it to the caller's array.

    Args:
        target: The array of the caller.
        source: The array that MPI has written; may be the target.
        divisor: Divides the result, for averages.

    Returns:
        The callback; None if there is nothing to do.
    """
    if divisor is None and source is target:
        return None

    def finish_copy() -> None:
        if divisor is not None:
            np.divide(source, divisor, out=source)
        if source is not target:
            np.copyto(target, source, casting="unsafe")

    return finish_copy


def chain_callbacks(steps: Sequence[OnComplete]) -> OnComplete:
    """Return a callback that calls all callbacks in order; None if there are none."""
    callbacks = [step for step in steps if step is not None]
    if not callbacks:
        return None

    def run_all() -> None:
        for callback in callbacks:
            callback()

    return run_all
