"""Variables on the GPUs of a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.buffers.copying import put_rows, take_rows
from mpidist.gpu import Pinned, StagingStream
from strategy.protocol.layout import BLOCK_BYTES, WIDE, Bytes
from strategy.protocol.push_message import in_blocks
from strategy.protocol.rows import grouped
from strategy.rules import Array, Kind, Rule, Update
from strategy.server.gpu import LANES, Gpu, convert_text, merge_text, rows_text
from strategy.server.shard import End, Shard


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
        put = self.gpu.kernel(rows_text(self.dtype.itemsize, put=True))
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

    def _by_rule(self, rule: Rule, numbers: Sequence[float]) -> _BeginRows:
        """Return the function that gathers rows, starts their update, and scatters them back."""
        wide, tables = self.param.dtype, [self.param, *self.slots]
        merge = self.gpu.kernel(merge_text(self.dtype))
        take, put = (self.gpu.kernel(rows_text(wide.itemsize, put=way)) for way in (False, True))
        narrow = None
        if self.values is not self.param:
            narrow = self.gpu.kernel(convert_text(wide, self.dtype))
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
        return self.gpu.kernel(rows_text(self.dtype.itemsize, put))


_BeginRows = Callable[[Any, int, Sequence[int], np.generic, int], None]
"""Starts an update of rows. Called with CuPy, the number of elements, the addresses of row numbers,
starts and gradients, the divisor of the sums, and the address for the new rows."""


_Begin = Callable[[Any, int, Array, Any], None]
"""Starts the update of at most a block of the values. Called with CuPy, the index of the first
element, the gradient on the host, and a pointer to the gradient on the GPU."""


class GpuShard(Shard):
    """A shard on a GPU.

    Args:
        given: The arguments of :class:`Shard`.
        gpu: The GPU.
        values: Array on the GPU for the values; see :meth:`Gpu.array`.
        pinned: Handle that unpins the host copy; None if the host copy is not pinned.
    """

    _ahead = LANES - 1

    def __init__(self, *given: Any, gpu: Gpu, values: Any, pinned: Pinned | None) -> None:
        super().__init__(*given)
        self.gpu = gpu.number
        self._gpu = gpu
        self._values = values
        self._pinned = pinned
        self._copy = self.flat.view(np.uint8)

    def close(self) -> None:
        """Free the memory on the GPU and unpin the host copy. The GPU must be idle."""
        super().close()
        self._values = None
        if self._pinned is not None:
            self._pinned.close()

    def apply(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        """Update the whole variable once; see :meth:`Shard.apply`.

        Raises:
            InternalError: CUDA failed.
        """
        with self._gpu.told():
            super().apply(name, rule, numbers, blocks)

    def slots_on_host(self) -> Mapping[str, Array]:
        """Return host copies of the slots; see :meth:`Shard.slots_on_host`.

        Raises:
            InternalError: CUDA failed.
        """
        found = {}
        for key, slot in self.slots.items():
            self._check_room(key, slot.dtype, slot.size)
            found[key], start = np.empty(slot.size, slot.dtype), 0
            with self._gpu.told():
                for piece in self._gpu.pieces_of(slot):
                    found[key][start : start + piece.size] = piece
                    start += piece.size
        return found

    def restore_slot(self, key: str, slices: Sequence[Array]) -> None:
        """See :meth:`Shard.restore_slot`."""
        dtype, size = slices[0].dtype, sum([values.size for values in slices])
        with self._gpu.told():
            if key not in self.slots or self.slots[key].size != size:
                self.slots[key] = self._room_for(key, dtype, size)
            self._gpu.put_pieces(self.slots[key], in_blocks(slices, dtype))

    def _new_slot(self, key: str, initial: float, dtype: np.dtype[Any], size: int) -> Array:
        slot = self._room_for(key, dtype, size)
        self._gpu.fill(slot, initial)
        return slot  # type: ignore[no-any-return]

    def _room_for(self, key: str, dtype: np.dtype[Any], size: int) -> Any:
        return self._gpu.array(size, dtype, f"slot {key!r} beside variable {self.name!r}")

    def _wide_copy(self, name: str) -> Array:
        key = f"{name}/{WIDE}"
        if key not in self.slots:
            wide = np.dtype(np.float32)
            size = self.layout.size
            copy = self._room_for(key, wide, size)
            widen = self._gpu.kernel(convert_text(self.layout.dtype, wide))
            lane = self._gpu.lane()
            with lane.working("widening halves"), lane.current():
                widen(size, self._values.data.ptr, copy.data.ptr)
            lane.finish()
            self.slots[key] = copy
        return self.slots[key]

    def _updater(
        self, name: str, rule: Rule, numbers: Sequence[float]
    ) -> Callable[[int, Array], End | None]:
        if rule.kind is Kind.PLAIN:
            return self._upwards(super()._updater(name, rule, numbers))
        begin = self._by_rule(name, rule, numbers)
        here, itemsize = self._values.data.ptr, self.layout.dtype.itemsize

        def update(start: int, gradient: Array) -> End:
            lane = self._gpu.lane()
            first, nbytes = start * itemsize, gradient.size * itemsize
            target = self._copy[first : first + nbytes]
            with lane.working(f"changing variable {self.name!r}") as package, lane.current():
                grad = lane.place(gradient)[0]
                try:
                    begin(package, start, gradient, grad)
                except Exception:  # a user's function may have changed values before it failed
                    self._bring_down(lane, here + first, target)()
                    raise
                return self._bring_down(lane, here + first, target)

        return update

    def _bring_down(self, lane: StagingStream, address: int, target: Bytes) -> End:
        """Start to download values to the host copy. Return the function that waits for the end."""
        if self._pinned is not None:
            lane.download(address, target)
            return lane.finish
        lane.fetch(address, target.nbytes)
        return lambda: np.copyto(target, lane.finish())

    def _upwards(self, change: Callable[[int, Array], End | None]) -> Callable[[int, Array], End]:
        """Return the function that changes a block of the host copy and starts to upload it."""
        here, itemsize = self._values.data.ptr, self.layout.dtype.itemsize

        def update(start: int, gradient: Array) -> End:
            change(start, gradient)
            lane, first = self._gpu.lane(), start * itemsize
            with lane.working(f"bringing variable {self.name!r} up"):
                source = self._copy[first : first + gradient.size * itemsize]
                lane.upload(here + first, source, pinned=self._pinned is not None)
            return lane.finish

        return update

    def _by_rule(self, name: str, rule: Rule, numbers: Sequence[float]) -> _Begin:
        """Return the function that starts the update of a block on CuPy arrays."""
        param, slots = self._arrays(name, rule, self._values)
        dtype, wide = self.layout.dtype, param.dtype
        if self.layout.is_half:
            widen = self._gpu.kernel(convert_text(dtype, wide))
            narrow = self._gpu.kernel(convert_text(wide, dtype))

        def begin(package: Any, start: int, gradient: Array, grad: Any) -> None:
            size = gradient.size
            here = slice(start, start + size)
            if gradient.dtype == wide:
                given = package.ndarray((size,), wide, grad)
            else:
                given = package.empty(size, wide)
                widen(size, grad.ptr, given.data.ptr)
            parts = [slot[here] for slot in slots]
            try:
                rule.apply(Update(param[here], given, parts, numbers))
            finally:  # readers must see values that changed before an error
                if self.layout.is_half:
                    narrow(size, _address(param, start), _address(self._values, start))

        return begin

    def _whole_changer(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> Callable[[], None]:
        param, slots = self._arrays(name, rule, self._values)
        size = self.layout.size
        gradient = self._gpu.array(size, param.dtype, f"the gradient of variable {self.name!r}")
        self._gpu.put_pieces(gradient, (block.astype(param.dtype) for block in blocks))
        arrays = self._in_shapes(rule, param, gradient, slots)

        def change() -> None:
            if not size:
                return
            lane = self._gpu.lane()
            with lane.working(f"changing variable {self.name!r}"), lane.current():
                rule.apply(Update(*arrays, numbers))
                if self.layout.is_half:
                    text = convert_text(param.dtype, self.layout.dtype)
                    self._gpu.kernel(text)(size, _address(param, 0), _address(self._values, 0))
            lane.finish()
            start = 0
            for piece in self._gpu.pieces_of(self._values):
                self._copy[start : start + piece.nbytes] = piece.view(np.uint8)
                start += piece.nbytes

        return change

    def _change_at_once(self, name: str, changer: Callable[[], Callable[[], None]]) -> None:
        with self._gpu.told():
            super()._change_at_once(name, changer)

    def apply_mean_of_rows(
        self,
        name: str,
        rule: Rule,
        numbers: Sequence[float],
        each: Sequence[tuple[Array, Array]],
    ) -> None:
        """Update rows by a mean; see :meth:`Shard.apply_mean_of_rows`.

        For optimizers, the GPU adds up the gradients.
        """
        if rule.kind is Kind.PLAIN:
            super().apply_mean_of_rows(name, rule, numbers, each)
            return
        for ids, _ in each:
            self.check_rows(ids)
        given = rows_of(each, self._width)
        self._change_at_once(name, lambda: self._tables(name, rule).change(rule, numbers, given))

    def _row_changer(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> Callable[[], None]:
        change = super()._row_changer(name, rule, numbers, ids, rows)
        bring_up = self._tables_with(self._values, ()).bringing_up(ids)

        def change_here_and_there() -> None:
            change()
            bring_up()

        return change_here_and_there

    @property
    def _width(self) -> int:
        return self.layout.size // max(len(self.data), 1)

    def _tables(self, name: str, rule: Rule) -> Tables:
        return self._tables_with(*self._arrays(name, rule, self._values))

    def _tables_with(self, param: Any, slots: Sequence[Any]) -> Tables:
        values = self._values
        copy = self._copy.view(values.dtype).reshape(len(self.data), self._width)
        kept = (values, param, slots, copy)
        return Tables(self._gpu, self.layout.dtype, self._width, *kept)


def _address(array: Any, start: int) -> int:
    return int(array.data.ptr) + start * int(array.itemsize)
