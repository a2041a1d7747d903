"""What all optimizers are to a worker: a rule that servers know, and gradients to push by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from mpidist import Work, errors
from strategy.connection.change import Change, global_norm
from strategy.described import described
from strategy.gpus import leaving, usable_elsewhere
from strategy.proto import parameter_server_pb2 as pb
from strategy.reductions import PerReplica, reduced
from strategy.replicas import get_replica_context
from strategy.schedules import Schedule
from strategy.slices import IndexedSlices

if TYPE_CHECKING:
    from strategy.assigned import Version
    from strategy.connection.compression import Compressor, Residuals
    from strategy.connection.connection import Connection
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variable import RuleOf, Variable

_ONE = np.ones((), np.int64)


@dataclass(frozen=True)
class Applied:
    """What became of gradients that were pushed.

    Attributes:
        versions: Version of each variable after its gradient was applied; of one in parts, a tuple.
        staleness: For each, how many changes by others came between pull and push; of one in parts,
            the most.
        contributed: Whether they were applied. In mode ``"sync"`` with backup workers, gradients
            that come too late for their step are not, nor those that are not finite if the
            strategy's ``nan`` is ``"skip"``; then the other two are empty.
    """

    versions: tuple[Version, ...]
    staleness: tuple[int, ...]
    contributed: bool = True


@dataclass(frozen=True)
class _Given:
    """The gradients of one replica and their variables."""

    pairs: list[tuple[Any, Variable]]


class Optimizer:
    """Base of the optimizers; those below differ in their rule and its numbers.

    Variables of float16 and bfloat16 are changed in float32: the server keeps them in both.

    Args:
        learning_rate: Positive, or a schedule: a function from the number of earlier updates of a
            variable to a learning rate, such as those of :mod:`strategy.schedules`. Servers call
            it, and what it refers to must be there or can be pickled by cloudpickle.
        values: The rule's other numbers.
        clipnorm: If the norm of a gradient is more, it is scaled down to it; in mode ``"sync"``
            each worker's own.
        global_clipnorm: If the norm of all gradients of an ``apply_gradients`` together is more,
            they are scaled down to it; in mode ``"sync"`` each worker's own.
        name: Under which servers keep the slots, and checkpoints have them; by default that of
            the class. Optimizers of one name share them.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        values: Mapping[str, float],
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        self.name = type(self).__name__ if name is None else name
        if not self.name or set(self.name) & {":", "/"}:
            raise ValueError(f"an optimizer needs a name without ':' and '/', not {name!r}")
        if clipnorm is not None and global_clipnorm is not None:
            raise ValueError("give clipnorm or global_clipnorm, not both")
        self._clip = None if clipnorm is None else positive(clipnorm=clipnorm)
        self._clip_all = None
        if global_clipnorm is not None:
            self._clip_all = positive(global_clipnorm=global_clipnorm)
        self._schedule = learning_rate if callable(learning_rate) else None
        if not callable(learning_rate):
            values = {"learning_rate": positive(learning_rate=learning_rate), **values}
        self._values = {key: float(value) for key, value in values.items()}
        self._rules: dict[Connection, int] = {}

    @property
    def learning_rate(self) -> Any:
        """The learning rate, or the schedule; another one needs another optimizer."""
        return self._values["learning_rate"] if self._schedule is None else self._schedule

    @property
    def values(self) -> dict[str, float]:
        """The rule's numbers, by name; without the learning rate if that is a schedule."""
        return dict(self._values)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Work:
        """Local. Push gradients to the servers, which apply them; advances the global step by one.

        Gradients are any arrays, also on a GPU or on their way from there
        (:func:`to_host_ahead`), of their variables' shapes; None is left out. They may be used
        again when the call returns, which may be before they are applied: this worker's later reads
        wait for that, and so does the Work; others see them then. Several replicas meet here: the
        means of their gradients are pushed once, and all get the same Work.

        Args:
            grads_and_vars: Pairs of gradient and variable, all variables of one strategy.

        Returns:
            A Work whose result is :class:`Applied`, without the variables left out. It fails with
            InvalidArgumentError if a schedule or a function of the user's fails on a server.

        Raises:
            InvalidArgumentError: A gradient has elements that are NaN or infinite, and the
                strategy's ``nan`` is ``"error"``. Nothing has been pushed.
            ValueError: There is no gradient, a shape differs, a variable comes twice, or the norm
                of gradients to be clipped is no number.
            TypeError: A gradient is not an array, or its dtype does not fit.
        """
        pairs = [(grad, var) for grad, var in _pairs(grads_and_vars) if grad is not None]
        if not pairs:
            raise ValueError("there is no gradient to apply: all are None, or the list is empty")
        strategy = pairs[0][1].strategy
        if any(var.strategy is not strategy for _, var in pairs):
            raise ValueError("all variables of one apply_gradients must belong to one strategy")
        names = [var.name for _, var in pairs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"variables come twice: {twice}; add their gradients first")
        context = get_replica_context()
        if context is not None and context.strategy is not strategy:
            raise ValueError(
                f"variable {pairs[0][1].name!r} is not of the strategy that runs this step: was it "
                "made outside of strategy.scope()?"
            )
        if context is not None and context.num_replicas_in_sync > 1:
            pairs = [(usable_elsewhere(grad), var) for grad, var in pairs]
            work: Work = context.merge_call(self._apply_merged, (_Given(pairs),))
            return work
        return self._apply(strategy, pairs)

    def _apply_merged(self, strategy: ParameterServerStrategy, each: PerReplica) -> Work:
        """Apply the means of several replicas' gradients."""
        names = [[var.name for _, var in given.pairs] for given in each.values]
        if any(own != names[0] for own in names):
            raise ValueError(f"replicas have gradients of different variables: {names}")
        variables = [var for _, var in each.values[0].pairs]
        grads = [[grad for grad, _ in given.pairs] for given in each.values]
        means = [reduced("mean", PerReplica(own)) for own in zip(*grads, strict=True)]
        return self._apply(strategy, list(zip(means, variables, strict=True)))

    def _apply(
        self, strategy: ParameterServerStrategy, pairs: Sequence[tuple[Any, Variable]]
    ) -> Work:
        strategy.begin_step()
        pairs = [(_leaving(grad, var), var) for grad, var in pairs]  # all before any is waited for
        divided = [_changes(grad, var, self._rule) for grad, var in pairs]
        changes = [change for parts in divided for change in parts]
        if not strategy.nan.allows(changes):
            return strategy.pace.pass_over().then(lambda _: Applied((), (), contributed=False))
        if self._clip is not None:
            for parts in divided:
                _scale_down(parts, self._clip)
        if self._clip_all is not None:
            _scale_down(changes, self._clip_all)
        shapes = [(var, len(parts)) for (_, var), parts in zip(pairs, divided, strict=True)]
        residuals = strategy.compressor.apply(changes)
        try:
            rate = self._rate_alone()
            if rate is not None and strategy.pace.alone:
                for change in changes:
                    change.scale_ahead(rate)
            changes.append(Change(strategy.global_step.remotes[0], pb.ADD, _ONE))
            work = strategy.pace.push(changes, lambda: self._in_words(pairs))
        except BaseException:
            strategy.compressor.undo(residuals)
            raise
        if residuals.after:
            work.add_done_callback(partial(_undo_uncounted, strategy.compressor, residuals))
        changes[0].remote.connection.metrics.values["steps"] += 1
        return work.then(lambda results: _applied(results, shapes))

    def _in_words(self, pairs: Sequence[tuple[Any, Variable]]) -> str:
        """Of what variables gradients are, and for which optimizer: the same on all workers."""
        names = [
            f"rows of {var.name}" if isinstance(grad, IndexedSlices) else var.name
            for grad, var in pairs
        ]
        rate = "" if self._schedule is None else f", learning rate {self._schedule_in_words}"
        return f"{names} for {type(self).__name__} {self.name!r} with {self._values}{rate}"

    @cached_property
    def _schedule_in_words(self) -> str:
        return described(self._schedule)

    def _describe(self) -> pb.OptimizerDef:
        """What servers must know."""
        schedule = b"" if self._schedule is None else cloudpickle.dumps(self._schedule)
        kind = type(self).__name__
        return pb.OptimizerDef(kind=kind, name=self.name, values=self._values, schedule=schedule)

    def _rule(self, connection: Connection) -> int:
        if connection not in self._rules:
            self._rules[connection] = connection.configure(self._describe())
        return self._rules[connection]

    def _rate_alone(self) -> float | None:
        """The learning rate, if an update is the gradient times it, subtracted; None otherwise."""
        return None

    def __repr__(self) -> str:
        rate = [] if self._schedule is None else [f"learning_rate={self._schedule_in_words}"]
        values = [f"{name}={value:g}" for name, value in self._values.items()]
        return f"{type(self).__name__}({', '.join(rate + values)})"


def _pairs(grads_and_vars: Iterable[Any]) -> list[tuple[Any, Variable]]:
    """Pairs of gradient and variable; TypeError if one is none."""
    pairs = list(grads_and_vars)
    for number, pair in enumerate(pairs):
        parts = tuple(pair) if isinstance(pair, tuple | list) else (pair,)
        if len(parts) != 2 or (parts[0] is not None and not hasattr(parts[1], "changes")):
            got = " and ".join(map(errors.type_name, parts))
            raise TypeError(
                "apply_gradients needs a list of pairs of a gradient and its variable, in this "
                f"order; number {number} of what it got is {got}"
            )
    return pairs


def _changes(grad: Any, variable: Variable, rule_of: RuleOf) -> list[Change]:
    """Checked changes; see :meth:`Variable.changes`. A number is no gradient of an array."""
    shape = () if isinstance(grad, int | float | complex) else getattr(grad, "shape", None)
    if shape == () and variable.shape:
        raise ValueError(
            f"the gradient of variable {variable.name!r} is a number, and the variable has shape "
            f"{variable.shape}"
        )
    with _about(variable):
        return variable.changes(grad, rule_of)


def _leaving(grad: Any, variable: Variable) -> Any:
    """A gradient on a GPU on its way to the host; others as they are."""
    with _about(variable):
        return leaving(grad)


def _scale_down(changes: Sequence[Change], limit: float) -> None:
    norm = global_norm(changes)
    if norm > limit:
        for change in changes:
            change.scale = limit / norm


@contextmanager
def _about(variable: Variable) -> Iterator[None]:
    """Have a TypeError say whose gradient it is about."""
    try:
        yield
    except TypeError as error:
        error.add_note(f"It is the gradient of variable {variable.name!r}.")
        raise


def _undo_uncounted(compressor: Compressor, residuals: Residuals, push: Work) -> None:
    """Undo the compression of gradients whose push has failed, or came too late for its step."""
    if push.error is not None or push.result() is None:
        compressor.undo(residuals)


def _applied(pairs: list[tuple[int, int]] | None, variables: list[tuple[Variable, int]]) -> Applied:
    if pairs is None:
        return Applied((), (), contributed=False)
    versions: list[Version] = []
    staleness = []
    begin = 0  # the last pair, of the global step, is left over
    for variable, count in variables:
        own = pairs[begin : begin + count]
        versions.append(variable.version_of([version for version, _ in own]))
        staleness.append(max([stale for _, stale in own]))
        begin += count
    return Applied(tuple(versions), tuple(staleness))


def _number(named: Mapping[str, Any]) -> tuple[str, float]:
    ((name, value),) = named.items()
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return name, value


def positive(**named: float) -> float:
    """Local. The number, given by its name; ValueError unless it is positive."""
    name, value = _number(named)
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value!r}")
    return value


def not_negative(**named: float) -> float:
    """Local. The number, given by its name; ValueError if it is negative."""
    name, value = _number(named)
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, not {value!r}")
    return value


def part(**named: float) -> float:
    """Local. The number, given by its name; ValueError unless it is in [0, 1)."""
    name, value = _number(named)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), not {value!r}")
    return value
