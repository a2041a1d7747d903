"""``Dataset.unique``: each element once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from mpidist.errors import InvalidArgumentError

# So long that two of a dataset's elements never have the same by chance.
_BYTES = 16

_TEXT = "SUTO"


@dataclass(frozen=True)
class Unique(UnaryNode):
    """Attributes: the node below."""

    parent: Node

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Raise UnimplementedError; see :class:`Node`."""
        raise self.cannot_be_split("each would know the elements of its own part only")

    def _iterate(self, context: Context) -> ElementIterator:
        return UniqueIterator(self.parent.iterate(context))


class UniqueIterator(UnaryIterator):
    """One pass; holds a fingerprint of each element that it has given."""

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
        """Local. See :class:`ElementIterator`; the fingerprints are a part of it."""
        return b"".join(self._given), super().get_state()

    def set_state(self, state: tuple[bytes, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        given, below = state
        self._given = dict.fromkeys(given[i : i + _BYTES] for i in range(0, len(given), _BYTES))
        super().set_state(below)


def _fingerprint(element: Any) -> bytes:
    """The same bytes for equal elements, in every process."""
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
    """What tells text from others, whatever it is kept in; None if it is none."""
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
