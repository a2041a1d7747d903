"""Copies by non-temporal stores, and of rows, compiled by numba; extra ``fast``."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mpidist.buffers.compiling import compiled, compiled_fence

_LINE = 64  # bytes of a cache line
_AHEAD = 16  # rows to prefetch; measured with rows of 256 bytes: 4 are too few, 32 no better
_BYTES_AHEAD = 4096  # hardware prefetchers stop at page boundaries


def _copy_line_code(typing_context: Any, target: Any, source: Any) -> Any:
    """Generate code that copies a cache line to an aligned address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), _LINE)
        to, whence = (builder.inttoptr(address, line.as_pointer()) for address in arguments)
        store = builder.store(builder.load(whence, align=1), to, align=_LINE)
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), code


def _prefetch_code(typing_context: Any, address: Any) -> Any:
    """Generate code that prefetches the cache line of an address; a wrong one does no harm."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        function = declare(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.uintp), code


_copy_line: Any = intrinsic(_copy_line_code)
# Non-temporal stores are not ordered, so later stores must not overtake them.
_fence: Any = compiled_fence()
_prefetch: Any = intrinsic(_prefetch_code)


@compiled
def _copy_lines(to: Any, whence: Any, nbytes: Any) -> None:
    for offset in range(0, nbytes, _LINE):
        _prefetch(whence + np.uintp(offset + _BYTES_AHEAD))
        _copy_line(to + np.uintp(offset), whence + np.uintp(offset))
    _fence()


@compiled
def _take_rows(table: Any, first: Any, ids: Any, out: Any) -> None:
    width = table.shape[1]
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            row = first + np.uintp(ids[i + _AHEAD] * width)
            for offset in range(0, width, _LINE):
                _prefetch(row + np.uintp(offset))
        found = table[ids[i]]
        for k in range(width):
            out[i, k] = found[k]


@compiled
def _put_rows(table: Any, ids: Any, rows: Any) -> None:
    for i in range(ids.size):
        place = table[ids[i]]
        for k in range(rows.shape[1]):
            place[k] = rows[i, k]


def copy_past_caches(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array by non-temporal stores.

    An ordinary copy reads each target line before it writes it, and evicts other data from the
    caches (Intel 64 and IA-32 Architectures Optimization Reference Manual, non-temporal stores).

    Args:
        target: C-contiguous.
        source: C-contiguous, of the same shape and dtype, not overlapping.
    """
    to, whence = (array.reshape(-1).view(np.uint8) for array in (target, source))
    begin = min(-to.ctypes.data % _LINE, to.size)
    end = begin + (to.size - begin) // _LINE * _LINE
    to[:begin] = whence[:begin]
    first, source_of_first = np.uintp(to.ctypes.data + begin), np.uintp(whence.ctypes.data + begin)
    _copy_lines(first, source_of_first, end - begin)
    to[end:] = whence[end:]


def take_ahead(table: NDArray[Any], ids: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy rows out of a table and prefetch later rows meanwhile.

    Rows in random order would arrive from memory one after the other. Prefetching keeps many loads
    under way (Chen et al., "Improving hash join performance through prefetching", ACM TODS 32,
    2007).

    Args:
        table: C-contiguous, shape ``(rows, ...)``, not empty.
        ids: Indices of the rows, each within the table.
        out: C-contiguous, shape ``(len(ids), ...)``, of the dtype of the table, not empty.
    """
    rows, to = _as_rows(table), _as_rows(out)
    _take_rows(rows, np.uintp(rows.ctypes.data), ids, to)


def put_compiled(table: NDArray[Any], ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
    """Copy rows into a table.

    Args:
        table: C-contiguous, shape ``(n, ...)``, not empty.
        ids: Indices of the rows, each within the table.
        rows: C-contiguous, shape ``(len(ids), ...)``, of the dtype of the table, not empty.
    """
    _put_rows(_as_rows(table), ids, _as_rows(rows))


def _as_rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8).reshape(len(array), -1)
