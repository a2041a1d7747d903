"""Variables on the GPUs of a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpidist import errors
from mpidist.buffers.copying import put_rows, take_rows
from mpidist.gpu import pin
from strategy.protocol.layout import WIDE
from strategy.protocol.push_message import in_blocks
from strategy.rules import Array, Kind, Rule, Update
from strategy.server.gpu import Gpu
from strategy.server.memory import paged_bytes
from strategy.server.shard import Shard


class GpuShard(Shard):
    """A shard on a GPU.

    Optimizers change the values and the slots on the GPU, and the new values are downloaded to the
    host copy, which workers and checkpoints read. Plain rules change the host copy, which is
    uploaded before the next change by an optimizer.

    Args:
        given: The arguments of :class:`Shard`. The values in ``memory`` have whole pages of their
            own, see :func:`paged_bytes`.
        gpu: The GPU.
        values: Flat array on the GPU for the values, in the dtype in which optimizers change them.
    """

    def __init__(self, *given: Any, gpu: Gpu, values: Any) -> None:
        super().__init__(*given)
        self.gpu = gpu.number
        self._gpu = gpu
        self._values = values
        self._stale = True  # whether the values of the host copy are newer
        self._pinned = None
        if self.layout.size:
            _, memory, _, _, data, *_ = given
            end = data + paged_bytes(self.layout.data_bytes) - paged_bytes(0)
            self._pinned = pin(memory[data:end], gpu.number)

    def close(self) -> None:
        """Free the memory on the GPU, and unpin the host copy."""
        super().close()
        self._values = None
        if self._pinned is not None:
            self._pinned.close()

    def apply(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        """Update the whole variable once; see :meth:`Shard.apply`.

        The versions of all blocks are odd during a change by an optimizer.

        Raises:
            ResourceExhaustedError: The GPU has no memory.
            InternalError: CUDA failed.
        """
        if rule.kind is Kind.PLAIN:
            self._stale = True  # before the change, which may end in an error
        if rule.kind in (Kind.PLAIN, Kind.WHOLE):
            super().apply(name, rule, numbers, blocks)
            return
        param, slots = self._arrays_on_gpu(name, rule)
        start = 0
        with self._gpu.working(f"changing variable {self.name!r}"), self._changing(name):
            try:
                for block in blocks:
                    here = slice(start, start + block.size)
                    grad, parts = self._gpu.up(block, param.dtype), [slot[here] for slot in slots]
                    self._update(rule, Update(param[here], grad, parts, numbers), self.flat[here])
                    start = here.stop
            finally:
                self._gpu.wait()

    def _apply_whole(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        param, slots = self._arrays_on_gpu(name, rule)
        with self._gpu.working(f"changing variable {self.name!r}"):
            owner = f"the gradient of variable {self.name!r}"
            gradient = self._gpu.array(param.size, param.dtype, owner)
            self._gpu.fill(gradient, blocks)
            update = Update(*self._in_shapes(rule, param, gradient, slots), numbers)
            with self._changing(name):
                try:
                    if param.size:
                        self._update(rule, update, self.flat)
                finally:
                    self._gpu.wait()

    def _update(self, rule: Rule, update: Update, target: Array) -> None:
        try:
            rule.apply(update)
        finally:  # readers must see values that changed before an error
            self._gpu.down(update.param, target)

    def _apply_rows(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> None:
        if rule.kind is Kind.PLAIN:
            stale, self._stale = self._stale, True
            super()._apply_rows(name, rule, numbers, ids, rows)
            if not stale and not self.layout.is_half:
                self._upload_rows(ids)
            return
        param, slots = self._arrays_on_gpu(name, rule)
        tables = [self._as_table(array) for array in (param, *slots)]
        new = np.empty((len(ids), tables[0].shape[1]), self.layout.dtype)
        with self._gpu.working(f"changing rows of variable {self.name!r}"):
            places, grad = self._gpu.up(ids, ids.dtype), self._gpu.up(rows, param.dtype)
            taken = [table[places] for table in tables]
            own, *others = [part.reshape(-1) for part in taken]
            with self._changing(name):
                rule.apply(Update(own, grad, others, numbers))
                for table, part in zip(tables, taken, strict=True):
                    table[places] = part
                self._gpu.down(own, new)
                self._gpu.wait()
                put_rows(self._as_table(self.flat), ids, new)

    def _upload_rows(self, ids: Array) -> None:
        """Upload rows of the host copy, the only rows that are newer than those on the GPU.

        A table whose rows are changed by plain rules and by optimizers in turn is then not uploaded
        as a whole for each step. If the GPU has no memory for the rows, it is.
        """
        table, copy = self._as_table(self._values), self._as_table(self.flat)
        new = np.empty((len(ids), copy.shape[1]), copy.dtype)
        take_rows(copy, ids, new)
        operation = f"uploading rows of variable {self.name!r}"
        with suppress(errors.ResourceExhaustedError), self._gpu.working(operation):
            table[self._gpu.up(ids, ids.dtype)] = self._gpu.up(new, new.dtype)
            self._stale = False

    def _arrays_on_gpu(self, name: str, rule: Rule) -> tuple[Any, list[Any]]:
        """Return the array that an optimizer updates, with the newest values, and its slots."""
        found = self._arrays(name, rule, self._values)
        if self._stale:
            self._upload()
        return found

    def _upload(self) -> None:
        with self._gpu.working(f"uploading variable {self.name!r}"):
            self._gpu.fill(self._values, in_blocks([self.flat], self._values.dtype))
        self._stale = False

    def _wide_copy(self, name: str) -> Array:
        key = f"{name}/{WIDE}"
        if key not in self.slots:
            self._forget_wide_copies(self.flat)  # the GPU has one, of the last optimizer
            self._upload()
            self.slots[key] = self._values
        return self.slots[key]

    def _new_slot(self, key: str, initial: float, dtype: np.dtype[Any], size: int) -> Array:
        if key.endswith(f"/{WIDE}"):
            return self._values  # type: ignore[no-any-return]
        with self._gpu.working(f"making slots of variable {self.name!r}"):
            slot = self._gpu.array(size, dtype, f"slot {key!r} beside variable {self.name!r}")
            slot.fill(initial)
        return slot  # type: ignore[no-any-return]

    def _fill_slot(self, slot: Any, slices: Sequence[Array]) -> None:
        with self._gpu.working(f"restoring slots of variable {self.name!r}"):
            self._gpu.fill(slot, in_blocks(slices, slot.dtype))
        if slot is self._values:
            self._stale = False

    def slots_on_host(self) -> Mapping[str, Array]:
        """Return host copies of the slots; see :meth:`Shard.slots_on_host`.

        Raises:
            ResourceExhaustedError: The host has no memory for a slot.
            InternalError: CUDA failed.
        """
        found = {}
        with self._gpu.working(f"downloading slots of variable {self.name!r}"):
            for key, slot in self.slots.items():
                self._check_room(key, slot.dtype, slot.size)
                found[key] = np.empty(slot.size, slot.dtype)
                self._gpu.down(slot, found[key])
            self._gpu.wait()
        return found
