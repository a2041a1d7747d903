"""A variable as its server has it: the only one who changes it, and keeps slots beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from mpidist import errors
from strategy.checkpoints.carried import Stored
from strategy.rules.rule import ASSIGN, Rule, Update
from strategy.server.means import mean_of_rows
from strategy.server.row_changes import change_rows
from strategy.server.slotted_shard import SlottedShard
from strategy.shared.shard import Array

End = Callable[[], object]
"""Waits until the change of a block is over; raises what it has failed with."""

# What overflows becomes infinite, and nobody is told: a server's log is not where it is looked for.
_quiet = partial(np.errstate, all="ignore")


class OwnedShard(SlottedShard):
    """A shard as its server has it: the only one who writes. See :class:`SlottedShard`."""

    _ahead = 0  # unfinished blocks when the change of the next block begins

    def apply(
        self, name: str, rule: Rule, numbers: Sequence[float], blocks: Iterable[Array]
    ) -> None:
        """Change the whole variable once.

        Args:
            name: Name of the optimizer, under which slots and steps are kept.
            rule: The update rule.
            numbers: The numbers of this step.
            blocks: The gradient, flat, block by block.

        Raises:
            Exception: An error of the rule or of the blocks, after the versions of all blocks have
                advanced: some of the values may have changed.
        """
        step = self.steps.get(name, 0) + 1
        update = self._updater(name, rule, numbers)
        block, start = 0, 0
        odd: deque[tuple[int, End]] = deque()  # blocks whose change has begun
        problem: BaseException | None = None
        try:
            for gradient in blocks:
                self._version_of[block] += 1
                self._sync()
                end: End | None = None
                try:
                    if problem is None:
                        with _quiet():
                            end = update(start, gradient)
                except (Exception, SystemExit) as error:  # a user's function may raise either
                    problem = error
                if end is None:
                    self._sync()
                    self._version_of[block] += 1
                else:
                    odd.append((block, end))
                    problem = self._end_blocks(odd, self._ahead) or problem
                block, start = block + 1, start + gradient.size
        finally:
            problem = self._end_blocks(odd, 0) or problem
            self.versions[block:] += 2  # blocks are left only after an error of the iterator
            self.steps[name] = step
        if problem is not None:
            raise problem

    def _end_blocks(self, odd: deque[tuple[int, End]], left: int) -> BaseException | None:
        """Wait for changes of blocks until so many are left; returns what one has failed with."""
        problem: BaseException | None = None
        while len(odd) > left:
            block, end = odd.popleft()
            try:
                end()
            except (Exception, SystemExit) as error:
                problem = error
            finally:
                self._sync()
                self._version_of[block] += 1
        return problem

    def apply_rows(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> None:
        """Local. Change some rows once; all others, and what is kept beside them, stay.

        Args:
            name: See :meth:`apply`, which raises the same.
            rule: How.
            numbers: The numbers of this step.
            ids: Which rows, each once.
            rows: The gradients, flat, one behind the other.

        Raises:
            InvalidArgumentError: A row is not there.
        """
        self.check_rows(ids)
        self._change_rows(name, lambda: self._row_changer(name, rule, numbers, ids, rows))

    def apply_mean_of_rows(
        self,
        name: str,
        rule: Rule,
        numbers: Sequence[float],
        each: Sequence[tuple[Array, Array]],
    ) -> None:
        """Local. Change some rows once, by the mean of what several workers give for them.

        Args:
            name: See :meth:`apply_rows`, which raises the same.
            rule: How.
            numbers: The numbers of this step.
            each: Of each worker the numbers of rows, each once, and the gradients, flat.
        """
        ids, rows = mean_of_rows(each, self.layout)
        self.apply_rows(name, rule, numbers, ids, rows)

    def _change_rows(self, name: str, changer: Callable[[], Callable[[], None]]) -> None:
        """Make a change of rows, while all blocks are odd.

        Args:
            name: See :meth:`apply_rows`.
            changer: Prepares the change, and returns the function that makes it.
        """
        step = self.steps.get(name, 0) + 1
        change = changer()
        self.versions += 1
        self._sync()
        try:
            with _quiet():
                change()
        finally:
            self._sync()
            self.versions += 1
            self.steps[name] = step

    def _row_changer(
        self, name: str, rule: Rule, numbers: Sequence[float], ids: Array, rows: Array
    ) -> Callable[[], None]:
        """What changes rows; see :meth:`apply_rows`."""
        param, slots = self._arrays(name, rule, self.flat)
        width = self.layout.size // max(len(self.data), 1)
        tables = [array.reshape(len(self.data), width) for array in (param, *slots)]
        mirror = None if param is self.flat else self.flat.reshape(len(self.data), width)
        return partial(change_rows, rule, tables, ids, rows, numbers, mirror)

    def check_rows(self, ids: Array) -> None:
        """Local. InvalidArgumentError if there are no rows of these numbers."""
        shape = self.layout.shape
        if not shape or (ids.size and not 0 <= ids.min() <= ids.max() < shape[0]):
            raise errors.InvalidArgumentError(
                f"variable {self.name!r} of shape {shape} has not all rows that are named"
            )

    def restore(
        self,
        data: Stored,
        slots: Mapping[str, Stored],
        steps: dict[str, int],
        initials: dict[str, float],
    ) -> None:
        """Local. Take values, and all that is kept beside them, from a checkpoint.

        Slots that are there already, and that the checkpoint does not have, stay: they are to be
        dropped before, of all shards, so that there is memory for new ones.

        Args:
            data: The values.
            slots: See :attr:`slots`.
            steps: Likewise.
            initials: Likewise.

        Raises:
            ResourceExhaustedError: There is no memory for a slot.
            DataLossError: The checkpoint has been damaged since it was looked at.
        """
        self.apply(":assign", ASSIGN, (), data.blocks())
        for key, stored in slots.items():
            self._restore_slot(key, stored)
        self.initials, self.steps = initials, steps

    def _updater(
        self, name: str, rule: Rule, numbers: Sequence[float]
    ) -> Callable[[int, Array], End | None]:
        """What changes the values from a place on, by a gradient that fits a block.

        It gives what to wait for before the block is even again, if that is not at once.
        """
        param, slots = self._arrays(name, rule, self.flat)
        (wide,) = self._scratch.take(1, param.dtype)
        length, apply = rule.tile or wide.size, rule.on_host

        def update(start: int, gradient: Array) -> None:
            for begin in range(0, gradient.size, length):
                grad = gradient[begin : begin + length]
                here = slice(start + begin, start + begin + grad.size)
                if param is not self.flat:
                    np.copyto(wide[: grad.size], grad)
                    grad = wide[: grad.size]
                parts = [slot[here] for slot in slots]
                try:
                    apply(Update(param[here], grad, parts, numbers))
                finally:  # what a user's rule has changed before it failed is to be seen at once
                    if param is not self.flat:
                        np.copyto(self.flat[here], param[here], casting="same_kind")

        return update
