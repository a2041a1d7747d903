"""What happens to gradients that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpidist import errors
from strategy.connection.change import Change
from strategy.connection.finite import not_finite

logger = logging.getLogger(__name__)

POLICIES = ("error", "skip", "pass")


class NanPolicy:
    """Looks at gradients before they are pushed.

    Args:
        policy: ``"error"``: gradients with NaN or infinite elements are an error; ``"skip"``: they
            are not pushed, and a warning says so once; ``"pass"``: nobody looks.
        worker: Index of this worker, for messages.

    Attributes:
        skipped: How many calls of ``apply_gradients`` of this worker were not pushed.

    Raises:
        ValueError: The policy is unknown.
    """

    def __init__(self, policy: str, worker: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown nan policy {policy!r}; the known ones are {POLICIES}")
        self._policy = policy
        self._worker = worker
        self.skipped = 0

    def allows(self, changes: Sequence[Change]) -> bool:
        """Local. Whether gradients are to be pushed.

        Raises:
            InvalidArgumentError: They are not finite, and that is an error.
        """
        names = not_finite(changes) if self._policy != "pass" else []
        if not names:
            return True
        what = f"gradients of worker {self._worker} have NaN or infinite elements: those of {names}"
        if self._policy == "error":
            raise errors.InvalidArgumentError(
                f"{what}; nothing was pushed. The strategy's nan='skip' leaves such gradients out, "
                "nan='pass' applies them"
            )
        if self.skipped == 0:
            logger.warning("%s; they are skipped, and so will others be without a word", what)
        self.skipped += 1
        return False
