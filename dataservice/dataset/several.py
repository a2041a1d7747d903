"""What nodes over several others have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, NoElementError
from dataservice.dataset.portions import side_by_side
from dataservice.dataset.spec import Spec, alike, merged


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

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.has_static_spec for parent in self.parents)

    def sample(self) -> Node:
        """Return this node over the samples of the others; see :class:`Node`."""
        parents = tuple(parent.sample() for parent in self.parents)
        if all(one is other for one, other in zip(parents, self.parents, strict=True)):
            return self
        node: Node = dataclasses.replace(self, parents=parents)  # type: ignore[type-var]
        return node

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


def merged_spec(parents: Sequence[Node]) -> Spec:
    """Local. What the elements of several nodes are like.

    Raises:
        InvalidArgumentError: They differ in more than lengths.
        NoElementError: No node has an element to look at.
    """
    specs: list[Spec] = []
    nothing: NoElementError | None = None
    for parent in [each for each in parents if each.cardinality() != 0] or parents:
        try:
            specs.append(parent.element_spec())
        except NoElementError as error:
            nothing = error
    if not specs and nothing is not None:
        raise nothing
    return merged(specs)


def check_alike(method: str, nodes: Sequence[Node]) -> None:
    """Local. TypeError if nodes are known to have elements of different structure or dtype."""
    known: list[Spec] = []
    for node in nodes:
        with suppress(ValueError):  # a pass will tell
            if node.has_static_spec and node.cardinality() != 0:
                known.append(node.element_spec())
    for spec in known[1:]:
        if not alike(known[0], spec):
            raise TypeError(
                f"{method} needs datasets whose elements have the same structure and dtypes, "
                f"not {known[0]} and {spec}"
            )


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
