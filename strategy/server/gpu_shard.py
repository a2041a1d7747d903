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
from strategy.rules import Array, Kind, Rule, Update
from strategy.server.gpu import LANES, Gpu, convert_text, rows_text
from strategy.server.shard import End, Shard


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

    def change(
        self, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> Callable[[], None]:
        """Return the function that updates rows by an optimizer on the GPU and in the host copy.

        The kernels that move rows are compiled when this method returns.

        Args:
            rule: The update rule.
            numbers: The numbers of this step.
            ids: Unique row numbers.
            rows: The gradients of the rows, flat, in the dtype of the variable or of ``param``.
        """
        begin = self._by_rule(rule, numbers, rows.dtype)

        def change() -> None:
            under_way: deque[tuple[StagingStream, Array]] = deque()
            try:
                for here in self._pieces(ids, rows.itemsize):
                    own, size = ids[here], len(ids[here]) * self.width
                    grad = rows[here.start * self.width : here.start * self.width + size]
                    lane, room = self.gpu.lane(), size * self.dtype.itemsize
                    with lane.working("changing rows") as package, lane.current():
                        numbers, given, changed = lane.place(own, grad, room=room)
                        begin(package, size, numbers.ptr, given, changed.ptr)
                        lane.fetch(changed.ptr, room)
                    under_way.append((lane, own))
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
        pieces = [ids[here] for here in self._pieces(ids, self.copy.itemsize)]
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

    def _pieces(self, ids: Array, itemsize: int) -> Iterator[slice]:
        """Divide row numbers into pieces whose rows fill about one block."""
        length = max(BLOCK_BYTES // max(self.width * itemsize, 1), 1)
        for start in range(0, len(ids), length):
            yield slice(start, start + length)

    def _put_down(self, lane: StagingStream, ids: Array) -> None:
        changed = lane.finish().view(self.copy.dtype)
        put_rows(self.copy, ids, changed.reshape(len(ids), self.width))

    def _by_rule(self, rule: Rule, numbers: Sequence[float], given: np.dtype[Any]) -> _BeginRows:
        """Return the function that gathers rows, starts their update, and scatters them back."""
        wide, tables = self.param.dtype, [self.param, *self.slots]
        widen = None if given == wide else self.gpu.kernel(convert_text(given, wide))
        take, put = (self.gpu.kernel(rows_text(wide.itemsize, put=way)) for way in (False, True))
        narrow = None
        if self.values is not self.param:
            narrow = self.gpu.kernel(convert_text(wide, self.dtype))
        put_values = self.gpu.kernel(rows_text(self.dtype.itemsize, put=True))

        def begin(package: Any, size: int, ids: int, rows: Any, changed: int) -> None:
            taken = [package.empty(size, wide) for _ in tables]
            if widen is None:
                grad = package.ndarray((size,), wide, rows)
            else:
                grad = package.empty(size, wide)
                widen(size, rows.ptr, grad.data.ptr)
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


_BeginRows = Callable[[Any, int, int, Any, int], None]
"""Starts an update of rows. Called with CuPy, the number of elements, the address of the row
numbers, a pointer to the gradients, and the address for the new rows."""


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

    def _row_changer(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> Callable[[], None]:
        if rule.kind is not Kind.PLAIN:
            tables = self._tables(*self._arrays(name, rule, self._values))
            return tables.change(rule, numbers, ids, rows)
        change = super()._row_changer(name, rule, numbers, ids, rows)
        bring_up = self._tables(self._values, ()).bringing_up(ids)

        def change_here_and_there() -> None:
            change()
            bring_up()

        return change_here_and_there

    def _tables(self, param: Any, slots: Sequence[Any]) -> Tables:
        values, width = self._values, self.layout.size // max(len(self.data), 1)
        copy = self._copy.view(values.dtype).reshape(len(self.data), width)
        return Tables(self._gpu, self.layout.dtype, width, values, param, slots, copy)


def _address(array: Any, start: int) -> int:
    return int(array.data.ptr) + start * int(array.itemsize)
