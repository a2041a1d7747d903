"""Replicas: copies of the step inside a worker, each on a thread of its own."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from mpidist import errors
from mpidist.gpu import make_current
from strategy.array_like import read
from strategy.replicas.gpu import Handed, brought_like, go_behind, handed_over, usable_elsewhere
from strategy.replicas.nest import tree_map
from strategy.replicas.reduce import gathered, local_results, own_value, reduced, regrouped

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variable import Variable


current_replica: ContextVar[ReplicaContext | None] = ContextVar("replica", default=None)


class ReplicaContext:
    """The context of one replica, inside a function that runs on every replica.

    Args:
        strategy: The strategy of the replicas.
        together: The state that the replicas of this call share.
        number: Index of this replica.

    Attributes:
        strategy: The strategy of the replicas.
        replica_id_in_sync_group: Index of this replica.
        gpu: Index of the replica's GPU, as in CuPy and torch; None on the CPU.
    """

    def __init__(self, strategy: ParameterServerStrategy, together: _Together, number: int) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = number
        self.gpu = strategy.gpus[number] if strategy.gpus else None
        self._together = together
        self._taken: set[str] = set()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of this worker."""
        return self._together.count

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the device of this replica, in a tuple."""
        return (self.strategy.worker_devices[self.replica_id_in_sync_group],)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function once for all replicas, when every replica has called this method.

        Args:
            merge_fn: Called as ``merge_fn(strategy, *args, **kwargs)``, outside of any replica. The
                arguments of all replicas arrive as :class:`PerReplica`, also inside tuples, lists
                and dicts.
            args: Arguments of this replica.
            kwargs: Keyword arguments of this replica.

        Returns:
            The result of the function, with this replica's value in place of each PerReplica.

        Raises:
            RuntimeError: Another replica calls another function, has ended, or has failed.
            Exception: The error of the function, on all replicas.
        """
        given = (merge_fn, tuple(args), dict(kwargs or {}))
        return self._together.merge(self.replica_id_in_sync_group, given, handed_over(self.gpu))

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the sum or mean of all replicas' values. Every replica must call this method.

        The result of an array on a GPU is on that GPU. Other results are host arrays.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: An array or a number with the same shape on all replicas, or tuples, lists and
                dicts of these. float16 and bfloat16 are added in float32, and the result is
                rounded.
        """
        return self._merged(_all_reduce, value, {"reduce_op": reduce_op})

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate the arrays of all replicas. Every replica must call this method.

        The result of an array on a GPU is on that GPU.

        Args:
            value: The array of this replica, or a tree of arrays.
            axis: The axis along which to concatenate.
        """
        return self._merged(_all_gather, value, {"axis": axis})

    def _merged(self, merge_fn: Callable[..., Any], value: Any, kwargs: Mapping[str, Any]) -> Any:
        # Read variables first: merge_call() would pass on a shared variable as one value.
        own = tree_map(read, value)
        result = self.merge_call(merge_fn, (tree_map(usable_elsewhere, own),), kwargs)
        return tree_map(lambda part, like: brought_like(part, like, self.gpu), result, own)

    def first_or_known(self, name: str, create: Callable[[], Variable]) -> Variable:
        """Return the variable with a name. The first replica that asks creates the variable.

        Args:
            name: Full name of the variable.
            create: Creates the variable.
        """
        with self._together.creating:
            known = self._together.created.get(name)
            if known is None or name in self._taken:
                known = self._together.created[name] = create()
            self._taken.add(name)
            return known


def _all_reduce(_: Any, value: Any, reduce_op: Any) -> Any:
    return reduced(local_results(reduce_op)[0], value, rounded=True)


def _all_gather(_: Any, value: Any, axis: Any) -> Any:
    return gathered(value, local_results(axis)[0])


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the replica that this thread runs; None outside of replicas."""
    return current_replica.get()


def in_cross_replica_context() -> bool:
    """Return whether this thread runs no replica, as in a scope or in a merge call."""
    return current_replica.get() is None


def check_outside(what: str) -> None:
    """Raise RuntimeError if this thread runs a replica."""
    context = current_replica.get()
    if context is not None:
        raise RuntimeError(
            f"{what} is called in replica {context.replica_id_in_sync_group}; it is for what is "
            "done once for all replicas: call it in a merge_call, or outside of run"
        )


@contextlib.contextmanager
def outside_of_replicas() -> Iterator[None]:
    """Run the ``with`` block outside of any replica."""
    token = current_replica.set(None)
    try:
        yield
    finally:
        current_replica.reset(token)


def call_for_each_replica(
    strategy: ParameterServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function on every replica, each on a thread of its own.

    Args:
        strategy: The strategy of the replicas, whose scope is open. A single replica runs on this
            thread.
        fn: The function.
        args: Arguments of the function. Each replica gets its own value of a PerReplica.
        kwargs: Keyword arguments of the function, likewise.

    Returns:
        The result of the function. For several replicas, a :class:`PerReplica`, or a tree of
        PerReplica values if the function returns trees.

    Raises:
        Exception: The error of the first replica that failed.
    """
    count = strategy.num_replicas_in_sync
    together = _Together(strategy)

    def call(number: int) -> Any:
        context = ReplicaContext(strategy, together, number)
        token = current_replica.set(context)
        try:
            own = [own_value(value, number) for value in args]
            named = {key: own_value(value, number) for key, value in kwargs.items()}
            if context.gpu is not None:
                make_current(context.gpu)
                go_behind(begun)
            try:
                result = fn(*own, **named)
            except BaseException:
                # The GPU may still use the arguments. An error here must not hide the first one.
                with contextlib.suppress(errors.DistBackendError):
                    made[number] = handed_over(context.gpu)
                raise
            made[number] = handed_over(context.gpu)
            return result
        finally:
            current_replica.reset(token)

    made: list[Handed | None] = [None] * count
    begun: list[Handed | None] = []
    if count == 1:
        return call(0)
    begun = [handed_over(gpu) for gpu in sorted(set(strategy.gpus))]
    results: list[Any] = [None] * count
    problems: list[BaseException | None] = [None] * count

    def run(number: int) -> None:
        try:
            results[number] = call(number)
        except BaseException as error:
            problems[number] = error
        finally:
            together.end(problems[number])

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(run, number), name=f"replica {number}"
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        go_behind(made)
    finally:
        if together.first_problem is not None:
            raise together.first_problem
    return regrouped(results)


class _Together:
    """The state that the replicas of one call share.

    Args:
        strategy: The strategy of the replicas.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.count = strategy.num_replicas_in_sync
        self._strategy = strategy
        self.created: dict[str, Variable] = {}
        self.creating = threading.RLock()
        self.first_problem: BaseException | None = None
        self._changed = threading.Condition()
        self._given: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._made: list[Handed | None] = []
        self._ended = 0
        self._round = 0
        self._outcome: tuple[Any, BaseException | None, list[Handed | None]] = (None, None, [])

    def merge(
        self,
        number: int,
        given: tuple[Any, tuple[Any, ...], dict[str, Any]],
        made: Handed | None,
    ) -> Any:
        """See :meth:`ReplicaContext.merge_call`. ``made`` is the result of :func:`handed_over`."""
        with self._changed:
            this = self._round
            self._given[number] = given
            self._made.append(made)
            if len(self._given) == self.count:
                self._carry_out()
            else:
                self._changed.wait_for(lambda: self._round != this or self._ended)
            if self._round == this:
                raise RuntimeError(
                    f"replica {number} waits in merge_call, and another one has "
                    + ("failed" if self.first_problem is not None else "ended without it")
                )
            value, error, events = self._outcome
        if error is not None:
            raise error
        go_behind(events)
        return own_value(value, number)

    def end(self, problem: BaseException | None) -> None:
        """Record the end of a replica, and its error if it failed."""
        with self._changed:
            self.first_problem = self.first_problem or problem
            self._ended += 1
            self._changed.notify_all()

    def _carry_out(self) -> None:
        given = [self._given[number] for number in range(self.count)]
        self._given = {}
        made, self._made = self._made, []
        self._round += 1
        try:
            go_behind(made)
            value = _merged(self._strategy, given)
            events = [handed_over(gpu) for gpu in sorted(set(self._strategy.gpus))]
            self._outcome = (value, None, events)
        except BaseException as error:  # Ctrl-C, too, must not leave an earlier outcome
            self._outcome = (None, error, [])
        self._changed.notify_all()


def _merged(
    strategy: ParameterServerStrategy,
    given: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]],
) -> Any:
    """Call the function of a merge call with the arguments of all replicas."""
    function, args, kwargs = given[0]
    for number, (other, other_args, other_kwargs) in enumerate(given):
        alike = (other.__qualname__, len(other_args), set(other_kwargs))
        if alike != (function.__qualname__, len(args), set(kwargs)):
            raise RuntimeError(
                f"replica 0 merges by {function.__qualname__} and replica {number} by "
                f"{other.__qualname__}, or with other arguments"
            )
    if len(given) > 1:
        args = tuple(regrouped(values) for values in zip(*(a for _, a, _ in given), strict=True))
        kwargs = {key: regrouped([own[key] for _, _, own in given]) for key in kwargs}
    with outside_of_replicas():
        return function(strategy, *args, **kwargs)
