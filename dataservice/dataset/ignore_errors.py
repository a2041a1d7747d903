"""``Dataset.ignore_errors``: all but the elements whose evaluation fails."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.spec import Spec, spec_of
from dataservice.metrics import own_metrics

logger = logging.getLogger(__name__)


class Count:
    """Errors that a whole pass has ignored; its nodes add from their threads.

    Args:
        value: How many so far.

    Attributes:
        value: How many.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._lock = threading.Lock()

    def add(self) -> None:
        """Local. One more."""
        with self._lock:
            self.value += 1


@dataclass(frozen=True)
class CountingContext(Context):
    """The context of a pass whose user wants to know.

    Attributes:
        ignored: Errors that have been ignored.
    """

    ignored: Count = field(default_factory=Count)


@dataclass(frozen=True)
class IgnoreErrors(UnaryNode):
    """Leaves out elements whose evaluation by the nodes below raised an Exception.

    Attributes:
        parent: The node below.
        log_warning: Whether to log each error.
        limit: How many errors of a pass to ignore; None ignores all.
    """

    parent: Node
    log_warning: bool
    limit: int | None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"ignore_errors needs a limit of at least 0, not {self.limit}")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        try:
            return super().element_spec()
        except Exception:  # of the first element: another one tells as well
            return spec_of(self.first())

    def _iterate(self, context: Context) -> ElementIterator:
        return IgnoreErrorsIterator(self, context)


class IgnoreErrorsIterator(UnaryIterator):
    """One pass.

    Attributes:
        ignored: How many errors it has ignored.
    """

    def __init__(self, node: IgnoreErrors, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._context = context
        self.ignored = 0

    def __next__(self) -> Any:
        last: Exception | None = None
        try:
            while self._context.scope is None or not self._context.scope.closed:
                try:
                    return next(self._parent)
                except StopIteration:
                    raise
                except Exception as error:
                    # A pass that cannot go on, as one over a generator, raises the same once more.
                    stuck = error is last and not self._parent.goes_on(error)
                    if stuck or not self._ignores(error):
                        raise
                    last = error
            raise StopIteration
        finally:
            last = None  # whose traceback refers to this frame

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self.ignored, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self.ignored, below = state
        super().set_state(below)

    def _ignores(self, error: Exception) -> bool:
        """Count an error, unless that is one too many."""
        if self.ignored == self._node.limit:
            note = f"ignore_errors had ignored {self.ignored} errors, which is its limit"
            if note not in getattr(error, "__notes__", ()):  # it may be raised several times
                error.add_note(note)
            return False
        self.ignored += 1
        if isinstance(self._context, CountingContext):
            self._context.ignored.add()
        own_metrics().values["ignored"] += 1
        if self._node.log_warning:
            logger.warning("%s drops an element: %r", self._node.summary(), error)
        return True
