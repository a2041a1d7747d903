"""How a server changes some rows of a variable, and of what it keeps beside it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.buffers.copying import put_rows, take_rows
from strategy.rules.rule import TILE, Array, Rule, Update


def change_rows(
    rule: Rule,
    tables: Sequence[Array],
    ids: Array,
    rows: Array,
    numbers: Sequence[float],
    mirror: Array | None = None,
) -> None:
    """Local. Take rows out piece by piece, change them, and put them back.

    Args:
        rule: How.
        tables: The variable and the rule's slots, all of one shape ``(n, width)`` and dtype.
        ids: Which rows, each once; int64, all there.
        rows: The gradients, flat, one behind the other; any dtype that becomes that of the tables.
        numbers: The numbers of this step.
        mirror: Another table of the variable's shape, which is to hold the same in its own dtype.

    Raises:
        Exception: What the rule raises; the pieces before have been changed.
    """
    width, dtype = tables[0].shape[1], tables[0].dtype
    length = min(max(TILE // max(width, 1), 1), len(ids))
    taken = [np.empty((length, width), dtype) for _ in tables]
    apply = rule.on_host
    for start in range(0, len(ids), max(length, 1)):
        here = ids[start : start + length]
        parts = [part[: len(here)] for part in taken]
        for table, part in zip(tables, parts, strict=True):
            take_rows(table, here, part)
        grad = rows[start * width : (start + len(here)) * width].astype(dtype, copy=False)
        param, *slots = [part.reshape(-1) for part in parts]
        apply(Update(param, grad, slots, numbers))
        for table, part in zip(tables, parts, strict=True):
            put_rows(table, here, part)
        if mirror is not None:
            put_rows(mirror, here, parts[0].astype(mirror.dtype))
