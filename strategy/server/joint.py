"""Small variables that a push changes by one rule are changed together.

What a rule costs with a few elements is that it is called: so their values are brought together,
the rule is called once for all of them, and the results are put back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules.rule import TILE, Rule, Update
from strategy.server.ledger import FoundRule, Ledger
from strategy.server.owned_shard import OwnedShard
from strategy.server.scratch import Scratch
from strategy.shared.shard import Layout
from strategy.shared.staging import STAGED_BYTES

Array = NDArray[Any]


class Joint:
    """Local. Changes of shards that are made by one call of a rule.

    Args:
        name: The rule's; slots and steps are kept under it.
        rule: Of all.
        numbers: The numbers of this step.
        layout: Of one of the shards; all have its dtype.
        step: How often all of them have been changed by the rule.

    Attributes:
        shards: Those that are changed; see :meth:`add`.
        size: Their elements.
        dtype: Theirs.
    """

    def __init__(
        self, name: str, rule: Rule, numbers: Sequence[float], layout: Layout, step: int
    ) -> None:
        self.shards: list[OwnedShard] = []
        self.size = 0
        self.dtype = layout.dtype
        self._name = name
        self._rule = rule
        self._numbers = numbers
        self._step = step
        self._slots = [
            (f"{name}/{slot}", rule.initial.get(slot, 0.0), list[Array]()) for slot in rule.slots
        ]

    def add(self, shard: OwnedShard) -> bool:
        """Local. Take a shard in.

        Returns:
            False if it is not like the others, or these are enough, or there is no memory for what
            the rule keeps beside it.
        """
        size = self.size + shard.layout.size
        alike = shard.layout.dtype == self.dtype and shard.steps.get(self._name, 0) == self._step
        if not alike or size > TILE:
            return False
        try:
            found = [shard.slot(key, initial) for key, initial, _ in self._slots]
        except errors.ResourceExhaustedError:
            return False  # it is told of it when it is made by itself
        for (_, _, parts), slot in zip(self._slots, found, strict=True):
            parts.append(slot)
        self.shards.append(shard)
        self.size = size
        return True

    def change(self, gradient: Array, scratch: Scratch) -> None:
        """Local. Change all, each of which advances by a version.

        Args:
            gradient: Of all, flat, one behind the other.
            scratch: For what lies between.
        """
        step, slots = self._step + 1, [parts for _, _, parts in self._slots]
        arrays = scratch.take(1 + len(slots), self.dtype)
        param, *kept = [array[: self.size] for array in arrays]
        np.concatenate([shard.flat for shard in self.shards], out=param)
        for whole, parts in zip(kept, slots, strict=True):
            np.concatenate(parts, out=whole)
        with np.errstate(all="ignore"):
            self._rule.on_host(Update(param, gradient, kept, self._numbers))
        begin = 0
        for number, shard in enumerate(self.shards):
            end = begin + shard.layout.size
            for whole, parts in zip(kept, slots, strict=True):
                parts[number][:] = whole[begin:end]
            shard.replace(param[begin:end])
            shard.steps[self._name] = step
            begin = end


def find_joint(
    ledger: Ledger, each: Sequence[Sequence[pb.PushEntry]], place: int, found: FoundRule
) -> Joint | None:
    """Local. The changes, from a place on, that can be made together.

    Args:
        ledger: The server's.
        each: All changes, of one or more workers each, who push the same.
        place: Of the first.
        found: The rule of the first.

    Returns:
        The changes; None if the first has to be made by itself.
    """
    first = each[place][0]
    if not (ledger.may_join(first) and _can_join(ledger.variable(first).shard)):
        return None
    name, rule, numbers = found
    shard = ledger.variable(first).shard
    joint = Joint(name, rule, numbers, shard.layout, shard.steps.get(name, 0))
    taken = set(ledger.in_work)
    for entries in itertools.islice(each, place, None):
        number, shard = entries[0].variable, ledger.variable(entries[0]).shard
        alike = _key(entries[0]) == _key(first)
        as_it_is = alike and number not in taken and all(map(_is_as_it_is, entries))
        if not (as_it_is and _can_join(shard) and joint.add(shard)):
            break
        taken.add(number)
    return joint if joint.shards else None


def _key(entry: pb.PushEntry) -> tuple[int, bool, float]:
    """Return the fields by which the numbers of an update depend on an entry."""
    return entry.rule, entry.scaled, entry.learning_rate


def _is_as_it_is(entry: pb.PushEntry) -> bool:
    """Whether a change is of a whole shard, and in the message in its dtype."""
    return not (entry.rows or entry.staged or entry.places or entry.wire)


def _can_join(shard: OwnedShard) -> bool:
    """Whether a shard may be changed with others; halves are changed in float32."""
    layout = shard.layout
    return shard.gpu is None and layout.data_bytes < STAGED_BYTES and not layout.is_half
