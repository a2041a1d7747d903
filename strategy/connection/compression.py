"""Gradients made smaller on their way to the servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from strategy.connection.change import Change, converted

Array = NDArray[Any]

_HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Compression:
    """How gradients travel; made by :func:`parse`.

    Attributes:
        name: ``"fp16"``, ``"bf16"`` or ``"topk"``; empty for as they are.
        share: Of the elements that ``"topk"`` sends.
    """

    name: str = ""
    share: float = 1.0

    def __str__(self) -> str:
        """Local. The same for all workers that compress alike."""
        return f"{self.name}, {self.share!r}" if self.name == "topk" else self.name


def parse(given: Any) -> Compression:
    """Local. What a strategy's argument means.

    Args:
        given: None; ``"fp16"`` or ``"bf16"``: gradients travel in half precision, those of float16
            no larger than it can hold; or ``("topk", share)``: of each gradient only the largest
            elements travel, and what stays behind is added to the next one (error feedback; Stich
            et al., "Sparsified SGD with Memory", NeurIPS 2018). Rows travel in halves, but whole.

    Raises:
        ValueError: It is none of these, or the share is not in (0, 1].
    """
    if given is None:
        return Compression()
    if isinstance(given, str) and given in _HALVES:
        return Compression(given)
    if isinstance(given, tuple | list) and len(given) == 2 and given[0] == "topk":
        share = given[1]
        if isinstance(share, int | float) and 0 < share <= 1:
            return Compression("topk", float(share))
        raise ValueError(f"'topk' sends a share of the elements from 0 to 1, not {share!r}")
    raise ValueError(
        f"unknown compression {given!r}; the known ones are None, 'fp16', 'bf16' and "
        "('topk', share)"
    )


@dataclass
class Residuals:
    """What error feedback had kept of each variable before a push, and what it keeps after it."""

    before: dict[str, Array] = field(default_factory=dict)
    after: dict[str, Array] = field(default_factory=dict)


class Compressor:
    """Compresses the gradients of one worker, and keeps what stayed behind.

    Args:
        compression: How.
    """

    def __init__(self, compression: Compression) -> None:
        self._how = compression
        self._behind: dict[str, Array] = {}
        self._lock = threading.Lock()

    def apply(self, changes: Sequence[Change]) -> Residuals:
        """Replace what gradients carry by what is to travel, and keep the rest for the next push.

        Args:
            changes: Gradients; those of float32 and float64 variables change.

        Returns:
            The residuals before and after, for :meth:`undo`.
        """
        residuals = Residuals()
        if not self._how.name:
            return residuals
        try:
            for change in changes:
                if change.remote.layout.dtype.kind != "f" or change.remote.layout.is_half:
                    continue
                if self._how.name != "topk":
                    self._halve(change, _HALVES[self._how.name])
                elif change.ids is None:
                    self._select(change, residuals)
        except BaseException:
            self.undo(residuals)
            raise
        return residuals

    def undo(self, residuals: Residuals) -> None:
        """Take back what a push changed that has failed or came too late: it does not count.

        Args:
            residuals: What :meth:`apply` returned.
        """
        with self._lock:
            for name, after in residuals.after.items():
                before, now = residuals.before[name], self._behind[name]
                # Another push may have sent some of it meanwhile.
                self._behind[name] = before if now is after else now + (before - after)

    def _halve(self, change: Change, dtype: np.dtype[Any]) -> None:
        flat = converted(change)
        if dtype == np.float16:
            np.clip(flat, -_LARGEST, _LARGEST, out=flat)
        change.data, change.wire, change.scale = flat.astype(dtype), dtype, 1.0

    def _select(self, change: Change, residuals: Residuals) -> None:
        total = converted(change)
        name = change.remote.name
        with self._lock:
            before = self._behind.get(name)
            if before is None:
                before = np.zeros_like(total)
            total += before
            count = min(max(1, round(self._how.share * total.size)), total.size)
            places = np.argpartition(np.abs(total), total.size - count)[total.size - count :]
            places.sort()
            change.data, change.places, change.scale = total[places], places.astype(np.int64), 1.0
            total[places] = 0
            residuals.before[name], residuals.after[name] = before, total
            self._behind[name] = total
