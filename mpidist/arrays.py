"""Any array as memory that MPI can read and write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda import Mirror, layout_of, lies_on_gpu, mirror
from mpidist.foreign import view_by_dlpack, view_of_tensor

Array = NDArray[Any]
Finish = Callable[[], None] | None

# Type characters whose arrays MPI moves as they are, and reduces. Those of complex long doubles are
# not among them: MPICH 5.0.2 aborts while it gathers them over four ranks. They move as bytes.
NATIVE = frozenset("bBhHiIlLqQfdgFD")


def host_view(array: Any, *, read: bool = True) -> Array:
    """Local. The memory of an array as a NumPy array; of one on a GPU, a copy in pinned memory.

    Args:
        array: A NumPy array, or anything with DLPack, the buffer protocol or the CUDA array
            interface.
        read: Whether its values are of use, which then are copied from a GPU, behind what its
            stream has to do before; otherwise one on a GPU must be such that it can be written.

    Returns:
        A NumPy array over the same memory; read-only where the array cannot change, as JAX's. For
        an array on a GPU a :class:`mpidist.cuda.Mirror`, whose ``upload()`` brings values to the
        GPU.

    Raises:
        TypeError: It has neither, its memory is on a device that is no CUDA GPU or no plain array,
            or NumPy and ml_dtypes do not know its dtype.
        ValueError: It is a torch tensor that requires grad, or that is conjugated or negated only
            when it is read; or it is on a GPU, to be written, and read-only, or has elements that
            share memory.
        FailedPreconditionError: It is on a GPU, and there is no CuPy.
    """
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _mirrored(array, read) if array.is_cuda else view_of_tensor(array, torch)
    if lies_on_gpu(array):
        return _mirrored(array, read)
    kind = type(array).__name__
    if hasattr(array, "__dlpack__"):
        return view_by_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise TypeError(
            f"a {kind} is not an array: expected a NumPy array, or one with DLPack or the buffer "
            "protocol; lists and numbers go through numpy.asarray first"
        ) from None


def _mirrored(array: Any, read: bool) -> Array:
    view = mirror(array, read=read)
    if not read:
        check_usable(view, write=True)
    return view


def written(view: Array, finish: Finish = None) -> Finish:
    """Local. What is left to do once an array has been written.

    Args:
        view: Which, of :func:`host_view`.
        finish: What is left to do before.

    Returns:
        That, and for a mirror its way to the GPU; None if nothing is left.
    """
    if view.__class__ is np.ndarray or not isinstance(view, Mirror):
        return finish
    return Upload(view, finish)


class Upload:
    """What is left to do for an array on a GPU.

    Args:
        view: Its mirror.
        before: What comes before the values are brought there.

    Attributes:
        layout: Where the array lies; see :func:`mpidist.cuda.layout_of`.
    """

    def __init__(self, view: Mirror, before: Finish) -> None:
        self._view = view
        self._before = before
        self.layout = layout_of(view)

    def __call__(self) -> None:
        """Local. Do it."""
        if self._before is not None:
            self._before()
        self._view.upload()


def is_plain(array: Any) -> bool:
    """Local. Whether MPI takes an array as it is: contiguous, aligned, of a native dtype."""
    if array.__class__ is not np.ndarray:
        return False
    dtype = array.dtype
    return lies_plainly(array) and dtype.char in NATIVE and dtype.isnative


def lies_plainly(array: Array) -> bool:
    """Local. Whether an array is contiguous and aligned."""
    flags = array.flags
    return flags.carray or (flags.c_contiguous and flags.aligned)  # most are writable, too


def to_move(array: Any, *, write: bool) -> tuple[Array, Finish]:
    """Local. A contiguous array whose bytes MPI can move in place of this one.

    Args:
        array: See :func:`host_view`; any dtype without Python objects, any strides.
        write: Whether MPI writes into it, all of it.

    Returns:
        The array to hand to MPI, and what to call once MPI is done (None if nothing is left to do).

    Raises:
        TypeError: See :func:`host_view`; also for dtype object.
        ValueError: It is to be written but read-only.
    """
    if is_plain(array) and (not write or array.flags.writeable):
        return array, None
    view = host_view(array, read=not write)
    if is_plain(view) and (not write or view.flags.writeable):
        return view, None
    check_usable(view, write)
    direct = view if view.flags.c_contiguous else np.asarray(view, order="C")
    finish = None
    if write and direct is not view:
        finish = copier(view, direct)
    if write:
        finish = written(view, finish)
    if direct.dtype.char not in NATIVE or not direct.dtype.isnative or not direct.flags.aligned:
        direct = direct.reshape(-1).view(np.uint8)
    return direct, finish


def apart(source: Array, target: Array) -> Array:
    """Local. What is read, or a copy of it if it may lie where is written: MPI forbids that."""
    if source.base is None and target.base is None and source is not target:  # each has its own
        return source
    return source.copy() if np.may_share_memory(source, target) else source


def movable(array: Array) -> Array:
    """Local. A contiguous array whose bytes MPI can read; of contiguous memory, a view."""
    return array if is_plain(array) else to_move(array, write=False)[0]


def check_usable(view: Array, write: bool) -> None:
    """Local. Whether an array can be sent, or written.

    Raises:
        TypeError: It holds Python objects.
        ValueError: It is to be written, but is read-only, or has elements that share memory.
    """
    if view.dtype.hasobject:
        raise TypeError(f"dtype {view.dtype} holds Python objects; only numbers can be moved")
    layout = layout_of(view)
    if not write or (view.flags.writeable and layout.flags.c_contiguous):
        return
    if not view.flags.writeable:
        raise ValueError(
            "the array receives a result but is read-only; pass a writable copy (in place of a "
            "scalar an array without axes, np.array(value))"
        )
    if _overlaps_itself(layout):
        raise ValueError(
            f"the array receives a result, but elements of it share memory (shape {layout.shape}, "
            f"strides {layout.strides} bytes), as in an expanded or sliding view; pass a copy"
        )


def _overlaps_itself(view: Array) -> bool:
    """Whether two elements share memory."""
    reach = view.itemsize
    dimensions = sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1)
    for stride, count in dimensions if view.size else ():
        if stride < reach:
            break
        reach += stride * (count - 1)
    else:
        return False  # as in all views that slices and transposition make
    if sum(s * (n - 1) for s, n in dimensions) + view.itemsize < view.nbytes:
        return True
    offsets = np.zeros((), np.intp)
    for stride, count in dimensions:
        offsets = np.add.outer(offsets, stride * np.arange(count))
    gaps = np.diff(np.sort(offsets, axis=None))
    return bool((gaps < view.itemsize).any())


def copier(target: Array, source: Array, divisor: int | None = None) -> Finish:
    """Local. What is left to do after MPI: divide, and copy back if MPI worked on a copy.

    Args:
        target: Where the result belongs.
        source: Where MPI has it.
        divisor: Of the result, for averages.

    Returns:
        What does it; None if there is nothing to do.
    """
    if divisor is None and source is target:
        return None

    def finish() -> None:
        if divisor is not None:
            np.divide(source, divisor, out=source)
        if source is not target:
            np.copyto(target, source, casting="unsafe")

    return finish


def one_after_the_other(steps: Sequence[Finish]) -> Finish:
    """Local. All of what is left to do after MPI; None if that is nothing."""
    left = [step for step in steps if step is not None]
    if not left:
        return None

    def finish() -> None:
        for step in left:
            step()

    return finish
