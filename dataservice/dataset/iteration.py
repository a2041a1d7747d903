"""A pass of a Dataset, as users hold it: one that can be put away and taken up again."""

from __future__ import annotations

import pickle
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.ignore_errors import Count, CountingContext
from dataservice.dataset.node import ElementIterator, Node
from mpidist.errors import DataLossError, InvalidArgumentError

_FORMAT = 5


class DatasetIterator(ElementIterator):
    """One pass over a dataset.

    Args:
        node: The description.
        context: What the pass depends on besides.
    """

    def __init__(self, node: Node, context: Context) -> None:
        self._node = node
        self._begin(context, 0)

    @property
    def ignored(self) -> int:
        """Local. How many errors the ``ignore_errors`` of this pass have ignored so far.

        Those of elements that ``prefetch`` has made ahead count already.
        """
        return self._context.ignored.value

    def __next__(self) -> Any:
        return next(self._elements)

    def get_state(self) -> bytes:
        """Local. Where the pass is: what :meth:`set_state` of a later one goes on from.

        It takes no longer at the end of a pass than at its beginning. It holds the elements that
        ``shuffle`` and ``prefetch`` hold, and is small otherwise.

        Returns:
            A pickle, for instance for ``strategy.save(..., extra={"data": state})``.

        Raises:
            UnimplementedError: A source cannot say where it is, or a data service reads it.
        """
        context = self._context
        of = (_FORMAT, self._node.summary(), context.seed, context.epoch, self.ignored)
        return pickle.dumps((*of, self._elements.get_state()), protocol=5)

    def set_state(self, state: bytes) -> None:
        """Local. Go on where another pass was, with the elements that come next there.

        Args:
            state: What :meth:`get_state` gave, of an equal dataset. It is unpickled: it must come
                from somebody who is trusted.

        Raises:
            DataLossError: It is damaged.
            InvalidArgumentError: It is of another dataset; the message names both.
            UnimplementedError: As :meth:`get_state`.
        """
        try:
            version, summary, *within = pickle.loads(state)
        except Exception as error:
            raise DataLossError(f"the state of an iterator is damaged: {error!r}") from error
        if (version, summary) != (_FORMAT, self._node.summary()):
            raise InvalidArgumentError(
                f"the state belongs to an iterator over {summary} (format {version}), not over "
                f"{self._node.summary()} (format {_FORMAT})"
            )
        seed, epoch, ignored, below = within
        self._elements.close()
        self._begin(Context(seed, epoch), ignored)
        self._elements.set_state(below)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._elements.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._elements.goes_on(error)

    def _begin(self, context: Context, ignored: int) -> None:
        self._context = CountingContext(context.seed, context.epoch, ignored=Count(ignored))
        self._elements = self._node.iterate(self._context)
