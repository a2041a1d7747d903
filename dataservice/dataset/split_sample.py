"""What ``sample_from_datasets`` does where the source indices are dealt out: element i is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dataservice.dataset.context import Context, Feed
from dataservice.dataset.draws import Drawn, Draws, Numbers
from dataservice.dataset.node import Node
from dataservice.dataset.runs import AT_ONCE, NEAR, Chosen, Remembered, SplitIterator
from dataservice.dataset.source import SplitReader


class SplitSampleIterator(SplitIterator):
    """A pass over some splits of a mixture, whose elements are those of a pass over all.

    Args:
        parents: The nodes, one to one.
        draws: Of the pass.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, parents: Sequence[Node], draws: Draws, context: Context, feed: Feed) -> None:
        super().__init__(context, feed)
        self._parents = parents
        self._draws = draws
        self._contexts = [context.branch(number) for number in range(len(parents))]
        self._passes: list[Chosen | None] = [None] * len(parents)

    def _element(self, index: int) -> Any:
        number, within = divmod(index, self._draws.size)
        which = int(self._draws.block(number)[0][within])
        for chosen in (self._passes[which], None):
            chosen = chosen or self._begin(which)
            try:
                return chosen.next()
            except StopIteration:  # a pass is told of no further splits than were needed
                self._end(which)
        raise StopIteration

    def get_state(self) -> tuple[tuple[int, int], int, Drawn]:
        """Local. See :class:`ElementIterator`; with what is known of draws, to make none twice."""
        number, position = self._indices.get_state()
        split = self._splits.split(number) if number >= 0 else range(0)
        first = split[min(position, len(split) - 1)] if split else 0
        block = first // self._draws.size
        return (number, position), block, self._draws.before(block)

    def set_state(self, state: tuple[tuple[int, int], int, Drawn]) -> None:
        """Local. See :class:`ElementIterator`."""
        place, block, drawn = state
        self._draws.begin_at(block, drawn)
        self._indices.set_state(place)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        for which in range(len(self._passes)):
            self._end(which)

    def _begin(self, which: int) -> Chosen:
        """A pass over one of the nodes, from the index on that has been read last."""
        parent = self._parents[which]
        places = _places_ahead(self._indices, self._splits, self._draws, which)
        # What the pass below holds must not refer to this one, which would be a circle.
        below = parent.source_indices()
        runs = (below[run.start : run.stop] for run in places)
        chosen = Chosen(parent, self._contexts[which], runs)
        self._passes[which] = chosen
        return chosen

    def _end(self, which: int) -> None:
        chosen, self._passes[which] = self._passes[which], None
        if chosen is not None:
            chosen.close()


def _places_ahead(
    reader: SplitReader, splits: Remembered, draws: Draws, which: int
) -> Iterator[range]:
    """Where the elements of a mixture are in one of its nodes, from the last one read on.

    It goes no further than the split behind the one that is being read, unless splits are short:
    others could begin with those after it, while elements of this node may be few.
    """
    number, position = reader.last
    lengths: dict[int, int] = {}
    while _is_near(number, reader.last[0], lengths):
        found, split = splits.split_from(number)
        if not split:
            return
        number, position = found, position if found == number else 0
        lengths[number] = len(split)
        while position < len(split):
            # What has been read has no element of this node that has not been asked for.
            reading, read = reader.last
            if reading > number:
                break
            position = max(position, read if reading == number else 0)
            yield from _consecutive(_places(draws, split[position : position + AT_ONCE], which))
            position += AT_ONCE
        number, position = number + 1, 0


def _is_near(number: int, reading: int, lengths: dict[int, int]) -> bool:
    """Whether a split may be looked at; lengths are of those that have been."""
    for read in [each for each in lengths if each <= reading]:
        del lengths[read]
    return number <= reading + 1 or sum(lengths.values()) < NEAR


def _places(draws: Draws, indices: range, which: int) -> Numbers:
    """Where some elements of a mixture are in a node, as far as they are of it."""
    size = draws.size
    found = []
    for number in range(indices[0] // size, indices[-1] // size + 1):
        first = number * size
        sequences, places = draws.block(number)
        # Those of a strided range that are in this block.
        start = max(-(-(first - indices.start) // indices.step), 0)
        stop = -(-(first + size - indices.start) // indices.step)
        own = indices[start:stop]
        within = slice(own.start - first, own.stop - first, own.step)
        found.append(places[within][sequences[within] == which])
    return np.concatenate(found)


def _consecutive(places: Numbers) -> Iterator[range]:
    """Ascending numbers as runs of consecutive ones."""
    if len(places):
        ends = np.flatnonzero(np.diff(places) != 1)
        starts = places[np.concatenate(([0], ends + 1))].tolist()
        stops = places[np.concatenate((ends, [len(places) - 1]))].tolist()
        for start, stop in zip(starts, stops, strict=True):
            yield range(start, stop + 1)
