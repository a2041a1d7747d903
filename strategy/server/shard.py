"""The values of variables on their server, alone or in buckets, and their updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist import errors
from mpidist.buffers.copying import put_rows, take_rows
from strategy.protocol.layout import BLOCK_BYTES, WIDE, Bytes, Layout, ShardView
from strategy.protocol.partition import Origin, whole
from strategy.protocol.push_message import JOINED_BYTES, Blocks, in_blocks
from strategy.protocol.rows import distinct
from strategy.rules import ASSIGN, TILE, FoundRule, Kind, Rule, Update
from strategy.server.memory import Place, check_room

Array = NDArray[Any]

_ONE = np.ones((), np.int64)  # added faster than the number 1

DATA_BYTES = 256 << 10
VERSIONS_BYTES = 16 << 10


def is_small(layout: Layout) -> bool:
    """Return whether a variable may lie in a bucket."""
    # Halves may not, because they are updated in float32, one variable at a time.
    return 0 < layout.data_bytes < JOINED_BYTES and not layout.is_half


@dataclass(eq=False)
class Bucket:
    """Memory for small variables of one dtype.

    Attributes:
        place: Location of the versions and the values.
        dtype: The dtype of the values.
        sync: Memory fence: orders earlier loads and stores before later loads and stores.
        used: Number of elements in use.
        count: Number of variables.
        slots: Optimizer slots, each for all variables, by ``<name of the optimizer>/<slot>``.
    """

    place: Place
    dtype: np.dtype[Any]
    sync: Callable[[], None]
    used: int = 0
    count: int = 0
    slots: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        versions, data = self.place.offsets
        memory = self.place.memory
        self.versions: Array = memory[versions : versions + VERSIONS_BYTES].view(np.int64)
        self.flat: Array = memory[data : data + DATA_BYTES].view(self.dtype)

    def has_room(self, layout: Layout) -> bool:
        """Return whether another variable fits into the bucket."""
        return self.used + layout.size <= self.flat.size and self.count < self.versions.size

    def take(self, layout: Layout) -> Span:
        """Allocate the span of a new variable."""
        span = Span(self, self.count, self.used, layout.size)
        self.count += 1
        self.used += layout.size
        return span

    def slot(self, key: str) -> Array:
        """Return the slot array of all variables, in the shape of ``flat``."""
        if key not in self.slots:
            self.slots[key] = np.zeros(self.flat.size, self.dtype)
        return self.slots[key]


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a bucket that belongs to one variable.

    Attributes:
        bucket: The bucket.
        number: Index of the variable in the bucket.
        start: Index of the variable's first element in the bucket.
        size: Number of elements of the variable.
    """

    bucket: Bucket
    number: int
    start: int
    size: int

    @property
    def place(self) -> Place:
        """Location of the version and the values of the variable."""
        whole = self.bucket.place
        versions, data = whole.offsets
        offsets = (versions + 8 * self.number, data + self.start * self.bucket.dtype.itemsize)
        return Place(whole.segment, offsets)

    def slot(self, key: str) -> Array:
        """Return the part of a slot array that belongs to the variable."""
        return self.bucket.slot(key)[self.start : self.start + self.size]

    def comes_after(self, other: Span) -> bool:
        """Return whether this variable directly follows another variable in the bucket."""
        return other.bucket is self.bucket and other.number == self.number - 1


class Neighbors:
    """Adjacent variables of a bucket, which one call of a rule updates together.

    Args:
        spans: The spans of the variables, in order.

    Attributes:
        count: Number of variables.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.count = len(spans)
        first, last = spans[0], spans[-1]
        self._bucket = first.bucket
        self._elements = slice(first.start, last.start + last.size)
        self._param = self._bucket.flat[self._elements]
        self._versions = self._bucket.versions[first.number : last.number + 1]

    def change(self, found: FoundRule, gradient: Array) -> None:
        """Update the variables. The version of each variable advances by one.

        Args:
            found: The rule, its name for slots, and its numbers.
            gradient: The gradients of the variables, joined in one flat array.
        """
        name, rule, numbers = found
        param, sync = self._param, self._bucket.sync
        slots = [self._bucket.slots[f"{name}/{slot}"][self._elements] for slot in rule.slots]
        step = rule.tile or param.size
        np.add(self._versions, _ONE, self._versions)
        sync()
        try:
            for start in range(0, param.size, step):
                here = slice(start, start + step)
                parts = [slot[here] for slot in slots]
                rule.on_host(Update(param[here], gradient[here], parts, numbers))
        finally:
            sync()
            np.add(self._versions, _ONE, self._versions)


class Scratch:
    """Temporary arrays of one block, shared by the shards of a server.

    The arrays are reused, because new memory costs a page fault every 4 KiB. Arrays of float32 also
    have room for a block of halves.
    """

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], list[Array]] = {}

    def take(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Return flat arrays of one block each, not initialized. Later calls return them again."""
        arrays = self._arrays.setdefault(dtype, [])
        while len(arrays) < count:
            itemsize = 2 if dtype == np.float32 else dtype.itemsize
            arrays.append(np.empty(BLOCK_BYTES // itemsize, dtype))
        return arrays[:count]


def change_rows(
    rule: Rule,
    tables: Sequence[Array],
    ids: Array,
    rows: Array,
    numbers: Sequence[float],
    mirror: Array | None = None,
) -> None:
    """Update rows in tiles: gather the rows, apply the rule, and scatter the rows back.

    Args:
        rule: The update rule.
        tables: The variable and the slots, all of one dtype and shape ``(n, width)``.
        ids: Unique numbers of existing rows, int64.
        rows: The gradients, flat, in the order of ``ids``. They are converted to the tables' dtype.
        numbers: The numbers of this step.
        mirror: Array of shape ``(n, width)`` that receives the new rows in its own dtype, or None.

    Raises:
        Exception: An error of the rule. Earlier tiles have been updated.
    """
    width, dtype = tables[0].shape[1], tables[0].dtype
    length = min(max(TILE // max(width, 1), 1), len(ids))
    taken = [np.empty((length, width), dtype) for _ in tables]
    apply = rule.on_host
    for start in range(0, len(ids), max(length, 1)):
        here = ids[start : start + length]
        parts = [part[: len(here)] for part in taken]
        for table, part in zip(tables, parts, strict=True):
            take_rows(table, here, part)
        grad = rows[start * width : (start + len(here)) * width].astype(dtype, copy=False)
        param, *slots = [part.reshape(-1) for part in parts]
        apply(Update(param, grad, slots, numbers))
        for table, part in zip(tables, parts, strict=True):
            put_rows(table, here, part)
        if mirror is not None:
            put_rows(mirror, here, parts[0].astype(mirror.dtype))


def mean_of_blocks(each: Sequence[Blocks], layout: Layout, scratch: Scratch) -> Blocks:
    """Yield the mean of several changes of a variable, block by block.

    The changes are added in the given order, then the sum is divided. Halves are added in float32.
    Means of integers are rounded down.

    Args:
        each: The blocks of each change. The blocks of a single change are yielded unchanged.
        layout: The layout of the variable.
        scratch: Memory for the sum.

    Yields:
        Flat arrays; each is overwritten by the next.
    """
    if len(each) == 1:
        yield from each[0]
        return
    (memory,) = scratch.take(1, wide_dtype(layout))
    for first, second, *others in zip(*each, strict=True):
        total = memory[: first.size]
        np.add(first, second, out=total, dtype=total.dtype)
        for block in others:
            np.add(total, block, out=total, dtype=total.dtype)
        yield _divided(total, len(each))


def mean_of_rows(each: Sequence[tuple[Array, Array]], layout: Layout) -> tuple[Array, Array]:
    """Return the mean of several changes of rows. A row that a change lacks counts as zero.

    Args:
        each: Unique row numbers and flat values of each change.
        layout: The layout of the variable.

    Returns:
        Unique row numbers and their flat values.
    """
    if len(each) == 1:
        return each[0]
    ids, places = distinct(np.concatenate([numbers for numbers, _ in each]))
    width = layout.size // max(layout.shape[0], 1)
    # Adding -0.0 changes no number. Adding 0.0 would change -0.0 to 0.0.
    total = np.full((len(ids), width), -0.0 if layout.is_floating else 0, wide_dtype(layout))
    ends = np.cumsum([len(numbers) for numbers, _ in each])
    for here, (numbers, values) in zip(np.split(places, ends[:-1]), each, strict=True):
        part = total.take(here, axis=0)
        part += values.reshape(len(numbers), width)
        put_rows(total, here, part)
    return ids, _divided(total, len(each)).reshape(-1)


def wide_dtype(layout: Layout) -> np.dtype[Any]:
    """Return the dtype in which gradients are added and optimizers compute: float32 for halves."""
    return np.dtype(np.float32) if layout.is_half else layout.dtype


def _divided(total: Array, count: int) -> Array:
    divide = np.floor_divide if total.dtype.kind in "iu" else np.divide
    return divide(total, total.dtype.type(count), out=total)  # type: ignore[no-any-return]


class Shard(ShardView):
    """A shard on its server, with its optimizer slots and updates.

    The server is the only writer. The version of a block is odd while the block changes (seqlock).

    Args:
        name: Name of the variable on the server.
        memory: See :class:`ShardView`.
        layout: See :class:`ShardView`.
        versions_offset: See :class:`ShardView`.
        data_offset: See :class:`ShardView`.
        sync: See :class:`ShardView`.
        scratch: Temporary arrays of the server; by default new ones.
        origin: The variable and the range of it in this shard; by default the whole variable
            ``name``.
        span: The span of the variable in a bucket; None outside of buckets.

    Attributes:
        gpu: Index of the GPU that holds the values and slots. ``memory`` then holds a copy of the
            values. None for a shard on the host.
        slots: Optimizer slots, flat, by ``<name of the optimizer>/<slot>``.
        steps: Number of updates by each rule, by name of the optimizer.
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
        self.steps: dict[str, int] = {}
        self._scratch = Scratch() if scratch is None else scratch

    @property
    def version(self) -> int:
        """Number of changes so far."""
        return self._version_of[0] >> 1

    def close(self) -> None:
        """Free the slots. The variable must not be changed afterwards."""
        self.slots = {}
        self.span = None

    def slot(
        self,
        name: str,
        initial: float = 0.0,
        dtype: DTypeLike | None = None,
        size: int | None = None,
    ) -> Array:
        """Return a slot, flat. The first call creates the slot.

        Args:
            name: ``<name of the optimizer>/<slot>``.
            initial: Initial value of all elements.
            dtype: Dtype of a new slot; by default the dtype of the variable.
            size: Number of elements; by default that of the variable.

        Raises:
            ResourceExhaustedError: There is no memory for a new slot.
        """
        known = self.slots.get(name)
        wanted = self.layout.size if size is None else size
        if known is None or known.size != wanted:  # a checkpoint may have slots of another size
            kind = np.dtype(dtype or self.layout.dtype)
            known = self.slots[name] = self._new_slot(name, initial, kind, wanted)
        return known

    def slots_on_host(self) -> Mapping[str, Array]:
        """Return the slots as host arrays, which are valid until the next change."""
        return self.slots

    def restore_slot(self, key: str, slices: Sequence[Array]) -> None:
        """Replace a slot by that of a checkpoint.

        Args:
            key: ``<name of the optimizer>/<slot>``.
            slices: The values, flat.

        Raises:
            ResourceExhaustedError: There is no memory for a new slot.
        """
        size = sum([values.size for values in slices])
        known = self.slots.get(key)
        if known is None or known.size != size:
            known = self.slots[key] = self._new_slot(key, 0.0, slices[0].dtype, size)
        self._fill_slot(known, slices)

    def _fill_slot(self, slot: Array, slices: Sequence[Array]) -> None:
        np.concatenate(slices, out=slot)

    def _new_slot(self, key: str, initial: float, dtype: np.dtype[Any], size: int) -> Array:
        self._check_room(key, dtype, size)
        if self.span is not None and (dtype, size) == (self.layout.dtype, self.layout.size):
            slot = self.span.slot(key)
            slot.fill(initial)
            return slot
        return np.full(size, initial, dtype)

    def _arrays(self, name: str, rule: Rule, values: Array) -> tuple[Array, list[Array]]:
        """Return the array that a rule updates, the values or their float32 copy, and its slots."""
        param = values
        if self.layout.is_half:
            param = param if rule.kind is Kind.PLAIN else self._wide_copy(name)
            self._forget_wide_copies(param)
        shapes = rule.shapes_of_slots(self.layout.shape)
        return param, [
            self.slot(f"{name}/{slot}", rule.initial.get(slot, 0.0), param.dtype, math.prod(shape))
            for slot, shape in zip(rule.slots, shapes, strict=True)
        ]

    def _in_shapes(
        self, rule: Rule, param: Array, gradient: Array, slots: Sequence[Array]
    ) -> tuple[Array, Array, list[Array]]:
        """Return flat arrays in the shapes in which a rule of the whole variable takes them."""
        shape = self.layout.shape
        shapes = zip(slots, rule.shapes_of_slots(shape), strict=True)
        return param.reshape(shape), gradient.reshape(shape), [s.reshape(own) for s, own in shapes]

    def _wide_copy(self, name: str) -> Array:
        """Return the float32 copy of the values that an optimizer updates (master copy)."""
        key = f"{name}/{WIDE}"
        if key not in self.slots:
            self._check_room(key, np.dtype(np.float32), self.layout.size)
            self.slots[key] = self.flat.astype(np.float32)
        return self.slots[key]

    def _check_room(self, slot: str, dtype: np.dtype[Any], size: int) -> None:
        nbytes = size * dtype.itemsize
        try:
            check_room(nbytes)
        except errors.ResourceExhaustedError as error:
            raise errors.ResourceExhaustedError(
                f"there is no room for {slot!r} of {nbytes} bytes beside variable {self.name!r}: "
                f"{error.message}"
            ) from error

    def _forget_wide_copies(self, kept: Array) -> None:
        """Drop the float32 copies that a change leaves out of date."""
        for key in [key for key in self.slots if key.endswith(f"/{WIDE}")]:
            if self.slots[key] is not kept:
                del self.slots[key]

    def apply(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        """Update the whole variable once.

        Args:
            name: Name of the optimizer, under which slots and steps are kept.
            rule: The update rule.
            numbers: The numbers of this step.
            blocks: The gradient, flat, block by block.

        Raises:
            Exception: An error of the rule or of ``blocks``. It is raised after the versions of all
                blocks have advanced, because some of the values may have changed.
        """
        if rule.kind is Kind.WHOLE:
            self._apply_whole(name, rule, numbers, blocks)
            return
        step = self.steps.get(name, 0) + 1
        update = self._updater(name, rule, numbers)
        block, start = 0, 0
        try:
            for gradient in blocks:
                self._version_of[block] += 1
                self._sync()
                try:
                    update(start, gradient)
                finally:
                    self._sync()
                    self._version_of[block] += 1
                    block, start = block + 1, start + gradient.size
        finally:
            self.versions[block:] += 2  # blocks are left only after an error
            self.steps[name] = step

    def increment(self) -> None:
        """Add one to a variable of one element."""
        self._version_of[0] += 1
        self._sync()
        self.flat[0] += 1
        self._sync()
        self._version_of[0] += 1

    def apply_mean_of_rows(
        self,
        name: str,
        rule: Rule,
        numbers: Sequence[float],
        each: Sequence[tuple[Array, Array]],
    ) -> None:
        """Update some rows once, by the mean of the gradients of several workers.

        Other rows and their slots stay unchanged.

        Args:
            name: See :meth:`apply`.
            rule: The update rule.
            numbers: The numbers of this step.
            each: Unique row numbers and flat gradients of each worker.

        Raises:
            InvalidArgumentError: A row does not exist.
            Exception: An error of the rule, as in :meth:`apply`.
        """
        ids, rows = mean_of_rows(each, self.layout)
        self.check_rows(ids)
        self._apply_rows(name, rule, numbers, ids, rows)

    def _apply_rows(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> None:
        """Update existing rows; see :meth:`apply_mean_of_rows`."""
        param, slots = self._arrays(name, rule, self.flat)
        tables = [self._as_table(array) for array in (param, *slots)]
        mirror = None if param is self.flat else self._as_table(self.flat)
        with self._changing(name):
            change_rows(rule, tables, ids, rows, numbers, mirror)

    def _apply_whole(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        """Update all values by one call of a rule; see :meth:`apply`."""
        param, slots = self._arrays(name, rule, self.flat)
        gradient = np.concatenate([block.astype(param.dtype) for block in blocks])
        update = Update(*self._in_shapes(rule, param, gradient, slots), numbers)
        with self._changing(name):
            if param.size:
                rule.on_host(update)
            if param is not self.flat:
                np.copyto(self.flat, param, casting="same_kind")

    @contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        """Count one update, during which the versions of all blocks are odd.

        Args:
            name: See :meth:`apply`.
        """
        step = self.steps.get(name, 0) + 1
        self.versions += 1
        self._sync()
        try:
            yield
        finally:
            self._sync()
            self.versions += 1
            self.steps[name] = step

    def _as_table(self, array: Array) -> Array:
        """Return a flat array as the rows of the variable, each flat."""
        return array.reshape(len(self.data), self.layout.size // max(len(self.data), 1))

    def check_rows(self, ids: Array) -> None:
        """Raise InvalidArgumentError unless all rows with these numbers exist."""
        shape = self.layout.shape
        if not shape or (ids.size and not 0 <= ids.min() <= ids.max() < shape[0]):
            raise errors.InvalidArgumentError(
                f"variable {self.name!r} of shape {shape} has not all rows that are named"
            )

    def restore(
        self,
        values: Sequence[Array],
        slots: Mapping[str, np.dtype[Any]],
        steps: dict[str, int],
    ) -> None:
        """Replace the values and the numbers of updates.

        Remove slots that the checkpoint lacks or stores with another dtype.

        Args:
            values: The values, flat, in slices of whole blocks.
            slots: The dtypes of the slots in the checkpoint, which :meth:`restore_slot` replaces.
            steps: Number of updates by each optimizer.
        """
        self.slots = {
            key: slot
            for key, slot in self.slots.items()
            if key in slots and slots[key] == slot.dtype  # None would be equal to float64
        }
        self.apply(":assign", ASSIGN, (), in_blocks(values, self.layout.dtype))
        self.steps = steps

    def _updater(
        self, name: str, rule: Rule, numbers: Sequence[float]
    ) -> Callable[[int, Array], None]:
        """Return the function that updates at most a block of the values.

        The function takes the index of the first element and the gradient.
        """
        param, slots = self._arrays(name, rule, self.flat)
        (wide,) = self._scratch.take(1, param.dtype)
        length, apply = rule.tile or wide.size, rule.on_host

        def update(start: int, gradient: Array) -> None:
            for begin in range(0, gradient.size, length):
                grad = gradient[begin : begin + length]
                here = slice(start + begin, start + begin + grad.size)
                if param is not self.flat:
                    np.copyto(wide[: grad.size], grad)
                    grad = wide[: grad.size]
                parts = [slot[here] for slot in slots]
                try:
                    apply(Update(param[here], grad, parts, numbers))
                finally:  # readers must see values that changed before an error
                    if param is not self.flat:
                        np.copyto(self.flat[here], param[here], casting="same_kind")

        return update
