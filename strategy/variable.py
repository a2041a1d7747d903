"""Variables that live on ps tasks, whole or in parts, and pulls of several variables."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpidist import host_view
from mpidist.errors import did_you_mean
from strategy.array_like import ArrayLike, IndexedSlices, in_dtype, on_host, read, row_numbers
from strategy.client.changes import Change, check_change
from strategy.client.connection import push_all
from strategy.client.pull import RemoteVariable, pull, pull_all, pull_into
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.layout import HALVES, Layout
from strategy.protocol.partition import Part, Rows
from strategy.protocol.rows import merged
from strategy.replicas.context import get_replica_context
from strategy.replicas.gpu import landing, pulled
from strategy.replicas.reduce import reduced

if TYPE_CHECKING:
    from strategy.client.connection import Connection
    from strategy.creation import Use
    from strategy.parameter_server_strategy import ParameterServerStrategy


E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """The way to combine the values that all replicas of a worker assign to a variable."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """The time at which copies of a variable are synchronized.

    The option has no effect on values, because a variable has one copy. ON_READ makes the variable
    not trainable.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


def member(kind: type[E], value: Any) -> E:
    """Return a member of an enum.

    Args:
        kind: The enum.
        value: A member, its name in upper or lower case, or None for the first member.

    Raises:
        ValueError: The name is unknown.
    """
    if value is None:
        return next(iter(kind))
    if isinstance(value, kind):
        return value
    try:
        # Members of TensorFlow's enums have the same names.
        return kind[str(getattr(value, "name", value)).upper()]
    except KeyError:
        known, hint = ", ".join(kind.__members__), did_you_mean(value, kind.__members__)
        raise ValueError(
            f"unknown {kind.__name__} {value!r}{hint}; the known ones are {known}"
        ) from None


Version = int | tuple[int, ...]
"""The number of changes of a variable; for a divided variable, a tuple with one per part."""


def check_first_only(variable: Variable, what: str) -> None:
    """Raise ValueError if a change by several replicas would have to be added up.

    Args:
        variable: The variable that the replicas change.
        what: The change, for the message.
    """
    context = get_replica_context()
    several = context is not None and context.num_replicas_in_sync > 1
    if several and variable.aggregation not in (
        VariableAggregation.NONE,
        VariableAggregation.ONLY_FIRST_REPLICA,
    ):
        raise ValueError(
            f"{what} of variable {variable.name!r} on several replicas needs aggregation "
            f"ONLY_FIRST_REPLICA, not {variable.aggregation.name}: rows can only be added up for "
            "scatter_add and scatter_sub"
        )


def of_all_replicas(variable: Variable, push: Callable[[Any], Version], value: Any) -> Version:
    """Push a value. On several replicas, aggregate their values and push the result once.

    Args:
        variable: The variable to assign to.
        push: Pushes one value.
        value: Value of this replica, in host memory: other replicas would not wait for its GPU.

    Raises:
        ValueError: Several replicas assign to a variable with aggregation NONE.
        RuntimeError: The replicas assign to different variables.
    """
    context = get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return push(value)
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"variable {variable.name!r} is assigned to on several replicas, and has aggregation "
            "NONE: give it SUM, MEAN or ONLY_FIRST_REPLICA, or assign in a merge_call"
        )
    given = (push, value, variable.name, variable.aggregation)
    version: Version = context.merge_call(_aggregate, given)
    return version


def _aggregate(_: Any, pushes: Any, values: Any, names: Any, aggregations: Any) -> Version:
    if len(set(names.values)) > 1:
        raise RuntimeError(
            f"replicas assign to different variables at a time: {list(names.values)}"
        )
    push: Callable[[Any], Version] = pushes.values[0]
    aggregation = aggregations.values[0]
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return push(values.values[0])
    return push(reduced(aggregation.name, values))


Array = NDArray[Any]
RuleOf = Callable[["Connection"], int]

_PARTS = 5  # arguments by which a strategy creates a variable


class _MadeByStrategies(type):
    """Metaclass of variables. A call by a script raises an error that names get_variable."""

    def __call__(cls, *parts: Any, **options: Any) -> Any:
        if len(parts) < _PARTS or options:
            raise TypeError(
                f"a {cls.__name__} lives on ps tasks and is not made by its class: call "
                "strategy.get_variable(name, shape, dtype, initializer), in the scope() of a "
                "ParameterServerStrategy"
            )
        return super().__call__(*parts)


# NumPy's stubs declare NDArrayOperatorsMixin as an ABC, but it is not one.
class Variable(ArrayLike, metaclass=_MadeByStrategies):  # type: ignore[metaclass]
    """An array that lives on a ps task; created by :func:`get_variable`.

    A variable can be used like an array, and each use pulls its value. A worker always sees its own
    earlier pushes. Pulls and changes are never collective.

    Args:
        strategy: The strategy of the variable.
        name: Name of the variable.
        layout: Shape and dtype.
        remotes: The variable on its ps task, or each part on its ps task.
        use: Options of the variable.

    Attributes:
        name: Name, unique among the variables of the strategy.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        trainable: True if optimizers are meant to change the variable.
        aggregation: The way to combine values that several replicas assign.
        synchronization: The given option. It has no effect, because a variable has one copy.
        strategy: The strategy of the variable.
        remotes: The variable on its ps task, or each part on its ps task.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        name: str,
        layout: Layout,
        remotes: Sequence[RemoteVariable],
        use: Use,
    ) -> None:
        self.strategy = strategy
        self.name = name
        self.shape = layout.shape
        self.dtype = layout.dtype
        self.remotes = tuple(remotes)
        self.trainable = use.trainable
        self.aggregation = use.aggregation
        self.synchronization = use.synchronization

    @property
    def version(self) -> Version:
        """The version at the last pull or push, which counts the changes until then.

        A pull with ``consistent=False`` does not update the version, unless the pull is by message.
        """
        return self.version_of([remote.known for remote in self.remotes])

    @property
    def device(self) -> str | tuple[str, ...]:
        """Name of the device, such as ``"/job:ps/task:0/device:CPU:0"``.

        A divided variable has a tuple of names.
        """
        names = [
            self.strategy.device_of(remote.connection.index, remote.gpu) for remote in self.remotes
        ]
        return names[0] if len(names) == 1 else tuple(names)

    def read_value(self, out: Any = None, *, consistent: bool = True) -> Any:
        """Pull the value.

        Args:
            out: Output array, writable, with the shape and dtype of the variable. A host array must
                be C-contiguous. An array on a GPU is filled behind the work on its stream. None for
                a fresh array.
            consistent: If True, the whole value belongs to one version, or to one version for each
                part of a divided variable. If False, each block of 1 MiB may belong to its own
                version.

        Returns:
            The value in ``out`` or in a fresh array. On a replica with a GPU, a fresh array is a
            CuPy array. The upload runs beside already queued work. Work queued later on the current
            stream waits for the upload. Elsewhere, also in a merge call, a fresh array is a host
            array.

        Raises:
            ValueError: ``out`` does not fit.
            TypeError: The array would be on a GPU, but CuPy has no such dtype.
        """
        array = self._on_host(out, self.shape)
        if array is None:
            return self._pulled(self.shape, out, lambda out: self._pull(out, consistent))
        self._pull(array, consistent)
        return array

    def numpy(self) -> Array:
        """Return a fresh copy of the value in host memory."""
        value: Array = self.read_value(np.empty(self.shape, self.dtype))
        return value

    def assign(self, value: Any) -> Version:
        """Replace the value. Return when the change has been applied.

        Args:
            value: An array of the variable's shape, or a number for all elements.

        Returns:
            The new version.

        Raises:
            ValueError: The shape differs, or an integer does not fit the dtype of the variable.
            TypeError: The dtype of the value cannot be converted to the dtype of the variable.
        """
        return self._change(pb.ASSIGN, value)

    def assign_add(self, delta: Any) -> Version:
        """Add to the value; see :meth:`assign`."""
        return self._change(pb.ADD, delta)

    def assign_sub(self, delta: Any) -> Version:
        """Subtract from the value; see :meth:`assign`."""
        return self._change(pb.SUB, delta)

    def gather(self, indices: Any, out: Any = None) -> Any:
        """Pull some rows.

        All rows belong to one version, or to one version for each part of a divided variable.

        Args:
            indices: Row numbers along the first axis: integers of any shape, in any order, also
                repeated.
            out: Output array of shape ``(*indices.shape, *variable.shape[1:])`` with the dtype of
                the variable; see :meth:`read_value`.

        Returns:
            The rows, in the order of ``indices``.

        Raises:
            IndexError: A row number is out of range.
            TypeError: The indices are not integers.
            ValueError: ``out`` does not fit, or the variable has no axes.
        """
        ids = row_numbers(self.name, self.shape, indices)
        flat = ids.reshape(-1)
        rows = (len(flat), *self.shape[1:])
        shape = (*ids.shape, *self.shape[1:])
        array = self._on_host(out, shape)
        if array is None:
            return self._pulled(shape, out, lambda out: self._pull_rows(flat, out.reshape(rows)))
        self._pull_rows(flat, array.reshape(rows))
        return array

    sparse_read = gather
    """TensorFlow's name for :meth:`gather`."""

    def scatter_update(self, indices: Any, values: Any = None) -> Version:
        """Replace some rows. Return when the change has been applied.

        Args:
            indices: Row numbers along the first axis; or :class:`IndexedSlices`. The last value of
                a repeated row number counts.
            values: Array of shape ``(len(indices), *variable.shape[1:])``, or a number.

        Returns:
            The new version.

        Raises:
            IndexError: A row number is out of range.
            TypeError: The indices are not integers, or the values cannot be converted to the
                dtype of the variable.
            ValueError: The shapes do not fit, or an integer does not fit the variable's dtype.
        """
        return self._scatter(pb.ASSIGN, indices, values, None)

    def scatter_add(self, indices: Any, values: Any = None) -> Version:
        """Add all values for a row to the row; see :meth:`scatter_update`."""
        return self._scatter(pb.ADD, indices, values, np.add)

    def scatter_sub(self, indices: Any, values: Any = None) -> Version:
        """Subtract all values for a row from the row; see :meth:`scatter_update`."""
        return self._scatter(pb.SUB, indices, values, np.add)

    def scatter_mul(self, indices: Any, values: Any = None) -> Version:
        """Multiply a row by all values for the row; see :meth:`scatter_update`."""
        return self._scatter(pb.MUL, indices, values, np.multiply)

    def scatter_div(self, indices: Any, values: Any = None) -> Version:
        """Divide a row by all values for the row; see :meth:`scatter_update`.

        Raises:
            TypeError: See :meth:`scatter_update`; also if the variable has integers or bools.
        """
        if self.dtype.kind in "biu":
            raise TypeError(f"variable {self.name!r} of {self.dtype} cannot be divided in place")
        return self._scatter(pb.DIV, indices, values, np.multiply)

    def scatter_min(self, indices: Any, values: Any = None) -> Version:
        """Set a row to the minimum of the row and all values for it; see :meth:`scatter_update`."""
        return self._scatter(pb.MIN, indices, values, np.minimum)

    def scatter_max(self, indices: Any, values: Any = None) -> Version:
        """Set a row to the maximum of the row and all values for it; see :meth:`scatter_update`."""
        return self._scatter(pb.MAX, indices, values, np.maximum)

    def changes(self, value: Any, rule_of: RuleOf) -> list[Change]:
        """Return checked changes of this variable to push, one for each part.

        Args:
            value: Any array, another variable, a number for all elements, or
                :class:`IndexedSlices`, whose values for the same row are added.
            rule_of: Returns the rule for a connection; see
                :class:`strategy.client.changes.Change`.
        """
        if (
            value.__class__ is np.ndarray
            and value.dtype == self.dtype
            and value.shape == self.shape
        ):
            return self._divided(value, rule_of)  # the usual case
        if isinstance(value, IndexedSlices):
            ids = row_numbers(self.name, self.shape, value.indices).reshape(-1)
            rows = host_view(on_host(read(value.values)))
            return self._changes_of_rows(ids, rows, np.add, rule_of)
        value = on_host(read(value))
        if isinstance(value, int | float | complex | np.generic):
            data = np.full(self.shape, self._number(value))
        else:
            data = host_view(value)
        check_change(self.name, self.shape, self.dtype, data)
        return self._divided(data, rule_of)

    # Overridden by ShardedVariable

    def places_in(self, out: Array) -> list[tuple[RemoteVariable, Array]]:
        """Return each remote with the part of an array into which to pull it."""
        return [(self.remotes[0], out)]

    def _pull(self, out: Array, consistent: bool) -> None:
        pull(self.remotes[0], out, consistent=consistent)

    def _pull_rows(self, ids: Array, out: Array) -> None:
        pull(self.remotes[0], out, ids)

    def _divided(self, data: Array, rule_of: RuleOf) -> list[Change]:
        (remote,) = self.remotes
        return [Change(self.remotes, rule_of(remote.connection), data)]

    def _divided_rows(self, ids: Array, rows: Array, rule_of: RuleOf) -> list[Change]:
        (remote,) = self.remotes
        return [Change(self.remotes, rule_of(remote.connection), rows, ids=ids.copy())]

    def version_of(self, versions: Sequence[int]) -> Version:
        """Return the version of the variable from the versions of its parts."""
        return versions[0]

    def _scatter(self, rule: int, indices: Any, values: Any, combine: np.ufunc | None) -> Version:
        if isinstance(indices, IndexedSlices):
            if values is not None:
                raise ValueError("IndexedSlices have their values: give no others")
            indices, values = indices.indices, indices.values
        ids = row_numbers(self.name, self.shape, indices).reshape(-1)
        values = self._as_array(values)
        if isinstance(values, int | float | complex | np.generic):
            values = np.full((len(ids), *self.shape[1:]), self._number(values))
        rows = host_view(values)

        def push(slices: IndexedSlices) -> Version:
            changes = self._changes_of_rows(slices.indices, slices.values, combine, lambda _: rule)
            return self._push(changes)

        if rule not in (pb.ADD, pb.SUB):
            check_first_only(self, "this scatter_ method")
        return of_all_replicas(self, push, IndexedSlices(rows, ids))

    def _changes_of_rows(
        self, ids: Array, rows: Array, combine: np.ufunc | None, rule_of: RuleOf
    ) -> list[Change]:
        check_change(self.name, self.shape, self.dtype, rows, len(ids))
        # Convert rows before the merge: sums of small integers or halves might not fit their dtype.
        wide = np.float32 if self.dtype in HALVES else self.dtype
        with np.errstate(over="ignore"):  # NanPolicy finds infinite gradients later
            ids, rows = merged(ids, rows.astype(wide, copy=False), combine)
            own = rows.astype(self.dtype, copy=False)
        return self._divided_rows(ids, own, rule_of)

    def _change(self, rule: int, value: Any) -> Version:
        if isinstance(value, IndexedSlices):
            raise TypeError(f"rows of variable {self.name!r} are changed by its scatter_ methods")

        def push(value: Any) -> Version:
            return self._push(self.changes(value, lambda _: rule))

        return of_all_replicas(self, push, self._as_array(value))

    def _push(self, changes: Sequence[Change]) -> Version:
        versions, _ = push_all(changes).result()
        return self.version_of(versions)

    def _on_host(self, out: Any, shape: tuple[int, ...]) -> Array | None:
        """Return a host array to pull into, or None if the array must be on a GPU or be checked."""
        if out is None:
            context = get_replica_context()
            return np.empty(shape, self.dtype) if context is None or context.gpu is None else None
        fits = out.__class__ is np.ndarray and out.shape == shape and out.dtype == self.dtype
        return out if fits and out.flags.carray else None

    def _pulled(self, shape: tuple[int, ...], out: Any, pull: Callable[[Array], None]) -> Any:
        context = get_replica_context()
        gpu = None if context is None else context.gpu
        return pulled(f"variable {self.name!r}", shape, self.dtype, out, gpu, pull)

    def _number(self, value: Any) -> Array:
        return in_dtype(value, self.dtype, f"variable {self.name!r}")

    def _as_array(self, value: Any) -> Any:
        """Return variables and lists as arrays, and integers of lists in the variable's dtype."""
        value = on_host(read(value))
        if not isinstance(value, list | tuple):
            return value
        array = np.asarray(value)
        whole = array.dtype.kind in "iu" and self.dtype.kind in "iu"
        return self._number(array) if whole else array

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.dtype}{list(self.shape)}>"


class ShardedVariable(Variable):
    """A variable in parts: ranges along one axis, or ranges of the flattened elements.

    :func:`get_variable` creates a sharded variable if the partitioner returns more than one part. A
    sharded variable is used like any other :class:`Variable`. The pulled value of each part belongs
    to one version of the part. Every change changes all parts, so without concurrent changes all
    parts have the same version.

    Args:
        parts: The part of the variable for each of ``remotes``.
        arguments: Arguments of :class:`Variable`.

    Attributes:
        parts: The parts of the variable. Part i is named ``<name>/part_<i>``.
    """

    def __init__(self, parts: Sequence[Part], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts = tuple(parts)

    def version_of(self, versions: Sequence[int]) -> Version:
        """Return the versions of the parts as a tuple."""
        return tuple(versions)

    def places_in(self, out: Array) -> list[tuple[RemoteVariable, Array]]:
        """Return the view of an array into which to pull each part. Columns are not contiguous."""
        return [(r, part.of(out)) for part, r in zip(self.parts, self.remotes, strict=True)]

    def _pull(self, out: Array, consistent: bool) -> None:
        pull_into(self.places_in(out), consistent)

    def _pull_rows(self, ids: Array, out: Array) -> None:
        rows = Rows(self.parts, ids)
        pulls = []
        for number, remote in enumerate(self.remotes):
            target = np.empty(rows.shape_inside(number), self.dtype)
            pulls.append((remote, target, rows.inside(number)))
        pull_all(pulls)
        for number, (_, target, _) in enumerate(pulls):
            rows.put(out, number, target)

    def _divided(self, data: Array, rule_of: RuleOf) -> list[Change]:
        if self.parts[0].axis is None:
            data = np.ascontiguousarray(data)  # one copy for all parts
        return [
            Change((remote,), rule_of(remote.connection), part.of(data))
            for part, remote in zip(self.parts, self.remotes, strict=True)
        ]

    def _divided_rows(self, ids: Array, rows: Array, rule_of: RuleOf) -> list[Change]:
        places = Rows(self.parts, ids)
        return [
            Change(
                (remote,),
                rule_of(remote.connection),
                places.take(rows, number),
                ids=np.array(places.inside(number)),
            )
            for number, remote in enumerate(self.remotes)
        ]

    def __repr__(self) -> str:
        return f"<{super().__repr__()[1:-1]} in {len(self.parts)} parts>"


def read_values(
    variables: Iterable[Variable], out: Sequence[Any] | None = None, *, consistent: bool = True
) -> list[Any]:
    """Pull several variables at once.

    Variables in memory that this process cannot read are pulled by messages at the same time. Small
    variables come in one message from each server. Each value has a version of its own, as in a
    separate pull. Afterwards the ``version`` of each variable is the version of its value. With
    ``consistent=False``, only pulls by message update ``version``.

    Args:
        variables: The variables.
        out: One output array or None for each variable; see :meth:`Variable.read_value`.
        consistent: See :meth:`Variable.read_value`.

    Returns:
        The values, in order. On a replica with a GPU, fresh arrays are CuPy arrays on that GPU.

    Raises:
        ValueError: ``out`` has another length, or one of its arrays does not fit.
        TypeError: An argument is not a variable, or a value would be on a GPU, but CuPy has no such
            dtype.
    """
    wanted = list(variables)
    for variable in wanted:
        if not isinstance(variable, Variable):
            raise TypeError(f"read_values takes variables, not {variable!r}")
    given = [None] * len(wanted) if out is None else list(out)
    if len(given) != len(wanted):
        raise ValueError(f"out has {len(given)} arrays for {len(wanted)} variables")
    context = get_replica_context()
    gpu = None if context is None else context.gpu
    places = [
        landing(f"variable {one.name!r}", one.shape, one.dtype, where, gpu)
        for one, where in zip(wanted, given, strict=True)
    ]
    arrays: list[Any] = [None] * len(wanted)
    for group in _groups(wanted, gpu):
        targets = [
            place for number in group for place in wanted[number].places_in(places[number][0])
        ]
        pull_into(targets, consistent)
        for number in group:
            arrays[number] = places[number][1]()
    return arrays


def _groups(variables: Sequence[Variable], gpu: int | None) -> list[list[int]]:
    """Return groups of variables to pull together, as lists of positions.

    With a GPU, each variable in memory that this process can read is a group, so that its upload
    overlaps the next copy. The other variables are one group.
    """
    numbers = list(range(len(variables)))
    if gpu is None:
        return [numbers]
    near = [all(remote.shared is not None for remote in one.remotes) for one in variables]
    far = [number for number in numbers if not near[number]]
    return [[number] for number in numbers if near[number]] + [far]
