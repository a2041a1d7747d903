"""Reductions, and the arrays that MPI can reduce."""

from __future__ import annotations

import enum
from operator import index
from typing import Any, Literal, cast

import numpy as np

from mpidist.buffers.host_view import Array, check_array, host_view
from mpidist.buffers.packing import NATIVE, OnComplete, copy_back, is_mpi_array, with_upload
from mpidist.errors import did_you_mean
from mpidist.gpu import HostStaging, lies_on_gpu

# Dtypes that MPI cannot reduce, or only imprecisely, and the dtype to reduce in.
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
_WIDER = dict.fromkeys(
    ("float16", "bfloat16", *(f"float8_{kind}" for kind in _FLOAT8)), np.dtype(np.float32)
)


class ReduceOp(enum.IntEnum):
    """A reduction over ranks; the names of torch.distributed, and MEAN for AVG.

    Arguments also take the name as a string: ``"sum"``. ``ReduceOp.PREMUL_SUM(factor)`` is the sum
    of each rank's values times that rank's factor.
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
    PREMUL_SUM = 8

    def __call__(self, factor: float | Array) -> PremulSum:
        """Return PREMUL_SUM with a factor.

        Args:
            factor: A number, or an array that broadcasts against the reduced arrays. Each rank may
                have its own.

        Raises:
            TypeError: The reduction takes no factor.
        """
        if self is not ReduceOp.PREMUL_SUM:
            raise TypeError(f"{self.name} takes no factor; PREMUL_SUM does")
        return PremulSum(factor)

    @classmethod
    def of(cls, op: Reduction | str) -> Reduction:
        """Return the reduction for a member, or for a name in upper or lower case.

        Raises:
            ValueError: The name is unknown.
        """
        if isinstance(op, (cls, PremulSum)):
            return op
        try:
            # Members of TensorFlow's enum have the same names.
            return NAMED[str(getattr(op, "name", op)).upper()]
        except KeyError:
            known, hint = ", ".join(cls.__members__), did_you_mean(op, cls.__members__)
            raise ValueError(
                f"unknown reduction {op!r}{hint}; the known ones are {known}"
            ) from None


NAMED = {
    spelling: member
    for name, member in ReduceOp.__members__.items()
    for spelling in (name, name.lower())
}
"""The reductions by name. A look-up enters no Python frame, unlike ``ReduceOp.of``."""


class WrappingSum(enum.IntEnum):
    """The sum of 8- and 16-bit integers modulo 2^n, as in NumPy.

    MPI_SUM cannot be used, because Open MPI's vectorized sum saturates. Error messages call this
    reduction SUM. Its value is the index after the last ReduceOp in the list of MPI_Ops.
    """

    SUM = len(ReduceOp)


class PremulSum:
    """A sum of values that are multiplied first; made by ``ReduceOp.PREMUL_SUM(factor)``.

    Args:
        factor: The factor of this rank.
    """

    def __init__(self, factor: float | Array) -> None:
        self.factor = factor

    def __index__(self) -> int:
        return int(ReduceOp.PREMUL_SUM)

    @property
    def name(self) -> str:
        """The name of the reduction."""
        return "PREMUL_SUM"

    def times(self, values: Array) -> Array:
        """Return the values times the factor as a new array of their dtype."""
        factor = host_view(self.factor) if lies_on_gpu(self.factor) else self.factor
        return np.multiply(values, factor, out=np.empty_like(values), casting="same_kind")

    def __repr__(self) -> str:
        return f"ReduceOp.PREMUL_SUM({self.factor!r})"


Reduction = ReduceOp | PremulSum
"""A reduction, with the factor of a PREMUL_SUM."""

ReductionName = Literal[
    "sum", "avg", "mean", "product", "min", "max", "band", "bor", "bxor", "premul_sum",
    "SUM", "AVG", "MEAN", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM",
]  # fmt: skip
"""The names of the reductions, as ``op`` arguments take them."""

ReduceOpLike = Reduction | ReductionName
"""The type of ``op`` arguments."""

MpiReduction = ReduceOp | WrappingSum
"""The indices of the MPI_Ops: every ReduceOp, and the user-defined wrapping sum."""

_INTEGER = frozenset(np.dtype(char).type for char in "bBhHiIlLqQ")
_REAL = _INTEGER | {np.float32, np.float64, np.longdouble}
# See WrappingSum.
_SMALL_INTEGERS = frozenset((np.int8, np.uint8, np.int16, np.uint16))
# Element types that MPI reduces by a predefined operation, by operation.
_NONE: frozenset[type] = frozenset()
_NUMBERS = NATIVE | {np.clongdouble}
_SUMMED = _NUMBERS - _SMALL_INTEGERS
_DIRECT = (_SUMMED, _NONE, _NUMBERS, _REAL, _REAL, _INTEGER, _INTEGER, _INTEGER, _NONE)
# bool arrays reduce by logic: SUM is "any", PRODUCT is "all".
_LOGICAL = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}


def is_direct(dtype: np.dtype[Any], op: Reduction | str) -> bool:
    """Return whether a predefined MPI_Op reduces a dtype. The dtype must have native byte order."""
    return op.__class__ is ReduceOp and dtype.type in _DIRECT[op]


def to_reduce(
    array: Any, op: Reduction | str, count: int, *, write: bool = True
) -> tuple[Array, MpiReduction, OnComplete]:
    """Return a contiguous array to pass to MPI for an array that is reduced in place.

    Args:
        array: Numbers or bools of any strides, see :func:`host_view`.
        op: The reduction or its name.
        count: The number of ranks, for AVG.
        write: Whether the array receives the result.

    Returns:
        The array for MPI, the reduction for MPI, and a function to call when the operation has
        ended, or None.

    Raises:
        TypeError: The reduction does not take the dtype.
        ValueError: The reduction is unknown, PREMUL_SUM has no factor, or the array receives a
            result but is read-only or has elements that share memory.
    """
    if type(op) is str:
        op = NAMED.get(op, op)
    if op.__class__ is not ReduceOp:
        op = ReduceOp.of(op)
    view = array if array.__class__ is np.ndarray else host_view(array)
    if view.__class__ is np.ndarray and op.__class__ is ReduceOp:
        flags, dtype = view.flags, view.dtype
        if (
            flags.carray or (not write and flags.c_contiguous and flags.aligned)
        ) and dtype.isnative:
            if dtype.type in _DIRECT[op]:
                return view, op, None
            if op is ReduceOp.SUM and dtype.type in _SMALL_INTEGERS:
                return view, WrappingSum.SUM, None
    check_array(view, write)
    if view.__class__ is HostStaging and view.dtype.isnative and is_direct(view.dtype, op):
        # Staging memory is contiguous and aligned.
        return np.asarray(view), cast("ReduceOp", op), with_upload(view) if write else None
    dtype = _reducing_dtype(view.dtype, op)
    memory = np.asarray(view)
    direct = np.require(memory, dtype, ("C", "A"))
    if isinstance(op, PremulSum):
        direct, op = op.times(direct), ReduceOp.PREMUL_SUM
    divisor = count if op is ReduceOp.AVG else None
    on_complete = with_upload(view, copy_back(memory, direct, divisor)) if write else None
    return _as_numbers(direct), _mpi_reduction(op, dtype), on_complete


def to_reduce_into(
    source: Array, target: Array, op: Reduction | str, count: int
) -> tuple[Array, Array, MpiReduction, OnComplete]:
    """Return contiguous arrays for a reduction that reads one array and writes another.

    Args:
        source: Numbers or bools of any strides.
        target: A writable array of the same dtype.
        op: The reduction or its name.
        count: The number of ranks, for AVG.

    Returns:
        The arrays to read and to write, the reduction for MPI, and a function to call when the
        operation has ended, or None.

    Raises:
        TypeError: The reduction does not take the dtype.
        ValueError: The reduction is unknown, PREMUL_SUM has no factor, or the target is read-only,
            has another dtype or has elements that share memory.
    """
    op = ReduceOp.of(op)
    dtype = source.dtype
    if (
        dtype is target.dtype
        and dtype.type in _DIRECT[op]
        and is_mpi_array(source)
        and is_mpi_array(target)
        and target.flags.writeable
    ):
        return source, target, cast("ReduceOp", op), None
    check_array(target, write=True)
    if dtype != target.dtype:
        raise ValueError(f"a reduction of {dtype} cannot write into {target.dtype}")
    divisor = count if op is ReduceOp.AVG else None
    send, mpi_op, _ = to_reduce(source, op, count, write=False)
    recv = result = _as_numbers(target)
    if recv.dtype != send.dtype or not recv.flags.carray:
        recv, result = np.empty(target.shape, send.dtype), target
    return send, recv, mpi_op, with_upload(target, copy_back(result, recv, divisor))


def _as_numbers(array: Array) -> Array:
    return array.view(np.uint8) if array.dtype == np.bool_ else array


def _mpi_reduction(op: ReduceOp, dtype: np.dtype[Any]) -> MpiReduction:
    """Return the reduction of MPI for a ReduceOp and a dtype.

    AVG and PREMUL_SUM are sums for MPI. They keep their names, since ranks compare their calls.
    """
    if dtype == np.bool_:
        return _LOGICAL.get(op, op)
    return WrappingSum.SUM if op is ReduceOp.SUM and dtype.type in _SMALL_INTEGERS else op


def _reducing_dtype(dtype: np.dtype[Any], reduction: Reduction) -> np.dtype[Any]:
    """Return the dtype in which numbers are reduced.

    Raises:
        TypeError: The reduction does not take the dtype.
        ValueError: PREMUL_SUM has no factor.
    """
    if reduction is ReduceOp.PREMUL_SUM:
        raise ValueError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(0.5)")
    op = ReduceOp(index(reduction))
    bitwise = op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    name = dtype.name
    if name in _WIDER:
        possible = not bitwise
    elif dtype.kind == "b" or dtype.kind in "iu":
        possible = op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    elif dtype.kind == "f":
        possible = not bitwise
    elif dtype.kind == "c":
        possible = op in (
            ReduceOp.SUM,
            ReduceOp.AVG,
            ReduceOp.PRODUCT,
            ReduceOp.PREMUL_SUM,
        )
    else:
        possible = False
    if not possible:
        hint = ""
        if dtype.kind in "USO":
            hint = "; all_gather_object exchanges text and other objects"
        elif op is ReduceOp.AVG:
            hint = "; reduce with SUM and divide, or convert to a floating dtype"
        raise TypeError(f"arrays of dtype {name} cannot be reduced with {op.name}{hint}")
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    return _WIDER.get(native.name, native)
