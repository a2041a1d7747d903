"""Transformations that depend on the elements before, or drop some elements."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataservice.calls import own_metrics
from dataservice.dataset import tree
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    FunctionNode,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.spec import ArraySpec, Spec, spec_of
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Filter(UnaryNode):
    """Attributes: the node below, and the predicate of the elements that stay."""

    parent: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def _iterate(self, context: Context) -> ElementIterator:
        return FilterIterator(self.parent.iterate(context), self.predicate)


class FilterIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate

    def __next__(self) -> Any:
        while True:
            element = next(self._parent)
            if tree.call_predicate(self._predicate, element, "filter"):
                return element


@dataclass(frozen=True)
class TakeWhile(UnaryNode):
    """Attributes: the node below, and the predicate, which ends the pass when it is False."""

    parent: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        raise self.cannot_be_split("each would stop somewhere in its own part")

    def _iterate(self, context: Context) -> ElementIterator:
        return TakeWhileIterator(self.parent.iterate(context), self.predicate)


class TakeWhileIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        element = next(self._parent)
        if tree.call_predicate(self._predicate, element, "take_while"):
            return element
        self._ended = True
        raise StopIteration

    def get_state(self) -> tuple[bool, Any]:
        return self._ended, super().get_state()

    def set_state(self, state: tuple[bool, Any]) -> None:
        self._ended, below = state
        super().set_state(below)


@dataclass(frozen=True, eq=False)
class Scan(FunctionNode):
    """Passes a state from element to element, and yields a result at each.

    Attributes:
        parent: The node below.
        initial_state: The state before the first element.
        function: Maps a state and an element to the next state and a result.
    """

    parent: Node
    initial_state: Any = field(repr=False)
    function: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, parent: Node, initial_state: Any, function: Callable[[Any, Any], Any]) -> Scan:
        """Copy the state, because the caller may change it."""
        return cls(parent, _own(initial_state), function)

    def source_length(self) -> int:
        raise self.cannot_be_split("each would have a state of its own")

    def _iterate(self, context: Context) -> ElementIterator:
        return ScanIterator(self, context)


class ScanIterator(UnaryIterator):
    """One pass; its copy of the state is read-only."""

    def __init__(self, node: Scan, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._function = node.function
        self._state = node.initial_state

    def __next__(self) -> Any:
        result = tree.call(
            self._function, (tree.copy_structure(self._state), next(self._parent)), "scan"
        )
        if not isinstance(result, tuple) or len(result) != 2 or result[1] is None:
            raise InvalidArgumentError(
                f"the function {tree.name_of(self._function)} given to scan returned {result!r}: "
                "it must return a state and an element"
            )
        state, element = result
        self._state = _own(state)
        return tree.to_numpy(element)

    def get_state(self) -> tuple[Any, Any]:
        return self._state, super().get_state()

    def set_state(self, state: tuple[Any, Any]) -> None:
        own, below = state
        self._state = _own(own)  # unpickled arrays can be written into
        super().set_state(below)


def _own(state: Any) -> Any:
    copy = tree.map_leaves(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree.to_numpy(state)
    )
    return tree.read_only(copy)


# With 16 bytes, two elements of a dataset never have the same hash by chance.
_BYTES = 16

_TEXT = "SUTO"


@dataclass(frozen=True)
class Unique(UnaryNode):
    """Attributes: the node below."""

    parent: Node

    def cardinality(self) -> int:
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        raise self.cannot_be_split("each would know the elements of its own part only")

    def _iterate(self, context: Context) -> ElementIterator:
        return UniqueIterator(self.parent.iterate(context))


class UniqueIterator(UnaryIterator):
    """One pass; holds a fingerprint of each element that it has yielded."""

    def __init__(self, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._given: dict[bytes, None] = {}  # in the order in which they have come

    def __next__(self) -> Any:
        while True:
            element = next(self._parent)
            fingerprint = _fingerprint(element)
            if fingerprint not in self._given:
                self._given[fingerprint] = None
                return element

    def get_state(self) -> tuple[bytes, Any]:
        return b"".join(self._given), super().get_state()

    def set_state(self, state: tuple[bytes, Any]) -> None:
        given, below = state
        self._given = dict.fromkeys(given[i : i + _BYTES] for i in range(0, len(given), _BYTES))
        super().set_state(below)


def _fingerprint(element: Any) -> bytes:
    """Return a hash that is the same for equal elements in every process."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    _add(digest, element)
    return digest.digest()


def _add(digest: hashlib.blake2b, element: Any) -> None:
    if isinstance(element, dict):
        digest.update(b"dict%d" % len(element))
        for key in sorted(element, key=repr):
            digest.update(repr(key).encode())
            _add(digest, element[key])
    elif isinstance(element, tuple):
        digest.update(b"tuple%d" % len(element))
        for part in element:
            _add(digest, part)
    elif (text := _text_of(element)) is not None:
        digest.update(text.encode())
    else:
        array = np.asarray(tree.on_host(element))
        if array.dtype.hasobject:
            raise InvalidArgumentError(
                f"unique needs elements of arrays, numbers and text, not {element!r}"
            )
        digest.update(f"{array.dtype.descr}{array.shape}".encode())
        digest.update(array.tobytes())


def _text_of(leaf: Any) -> str | None:
    """Return a text for a leaf that is text, whatever object holds it; None for other leaves."""
    if isinstance(leaf, str | bytes):
        values, shape = [leaf], ()
    elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in _TEXT:
        values, shape = leaf.ravel().tolist(), leaf.shape
    else:
        return None
    for kind in (str, bytes):
        if all(isinstance(value, kind) for value in values):
            return f"{kind.__name__}{shape}{[kind.__str__(value) for value in values]}"
    return None


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IgnoreErrors(UnaryNode):
    """Leaves out elements if the nodes below raised an Exception in their place.

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
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
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
            last = None  # its traceback refers to this frame

    def get_state(self) -> tuple[int, Any]:
        return self.ignored, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
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
        self._context.ignored.add()
        own_metrics().values["ignored"] += 1
        if self._node.log_warning:
            logger.warning("%s drops an element: %r", self._node.summary(), error)
        return True


_SEEN_BEFORE = 10
"""As if so many elements of each class had come before the first, as in TensorFlow."""


@dataclass(frozen=True)
class RejectionResample(UnaryNode):
    """Keeps elements at random, and gives them with their classes.

    Attributes:
        parent: The node below.
        class_of: Says which class an element is of.
        target: How frequent classes shall be, compared with each other.
        initial: How frequent they are below; None: as they have been so far.
        seed: Fixes the elements that are kept; None differs from run to run.
    """

    parent: Node
    class_of: Callable[..., Any]
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: int | None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"a seed cannot be negative: {self.seed}")
        _check_shares("target_dist", self.target)
        if self.initial is not None:
            _check_shares("initial_dist", self.initial)
            _check_together(self.target, self.initial)

    def cardinality(self) -> int:
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        return ArraySpec((), np.int64), self.parent.element_spec()

    def _iterate(self, context: Context) -> ElementIterator:
        return RejectionResampleIterator(self, context)

    def class_number(self, element: Any) -> int:
        """Return the class of an element.

        Raises:
            InvalidArgumentError: The class is not a class of the target.
        """
        found = tree.call_int(self.class_of, element, "rejection_resample")
        if not 0 <= found < len(self.target):
            raise InvalidArgumentError(
                f"rejection_resample: class {found} is not in [0, {len(self.target)})"
            )
        return found


class RejectionResampleIterator(UnaryIterator):
    """One pass; draws a random number for each element, and counts the elements of each class."""

    def __init__(self, node: RejectionResample, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._random = np.random.default_rng(
            node.entropy(node.seed, context.own_seed, context.epoch)
        )
        self._seen = [_SEEN_BEFORE] * len(node.target)

    def __next__(self) -> tuple[np.int64, Any]:
        while True:
            element = next(self._parent)
            found = self._node.class_number(element)
            self._seen[found] += 1
            if self._random.random() < self._chance(found):
                return np.int64(found), element

    def get_state(self) -> tuple[Any, list[int], Any]:
        return self._random.bit_generator.state, list(self._seen), super().get_state()

    def set_state(self, state: tuple[Any, list[int], Any]) -> None:
        self._random.bit_generator.state, seen, below = state
        self._seen = list(seen)
        super().set_state(below)

    def _chance(self, found: int) -> float:
        """Return the probability to keep an element of a class; 1 for the most wanted class."""
        there = self._seen if self._node.initial is None else self._node.initial
        wanted = [
            share / count if share > 0 else 0.0
            for share, count in zip(self._node.target, there, strict=True)
        ]
        return wanted[found] / max(wanted)


def _check_shares(name: str, shares: tuple[float, ...]) -> None:
    if not (np.isfinite(shares).all() and min(shares, default=0) >= 0 and sum(shares) > 0):
        raise ValueError(
            f"rejection_resample needs finite numbers of at least 0, not all 0, as {name}, not "
            f"{list(shares)}"
        )


def _check_together(target: tuple[float, ...], initial: tuple[float, ...]) -> None:
    if len(target) != len(initial):
        raise ValueError(
            f"rejection_resample: target_dist has {len(target)} classes, and initial_dist "
            f"{len(initial)}"
        )
    for each, (wanted, there) in enumerate(zip(target, initial, strict=True)):
        if wanted and not there:
            raise ValueError(
                f"rejection_resample: target_dist has class {each}, but its probability in "
                "initial_dist is 0"
            )
