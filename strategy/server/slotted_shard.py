"""A variable with what optimizers keep beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import errors
from strategy.checkpoints.carried import Stored
from strategy.rules.rule import Kind, Rule
from strategy.server.bucket import Span
from strategy.server.memory import check_room
from strategy.server.scratch import Scratch
from strategy.shared.parts import Origin, whole
from strategy.shared.shard import WIDE, Array, Bytes, Layout, SharedShard


class SlottedShard(SharedShard):
    """A shard as its server has it, with what optimizers keep beside it.

    Args:
        name: Of the variable.
        memory: The server's arena.
        layout: The shard's.
        versions_offset: See :class:`SharedShard`.
        data_offset: See :class:`SharedShard`.
        sync: See :class:`SharedShard`.
        scratch: The server's; by default one of its own.
        origin: What of which variable it is; by default all of the one of this name.
        span: The span of the variable in a bucket; None outside of buckets.

    Attributes:
        gpu: The number of the GPU on which its values and slots lie, beside the copy in the arena;
            None where they lie on the host alone.
        slots: What optimizers keep beside it, by ``<name of the optimizer>/<slot>``, flat.
        initials: What slots are full of at first, where that is not 0.
        steps: How often each optimizer has changed it.
    """

    gpu: int | None = None

    def __init__(
        self,
        name: str,
        memory: Bytes,
        layout: Layout,
        versions_offset: int,
        data_offset: int,
        sync: Callable[[], None],
        scratch: Scratch | None = None,
        origin: Origin | None = None,
        span: Span | None = None,
    ) -> None:
        super().__init__(memory, layout, versions_offset, data_offset, sync)
        self.origin = Origin(name, whole(layout.shape)) if origin is None else origin
        self.name = name
        self.span = span
        self.slots: dict[str, Array] = {}
        self.initials: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self._scratch = Scratch() if scratch is None else scratch

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version_of[0] >> 1

    def close(self) -> None:
        """Local. Give back what is kept beside the server's arena: nobody changes it any more."""
        self.slots = {}
        self.span = None

    def slot(self, name: str, initial: float = 0.0, dtype: DTypeLike | None = None) -> Array:
        """Local. The slot of this name, flat, shape ``(size,)``.

        Args:
            name: ``<name of the optimizer>/<slot>``.
            initial: What it is full of at first.
            dtype: Of a new one; by default the variable's.

        Raises:
            ResourceExhaustedError: There is no memory for a new one.
        """
        if name not in self.slots:
            self.slots[name] = self._new_slot(name, initial, np.dtype(dtype or self.layout.dtype))
            if initial:
                self.initials[name] = initial
        return self.slots[name]

    def slots_on_host(self) -> Mapping[str, Array]:
        """Local. What is kept beside it, by the same names, to be read at once."""
        return self.slots

    def _restore_slot(self, key: str, stored: Stored) -> None:
        if key not in self.slots:
            self.slots[key] = self._new_slot(key, 0.0, stored.dtype)
        stored.fill(self.slots[key])

    def _new_slot(self, key: str, initial: float, dtype: np.dtype[Any]) -> Array:
        self._check_room(key, dtype)
        if self.span is not None and dtype == self.layout.dtype:
            slot = self.span.slot(key)
            slot.fill(initial)
            return slot
        return np.full(self.layout.size, initial, dtype)

    def _arrays(self, name: str, rule: Rule, values: Array) -> tuple[Array, list[Array]]:
        """What a rule changes, the values or their wide copy, and what it keeps beside them."""
        param = values
        if self.layout.is_half:
            param = param if rule.kind is Kind.PLAIN else self._wide_copy(name)
            self._forget_wide_copies(param)
        return param, [
            self.slot(f"{name}/{slot}", rule.initial.get(slot, 0.0), param.dtype)
            for slot in rule.slots
        ]

    def _wide_copy(self, name: str) -> Array:
        """The values in float32, from which an optimizer goes on."""
        key = f"{name}/{WIDE}"
        if key not in self.slots:
            self._check_room(key, np.dtype(np.float32))
            self.slots[key] = self.flat.astype(np.float32)
        return self.slots[key]

    def _check_room(self, slot: str, dtype: np.dtype[Any]) -> None:
        nbytes = self.layout.size * dtype.itemsize
        try:
            check_room(nbytes)
        except errors.ResourceExhaustedError as error:
            raise errors.ResourceExhaustedError(
                f"there is no room for {slot!r} of {nbytes} bytes beside variable {self.name!r}: "
                f"{error.message}"
            ) from error

    def _forget_wide_copies(self, kept: Array) -> None:
        """Drop those that do not take part in a change."""
        for key in [key for key in self.slots if key.endswith(f"/{WIDE}")]:
            if self.slots[key] is not kept:
                del self.slots[key]
