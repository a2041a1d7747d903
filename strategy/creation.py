"""Creation of variables: check, divide, place, define, initialize."""

from __future__ import annotations

import logging
import reprlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from mpidist import errors
from strategy.client.changes import Change
from strategy.client.connection import Connection, push_all
from strategy.client.pull import RemoteVariable
from strategy.initializers import InitialValue
from strategy.placement import Placement
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.layout import DTYPES, Layout
from strategy.protocol.partition import Origin, Part, Partitioner, divided, part_of, whole
from strategy.variable import (
    ShardedVariable,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    member,
)

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy


logger = logging.getLogger(__name__)

_beside: ContextVar[Variable | None] = ContextVar("beside", default=None)


@dataclass(frozen=True)
class Use:
    """Options of a variable.

    Attributes:
        trainable: True if optimizers are meant to change the variable.
        aggregation: The way to combine values that several replicas assign.
        synchronization: The given option, without effect.
    """

    trainable: bool = True
    aggregation: VariableAggregation = VariableAggregation.NONE
    synchronization: VariableSynchronization = VariableSynchronization.AUTO

    @classmethod
    def of(cls, trainable: bool | None, aggregation: Any, synchronization: Any) -> Use:
        """Return options from members or names. See :func:`strategy.get_variable`.

        Raises:
            ValueError: A name is unknown, or a trainable variable has synchronization ON_READ.
        """
        when = member(VariableSynchronization, synchronization)
        on_read = when is VariableSynchronization.ON_READ
        if trainable and on_read:
            raise ValueError("a variable with synchronization ON_READ cannot be trainable")
        if trainable is None:
            trainable = not on_read
        return cls(trainable, member(VariableAggregation, aggregation), when)


class VariableCreator:
    """The creator and registry of the variables of a strategy.

    Args:
        strategy: The strategy.
        connections: The connections to all ps tasks.
        placement: Chooses the ps tasks of new variables.
        partitioner: Partitioner of variables that are created without one; None to keep them whole.

    Attributes:
        by_name: The variables by name.
        remotes: The variables on their ps tasks by name; for a divided variable, the parts by name.
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
        self.by_name: dict[str, Variable] = {}
        self.remotes: dict[str, RemoteVariable] = {}
        self._reserved: set[str] = set()  # names of variables that are being created
        self._reserving = threading.Lock()

    def create(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        initializer: Any,
        use: Use,
        partitioner: Partitioner | None = None,
    ) -> Variable:
        """Create a variable on ps tasks; see :func:`strategy.get_variable`."""
        if not name or ":" in name:
            raise ValueError(f"a variable needs a name without ':', not {name!r}")
        if not all(isinstance(axis, int | np.integer) and axis >= 0 for axis in shape):
            raise ValueError(
                f"variable {name!r} cannot have the shape {reprlib.repr(tuple(shape))}: its axes "
                "are as long as integers from 0 say; a first value is the argument initializer"
            )
        try:
            layout = Layout(shape, getattr(dtype, "as_numpy_dtype", dtype))  # TensorFlow's
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
        self._reserve(name)
        try:
            parts, remotes = self._create_parts(name, layout, parts, initializer)
            arguments = (self._strategy, name, layout, tuple(remotes.values()), use)
            made = Variable(*arguments) if len(parts) == 1 else ShardedVariable(parts, *arguments)
            self.by_name[name] = made
            self.remotes.update(remotes)
        finally:
            self._reserved.discard(name)
        return made

    def warn_if_uneven(self) -> None:
        """Warn if variables are spread unevenly. All variables must have been created."""
        problem = self._placement.imbalance()
        if problem and self._strategy.is_chief:
            logger.warning("%s", problem)

    @contextmanager
    def placing_with(self, variable: Variable) -> Iterator[None]:
        """Create the variables of the block, undivided, on the ps task of a given variable."""
        token = _beside.set(variable)
        try:
            yield
        finally:
            _beside.reset(token)

    def _reserve(self, name: str) -> None:
        """Reserve a name, so that no other thread creates a variable of the same name."""
        with self._reserving:
            self._check_free(name)
            self._reserved.add(name)

    def _check_free(self, name: str) -> None:
        if name in self.by_name or name in self.remotes or name in self._reserved:
            raise ValueError(
                f"variable {name!r} exists already; in a variable_scope with reuse=True or "
                "AUTO_REUSE it would be found"
            )

    def _create_parts(
        self, name: str, layout: Layout, parts: Sequence[Part], initializer: Any
    ) -> tuple[list[Part], dict[str, RemoteVariable]]:
        """Create all parts of a variable. Return the parts in force, and each part by name."""
        value = InitialValue(initializer, layout.shape, layout.dtype, name)
        definition, connections = self._define(name, layout, parts)
        parts = [part_of(layout.shape, part) for part in definition.parts]
        names = _names(name, parts)
        for one in names if len(names) > 1 else ():
            self._check_free(one)
        remotes: dict[str, RemoteVariable] = {}
        for one, part, connection in zip(names, parts, connections, strict=True):
            own = _layout(layout, parts, part)
            try:
                remotes[one], must_initialize = connection.create(
                    one, own, Origin(name, part), definition.worker
                )
            except BaseException:
                if not remotes:  # another attempt may use other parts
                    with suppress(errors.Error):  # the first error is raised
                        self._connections[0].undefine(name)
                raise
            if must_initialize:
                self._initialize(remotes[one], part, value)
        for part, connection in zip(parts, connections, strict=True):
            self._placement.note(self._connections.index(connection), _layout(layout, parts, part))
        return parts, remotes

    def _define(
        self, name: str, layout: Layout, parts: Sequence[Part]
    ) -> tuple[pb.Definition, list[Connection]]:
        """Return the definition of a variable, and the connection to the server of each part.

        The first worker decides about parts and servers. ``parts`` is the proposal of this worker.
        """
        beside = _beside.get()
        if beside is None:
            layouts = [_layout(layout, parts, part) for part in parts]
            chosen = self._placement.choose(list(zip(_names(name, parts), layouts, strict=True)))
            servers = [self._connections[place].index for place in chosen]
        else:
            servers = [beside.remotes[0].connection.index]
        own = pb.Definition(name=name, shape=layout.shape, dtype=layout.dtype.name)
        own.parts.extend(
            pb.PartOf(axis=part.axis, start=part.start, stop=part.stop, server=server)
            for part, server in zip(parts, servers, strict=True)
        )
        definition = self._connections[0].define(own)
        known = {connection.index: connection for connection in self._connections}
        missing = sorted({part.server for part in definition.parts} - set(known))
        if missing:
            raise errors.InvalidArgumentError(
                f"worker {definition.worker} created variable {name!r} on ps {missing[0]}, which "
                "is not among the parameter_devices of this strategy: use the same on all workers"
            )
        return definition, [known[part.server] for part in definition.parts]

    def _initialize(self, remote: RemoteVariable, part: Part, value: InitialValue) -> None:
        """Push the initial value of a part, for which other workers wait."""
        try:
            first = value.part(part).reshape(remote.layout.shape)
            push_all([Change((remote,), pb.ASSIGN, first)]).wait()
        except Exception:
            with suppress(errors.Error):  # the first error is raised
                remote.connection.abandon(remote.number)
            raise


def _names(name: str, parts: Sequence[Part]) -> list[str]:
    """Return the names of the parts of a variable on the servers."""
    return [name] if len(parts) == 1 else [f"{name}/part_{n}" for n in range(len(parts))]


def _layout(layout: Layout, parts: Sequence[Part], part: Part) -> Layout:
    """Return the layout of a part of a variable."""
    return layout if len(parts) == 1 else Layout(part.shape, layout.dtype)
