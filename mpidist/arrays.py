"""Any array as memory that MPI can read and write."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Finish = Callable[[], None] | None

_WORTH_A_LOOK = 65536  # bytes: for less, a copy costs no more
# Type characters whose arrays MPI takes, moves and reduces as they are.
_NATIVE = frozenset("bBhHiIlLqQfdgFDG")
# Types that MPI cannot reduce, or reduces with too little precision, and what they reduce in.
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
_WIDER = dict.fromkeys(
    ("float16", "bfloat16", *(f"float8_{kind}" for kind in _FLOAT8)), np.dtype(np.float32)
)


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one; the names of torch.distributed, and MEAN for AVG.

    Wherever an operation is asked for, its name as a string serves too: ``"sum"``.
    """

    SUM = 0
    AVG = 1
    MEAN = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Local. The operation meant by a member or a name, in either case of letters.

        Raises:
            ValueError: The name is unknown.
        """
        if op.__class__ is cls:
            return op
        try:
            return cls[str(op).upper()]
        except KeyError:
            known = ", ".join(cls.__members__)
            raise ValueError(f"unknown reduction {op!r}; the known ones are {known}") from None


_REAL = frozenset("bBhHiIlLqQfdg")
_INTEGER = frozenset("bBhHiIlLqQ")
# By operation, the types whose arrays MPI reduces as they are, with nothing left to do afterwards.
_DIRECT = (_NATIVE, frozenset(""), _NATIVE, _REAL, _REAL, _INTEGER, _INTEGER, _INTEGER)
# bool arrays reduce by logic: SUM is "any", PRODUCT is "all".
_LOGICAL = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}


def host_view(array: Any) -> Array:
    """Local. The memory of an array as a NumPy array, never a copy.

    Args:
        array: A NumPy array, or anything in host memory with DLPack or the buffer protocol.

    Returns:
        A NumPy array over the same memory.

    Raises:
        TypeError: It has neither, or its memory is on a device.
    """
    if isinstance(array, np.ndarray):
        return array
    kind = type(array).__name__
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(
            f"a {kind} in device memory cannot be sent by this version; pass a host copy, "
            "for example cupy.asnumpy(array)"
        )
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise TypeError(
            f"a {kind} is not an array: expected a NumPy array, or one with DLPack or the buffer "
            "protocol; lists and numbers go through numpy.asarray first"
        ) from None


def to_move(array: Any, *, write: bool) -> tuple[Array, Finish]:
    """Local. A contiguous array whose bytes MPI can move in place of this one.

    Args:
        array: See :func:`host_view`; any dtype without Python objects, any strides.
        write: Whether MPI writes into it.

    Returns:
        The array to hand to MPI, and what to call once MPI is done (None if nothing is left to do).

    Raises:
        TypeError: See :func:`host_view`; also for dtype object.
        ValueError: It is to be written but read-only.
    """
    view = host_view(array)
    _check(view, write)
    direct = view if view.flags.c_contiguous else np.asarray(view, order="C")
    finish = None
    if write and direct is not view:
        finish = _copier(view, direct)
    if direct.dtype.char not in _NATIVE or not direct.dtype.isnative:
        direct = direct.reshape(-1).view(np.uint8)
    return direct, finish


def to_reduce(
    array: Any, op: ReduceOp, count: int, *, write: bool = True
) -> tuple[Array, ReduceOp, Finish]:
    """Local. A contiguous array that MPI can reduce in place of this one.

    Args:
        array: See :func:`host_view`; numbers or bools, any strides.
        op: The reduction.
        count: How many ranks take part, for AVG.
        write: Whether the result goes into the array.

    Returns:
        The array to hand to MPI, MPI's operation, and what to call once MPI is done.

    Raises:
        TypeError: The dtype cannot be reduced so.
        ValueError: The array is read-only.
    """
    view = array
    if view.__class__ is np.ndarray:
        flags, dtype = view.flags, view.dtype
        if (
            flags.c_contiguous
            and (flags.writeable or not write)
            and dtype.char in _DIRECT[op]
            and dtype.isnative
        ):
            return view, op, None
    view = host_view(array)
    _check(view, write)
    _check_reducible(view.dtype, op)
    native = view.dtype if view.dtype.isnative else view.dtype.newbyteorder("=")
    dtype = _WIDER.get(native.name, native)
    direct = np.asarray(view, dtype, order="C")
    average = op is ReduceOp.AVG
    finish = _copier(view, direct, count if average else None) if write else None
    if dtype == np.bool_:
        return direct.view(np.uint8), _LOGICAL.get(op, op), finish
    return direct, ReduceOp.SUM if average else op, finish


def movable(array: Array) -> Array:
    """Local. A contiguous array whose bytes MPI can read; of contiguous memory, a view."""
    return to_move(array, write=False)[0]


def collect(arrays: Sequence[Array]) -> Array:
    """Local. Arrays of one dtype behind each other, flat; a view where they lie like that."""
    joined = _joined(arrays)
    if joined is not None:
        return joined
    memory = np.empty(sum(array.size for array in arrays), arrays[0].dtype)
    start = 0
    for array in arrays:
        memory[start : start + array.size].reshape(array.shape)[...] = array
        start += array.size
    return memory


def spread(arrays: Sequence[Array]) -> tuple[Array, Finish]:
    """Local. Flat memory for what belongs into arrays of one dtype, one behind the other.

    Args:
        arrays: Writable, any strides.

    Returns:
        The memory, and what copies it to the arrays (None where it is their own).

    Raises:
        ValueError: An array is read-only.
    """
    for array in arrays:
        _check(array, write=True)
    joined = _joined(arrays)
    if joined is not None:
        return joined, None
    memory = np.empty(sum(array.size for array in arrays), arrays[0].dtype)

    def finish() -> None:
        start = 0
        for array in arrays:
            array[...] = memory[start : start + array.size].reshape(array.shape)
            start += array.size

    return memory, finish


def _joined(arrays: Sequence[Array]) -> Array | None:
    """The memory of arrays that lie one behind the other, as those of a list of rows do."""
    first = arrays[0]
    if len(arrays) == 1 and first.flags.c_contiguous:
        return first.reshape(-1)
    if first.nbytes < _WORTH_A_LOOK or not first.flags.c_contiguous:
        return None
    address = first.ctypes.data
    for array in arrays:
        if not array.flags.c_contiguous or array.ctypes.data != address:
            return None
        if array.base is not first.base or first.base is None:  # neighbours by chance
            return None
        address += array.nbytes
    size = (address - first.ctypes.data) // first.itemsize
    return np.lib.stride_tricks.as_strided(
        first.reshape(-1), (size,), (first.itemsize,), writeable=first.flags.writeable
    )


def to_reduce_into(
    source: Array, target: Array, op: ReduceOp, count: int
) -> tuple[Array, Array, ReduceOp, Finish]:
    """Local. Contiguous arrays for a reduction that reads one array and writes another.

    Args:
        source: Numbers or bools, any strides.
        target: Writable, of the same dtype.
        op: The reduction.
        count: How many ranks take part, for AVG.

    Returns:
        The arrays to read from and to write to, MPI's operation, and what to call once MPI is done.

    Raises:
        TypeError: The dtype cannot be reduced so.
        ValueError: The target is read-only, or of another dtype.
    """
    _check(source, write=False)
    _check(target, write=True)
    if source.dtype != target.dtype:
        raise ValueError(f"a reduction of {source.dtype} cannot write into {target.dtype}")
    _check_reducible(source.dtype, op)
    native = source.dtype if source.dtype.isnative else source.dtype.newbyteorder("=")
    dtype = _WIDER.get(native.name, native)
    send = np.asarray(source, dtype, order="C")
    recv = target
    if dtype != target.dtype or not target.flags.c_contiguous:
        recv = np.empty(target.shape, dtype)
    average = op is ReduceOp.AVG
    finish = _copier(target, recv, count if average else None)
    if dtype == np.bool_:
        return send.view(np.uint8), recv.view(np.uint8), _LOGICAL.get(op, op), finish
    return send, recv, ReduceOp.SUM if average else op, finish


def _check(view: Array, write: bool) -> None:
    if view.dtype.hasobject:
        raise TypeError(f"dtype {view.dtype} holds Python objects; only numbers can be moved")
    if write and not view.flags.writeable:
        raise ValueError("the array receives a result but is read-only; pass a writable copy")


def _check_reducible(dtype: np.dtype[Any], op: ReduceOp) -> None:
    bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    name = dtype.name
    if name in _WIDER:
        possible = not bitwise
    elif dtype.kind == "b" or dtype.kind in "iu":
        possible = op is not ReduceOp.AVG
    elif dtype.kind == "f":
        possible = not bitwise
    elif dtype.kind == "c":
        possible = op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    else:
        possible = False
    if not possible:
        raise TypeError(f"arrays of dtype {name} cannot be reduced with {op.name}")


def _copier(target: Array, source: Array, divisor: int | None = None) -> Finish:
    """What is left to do after MPI: divide, and copy back if MPI worked on a copy."""
    if divisor is None and source is target:
        return None

    def finish() -> None:
        if divisor is not None:
            np.divide(source, divisor, out=source)
        if source is not target:
            np.copyto(target, source, casting="unsafe")

    return finish
