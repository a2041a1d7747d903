"""The global order of the elements of an iteration, and who gets which. Pure.

Round r has element r of every part that has one, in the order of the parts. Element g of the whole
goes to consumer g modulo their number. So the order depends on the number of parts alone, neither
on that of the workers nor on that of the consumers.

Under coordinated reads, round r has a block of each part, one element for every consumer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from dataservice.proto import dataservice_pb2 as pb


@dataclass(frozen=True)
class Plan:
    """Which elements of a part a consumer wants.

    Attributes:
        start: From here on.
        period: Those whose index modulo this is ``offset``; 0: none.
        offset: See above.
        until: Up to here, exclusive, as far as is known now; -1: to the end.
    """

    start: int
    period: int
    offset: int
    until: int = -1


@dataclass(frozen=True)
class _Place:
    """Attributes: a round, a part, and how many elements of the whole are before them."""

    round: int
    part: int
    number: int

    def mark(self, part: int) -> int:
        """Elements of a part before it are behind this place."""
        return self.round + (part < self.part)


class Order:
    """A walk through the elements, from the place where the iteration began.

    Args:
        parts: How many parts there are.
        consumers: How many consumers share them.
        index: Which of them this is.
        begin: Where the iteration began; None at its beginning.
    """

    def __init__(self, parts: int, consumers: int, index: int, begin: pb.State | None) -> None:
        self._consumers = consumers
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
            # Numbers count from the position: what is skipped before it is nobody's.
            rounds = begin.begin_round
            place = _Place(rounds, begin.next_part, -begin.skip)
        self._round, self._part, self._number = place.round, place.part, place.number
        self._given = place
        self._steps = 0

    @property
    def parts(self) -> int:
        """Local. How many parts there are."""
        return len(self._known)

    @property
    def consumers(self) -> int:
        """Local. How many consumers there are."""
        return self._consumers

    @property
    def part(self) -> int:
        """Local. The part of the element where the walk stands."""
        return self._part

    @property
    def index(self) -> int:
        """Local. Its index there."""
        return self._round

    def mark(self, part: int) -> int:
        """Local. Elements of a part before it are not needed any more, not even for a state."""
        return self._given.mark(part)

    def note(self, part: int, stop: int, end: bool) -> bool:
        """Local. Elements of a part before ``stop`` exist, and no others if ``end``.

        Returns:
            Whether the number of elements is news, which may change who wants which.
        """
        self._known[part] = max(self._known[part], stop)
        if not end or self._ends[part] >= 0:
            return False
        self._ends[part] = stop
        return True

    def end(self, part: int) -> int:
        """Local. The number of elements of a part; -1 if it is not known."""
        return self._ends[part]

    @property
    def over(self) -> bool:
        """Local. Whether there is nothing where the walk stands, or after it."""
        return min(self._ends) >= 0 and self._round >= max(self._ends)

    def missing(self) -> int | None:
        """Local. Walk to the next element of this consumer.

        Returns:
            The part of which more must be known before the walk can go on; None if it stands at an
            element of this consumer, or is over.
        """
        while True:
            end = self._ends[self._part]
            if end < 0 or self._round < end:
                if self._round >= self._known[self._part]:
                    return self._part
                if self._number >= 0 and self._number % self._consumers == self._own:
                    return None
                self._number += 1
            elif self._part == 0 and self.over:
                return None
            self._advance()

    def step(self) -> None:
        """Local. The element where the walk stands has been given."""
        self._number += 1
        self._steps += 1
        self._advance()
        self._given = _Place(self._round, self._part, self._number)

    def plan(self, part: int, start: int) -> Plan:
        """Local. Which elements of a part this consumer wants, from an index on."""
        here = _Place(self._round, self._part, self._number)
        start = max(start, here.mark(part))
        if 0 <= self._ends[part] <= start:
            return Plan(start, 0, 0)
        # Up to the next end of a part, those that live are the same.
        until = min((end for end in self._ends if end > start), default=-1)
        living = sum(not 0 <= end <= start for end in self._ends)
        period = self._consumers // gcd(living, self._consumers)
        number = self._count_to(here, part, start)
        for index in range(start, start + period):
            if (number + (index - start) * living) % self._consumers == self._own:
                return Plan(start, period, index % period, until)
        return Plan(start, 0, 0, until)

    def _count_to(self, here: _Place, part: int, index: int) -> int:
        """How many elements of the whole are before an element of a part."""
        number = here.number
        for other, end in enumerate(self._ends):
            last = index + (other < part)
            if end >= 0:
                last = min(last, end)
            number += max(last - here.mark(other), 0)
        return number

    def state(self) -> pb.State:
        """Local. Where all consumers are that have been given as many elements as this one."""
        given = self._given
        number = self._steps * self._consumers
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
        self._part += 1
        if self._part == len(self._known):
            self._round += 1
            self._part = 0
