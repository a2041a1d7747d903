"""Pushes of gradients: from an optimizer to the connections of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpidist import Work
from strategy.connection.change import Change, global_norm
from strategy.connection.compression import Compressor, Residuals
from strategy.connection.connection import Connection
from strategy.connection.nan_policy import NanPolicy
from strategy.connection.pace import Pace
from strategy.described import described
from strategy.gpus import leaving, usable_elsewhere
from strategy.optimizers import Applied, Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.reductions import PerReplica, reduced
from strategy.replicas import get_replica_context
from strategy.schedules import Schedule
from strategy.slices import IndexedSlices
from strategy.variable import Variable

Pairs = Sequence[tuple[Any, Variable]]

_ONE = np.ones((), np.int64)
_NOTE = "It is the gradient of variable {!r}."


@dataclass(frozen=True)
class _ReplicaGradients:
    """The gradients of one replica. A merge call would unpack a tuple, so this is a class."""

    optimizer: Optimizer
    pairs: Pairs


class GradientPusher:
    """The push of gradients by one worker.

    Args:
        strategy: The strategy to which all variables and replicas must belong.
        global_step: The variable that each push advances by one.
        nan: The policy for gradients with NaN or infinite elements.
        compressor: The gradient compression.
        pace: The synchronization mode, which decides when a push waits for other workers.
    """

    def __init__(
        self,
        strategy: object,
        global_step: Variable,
        nan: NanPolicy,
        compressor: Compressor,
        pace: Pace,
    ) -> None:
        self._strategy = strategy
        self._global_step = global_step
        self._nan = nan
        self._compressor = compressor
        self._pace = pace

    def push(self, optimizer: Optimizer, pairs: Pairs) -> Work:
        """Push gradients. In a step of several replicas, push the means of their gradients.

        Args:
            optimizer: The optimizer.
            pairs: Gradients and their variables, at least one pair.

        Returns:
            A Work whose result is :class:`Applied`.
        """
        if any(var.strategy is not self._strategy for _, var in pairs):
            raise ValueError("all variables of one apply_gradients must belong to one strategy")
        names = [var.name for _, var in pairs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"variables come twice: {twice}; add their gradients first")
        context = get_replica_context()
        if context is not None and context.strategy is not self._strategy:
            raise ValueError(
                f"variable {names[0]!r} does not belong to the strategy that runs this step: was "
                "it made outside of strategy.scope()?"
            )
        if context is not None and context.num_replicas_in_sync > 1:
            moved = [(usable_elsewhere(grad), var) for grad, var in pairs]
            own = _ReplicaGradients(optimizer, moved)
            work: Work = context.merge_call(self._push_means, (own,))
            return work
        return self._push(optimizer, pairs)

    def _push_means(self, _: object, each: PerReplica) -> Work:
        """Push the means of the replicas' gradients with the optimizer of the first replica."""
        names = [[var.name for _, var in replica.pairs] for replica in each.values]
        if any(own != names[0] for own in names):
            raise ValueError(f"replicas have gradients of different variables: {names}")
        variables = [var for _, var in each.values[0].pairs]
        grads = [[grad for grad, _ in replica.pairs] for replica in each.values]
        means = [reduced("mean", PerReplica(own)) for own in zip(*grads, strict=True)]
        return self._push(each.values[0].optimizer, list(zip(means, variables, strict=True)))

    def _push(self, optimizer: Optimizer, pairs: Pairs) -> Work:
        rate = optimizer.learning_rate  # read once: another thread may set it
        pairs = [(_to_host(grad, var), var) for grad, var in pairs]  # start all downloads first
        rules: dict[Connection, int] = {}

        def rule_of(connection: Connection) -> int:
            rule = rules.get(connection)
            if rule is None:
                rule = rules[connection] = connection.rule_of(optimizer)
            return rule

        sent_rate = 0.0 if callable(rate) else rate
        divided = [gradient_changes(rule_of, sent_rate, grad, var) for grad, var in pairs]
        changes = [change for parts in divided for change in parts]
        if not self._nan.allows(changes):
            return self._pace.pass_over().then(lambda _: Applied((), (), contributed=False))
        _clip(optimizer, divided)
        counts = [(var, len(parts)) for (_, var), parts in zip(pairs, divided, strict=True)]
        residuals = self._compressor.apply(changes)
        try:
            changes.append(Change(self._global_step.remotes[0], pb.ADD, _ONE))
            work = self._pace.push(changes, lambda: describe_step(optimizer, rate, pairs))
        except BaseException:
            self._compressor.undo(residuals)
            raise
        if residuals.after:
            work.add_done_callback(partial(_undo_uncounted, self._compressor, residuals))
        changes[0].remote.connection.metrics.values["steps"] += 1
        return work.then(lambda results: _applied(results, counts))


def describe_step(optimizer: Optimizer, rate: float | Schedule, pairs: Pairs) -> str:
    """Describe the variables and the optimizer of a step.

    The text is equal on all workers. In mode ``"sync"`` the first server compares the texts.
    """
    names = [
        f"rows of {var.name}" if isinstance(grad, IndexedSlices) else var.name
        for grad, var in pairs
    ]
    numbers: Any = optimizer.hyperparameters
    if isinstance(optimizer, Function):
        numbers = f"{described(optimizer.update)} and slots {optimizer.slots()}"
    shown = f"learning rate {rate!r}"
    if callable(rate):
        shown = f"learning rate schedule {described(rate)}"
    return f"{names} for {type(optimizer).__name__} {optimizer.name!r} with {numbers}, {shown}"


def gradient_changes(
    rule_of: Callable[[Connection], int], rate: float, grad: Any, variable: Variable
) -> list[Change]:
    """Return checked changes for the parts of a variable; see :meth:`Variable.changes`.

    Args:
        rule_of: Returns the number of the optimizer over a connection.
        rate: The learning rate; 0 if a schedule computes the rate.
        grad: The gradient.
        variable: The variable.
    """
    if grad.__class__ is not np.ndarray:
        number = isinstance(grad, int | float | complex)
        if variable.shape and (number or getattr(grad, "shape", None) == ()):
            raise _not_a_number(variable)
    elif grad.shape == () and variable.shape:
        raise _not_a_number(variable)
    try:
        changes = variable.changes(grad, rule_of)
    except TypeError as error:
        error.add_note(_NOTE.format(variable.name))
        raise
    for change in changes:
        change.rate = rate
    return changes


def _not_a_number(variable: Variable) -> ValueError:
    return ValueError(
        f"the gradient of variable {variable.name!r} is a number, and the variable has shape "
        f"{variable.shape}"
    )


def _to_host(grad: Any, variable: Variable) -> Any:
    """Start the download of a gradient from a GPU. Return host arrays unchanged."""
    if grad.__class__ is np.ndarray:
        return grad
    try:
        return leaving(grad)
    except TypeError as error:
        error.add_note(_NOTE.format(variable.name))
        raise


def _clip(optimizer: Optimizer, divided: Sequence[Sequence[Change]]) -> None:
    """Clip gradients in place. ``divided`` has one list of changes for each variable."""
    limit = optimizer.clipvalue
    if limit is not None:
        with np.errstate(over="ignore"):  # a limit beyond the range of a dtype is infinite
            for parts in divided:
                for change in parts:
                    change.data = np.clip(change.data, -limit, limit)
    if optimizer.clipnorm is not None:
        for parts in divided:
            _scale_down(parts, optimizer.clipnorm)
    if optimizer.global_clipnorm is not None:
        _scale_down([change for parts in divided for change in parts], optimizer.global_clipnorm)


def _scale_down(changes: Sequence[Change], limit: float) -> None:
    norm = global_norm(changes)
    if norm > limit:
        for change in changes:
            change.scale = limit / norm


def _undo_uncounted(compressor: Compressor, residuals: Residuals, push: Work) -> None:
    """Undo the compression of gradients if their push has failed or came too late."""
    if push.error is not None or push.result() is None:
        compressor.undo(residuals)


def _applied(
    pairs: Sequence[tuple[int, int]] | None, variables: Sequence[tuple[Variable, int]]
) -> Applied:
    """Return the result of a push for the caller of the optimizer.

    Args:
        pairs: Version and staleness of each part; the last pair is of the global step. None if the
            push came too late.
        variables: The variables, each with the number of its parts.
    """
    if pairs is None:
        return Applied((), (), contributed=False)
    versions, staleness, begin = [], [], 0
    for variable, count in variables:
        own = pairs[begin : begin + count]
        versions.append(variable.version_of([version for version, _ in own]))
        staleness.append(max([late for _, late in own]))
        begin += count
    return Applied(tuple(versions), tuple(staleness))
