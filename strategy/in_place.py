"""Changes that a worker makes itself in its server's memory, when the server gives it the turn.

What does not fit the ring has to wait for the server, block by block, and is moved twice. A worker
of the same node that is given its turn instead moves it once; the server stays the one who says
whose turn it is, so that a variable has a single writer at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import can_compile
from strategy import kernels
from strategy.proto import parameter_server_pb2 as pb
from strategy.shard import BLOCK_BYTES, SharedShard
from strategy.staging import Ring

if TYPE_CHECKING:
    from strategy.change import Change

Array = NDArray[Any]

_RULES: Mapping[int, kernels.Rule] = {
    pb.ASSIGN: kernels.ASSIGN,
    pb.ADD: kernels.ADD,
    pb.SUB: kernels.SUB,
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
    own = [place for place, change in enumerate(changes) if _rule_of(change) is not None]
    if sum(changes[place].remote.layout.data_bytes for place in own) <= ring.nbytes:
        return {}
    return {place: _making(changes[place], ring) for place in own}


def _rule_of(change: Change) -> kernels.Rule | None:
    """The rule of a change that a worker can make itself."""
    whole = change.ids is None and change.places is None and change.wire is None
    mapped = isinstance(change.remote.shared, SharedShard)
    if not whole or not mapped or change.remote.layout.data_bytes < BLOCK_BYTES:
        return None
    return kernels.SUB if change.scaled else _RULES.get(change.rule)


def _making(change: Change, ring: Ring) -> Callable[[], None]:
    shard, rule = change.remote.shared, _rule_of(change)
    assert isinstance(shard, SharedShard)
    assert rule is not None
    update = _update(shard, change, rule)

    def make() -> None:
        if ring.turn():
            shard.change(update)
        ring.end_turn()

    return make


def _update(shard: SharedShard, change: Change, rule: kernels.Rule) -> Callable[[slice], None]:
    """What changes a part of a shard that fits a block: to the bit what the server would do."""
    values, dtype, scale = shard.flat, shard.layout.dtype, change.scale
    # Compiled code is made anew for arrays that are not aligned.
    flat = np.require(change.data, requirements=["C", "A"]).reshape(-1)

    def apply(part: slice, given: Array) -> None:
        rule.update(kernels.Piece(values[part], given, (), (), {}, 0))

    if flat.dtype == dtype and scale == 1.0:
        return lambda part: apply(part, flat[part])
    if change.scaled and can_compile():
        from strategy.fused import descend  # takes half a second, and small pushes none

        rate = np.asarray(scale, dtype)[()]
        descend(values[:0], flat[:0], rate)  # compiled before others wait for the turn to end
        return lambda part: descend(values[part], flat[part], rate)
    scratch = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)

    def convert_and_apply(part: slice) -> None:
        given = flat[part]
        converted = scratch[: given.size]
        kernels.copy_scaled(converted, given, scale)
        apply(part, converted)

    return convert_and_apply
