"""The base of strategies, which runs and feeds the replicas of a worker."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist import ReduceOp, Work
from strategy.placement import Device, parse
from strategy.replicas.context import call_for_each_replica, check_outside
from strategy.replicas.input import (
    Calls,
    DatasetIterator,
    Feed,
    FeedIterator,
    InputContext,
    NumpyDataset,
    ValueContext,
    ahead_of,
    check_per_worker,
)
from strategy.replicas.nest import tree_leaves
from strategy.replicas.reduce import PerReplica, gathered, local_results, reduced

if TYPE_CHECKING:
    from strategy.compat.extended import StrategyExtended
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variable import Variable


current_strategy: ContextVar[ParameterServerStrategy | None] = ContextVar("strategy", default=None)
_device: ContextVar[Device] = ContextVar("device", default=Device())  # noqa: B039 - it is frozen


class Strategy(ABC):
    """Base of strategies: runs the replicas of a worker, feeds them, and combines their values.

    Args:
        replicas: Number of replicas of each worker.

    Attributes:
        worker_index: Index of this worker among the workers.
        num_workers: Number of workers.
        worker_devices: Name of the device of each replica of this worker.
        gpus: GPU index of each replica; empty on the CPU.
    """

    worker_index: int
    num_workers: int
    worker_devices: tuple[str, ...]
    gpus: tuple[int, ...]

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of this worker alone. Their gradients are pushed together."""
        return self._replicas

    @cached_property
    def extended(self) -> StrategyExtended:
        """TensorFlow's interface for libraries."""
        from strategy.compat.extended import StrategyExtended

        return StrategyExtended(cast("ParameterServerStrategy", self))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``fn`` on each replica of this worker, in the scope of the strategy.

        Several replicas run on threads of their own. They wait for each other in
        ``apply_gradients``, in assignments, and in :meth:`ReplicaContext.merge_call`.

        Args:
            fn: The step.
            args: Arguments of the step. Each replica gets its own value of a :class:`PerReplica`.
            kwargs: Keyword arguments of the step, likewise.

        Returns:
            The result of ``fn``. For several replicas, a :class:`PerReplica`, or a tree of
            PerReplica values if ``fn`` returns a tree: nested tuples, lists, dicts or dataclasses.

        Raises:
            RuntimeError: The caller runs on a replica.
            Exception: The error of the first replica that failed.
        """
        check_outside("run")
        with self.scope() as strategy:
            return call_for_each_replica(strategy, fn, args, kwargs or {})

    experimental_run_v2 = run
    """TensorFlow's earlier name for :meth:`run`."""

    call_for_each_replica = run
    """Another name for :meth:`run`."""

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Call :meth:`run` with the next element of an iterator, if an iterator is given."""
        args = () if input_iterator is None else (next(iter(input_iterator)),)
        return self.run(fn, args)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Return the sum or mean of the values of this worker's replicas as a host array.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: Result of :meth:`run`, or one value.
            axis: Reduce along this axis, too. A mean is then the mean of all elements.

        Raises:
            RuntimeError: The caller runs on a replica. Use ``all_reduce`` of the replica context.
            ValueError: The sum is requested for a value that is not a PerReplica, but the worker
                has several replicas.
        """
        check_outside("reduce")
        if self._replicas > 1 and ReduceOp.of(reduce_op) is ReduceOp.SUM:
            for leaf in tree_leaves(value):
                _check_of_replicas(leaf)
        return reduced(reduce_op, value, axis, rounded=True)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this worker's replicas as a tuple."""
        return local_results(value)

    unwrap = experimental_local_results
    """TensorFlow's earlier name for :meth:`experimental_local_results`."""

    def group(self, value: Any, name: str | None = None) -> None:
        """Wait for every Work among the values of the replicas."""
        for one in local_results(value):
            if isinstance(one, Work):
                one.wait()

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the arrays of this worker's replicas along an axis."""
        check_outside("gather")
        return gathered(value, axis)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Call a function with a :class:`ValueContext` for each replica. Return the values."""
        count = self._replicas
        values = [value_fn(ValueContext(number, count)) for number in range(count)]
        return values[0] if count == 1 else PerReplica(values)

    # Input

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: Any = None
    ) -> Iterable[Any]:
        """Return this worker's part of a dataset, with each batch divided among the replicas.

        Replicas with GPUs get CuPy arrays, which are prefetched to the GPUs; see
        :class:`strategy.replicas.input.FeedIterator`. This holds for the datasets of the next
        methods, too.

        Args:
            dataset: Any iterable. A dataset with a method ``shard(num_shards, index)`` is sharded
                over the workers. Other datasets, and datasets that a data service distributes, are
                used unchanged, so that every worker gets all elements of a list. Elements that are
                on a GPU already (``prefetch_to_device``) are not copied.
            options: An :class:`InputOptions`. With ``experimental_fetch_to_device=False``, arrays
                stay on the host.

        Returns:
            An iterable.

        Raises:
            TypeError: The options are not InputOptions.
            ValueError: An option has a value that is not valid.
        """
        return self._divided(self._own_part(dataset), options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: Any = None
    ) -> Iterable[Any]:
        """Return the dataset that a function makes for this worker, divided among its replicas.

        Args:
            dataset_fn: Called with an :class:`InputContext`; returns an iterable.
            options: See :meth:`experimental_distribute_dataset`.
        """
        return self._divided(dataset_fn(self._input_context()), options)

    distribute_datasets_from_function = experimental_distribute_datasets_from_function

    def make_dataset_iterator(self, dataset: Iterable[Any], options: Any = None) -> DatasetIterator:
        """Return an iterator over this worker's part of a dataset, with one batch per replica.

        Args:
            dataset: See :meth:`experimental_distribute_dataset`.
            options: See :meth:`experimental_distribute_dataset`.
        """
        return DatasetIterator(self._fed(self._own_part(dataset), options, one_each=True))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: Any = "per_worker",
        options: Any = None,
    ) -> DatasetIterator:
        """Return an iterator over the result of an input function, with one batch per replica.

        Args:
            input_fn: Called with an :class:`InputContext`; returns an iterable, or a function that
                returns the next element.
            replication_mode: ``"per_worker"``, the only mode.
            options: See :meth:`experimental_distribute_dataset`.
        """
        check_per_worker(replication_mode)
        given = input_fn(self._input_context())
        dataset = Calls(given) if callable(given) else given
        return DatasetIterator(self._fed(dataset, options, one_each=True))

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> NumpyDataset:
        """Return a dataset of the rows of an array, or of a tuple, list or dict of arrays."""
        return NumpyDataset(numpy_input)

    # Devices

    @contextmanager
    def device(self, name: str) -> Iterator[str]:
        """Run the operations of the block on a device of this worker. Variables are not affected.

        Args:
            name: Parts of ``/job:worker/task:0/device:CPU:0``. Inner blocks override outer blocks.

        Yields:
            The full name, with the parts of the blocks around this block.

        Raises:
            ValueError: The name is not valid, or is not a device of this worker.
        """
        here = self.worker_devices
        merged = parse(here[0]).merged(_device.get()).merged(parse(name))
        if str(merged) not in here:
            raise ValueError(f"{name!r} is no device of this worker, which has {list(here)}")
        token = _device.set(_device.get().merged(parse(name)))
        try:
            yield str(merged)
        finally:
            _device.reset(token)

    @contextmanager
    def colocate_with(self, variable: Variable) -> Iterator[None]:
        """Warn, and do nothing else: ``extended.colocate_vars_with`` places variables."""
        warnings.warn(
            "colocate_with has no effect under a strategy: operations run on the worker; use "
            "strategy.extended.colocate_vars_with to place variables",
            UserWarning,
            stacklevel=3,
        )
        yield

    @abstractmethod
    def scope(self) -> AbstractContextManager[ParameterServerStrategy]:
        """Make :func:`get_variable` create variables of this strategy in the ``with`` block."""

    def _divided(self, dataset: Iterable[Any], options: Any) -> Iterable[Any]:
        fed = self._fed(dataset, options, one_each=False)
        return fed if self._replicas > 1 or fed.gpus else dataset

    def _fed(self, dataset: Iterable[Any], options: Any, *, one_each: bool) -> Feed | FeedIterator:
        """Return a Feed of a dataset. If the dataset is an iterator, return its only pass."""
        ahead = ahead_of(options)
        on_host = ahead is None or getattr(dataset, "on_device", False)
        gpus = () if on_host else self.gpus
        feed = Feed(dataset, self._replicas, gpus, ahead or 0, one_each=one_each)
        return iter(feed) if isinstance(dataset, Iterator) else feed

    def _input_context(self) -> InputContext:
        return InputContext(self.num_workers, self.worker_index, self._replicas)

    def _own_part(self, dataset: Iterable[Any]) -> Iterable[Any]:
        shard = getattr(dataset, "shard", None)
        if shard is None or self.num_workers == 1 or getattr(dataset, "distributed", False):
            return dataset
        part: Iterable[Any] = shard(self.num_workers, self.worker_index)
        return part


def _check_of_replicas(value: Any) -> None:
    """Raise ValueError if a value is not a PerReplica: the other replicas' values are lost."""
    if not isinstance(value, PerReplica) and not (np.isscalar(value) and value == 0):
        raise ValueError(
            f"{value!r} is not of several replicas, and their sum cannot be known: reduce what run "
            "returns"
        )
