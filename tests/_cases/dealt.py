"""Contexts of passes over given source indices, without a dispatcher."""

from dataservice.dataset.base import Context, Share


class Dealt:
    """The splits of one worker. A request for a position before :attr:`first` fails.

    Args:
        splits: Ranges of indices.

    Attributes:
        asked: Numbers of the requested splits, in order.
        first: The first position that may be requested.
    """

    def __init__(self, *splits):
        self.splits = splits
        self.start = self.marked = self.first = 0
        self.asked = []

    def run(self, position):
        assert position >= self.first, f"index {position} is forgotten; {self.first} is the first"
        begin = 0
        for number, split in enumerate(self.splits):
            if position < begin + len(split):
                self.take(number)
                return split[position - begin :]
            begin += len(split)
        self.take(len(self.splits))
        return range(0)

    def take(self, number):
        self.asked.append(number)

    def mark(self, position):
        self.marked = position


def context_of(node, *splits, epoch=0, part=()):
    """Return the context of a pass of one worker over splits: ranges, or one Dealt."""
    dealt = splits[0] if splits and isinstance(splits[0], Dealt) else Dealt(*splits)
    return Context((1,), epoch, part=part, share=Share(dealt, node.source_length()))


def all_indices(node):
    """Return all source indices of a node."""
    return range(node.source_length())
