"""Changes that a worker makes itself in its server's memory, when the server gives it the turn.

What does not fit the ring would have to wait for the server, block by block, and be moved twice. A
worker of the same node that is given its turn instead moves it once; the server stays the one who
says whose turn it is, so that there is a single writer at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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


def change_of(change: Change, ring: object) -> Callable[[], None] | None:
    """Local. What the worker does when the server has been told of a change that it makes itself.

    Args:
        change: Any, but not a part of a mean.
        ring: The connection's.

    Returns:
        Makes the change when its turn comes. None: the server has to make it, since the memory is
        not mapped, or the change is one that takes more than the values. Also where the ring holds
        it whole: so the worker need not wait.
    """
    shard = change.remote.shared
    rule = kernels.SUB if change.scaled else _RULES.get(change.rule)
    if not (isinstance(shard, SharedShard) and isinstance(ring, Ring)) or rule is None:
        return None
    parts = change.ids, change.places, change.wire
    if shard.layout.data_bytes <= ring.nbytes or any(part is not None for part in parts):
        return None
    update = _update(shard, change, rule)

    def make() -> None:
        if ring.turn():
            shard.change(update)
        ring.end_turn()

    return make


def _update(shard: SharedShard, change: Change, rule: kernels.Rule) -> Callable[[slice], None]:
    """What changes a part of a shard that fits a block: to the bit what the server would do."""
    values, dtype, scale = shard.flat, shard.layout.dtype, change.scale
    flat = np.ascontiguousarray(change.data).reshape(-1)

    def apply(part: slice, given: Array) -> None:
        rule.update(kernels.Piece(values[part], given, (), (), {}, 0))

    if flat.dtype == dtype and scale == 1.0:
        return lambda part: apply(part, flat[part])
    if change.scaled and find_spec("numba") is not None:
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
