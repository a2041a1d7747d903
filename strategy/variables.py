"""How variables come to be: checked, divided, placed, and given their first value."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import errors
from strategy.aggregation import VariableAggregation, VariableSynchronization, member
from strategy.connection.change import Change, push_all
from strategy.connection.connection import Connection
from strategy.connection.remote import Remote
from strategy.initializers import InitialValue
from strategy.placement import Placement
from strategy.proto import parameter_server_pb2 as pb
from strategy.sharded_variable import ShardedVariable
from strategy.shared.parts import Origin, Part, Partitioner, divided, whole
from strategy.shared.shard import DTYPES, Layout
from strategy.variable import Variable

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy


logger = logging.getLogger(__name__)

_beside: ContextVar[Variable | None] = ContextVar("beside", default=None)


@dataclass(frozen=True)
class Use:
    """What a variable is for.

    Attributes:
        trainable: Whether optimizers are meant to change it.
        aggregation: What happens when several replicas assign to it.
        synchronization: Kept as it was given.
    """

    trainable: bool = True
    aggregation: VariableAggregation = VariableAggregation.NONE
    synchronization: VariableSynchronization = VariableSynchronization.AUTO

    @classmethod
    def of(cls, trainable: bool, aggregation: Any, synchronization: Any) -> Use:
        """Local. From members or names; ValueError if one is unknown, or they contradict."""
        use = cls(
            trainable,
            member(VariableAggregation, aggregation),
            member(VariableSynchronization, synchronization),
        )
        if trainable and use.synchronization is VariableSynchronization.ON_READ:
            raise ValueError("a variable with synchronization ON_READ cannot be trainable")
        return use


class Variables:
    """Makes the variables of a strategy, and keeps them.

    Args:
        strategy: Whose they are.
        connections: One to each ps task.
        placement: Where they go.
        partitioner: How those are divided that do not say so; None: they are not.

    Attributes:
        by_name: The variables.
        remotes: What servers know them as, by name; of one in parts, each part.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        connections: Sequence[Connection],
        placement: Placement,
        partitioner: Partitioner | None,
    ) -> None:
        self._strategy = strategy
        self._connections = connections
        self._placement = placement
        self._partitioner = partitioner
        self._said = False
        self.by_name: dict[str, Variable] = {}
        self.remotes: dict[str, Remote] = {}

    def create(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        initializer: Any,
        use: Use,
        partitioner: Partitioner | None,
    ) -> Variable:
        """Local. Make a variable; see :func:`strategy.get_variable`."""
        if not name or ":" in name:
            raise ValueError(f"a variable needs a name without ':', not {name!r}")
        if not all(isinstance(axis, int | np.integer) and axis >= 0 for axis in shape):
            raise ValueError(
                f"variable {name!r} cannot have the shape {reprlib.repr(tuple(shape))}: its axes "
                "are as long as integers from 0 say; a first value is the argument initializer"
            )
        try:
            layout = Layout(shape, dtype)
        except TypeError as error:
            raise TypeError(f"variable {name!r}: {dtype!r} is no dtype") from error
        if layout.dtype not in DTYPES:
            raise TypeError(
                f"variable {name!r} cannot have the dtype {layout.dtype}: what can be changed and "
                "saved is bool, integers, bfloat16, float16, float32 and float64"
            )
        divide = (partitioner or self._partitioner) if _beside.get() is None else None
        parts = [whole(layout.shape)]
        if divide is not None:
            parts = divided(name, layout.shape, layout.dtype, divide)
        names = [name] if len(parts) == 1 else [f"{name}/part_{n}" for n in range(len(parts))]
        for taken in (name, *names):
            if taken in self.by_name or taken in self.remotes:
                raise ValueError(
                    f"variable {taken!r} exists already; in a variable_scope with reuse=True or "
                    "AUTO_REUSE it would be found"
                )
        value = InitialValue(initializer, layout.shape, layout.dtype, name)
        origins = {one: Origin(name, part) for one, part in zip(names, parts, strict=True)}
        remotes = self._create_parts(origins, layout, value)
        arguments = (self._strategy, name, layout, tuple(remotes.values()), use)
        variable = Variable(*arguments) if len(parts) == 1 else ShardedVariable(parts, *arguments)
        self.by_name[name] = variable
        self.remotes.update(remotes)
        return variable

    def say_if_uneven(self) -> None:
        """Local. Say so, once, if servers have more to do than others; called when all are made."""
        if self._said:
            return
        self._said = True
        problem = self._placement.imbalance()
        if problem and self._strategy.is_chief:
            logger.warning("%s", problem)

    @contextmanager
    def placing_with(self, variable: Variable) -> Iterator[None]:
        """Local. In the block, new variables live where this one does, and are not divided."""
        token = _beside.set(variable)
        try:
            yield
        finally:
            _beside.reset(token)

    def _create_parts(
        self, origins: Mapping[str, Origin], layout: Layout, value: InitialValue
    ) -> dict[str, Remote]:
        """Make all parts of a variable, or none as far as this worker is concerned.

        Servers keep those that have got a first value.
        """
        remotes: dict[str, Remote] = {}
        placed: list[tuple[int, Layout]] = []
        announced: list[int] = []
        try:
            for name, origin in origins.items():
                own = layout if len(origins) == 1 else Layout(origin.part.shape, layout.dtype)
                server = self._server_for(name, own)
                ordinal = len(self.remotes) + len(remotes)
                division = (origin, len(origins))
                connection = self._connections[server]
                if len(self._connections) > 1:  # each server sees its own variables only
                    self._connections[0].announce(name, own, ordinal, connection.index, *division)
                    announced.append(ordinal)
                remote, must_initialize = connection.create(name, own, ordinal, *division)
                if must_initialize:
                    self._initialize(remote, origin.part, value)
                remotes[name] = remote
                placed.append((server, own))
                self._placement.note(server, own)
        except BaseException:
            for server, own in placed:
                self._placement.forget(server, own)
            with suppress(errors.Error):  # what counts is why it could not be made
                for ordinal in announced:
                    self._connections[0].retract(ordinal)
            raise
        return remotes

    def _server_for(self, name: str, layout: Layout) -> int:
        beside = _beside.get()
        if beside is None:
            return self._placement.choose(name, layout)
        return self._connections.index(beside.remotes[0].connection)

    def _initialize(self, remote: Remote, part: Part, value: InitialValue) -> None:
        """Give a part its first value, for which others wait."""
        try:
            first = value.part(part).reshape(remote.layout.shape)
        except Exception:
            remote.connection.abandon(remote)
            raise
        push_all([Change(remote, pb.ASSIGN, first)]).wait()
