"""Variables, as a training script has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import host_view
from strategy.array_like import ArrayLike, in_dtype, on_host, read
from strategy.assigned import Version, check_first_only, of_all_replicas
from strategy.connection.change import Change, check_change, push_all
from strategy.connection.remote import Remote, pull
from strategy.gpus import pulled
from strategy.proto import parameter_server_pb2 as pb
from strategy.replicas import get_replica_context
from strategy.shared.rows import merged
from strategy.shared.shard import HALVES, Layout
from strategy.slices import IndexedSlices, row_numbers

if TYPE_CHECKING:
    from strategy.connection.connection import Connection
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variables import Use

Array = NDArray[Any]
RuleOf = Callable[["Connection"], int]

_PARTS = 5  # that a strategy makes a variable of


class _MadeByStrategies(type):
    """Class of variables. A call of a script, which gives no parts, is told what to call."""

    def __call__(cls, *parts: Any, **options: Any) -> Any:
        if len(parts) < _PARTS or options:
            raise TypeError(
                f"a {cls.__name__} lives on ps tasks and is not made by its class: call "
                "strategy.get_variable(name, shape, dtype, initializer), in the scope() of a "
                "ParameterServerStrategy"
            )
        return super().__call__(*parts)


# NumPy's stubs take NDArrayOperatorsMixin for an ABC, which it is not.
class Variable(ArrayLike, metaclass=_MadeByStrategies):  # type: ignore[metaclass]
    """An array that lives on a ps task; made by :func:`get_variable`.

    It acts as an array wherever one is expected: each use pulls its value. A worker always sees
    its own earlier pushes. Neither reading nor changing it is collective.

    Args:
        strategy: Whose it is.
        name: Its name.
        layout: Its shape and dtype.
        remotes: Where it lives: one place, or one for each part.
        use: What it is for.

    Attributes:
        name: Unique among the strategy's variables.
        shape: Its shape.
        dtype: Its dtype.
        trainable: Whether optimizers are meant to change it.
        aggregation: What happens when several replicas assign to it.
        synchronization: As it was given; there is one copy of a variable.
        strategy: Whose it is.
        remotes: Where it lives.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        name: str,
        layout: Layout,
        remotes: Sequence[Remote],
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
        """Version of the last pull or push: how often the variable had been changed."""
        return self.version_of([remote.known for remote in self.remotes])

    @property
    def device(self) -> str | tuple[str, ...]:
        """Where it lives: ``"/job:ps/task:0/device:CPU:0"``; of one in parts a tuple."""
        names = [
            self.strategy.extended.device_of(remote.connection.index, remote.gpu)
            for remote in self.remotes
        ]
        return names[0] if len(names) == 1 else tuple(names)

    def read_value(self, out: Any = None, *, consistent: bool = True) -> Any:
        """Local. Pull.

        Args:
            out: Filled and returned if given: writable, the variable's shape and dtype, in host
                memory C-contiguous; also on a GPU, where it is filled behind what its stream has to
                do. Otherwise a fresh array is; on a replica with a GPU a CuPy array there, copied
                beside what is queued, for which the current stream waits.
            consistent: Whether all of it must belong to one version; otherwise each block of
                1 MiB may belong to its own.

        Returns:
            The value. On a replica with a GPU is where the step itself runs, on the replica's
            thread; in a merge call and elsewhere the value is an array of the host.

        Raises:
            ValueError: ``out`` does not fit.
            TypeError: It shall be on a GPU, and CuPy does not have the dtype.
        """
        array = self._on_host(out, self.shape)
        if array is None:
            return self._pulled(self.shape, out, lambda out: self._pull(out, consistent))
        self._pull(array, consistent)
        return array

    def numpy(self) -> Array:
        """Local. A fresh copy of the value, in host memory."""
        value: Array = self.read_value(np.empty(self.shape, self.dtype))
        return value

    def assign(self, value: Any) -> Version:
        """Local. Replace the value.

        Args:
            value: An array of the variable's shape, or a number for all elements.

        Returns:
            The new version, once it has been applied.

        Raises:
            ValueError: The shape differs, or an integer does not fit the variable's dtype.
            TypeError: The dtype cannot become the variable's.
        """
        return self._change(pb.ASSIGN, value)

    def assign_add(self, delta: Any) -> Version:
        """Local. Add to the value; see :meth:`assign`."""
        return self._change(pb.ADD, delta)

    def assign_sub(self, delta: Any) -> Version:
        """Local. Subtract from the value; see :meth:`assign`."""
        return self._change(pb.SUB, delta)

    def gather(self, indices: Any, out: Any = None) -> Any:
        """Local. Pull some rows, all of one version.

        Args:
            indices: Which, along the first axis, in any order and as often as wanted: integers of
                any shape.
            out: Filled and returned if given: the variable's dtype, shape
                ``(*indices.shape, *variable.shape[1:])``, otherwise as for :meth:`read_value`.

        Returns:
            The rows, in the order of ``indices``.

        Raises:
            IndexError: There is no such row.
            TypeError: The indices are no integers.
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
        """Local. Replace some rows.

        Args:
            indices: Which, along the first axis; or :class:`IndexedSlices`. Of several values for
                one row the last counts.
            values: Shape ``(len(indices), *variable.shape[1:])``, or a number.

        Returns:
            The new version, once it has been applied.

        Raises:
            IndexError: There is no such row.
            TypeError: The indices are no integers, or the values' dtype cannot become the
                variable's.
            ValueError: The shapes do not fit, or an integer does not fit the variable's dtype.
        """
        return self._scatter(pb.ASSIGN, indices, values, None)

    def scatter_add(self, indices: Any, values: Any = None) -> Version:
        """Local. Add to some rows, all that is given for each; see :meth:`scatter_update`."""
        return self._scatter(pb.ADD, indices, values, np.add)

    def scatter_sub(self, indices: Any, values: Any = None) -> Version:
        """Local. Subtract from some rows all that is given; see :meth:`scatter_update`."""
        return self._scatter(pb.SUB, indices, values, np.add)

    def scatter_mul(self, indices: Any, values: Any = None) -> Version:
        """Local. Multiply some rows with all that is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MUL, indices, values, np.multiply)

    def scatter_div(self, indices: Any, values: Any = None) -> Version:
        """Local. Divide some rows by all that is given; see :meth:`scatter_update`.

        TypeError, too, for variables of integers.
        """
        if self.dtype.kind in "biu":
            raise TypeError(f"variable {self.name!r} of {self.dtype} cannot be divided in place")
        return self._scatter(pb.DIV, indices, values, np.multiply)

    def scatter_min(self, indices: Any, values: Any = None) -> Version:
        """Local. Take the least of some rows and what is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MIN, indices, values, np.minimum)

    def scatter_max(self, indices: Any, values: Any = None) -> Version:
        """Local. Take the greatest of some rows and what is given; see :meth:`scatter_update`."""
        return self._scatter(pb.MAX, indices, values, np.maximum)

    def changes(self, value: Any, rule_of: RuleOf) -> list[Change]:
        """Local. Checked changes of this variable, for those who push: one for each part.

        Args:
            value: Any array, another variable, a number for all elements, or
                :class:`IndexedSlices` whose values for one row add up.
            rule_of: Gives the rule for a server; see :class:`strategy.connection.change.Change`.
        """
        if (
            value.__class__ is np.ndarray
            and value.dtype == self.dtype
            and value.shape == self.shape
        ):
            return self._divided(value, rule_of)  # as a rule
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

    # What sharded variables do otherwise

    def places_in(self, out: Array) -> list[tuple[Remote, Array]]:
        """Local. Where in an array of the variable's shape each of its remotes is pulled into."""
        return [(self.remotes[0], out)]

    def _pull(self, out: Array, consistent: bool) -> None:
        pull(self.remotes[0], out, consistent=consistent)

    def _pull_rows(self, ids: Array, out: Array) -> None:
        pull(self.remotes[0], out, ids)

    def _divided(self, data: Array, rule_of: RuleOf) -> list[Change]:
        (remote,) = self.remotes
        return [Change(remote, rule_of(remote.connection), data)]

    def _divided_rows(self, ids: Array, rows: Array, rule_of: RuleOf) -> list[Change]:
        (remote,) = self.remotes
        return [Change(remote, rule_of(remote.connection), rows, ids=ids.copy())]

    def version_of(self, versions: Sequence[int]) -> Version:
        """Local. The version that the variable has where its parts have these."""
        return versions[0]

    # Inside

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
        # Before they are merged: sums of small integers would not fit their own type, nor those of
        # halves.
        wide = np.float32 if self.dtype in HALVES else self.dtype
        with np.errstate(over="ignore"):  # what is not finite is found before it is pushed
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
        return self.version_of([version for version, _ in push_all(changes).result()])

    def _on_host(self, out: Any, shape: tuple[int, ...]) -> Array | None:
        """An array of the host to pull into, where that is what is wanted, and it fits."""
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
        """Variables and lists as arrays; whole numbers of lists fit any dtype that holds them."""
        value = on_host(read(value))
        if not isinstance(value, list | tuple):
            return value
        array = np.asarray(value)
        whole = array.dtype.kind in "iu" and self.dtype.kind in "iu"
        return self._number(array) if whole else array

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.dtype}{list(self.shape)}>"
