"""Trees of values: nested tuples, namedtuples, lists, dicts and dataclasses.

Leaves are all other values, IndexedSlices, optimizers, and dataclasses with a field that their
constructor does not take.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strategy.array_like import IndexedSlices
from strategy.optimizers import Optimizer

_LEAVES = (IndexedSlices, Optimizer)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each leaf of a tree. Return a tree of the same form.

    If the function returns all leaves unchanged, the tree itself is returned. A changed Mapping
    that is not a dict becomes a dict.

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


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of the same form with other leaves, in order."""
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


def _keys(tree: Any) -> Sequence[Any] | None:
    """Return the keys, indices or field names of a tree; None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree)
    if isinstance(tree, tuple | list):
        return range(len(tree))
    if not dataclasses.is_dataclass(tree) or isinstance(tree, (type, *_LEAVES)):
        return None
    fields = dataclasses.fields(tree)
    return [field.name for field in fields] if all(field.init for field in fields) else None


def _get(tree: Any, key: Any) -> Any:
    return tree[key] if isinstance(tree, Mapping | tuple | list) else getattr(tree, key)


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two trees have the same type and, at the first level, the same keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return bool(one.keys() == other.keys())
    return _keys(one) == _keys(other)


def _with_values(tree: Any, keys: Sequence[Any], values: list[Any]) -> Any:
    """Return a tree with other values at the first level."""
    # The constructors of dataclasses may have checks, so an unchanged tree is not made again.
    if all(value is _get(tree, key) for key, value in zip(keys, values, strict=True)):
        return tree
    named = dict(zip(keys, values, strict=True))
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # keeps the default factory of a defaultdict
        changed.update(named)
        return changed
    if isinstance(tree, Mapping):
        return named
    if isinstance(tree, tuple | list):
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return dataclasses.replace(tree, **named)
