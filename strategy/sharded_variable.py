"""Variables whose parts live on several ps tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategy.assigned import Version
from strategy.connection.connection import Change
from strategy.connection.remote import Remote, pull_all, pull_into
from strategy.shared.parts import Array, Part, Rows
from strategy.variable import RuleOf, Variable


class ShardedVariable(Variable):
    """A variable in parts: ranges along one axis, or ranges of the flattened elements.

    :func:`get_variable` creates a sharded variable if the partitioner returns more than one part. A
    sharded variable is used like any other :class:`Variable`. The pulled value of each part belongs
    to one version of the part. Every change changes all parts, so without concurrent changes all
    parts have the same version.

    Args:
        parts: The part of the variable for each of ``remotes``.
        arguments: Arguments of :class:`Variable`.

    Attributes:
        parts: The parts of the variable. Part i is named ``<name>/part_<i>``.
    """

    def __init__(self, parts: Sequence[Part], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts = tuple(parts)

    def version_of(self, versions: Sequence[int]) -> Version:
        """Return the versions of the parts as a tuple."""
        return tuple(versions)

    def places_in(self, out: Array) -> list[tuple[Remote, Array]]:
        """Return the view of an array into which to pull each part. Columns are not contiguous."""
        return [(r, part.of(out)) for part, r in zip(self.parts, self.remotes, strict=True)]

    def _pull(self, out: Array, consistent: bool) -> None:
        pull_into(self.places_in(out), consistent)

    def _pull_rows(self, ids: Array, out: Array) -> None:
        rows = Rows(self.parts, ids)
        pulls = []
        for number, remote in enumerate(self.remotes):
            target = np.empty(rows.shape_inside(number), self.dtype)
            pulls.append((remote, target, rows.inside(number)))
        pull_all(pulls)
        for number, (_, target, _) in enumerate(pulls):
            rows.put(out, number, target)

    def _divided(self, data: Array, rule_of: RuleOf) -> list[Change]:
        if self.parts[0].axis is None:
            data = np.ascontiguousarray(data)  # one copy for all parts
        return [
            Change(remote, rule_of(remote.connection), part.of(data))
            for part, remote in zip(self.parts, self.remotes, strict=True)
        ]

    def _divided_rows(self, ids: Array, rows: Array, rule_of: RuleOf) -> list[Change]:
        places = Rows(self.parts, ids)
        return [
            Change(
                remote,
                rule_of(remote.connection),
                places.take(rows, number),
                ids=np.array(places.inside(number)),
            )
            for number, remote in enumerate(self.remotes)
        ]

    def __repr__(self) -> str:
        return f"<{super().__repr__()[1:-1]} in {len(self.parts)} parts>"
