"""What nodes over several others have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node
from dataservice.dataset.portions import side_by_side


class SeveralNode(Node):
    """A node over several others; attribute ``parents`` has them."""

    parents: tuple[Node, ...]

    @property
    def steady(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.steady for parent in self.parents)

    @property
    def random_access(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.random_access for parent in self.parents)

    @property
    def distributed(self) -> bool:
        """Local. See :class:`Node`."""
        return any(parent.distributed for parent in self.parents)

    @property
    def on_device(self) -> bool:
        """Local. See :class:`Node`."""
        return any(parent.on_device for parent in self.parents)

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        raise self.cannot_be_split("it has several sources")

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shown = [parent.summary() for parent in self.parents]
        return f"{type(self).__name__.lower()}({', '.join([*shown, *self.further()])})"

    def begin(self, context: Context) -> list[ElementIterator]:
        """Local. A pass over each of the others; under a feed, all over the same splits."""
        contexts = side_by_side(context, self.parents)
        return [parent.iterate(each) for parent, each in zip(self.parents, contexts, strict=True)]

    def further(self) -> list[str]:
        """Local. What the summary says besides, as text."""
        return []


class SeveralIterator(ElementIterator):
    """A pass over several passes, which all run at once.

    Args:
        passes: Makes them; called once.
    """

    def __init__(self, passes: Callable[[], Sequence[ElementIterator]]) -> None:
        self._passes = list(passes())

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`; by default those of the passes."""
        return [each.get_state() for each in self._passes]

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        for each, its in zip(self._passes, state, strict=True):
            each.set_state(its)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        for each in self._passes:
            each.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return all(each.goes_on(error) for each in self._passes)
