"""Trees of values: nested tuples, namedtuples, lists, dicts and dataclasses.

An OrderedDict and a defaultdict are trees, too. A dataclass is a tree if it has the generated
constructor, which takes all fields, and no ``__post_init__``: the constructor is called with other
values. All other values are leaves, also other subclasses of list, tuple and dict.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from strategy.array_like import IndexedSlices
from strategy.optimizers import Optimizer

_DICTS = (dict, OrderedDict, defaultdict)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each leaf of a tree. Return a new tree of the same form.

    If the function returns all leaves of a dataclass unchanged, the dataclass itself is returned.
    It may be an object of the program, which a step changes.

    Args:
        function: Called with the values at the same place of all trees.
        tree: The tree, or one value.
        others: More trees of the same form; below a leaf of ``tree`` they may have any form.

    Raises:
        ValueError: The trees have different forms.
    """
    keys = _keys(tree)
    if keys is None:
        return function(tree, *others)
    for other in others:
        if not _is_alike(tree, other):
            raise ValueError(
                f"the values are nested differently: a {type(tree).__name__} with {list(keys)} "
                f"and {other!r}"
            )
    values = [
        tree_map(function, _get(tree, key), *[_get(other, key) for other in others]) for key in keys
    ]
    return _with_values(tree, keys, values)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    keys = _keys(tree)
    if keys is None:
        return [tree]
    return [leaf for key in keys for leaf in tree_leaves(_get(tree, key))]


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return a tree of the same form with other leaves, in order; as many as it has."""
    rest = iter(leaves)
    return tree_map(lambda _: next(rest), tree)


def tree_zip(function: Callable[[Sequence[Any]], Any], trees: Sequence[Any]) -> Any:
    """Combine several trees into one, as far down as they have the same form.

    Args:
        function: Called with the values of all trees at each place below which they differ in form,
            or where they are leaves.
        trees: At least one tree.
    """
    first = trees[0]
    keys = _keys(first)
    if keys is None or not all(_is_alike(first, tree) for tree in trees[1:]):
        return function(trees)
    values = [tree_zip(function, [_get(tree, key) for tree in trees]) for key in keys]
    return _with_values(first, keys, values)


@lru_cache(maxsize=256)
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass that is a tree; None for other types."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, (IndexedSlices, Optimizer)):
        return None
    names = tuple([field.name for field in dataclasses.fields(kind)])
    # A constructor that was written by hand, or that takes an InitVar, has other parameters.
    takes_all = tuple(inspect.signature(kind).parameters) == names
    return names if takes_all and not hasattr(kind, "__post_init__") else None


def _keys(tree: Any) -> Sequence[Any] | None:
    """Return the keys, indices or field names of a tree; None for a leaf."""
    kind: Any = type(tree)
    if kind is list or kind is tuple:
        return range(len(tree))
    if kind in _DICTS:
        return list(tree)
    if isinstance(tree, tuple):
        return range(len(tree)) if hasattr(kind, "_fields") else None
    names: tuple[str, ...] | None = _fields_of(kind)
    return names if names and all(hasattr(tree, name) for name in names) else None


def _get(tree: Any, key: Any) -> Any:
    return tree[key] if isinstance(tree, (tuple, list, dict)) else getattr(tree, key)


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two trees have the same type and, at the first level, the same keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(one) == set(other)
    return _keys(one) == _keys(other)


def _with_values(tree: Any, keys: Sequence[Any], values: list[Any]) -> Any:
    """Return a new tree with other values at the first level."""
    kind = type(tree)
    if kind is list:
        return values
    if isinstance(tree, tuple):
        return tuple(values) if kind is tuple else kind._make(values)
    named = dict(zip(keys, values, strict=True))
    if kind is defaultdict:
        return defaultdict(tree.default_factory, named)
    if isinstance(tree, dict):
        return kind(named)
    old = [leaf for name in keys for leaf in tree_leaves(getattr(tree, name))]
    new = tree_leaves(values)
    unchanged = len(old) == len(new) and all(map(operator.is_, old, new))
    return tree if unchanged else kind(**named)
