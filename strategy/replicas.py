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
from strategy.gpus import Handed, brought_like, go_behind, handed_over, usable_elsewhere
from strategy.reductions import gathered, local_results, mapped, own_value, reduced, regrouped

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variable import Variable

_replica: ContextVar[ReplicaContext | None] = ContextVar("replica", default=None)


class ReplicaContext:
    """Where a replica is, inside a function that runs on every replica.

    Args:
        strategy: Whose replicas they are.
        together: What the replicas of this call have in common.
        number: Which one it is.

    Attributes:
        strategy: Whose replicas they are.
        replica_id_in_sync_group: Which one it is, from 0.
        gpu: The number of its GPU, by which CuPy and torch know it; None on the CPU.
    """

    def __init__(self, strategy: ParameterServerStrategy, together: _Together, number: int) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = number
        self.gpu = strategy.gpus[number] if strategy.gpus else None
        self._together = together
        self._taken: set[str] = set()

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this worker."""
        return self._together.count

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica."""
        return (self.strategy.extended.worker_devices[self.replica_id_in_sync_group],)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Local, on every replica. Call a function once for all replicas, when all have come here.

        Args:
            merge_fn: Called as ``merge_fn(strategy, *args, **kwargs)``, outside of any replica,
                with what the replicas gave as :class:`PerReplica`, in tuples, lists and dicts too.
            args: This replica's arguments.
            kwargs: This replica's keyword arguments.

        Returns:
            What it returned; of every PerReplica in it, this replica's value.

        Raises:
            RuntimeError: Another replica merges by another function, has ended, or has failed.
            Exception: What the function raised, on all replicas.
        """
        given = (merge_fn, tuple(args), dict(kwargs or {}))
        made = handed_over(self.gpu)
        return self._together.merge(self.strategy, self.replica_id_in_sync_group, given, made)

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Local, on every replica. The sum or mean of all replicas' values.

        What is given on a GPU comes back there; anything else is a host array.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: An array or a number, of one shape on all replicas; or tuples, lists and dicts of
                those. Halves are added in float32, and the result is rounded to their dtype.
        """
        return self._merged(_all_reduce, value, {"reduce_op": reduce_op})

    def all_gather(self, value: Any, axis: int) -> Any:
        """Local, on every replica. All arrays, joined along an axis; on a GPU if given there."""
        return self._merged(_all_gather, value, {"axis": axis})

    def _merged(self, merge_fn: Callable[..., Any], value: Any, kwargs: Mapping[str, Any]) -> Any:
        # Variables would meet as one, as if there were but one value.
        own = mapped(read, value)
        result = self.merge_call(merge_fn, (mapped(usable_elsewhere, own),), kwargs)
        return mapped(lambda part, like: brought_like(part, like, self.gpu), result, own)

    def first_or_known(self, name: str, create: Callable[[], Variable]) -> Variable:
        """Local. The variable of a name: the first replica to ask makes it, the others get it.

        Args:
            name: Its whole name.
            create: Makes it.
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
    """Local. Where this thread is in a function that runs on every replica; None outside of one."""
    return _replica.get()


def in_cross_replica_context() -> bool:
    """Local. Whether this thread is in no replica: in a strategy's scope, or in a merge call."""
    return _replica.get() is None


def check_outside(what: str) -> None:
    """Local. RuntimeError if this thread is in a replica."""
    context = _replica.get()
    if context is not None:
        raise RuntimeError(
            f"{what} is called in replica {context.replica_id_in_sync_group}; it is for what is "
            "done once for all replicas: call it in a merge_call, or outside of run"
        )


@contextlib.contextmanager
def outside_of_replicas() -> Iterator[None]:
    """Local. In the block, this thread is in no replica."""
    token = _replica.set(None)
    try:
        yield
    finally:
        _replica.reset(token)


def call_for_each_replica(
    strategy: ParameterServerStrategy,
    count: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Local. Call a function on every replica, each on a thread of its own.

    Args:
        strategy: Whose replicas they are; its scope is open in the function.
        count: How many there are; one alone is called on this thread.
        fn: The function.
        args: Its arguments; of a PerReplica each gets its own value.
        kwargs: Its keyword arguments, likewise.

    Returns:
        What it returned: of several replicas a :class:`PerReplica`, or tuples, lists and dicts of
        those where it returns tuples, lists and dicts.

    Raises:
        Exception: What the first replica that failed raised.
    """
    together = _Together(count)

    def call(number: int) -> Any:
        context = ReplicaContext(strategy, together, number)
        token = _replica.set(context)
        try:
            own = [own_value(value, number) for value in args]
            named = {key: own_value(value, number) for key, value in kwargs.items()}
            if context.gpu is not None:
                make_current(context.gpu)
                go_behind(begun)
            try:
                result = fn(*own, **named)
            except BaseException:
                # Its GPU may still work on its arguments; its own error says more than another.
                with contextlib.suppress(errors.DistBackendError):
                    made[number] = handed_over(context.gpu)
                raise
            made[number] = handed_over(context.gpu)
            return result
        finally:
            _replica.reset(token)

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
    """What the replicas of one call have in common.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
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
        strategy: ParameterServerStrategy,
        number: int,
        given: tuple[Any, tuple[Any, ...], dict[str, Any]],
        made: Handed | None,
    ) -> Any:
        """Local. See :meth:`ReplicaContext.merge_call`; ``made`` as of :func:`handed_over`."""
        with self._changed:
            this = self._round
            self._given[number] = given
            self._made.append(made)
            if len(self._given) == self.count:
                self._carry_out(strategy)
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
        """Local. A replica has ended, perhaps by an error."""
        with self._changed:
            self.first_problem = self.first_problem or problem
            self._ended += 1
            self._changed.notify_all()

    def _carry_out(self, strategy: ParameterServerStrategy) -> None:
        given = [self._given[number] for number in range(self.count)]
        self._given = {}
        made, self._made = self._made, []
        self._round += 1
        try:
            go_behind(made)
            value = _merged(strategy, given)
            self._outcome = (value, None, [handed_over(gpu) for gpu in sorted(set(strategy.gpus))])
        except BaseException as error:  # sys.exit() and Ctrl-C, too, must not leave an earlier one
            self._outcome = (None, error, [])
        self._changed.notify_all()


def _merged(
    strategy: ParameterServerStrategy,
    given: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]],
) -> Any:
    """What the function of a merge call gives."""
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
