"""What a server notes of changes: which variables are in the middle of one, how stale they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpidist import TaskMetrics
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules.rule import Rule
from strategy.server.catalogue import Catalogue
from strategy.server.known_rules import Rules
from strategy.server.owned_shard import OwnedShard
from strategy.server.served import ServedVariable

FoundRule = tuple[str, Rule, Sequence[float]]
"""A rule's name, itself, and its numbers for a step; see :meth:`Rules.find`."""


class Ledger:
    """What a server notes of changes.

    Args:
        catalogue: Its variables and connections.
        rules: Its rules.
        metrics: What it has done so far.

    Attributes:
        in_work: Numbers of the variables of which a change has begun and not ended.
    """

    def __init__(self, catalogue: Catalogue, rules: Rules, metrics: TaskMetrics) -> None:
        self._catalogue = catalogue
        self._rules = rules
        self._values = metrics.values
        self.in_work: set[int] = set()
        self._waiting: dict[int, list[float]] = {}

    def variable(self, entry: pb.PushEntry) -> ServedVariable:
        """Local. What an entry is a change of."""
        return self._catalogue.variables[entry.variable]

    def until_free(self, variable: int, since: float) -> Iterator[None]:
        """Local. Yield until no change and no reader is in the middle of a variable.

        Args:
            variable: Its number.
            since: When the push that waits arrived, by ``time.monotonic()``.
        """
        if variable in self.in_work:
            waiting = self._waiting.setdefault(variable, [])
            waiting.append(since)
            try:
                while variable in self.in_work:
                    yield
            finally:
                waiting.remove(since)

    def awaited_since(self, variable: int) -> float:
        """Local. Return when the first push arrived that waits for a variable; infinity if none."""
        return min(self._waiting.get(variable, ()), default=math.inf)

    def rule(self, entry: pb.PushEntry) -> FoundRule:
        """Local. See :meth:`Rules.find`."""
        return self._rules.find(entry, self.variable(entry).shard)

    def may_join(self, entry: pb.PushEntry) -> bool:
        """Local. Whether the rule of a change may be called for several variables at once."""
        return self._rules.may_join(entry.rule)

    def count(
        self, entries: Sequence[pb.PushEntry], shards: Sequence[OwnedShard], reply: pb.PushReply
    ) -> None:
        """Local. Note, and tell the worker that pushes them, how stale changes by one rule are.

        Args:
            entries: The changes, which are about to be made.
            shards: Of what.
            reply: The staleness of each is added to it.
        """
        versions = [shard.version for shard in shards]
        late = [v - min(entry.seen, v) for entry, v in zip(entries, versions, strict=True)]
        reply.staleness.extend(late)
        if entries[0].rule >= pb.FIRST_OPTIMIZER:
            self._values["changes"] += len(late)
            self._values["staleness"] += sum(late)

    def count_streamed(self, entries: Sequence[pb.PushEntry], shard: OwnedShard) -> None:
        """Local. Note how much comes of changes of a shard by other ways than a message."""
        streamed = sum([entry.staged for entry in entries])
        self._values["in_bytes"] += streamed * shard.layout.data_bytes

    def tell_waiting(self, variable: ServedVariable) -> None:
        """Local. Answer those who wait for a variable's first value, which is there now."""
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()
