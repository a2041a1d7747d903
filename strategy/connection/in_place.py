"""Changes that a worker makes itself in its server's memory, when the server gives it the turn.

What does not fit the ring has to wait for the server, block by block, and is moved twice. A worker
of the same node that is given its turn instead moves it once; the server stays the one who says
whose turn it is, so that a variable has a single writer at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import can_compile
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules.rule import ADD, ASSIGN, SUB, Rule, Update
from strategy.shared.copy_scaled import copy_scaled
from strategy.shared.shard import BLOCK_BYTES, SharedShard
from strategy.shared.staging import Ring

if TYPE_CHECKING:
    from strategy.connection.change import Change

Array = NDArray[Any]

_RULES: Mapping[int, Rule] = {
    pb.ASSIGN: ASSIGN,
    pb.ADD: ADD,
    pb.SUB: SUB,
}


def own_changes(changes: Sequence[Change], ring: object) -> dict[int, Callable[[], None]]:
    """Local. The changes that a worker makes itself when the server has been told of them.

    They have a block at least, since each costs the server some time before the turn. There are
    none where the ring holds them all: so the worker need not wait.

    Args:
        changes: To be made by one push, each by itself: not a part of a mean.
        ring: The connection's.

    Returns:
        What makes them when their turn comes, by their places in ``changes``. The others the server
        has to make: the memory is not mapped, or they take more than the values.
    """
    if not isinstance(ring, Ring):
        return {}
    all_bytes = [change.remote.layout.data_bytes for change in changes]
    if sum(all_bytes) <= ring.nbytes:
        return {}
    own = [place for place, change in enumerate(changes) if _rule_of(change) is not None]
    if sum([all_bytes[place] for place in own]) <= ring.nbytes:
        return {}
    return {place: _making(changes[place], ring) for place in own}


def _rule_of(change: Change) -> Rule | None:
    """The rule of a change that a worker can make itself."""
    whole = change.ids is None and change.places is None and change.wire is None
    mapped = isinstance(change.remote.shared, SharedShard) and change.remote.gpu is None
    if not whole or not mapped or change.remote.layout.data_bytes < BLOCK_BYTES:
        return None
    return SUB if change.scaled else _RULES.get(change.rule)


def _making(change: Change, ring: Ring) -> Callable[[], None]:
    shard, rule = change.remote.shared, _rule_of(change)
    assert isinstance(shard, SharedShard)
    assert rule is not None
    update = _descent(shard, change) or partial(shard.change, _update(shard, change, rule))

    def make() -> None:
        if ring.turn():
            update()
        ring.end_turn()

    return make


def _descent(shard: SharedShard, change: Change) -> Callable[[], None] | None:
    """What changes the whole shard by compiled code, where that does just what is asked."""
    if not change.scaled or not can_compile():
        return None
    from strategy.connection.descent import descend  # takes half a second, and small pushes none

    values, gradient = shard.flat, _flat(change)
    rate, step = values.dtype.type(change.scale), BLOCK_BYTES // values.itemsize
    # Compiled before others wait for the turn to end.
    descend(shard.versions[:0], values[:0], gradient[:0], rate, step)
    return partial(descend, shard.versions, values, gradient, rate, step)


def _update(shard: SharedShard, change: Change, rule: Rule) -> Callable[[slice], None]:
    """What changes a part of a shard that fits a block: to the bit what the server would do."""
    values, dtype, scale, flat = shard.flat, shard.layout.dtype, change.scale, _flat(change)

    def apply(part: slice, given: Array) -> None:
        rule.apply(Update(values[part], given, (), ()))

    if flat.dtype == dtype and scale == 1.0:
        return lambda part: apply(part, flat[part])
    scratch = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)

    def convert_and_apply(part: slice) -> None:
        given = flat[part]
        converted = scratch[: given.size]
        copy_scaled(converted, given, scale)
        apply(part, converted)

    return convert_and_apply


def _flat(change: Change) -> Array:
    # Compiled code is made anew for arrays that are not aligned.
    return np.require(change.data, requirements=["C", "A"]).reshape(-1)
