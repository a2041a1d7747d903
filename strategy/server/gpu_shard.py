"""A variable whose values and slots lie on a GPU of its server.

The memory that workers read has a host copy of the values. It is written after each change, under
the same versions as variables on the host, so readers see no difference.

An optimizer updates a variable block by block. It uploads the gradient, updates values and slots on
the GPU, and downloads the new values to the host copy. The blocks take turns on the lanes of the
GPU, so the upload of a block overlaps the kernels and the downloads of earlier blocks. A plain rule
needs only the values. It changes the host copy, then uploads it: one transfer instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.gpu import Pinned, StagingStream
from strategy.rules import Kind, Rule, Update
from strategy.server.gpu import LANES, Gpu
from strategy.server.gpu_rows import Tables, rows_of
from strategy.server.shard import End, OwnedShard
from strategy.shared import gpu_kernels
from strategy.shared.push_message import in_blocks
from strategy.shared.shard import WIDE, Array, Bytes

_Begin = Callable[[Any, int, Array, Any], None]
"""Starts the update of at most a block of the values. Called with CuPy, the index of the first
element, the gradient on the host, and a pointer to the gradient on the GPU."""


class GpuShard(OwnedShard):
    """A shard on a GPU.

    Args:
        given: The arguments of :class:`OwnedShard`.
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
        """Update the whole variable once; see :meth:`OwnedShard.apply`.

        Raises:
            InternalError: CUDA failed.
        """
        with self._gpu.told():
            super().apply(name, rule, numbers, blocks)

    def slots_on_host(self) -> Mapping[str, Array]:
        """Return host copies of the slots; see :meth:`OwnedShard.slots_on_host`.

        Raises:
            InternalError: CUDA failed.
        """
        found = {}
        for key, slot in self.slots.items():
            self._check_room(key, slot.dtype)
            found[key], start = np.empty(slot.size, slot.dtype), 0
            with self._gpu.told():
                for piece in self._gpu.pieces_of(slot):
                    found[key][start : start + piece.size] = piece
                    start += piece.size
        return found

    def restore_slot(self, key: str, slices: Sequence[Array]) -> None:
        """See :meth:`OwnedShard.restore_slot`."""
        dtype = slices[0].dtype
        with self._gpu.told():
            if key not in self.slots:
                self.slots[key] = self._room_for(key, dtype)
            self._gpu.put_pieces(self.slots[key], in_blocks(slices, dtype))

    def _new_slot(self, key: str, initial: float, dtype: np.dtype[Any]) -> Array:
        slot = self._room_for(key, dtype)
        self._gpu.fill(slot, initial)
        return slot  # type: ignore[no-any-return]

    def _room_for(self, key: str, dtype: np.dtype[Any]) -> Any:
        return self._gpu.array(
            self.layout.size, dtype, f"slot {key!r} beside variable {self.name!r}"
        )

    def _wide_copy(self, name: str) -> Array:
        key = f"{name}/{WIDE}"
        if key not in self.slots:
            wide = np.dtype(np.float32)
            copy, size = self._room_for(key, wide), self.layout.size
            widen = self._gpu.kernel(gpu_kernels.convert_text(self.layout.dtype, wide))
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
            widen = self._gpu.kernel(gpu_kernels.convert_text(dtype, wide))
            narrow = self._gpu.kernel(gpu_kernels.convert_text(wide, dtype))

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

        def change() -> None:
            lane = self._gpu.lane()
            with lane.working(f"changing variable {self.name!r}"), lane.current():
                rule.apply(Update(param, gradient, slots, numbers))
                if self.layout.is_half:
                    text = gpu_kernels.convert_text(param.dtype, self.layout.dtype)
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
        """Update rows by a mean; see :meth:`OwnedShard.apply_mean_of_rows`.

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
        if rule.kind is not Kind.PLAIN:
            given = rows_of([(ids, rows)], self._width)
            return self._tables(name, rule).change(rule, numbers, given)
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
