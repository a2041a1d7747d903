"""Changes of rows of a variable on a GPU, in pieces of about one block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.buffers.copying import put_rows, take_rows
from mpidist.gpu import StagingStream
from strategy.rules import Array, Rule, Update
from strategy.server.gpu import LANES, Gpu
from strategy.shared import gpu_kernels
from strategy.shared.rows import grouped
from strategy.shared.shard import BLOCK_BYTES


@dataclass(frozen=True)
class GivenRows:
    """Gradients of rows of a variable, by one worker or several.

    Attributes:
        ids: Unique row numbers.
        starts: Index of the first gradient of each row number among the ordered ``rows``. The
            last element is the number of gradients.
        rows: The gradients, shape ``(n, width)``, in the order of the workers.
        order: Indices that sort ``rows`` by row number, stably. None if ``rows`` is sorted.
        divisor: The number by which the sum of the gradients of each row is divided.
    """

    ids: Array
    starts: Array
    rows: Array
    order: Array | None = None
    divisor: int = 1

    def pieces(self) -> Iterator[tuple[Array, Array, Array]]:
        """Yield row numbers, starts and gradients of pieces of about one block.

        The starts of a piece count from its first gradient.
        """
        limit = max(BLOCK_BYTES // max(self.rows[:1].nbytes, 1), 1)
        begin = 0
        while begin < len(self.ids):
            first = self.starts[begin]
            end = int(np.searchsorted(self.starts, first + limit, "right")) - 1
            end = max(end, begin + 1)
            here: Any = slice(first, self.starts[end])
            if self.order is not None:
                here = self.order[here]
            yield self.ids[begin:end], self.starts[begin : end + 1] - first, self.rows[here]
            begin = end


def rows_of(each: Sequence[tuple[Array, Array]], width: int) -> GivenRows:
    """Join the gradients of several workers.

    Args:
        each: Unique row numbers and flat gradients of each worker.
        width: Number of elements of a row.
    """
    if len(each) == 1:
        ((ids, rows),) = each
        return GivenRows(ids, np.arange(len(ids) + 1), rows.reshape(len(ids), width))
    ids, order, starts = grouped(np.concatenate([ids for ids, _ in each]))
    together = np.concatenate([rows.reshape(len(own), width) for own, rows in each])
    return GivenRows(ids, starts, together, order, len(each))


@dataclass(frozen=True)
class Tables:
    """The arrays of a variable on a GPU, for changes of its rows.

    Attributes:
        gpu: The GPU.
        dtype: Dtype of the variable.
        width: Number of elements of a row.
        values: The values; halves as their bits.
        param: The array that the rule updates: ``values``, or the float32 copy of halves.
        slots: The optimizer slots.
        copy: The values in the memory that workers read, shape ``(n, width)``; halves as their
            bits.
    """

    gpu: Gpu
    dtype: np.dtype[Any]
    width: int
    values: Any
    param: Any
    slots: Sequence[Any]
    copy: Array

    def change(self, rule: Rule, numbers: Sequence[float], given: GivenRows) -> Callable[[], None]:
        """Return the function that updates rows by an optimizer on the GPU and in the host copy.

        The kernels that move rows are compiled when this method returns.

        Args:
            rule: The update rule.
            numbers: The numbers of this step.
            given: The gradients.
        """
        divisor = self.param.dtype.type(given.divisor)
        begin = self._by_rule(rule, numbers)

        def change() -> None:
            under_way: deque[tuple[StagingStream, Array]] = deque()
            try:
                for ids, starts, rows in given.pieces():
                    lane, room = self.gpu.lane(), len(ids) * self.width * self.dtype.itemsize
                    with lane.working("changing rows") as package, lane.current():
                        *places, changed = lane.place(ids, starts, rows, room=room)
                        size = len(ids) * self.width
                        begin(package, size, [place.ptr for place in places], divisor, changed.ptr)
                        lane.fetch(changed.ptr, room)
                    under_way.append((lane, ids))
                    if len(under_way) == LANES:
                        self._put_down(*under_way.popleft())
            finally:  # workers must see rows changed before an error
                while under_way:
                    self._put_down(*under_way.popleft())

        return change

    def bringing_up(self, ids: Array) -> Callable[[], None]:
        """Return the function that uploads rows of the host copy after they have changed.

        The kernel and the device memory are ready when this method returns. If they were missing
        after the change, the GPU would keep the old rows.
        """
        put = self.gpu.kernel(gpu_kernels.rows_text(self.dtype.itemsize, put=True))
        pieces = [one for one, *_ in GivenRows(ids, np.arange(len(ids) + 1), self.copy).pieces()]
        longest = max(map(len, pieces), default=0)
        self.gpu.reserve(np.empty(longest, ids.dtype), self.copy[:longest])

        def bring_up() -> None:
            for here in pieces:
                rows = np.empty((len(here), self.width), self.copy.dtype)
                take_rows(self.copy, here, rows)
                lane = self.gpu.lane()
                with lane.working("bringing rows up"), lane.current():
                    places, source = (place.ptr for place in lane.place(here, rows)[:2])
                    put(rows.size, self.width, places, self.values.data.ptr, source)
            self.gpu.settle()

        return bring_up

    def _put_down(self, lane: StagingStream, ids: Array) -> None:
        changed = lane.finish().view(self.copy.dtype)
        put_rows(self.copy, ids, changed.reshape(len(ids), self.width))

    def _by_rule(self, rule: Rule, numbers: Sequence[float]) -> _Begin:
        """Return the function that gathers rows, starts their update, and scatters them back."""
        wide, tables = self.param.dtype, [self.param, *self.slots]
        merge = self.gpu.kernel(gpu_kernels.merge_text(self.dtype))
        take, put = (
            self.gpu.kernel(gpu_kernels.rows_text(wide.itemsize, put=way)) for way in (False, True)
        )
        narrow = None
        if self.values is not self.param:
            narrow = self.gpu.kernel(gpu_kernels.convert_text(wide, self.dtype))
        put_values = self._kernel(put=True)

        def begin(
            package: Any, size: int, places: Sequence[int], divisor: np.generic, changed: int
        ) -> None:
            ids, starts, rows = places
            grad, *taken = [package.empty(size, wide) for _ in range(1 + len(tables))]
            merge(size, self.width, ids, starts, divisor, rows, grad.data.ptr)
            for table, part in zip(tables, taken, strict=True):
                take(size, self.width, ids, table.data.ptr, part.data.ptr)
            rule.apply(Update(taken[0], grad, taken[1:], numbers))
            for table, part in zip(tables, taken, strict=True):
                put(size, self.width, ids, table.data.ptr, part.data.ptr)
            if narrow is None:
                take(size, self.width, ids, self.param.data.ptr, changed)
            else:
                narrow(size, taken[0].data.ptr, changed)
                put_values(size, self.width, ids, self.values.data.ptr, changed)

        return begin

    def _kernel(self, *, put: bool) -> Any:
        return self.gpu.kernel(gpu_kernels.rows_text(self.dtype.itemsize, put))


_Begin = Callable[[Any, int, Sequence[int], np.generic, int], None]
"""Starts an update of rows. Called with CuPy, the number of elements, the addresses of row numbers,
starts and gradients, the divisor of the sums, and the address for the new rows."""
