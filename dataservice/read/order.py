"""The global order of the elements of an iteration, and the consumer of each. Pure.

Round r has element r of every part with more than r elements, in the order of the parts. Element g
of this order goes to consumer g modulo the number of consumers. So the order depends on the number
of parts alone, and neither on the number of workers nor on the number of consumers.

Under coordinated reads, round r has a group of elements of each part, one for every consumer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from dataservice.proto import dataservice_pb2 as pb


@dataclass(frozen=True)
class Plan:
    """The indices that a consumer requests from a part.

    Attributes:
        start: The lowest index that the plan may contain.
        period: The plan contains the indices equal to ``offset`` modulo ``period``. 0 means none.
        offset: See ``period``.
        until: The plan ends before this index; -1 if the plan reaches to the end of the part.
    """

    start: int
    period: int
    offset: int
    until: int = -1


@dataclass(frozen=True)
class _Place:
    """A place in the global order.

    Attributes:
        round: The round.
        part: The part of the next element.
        number: The number of elements of all parts before this place.
    """

    round: int
    part: int
    number: int

    def mark(self, part: int) -> int:
        """Return the number of elements of a part before this place."""
        return self.round + (part < self.part)


class Order:
    """A walk through the elements, from the place where the iteration began.

    Args:
        parts: Number of parts.
        consumers: Number of consumers that share the elements.
        index: Index of this consumer.
        begin: State in which the iteration began; None for its beginning.

    Attributes:
        consumers: As given.
        part: The part of the current element.
        index: The index of the current element in its part.
    """

    def __init__(self, parts: int, consumers: int, index: int, begin: pb.State | None) -> None:
        self.consumers = consumers
        self._own = index
        self._known = [0] * parts
        self._ends = [-1] * parts
        self._base = 0
        place = _Place(0, 0, 0)
        if begin is not None:
            for state in begin.parts:
                self._known[state.part] = state.start
                self._ends[state.part] = state.total
            self._base = begin.position
            # Numbers count from the position: the skipped elements before it have been consumed.
            rounds = begin.begin_round
            place = _Place(rounds, begin.next_part, -begin.skip)
        self.index, self.part, self._number = place.round, place.part, place.number
        self._given = place
        self._steps = 0

    @property
    def parts(self) -> int:
        """The number of parts."""
        return len(self._known)

    def mark(self, part: int) -> int:
        """Return the watermark of a part: no state needs the elements before it."""
        return self._given.mark(part)

    def note(self, part: int, stop: int, end: bool) -> bool:
        """Record that a part has the elements before ``stop``, and ends there if ``end``.

        Returns:
            True if the number of its elements was unknown. This may change the plans.
        """
        self._known[part] = max(self._known[part], stop)
        if not end or self._ends[part] >= 0:
            return False
        self._ends[part] = stop
        return True

    def end(self, part: int) -> int:
        """Return the number of elements of a part; -1 if it is not known."""
        return self._ends[part]

    @property
    def over(self) -> bool:
        """True if the walk has passed the last element."""
        return min(self._ends) >= 0 and self.index >= max(self._ends)

    def missing(self) -> int | None:
        """Walk to the next element of this consumer.

        Returns:
            The part from which more elements are needed before the walk can continue. None if the
            current element is this consumer's, or the walk is over.
        """
        while True:
            end = self._ends[self.part]
            if end < 0 or self.index < end:
                if self.index >= self._known[self.part]:
                    return self.part
                if self._number >= 0 and self._number % self.consumers == self._own:
                    return None
                self._number += 1
            elif self.part == 0 and self.over:
                return None
            self._advance()

    def step(self) -> None:
        """Step over the current element, which the user has got."""
        self._number += 1
        self._steps += 1
        self._advance()
        self._given = _Place(self.index, self.part, self._number)

    def plan(self, part: int, start: int) -> Plan:
        """Return the plan of this consumer for a part, from an index on."""
        here = _Place(self.index, self.part, self._number)
        start = max(start, here.mark(part))
        if 0 <= self._ends[part] <= start:
            return Plan(start, 0, 0)
        # Until the next part ends, the same parts take turns.
        until = min((end for end in self._ends if end > start), default=-1)
        active = sum(not 0 <= end <= start for end in self._ends)
        period = self.consumers // gcd(active, self.consumers)
        number = self._count_to(here, part, start)
        for index in range(start, start + period):
            if (number + (index - start) * active) % self.consumers == self._own:
                return Plan(start, period, index % period, until)
        return Plan(start, 0, 0, until)

    def _count_to(self, here: _Place, part: int, index: int) -> int:
        """Return the number of elements of all parts before an element of a part."""
        number = here.number
        for other, end in enumerate(self._ends):
            last = index + (other < part)
            if end >= 0:
                last = min(last, end)
            number += max(last - here.mark(other), 0)
        return number

    def state(self) -> pb.State:
        """Return the state in which every consumer has had as many elements as this one."""
        given = self._given
        number = self._steps * self.consumers
        return pb.State(
            parts=[
                pb.PartState(
                    part=part,
                    start=given.mark(part) if end < 0 else min(given.mark(part), end),
                    total=end,
                )
                for part, end in enumerate(self._ends)
            ],
            position=self._base + number,
            skip=number - given.number,
            next_part=given.part,
            begin_round=given.round,
        )

    def _advance(self) -> None:
        self.part += 1
        if self.part == len(self._known):
            self.index += 1
            self.part = 0
