"""Changes of rows of a variable on a GPU: piece by piece, each of which goes up and comes down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.buffers.copying import put_rows, take_rows
from mpidist.gpu import StagingStream
from strategy.rules.rule import Array, Rule, Update
from strategy.server.gpu import LANES, Gpu
from strategy.shared import gpu_kernels
from strategy.shared.rows import grouped
from strategy.shared.shard import BLOCK_BYTES


@dataclass(frozen=True)
class GivenRows:
    """What one worker or several give for rows of a variable.

    Attributes:
        ids: Numbers of the rows, each once.
        starts: Where what is for each begins among ``rows``; one more than there are numbers.
        rows: Shape ``(n, width)``; like ones in the order of the workers.
        order: In which ``rows`` are meant; None: as they are.
        divisor: What the sums are divided by.
    """

    ids: Array
    starts: Array
    rows: Array
    order: Array | None = None
    divisor: int = 1

    def pieces(self) -> Iterator[tuple[Array, Array, Array]]:
        """Local. Numbers, starts and rows of one piece after the other, of about a block."""
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
    """Local. What workers give, of each numbers of rows, each once, and what is for them, flat."""
    if len(each) == 1:
        ((ids, rows),) = each
        return GivenRows(ids, np.arange(len(ids) + 1), rows.reshape(len(ids), width))
    ids, order, starts = grouped(np.concatenate([ids for ids, _ in each]))
    together = np.concatenate([rows.reshape(len(own), width) for own, rows in each])
    return GivenRows(ids, starts, together, order, len(each))


@dataclass(frozen=True)
class Tables:
    """A variable on a GPU, as its rows are changed.

    Attributes:
        gpu: On which.
        dtype: The variable's.
        width: Elements of a row.
        values: The values, in the variable's dtype.
        param: What is changed: these, or of a half those in float32.
        slots: What is kept beside it.
        copy: The values in the memory that workers see, shape ``(n, width)``, as bits of halves.
    """

    gpu: Gpu
    dtype: np.dtype[Any]
    width: int
    values: Any
    param: Any
    slots: Sequence[Any]
    copy: Array

    def change(self, rule: Rule, numbers: Sequence[float], given: GivenRows) -> Callable[[], None]:
        """Local. What changes rows by an optimizer, there and in the copy; all is compiled.

        Args:
            rule: The optimizer's.
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
            finally:  # what has been changed there is to be seen
                while under_way:
                    self._put_down(*under_way.popleft())

        return change

    def bringing_up(self, ids: Array) -> Callable[[], None]:
        """Local. What puts rows of the copy, once they are changed, in their places on the GPU.

        All that it needs is there when this returns: it is too late for that once they are changed.
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
        """Return the function that starts an update of rows, which are taken out and put back."""
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
"""Begins to change rows: given the package, how many elements, addresses of the rows' numbers, of
where what is for each begins and of that, what the sums are divided by, and where new rows go."""
