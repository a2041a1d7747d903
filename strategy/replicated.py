"""What a strategy does with the replicas of a worker: runs them, feeds them, joins their values."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist import ReduceOp, Work
from strategy.devices import Device, parse
from strategy.feeding import fed
from strategy.inputs import (
    Calls,
    DatasetIterator,
    InputContext,
    NumpyDataset,
    ValueContext,
    ahead_of,
    check_per_worker,
    divided_batches,
)
from strategy.reductions import PerReplica, gathered, local_results, mapped, reduced
from strategy.replicas import check_outside

if TYPE_CHECKING:
    from strategy.extended import StrategyExtended
    from strategy.parameter_server_strategy import ParameterServerStrategy
    from strategy.variable import Variable

current_strategy: ContextVar[ParameterServerStrategy | None] = ContextVar("strategy", default=None)
_device: ContextVar[Device] = ContextVar("device", default=Device())  # noqa: B039 - it is frozen


class Strategy(ABC):
    """What all strategies have: it runs, feeds and joins the replicas of a worker.

    Args:
        replicas: How many each worker has.
    """

    extended: StrategyExtended
    gpus: tuple[int, ...]

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    @abstractmethod
    def worker_index(self) -> int:
        """Index of this worker among the workers."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this worker, whose gradients make one push; workers are not counted."""
        return self._replicas

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Local. Call ``fn`` on each replica of this worker, in the strategy's scope.

        Several replicas run on threads of their own, and meet in ``apply_gradients``, in
        assignments, and in :meth:`ReplicaContext.merge_call`.

        Args:
            fn: The step.
            args: Its arguments; of a :class:`PerReplica` each replica gets its own value.
            kwargs: Its keyword arguments, likewise.

        Returns:
            What ``fn`` returns; of several replicas a :class:`PerReplica`, or tuples, lists and
            dicts of those where it returns tuples, lists and dicts.

        Raises:
            RuntimeError: It is called on a replica.
            Exception: What the first replica that failed raised.
        """
        return self.extended.call_for_each_replica(fn, args, kwargs)

    experimental_run_v2 = run
    """TensorFlow's earlier name for :meth:`run`."""

    call_for_each_replica = run
    """The specification's name for :meth:`run`."""

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Local. :meth:`run` with the next element of an iterator, if one is given."""
        args = () if input_iterator is None else (next(iter(input_iterator)),)
        return self.run(fn, args)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Local. Sum or mean of the values of this worker's replicas, as a host array.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: What :meth:`run` returned, or one value.
            axis: Also along this axis; a mean then is that of all elements.

        Raises:
            RuntimeError: It is called on a replica; there ``all_reduce`` of its context does it.
            ValueError: The sum of one value is asked for, which is not of several replicas.
        """
        check_outside("reduce")
        if self._replicas > 1 and ReduceOp.of(reduce_op) is ReduceOp.SUM:
            mapped(_check_of_replicas, value)
        return reduced(reduce_op, value, axis, rounded=True)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Local. The values of this worker's replicas, as a tuple."""
        return local_results(value)

    unwrap = experimental_local_results
    """TensorFlow's earlier name for :meth:`experimental_local_results`."""

    def group(self, value: Any, name: str | None = None) -> None:
        """Local. Wait until all Works among the values of the replicas have ended."""
        for one in local_results(value):
            if isinstance(one, Work):
                one.wait()

    def gather(self, value: Any, axis: int) -> Any:
        """Local. The arrays of this worker's replicas, joined along an axis."""
        check_outside("gather")
        return gathered(value, axis)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Local. What a function gives for each replica, told by a :class:`ValueContext`."""
        count = self._replicas
        values = [value_fn(ValueContext(number, count)) for number in range(count)]
        return values[0] if count == 1 else PerReplica(values)

    # Input

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: Any = None
    ) -> Iterable[Any]:
        """Local. This worker's part of a dataset; of several replicas each gets a part of a batch.

        Replicas with GPUs get CuPy arrays there, copied while they work on the ones before; see
        :class:`strategy.feeding.FeedIterator`. So do those of the methods that follow.

        Args:
            dataset: Any iterable. One with a method ``shard(num_shards, index)`` is sharded over
                the workers; any other, and one that a data service distributes, is used as it is.
                One whose elements lie on a GPU already (``prefetch_to_device``) is not copied.
            options: An :class:`InputOptions`; with ``experimental_fetch_to_device=False`` arrays
                stay on the host.

        Returns:
            An iterable.

        Raises:
            TypeError: The options are none.
            ValueError: One of the options has a value that there is not.
        """
        return self._divided(self._own_part(dataset), options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: Any = None
    ) -> Iterable[Any]:
        """Local. The dataset that a function makes for this worker, divided among its replicas.

        Args:
            dataset_fn: Called with an :class:`InputContext`; gives an iterable.
            options: See :meth:`experimental_distribute_dataset`.
        """
        return self._divided(dataset_fn(self._input_context()), options)

    distribute_datasets_from_function = experimental_distribute_datasets_from_function

    def make_dataset_iterator(self, dataset: Iterable[Any], options: Any = None) -> DatasetIterator:
        """Local. This worker's part of a dataset, whose batches are for one replica each.

        Args:
            dataset: See :meth:`experimental_distribute_dataset`.
            options: See there.
        """
        return self._one_each(self._own_part(dataset), options)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: Any = "per_worker",
        options: Any = None,
    ) -> DatasetIterator:
        """Local. What an input function gives for this worker, a batch for one replica each.

        Args:
            input_fn: Called with an :class:`InputContext`; gives an iterable, or a function that
                gives an element each time.
            replication_mode: ``"per_worker"``, the only one.
            options: See :meth:`experimental_distribute_dataset`.
        """
        check_per_worker(replication_mode)
        given = input_fn(self._input_context())
        return self._one_each(Calls(given) if callable(given) else given, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> NumpyDataset:
        """Local. A dataset of the rows of arrays: one, or a tuple, list or dict of them."""
        return NumpyDataset(numpy_input)

    # Devices

    @contextmanager
    def device(self, name: str) -> Iterator[str]:
        """Local. In the block, operations run on a device of this worker; variables live elsewhere.

        Args:
            name: Parts of ``/job:worker/task:0/device:CPU:0``; inner blocks count more.

        Returns:
            The whole name, with that of the blocks around it.

        Raises:
            ValueError: It is no name, or not a device of this worker.
        """
        here = self.extended.worker_devices
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
        """Local. Warns, and does nothing: ``extended.colocate_vars_with`` places variables."""
        warnings.warn(
            "colocate_with has no effect under a strategy: operations run on the worker; use "
            "strategy.extended.colocate_vars_with to place variables",
            UserWarning,
            stacklevel=3,
        )
        yield

    @abstractmethod
    def scope(self) -> AbstractContextManager[ParameterServerStrategy]:
        """Local. In the ``with`` block, :func:`get_variable` makes variables of this strategy."""

    # Inside

    def _divided(self, dataset: Iterable[Any], options: Any) -> Iterable[Any]:
        ahead = self._ahead(dataset, options)
        if ahead is None:
            return divided_batches(dataset, self._replicas)
        return fed(dataset, self.gpus, ahead)

    def _one_each(self, dataset: Iterable[Any], options: Any) -> DatasetIterator:
        ahead = self._ahead(dataset, options)
        if ahead is None:
            return DatasetIterator(dataset, self._replicas)
        return DatasetIterator(fed(dataset, self.gpus, ahead, one_each=True), 1)

    def _ahead(self, dataset: Iterable[Any], options: Any) -> int | None:
        """How many batches may lie on the GPUs of replicas ahead; None to bring none there."""
        ahead = ahead_of(options)
        on_device = getattr(dataset, "on_device", False)
        return ahead if self.gpus and not on_device else None

    def _input_context(self) -> InputContext:
        return InputContext(self.num_workers, self.worker_index, self._replicas)

    def _own_part(self, dataset: Iterable[Any]) -> Iterable[Any]:
        shard = getattr(dataset, "shard", None)
        if shard is None or self.num_workers == 1 or getattr(dataset, "distributed", False):
            return dataset
        part: Iterable[Any] = shard(self.num_workers, self.worker_index)
        return part


def _check_of_replicas(value: Any) -> None:
    """ValueError for a value that is not of several replicas: it has lost those of the others."""
    if not isinstance(value, PerReplica) and not (np.isscalar(value) and value == 0):
        raise ValueError(
            f"{value!r} is not of several replicas, and their sum cannot be known: reduce what run "
            "returns"
        )
