"""``strategy.extended``: what libraries on top of a strategy use; TensorFlow's StrategyExtended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strategy.devices import parse
from strategy.reductions import PerReplica, local_results, reduced
from strategy.replicas import call_for_each_replica, check_outside, outside_of_replicas
from strategy.shared.host import LOCAL_DEVICE, device_name
from strategy.variable import Variable

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy


class MultiStepContext:
    """What a loop of ``experimental_run_steps_on_iterator`` leaves behind.

    Attributes:
        last_step_outputs: What was set of the last step, by name.
        non_tensor_outputs: Anything else, by name.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Local. Keep an output of this step, reduced over the replicas if that is asked for."""
        value = output if reduce_op is None else reduced(reduce_op, output, rounded=True)
        self.last_step_outputs[name] = value

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Local. Keep anything else."""
        self.non_tensor_outputs[name] = output


class StrategyExtended:
    """Local, all of it. The finer interface of a strategy.

    Args:
        strategy: Whose it is.
        devices: That of each replica of this worker, as ``"device:CPU:0"``.
        worker: Job and index of this worker; None in local mode.
        servers: Indexes of the ps tasks on which variables are, each with the number of its GPU, or
            None for the host.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        devices: Sequence[str],
        worker: tuple[str, int] | None,
        servers: Mapping[int, int | None],
    ) -> None:
        self._strategy = strategy
        task = "" if worker is None else f"/job:{worker[0]}/task:{worker[1]}"
        self._worker_devices = tuple(f"{task}/{device}" for device in devices)
        self._parameter_tasks = {
            index: "" if worker is None else f"/job:ps/task:{index}" for index in servers
        }
        self._parameter_devices = tuple(
            (self._parameter_tasks[index] or LOCAL_DEVICE)
            if gpu is None
            else device_name(self._parameter_tasks[index], gpu)
            for index, gpu in servers.items()
        )

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica of this worker."""
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where variables live: ps tasks, with the GPU where it is one, or the local device."""
        return self._parameter_devices

    def device_of(self, server: int, gpu: int | None) -> str:
        """Where a variable lives that is on a ps task, and on its host or a GPU of its."""
        return device_name(self._parameter_tasks[server], gpu)

    @property
    def experimental_between_graph(self) -> bool:
        """True: every worker runs its own program."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker is the chief."""
        return self._strategy.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker is the chief."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker is the chief."""
        return self._strategy.is_chief

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function on every replica of this worker; see :meth:`ParameterServerStrategy.run`.

        Raises:
            RuntimeError: This thread is in a replica already.
        """
        check_outside("call_for_each_replica")
        with self._strategy.scope():
            count = self._strategy.num_replicas_in_sync
            return call_for_each_replica(self._strategy, count, fn, args, kwargs or {})

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """In the block, new variables live on the ps task of this one, and are not divided."""
        self._check_own(colocate_with_variable)
        with self._strategy.placing_with(colocate_with_variable):
            yield

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable is one of this strategy's."""
        return isinstance(v, Variable) and v.strategy is self._strategy

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any) -> Any:
        """The sum or mean of all replicas' values, as a host array.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: A PerReplica, or one value.
            destinations: Where it is wanted: a device, a variable or an array. On this worker it is
                in host memory wherever that is.

        Raises:
            ValueError: It is wanted on another worker, or at several places.
        """
        self._check_destination(destinations)
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Iterable[tuple[Any, Any]]
    ) -> list[Any]:
        """Several of :meth:`reduce_to`."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The same value on all replicas: itself, since they share the worker's memory."""
        self._check_destination(destinations)
        return tensor

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)``, in which assignments count at once.

        Args:
            var: A variable of this strategy.
            fn: The function.
            args: Its arguments; of a PerReplica of one value, that.
            kwargs: Its keyword arguments, likewise.
            group: Whether only that it has been done counts; otherwise gives what it returned.

        Raises:
            ValueError: It is no such variable, or an argument has several replicas' values.
        """
        check_outside("extended.update")
        self._check_own(var)
        return self._call(fn, (var, *args), kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)``, for what an optimizer keeps once for all variables.

        Args:
            colocate_with: What :meth:`non_slot_devices` gave; new variables live there.
            fn: The function.
            args: See :meth:`update`.
            kwargs: See :meth:`update`.
            group: See :meth:`update`.
        """
        check_outside("extended.update_non_slot")
        if isinstance(colocate_with, Variable):
            with self.colocate_vars_with(colocate_with):
                return self._call(fn, args, kwargs, group)
        self._check_destination(colocate_with)
        return self._call(fn, args, kwargs, group)

    def non_slot_devices(self, var_list: Iterable[Variable]) -> Variable:
        """With which variable to place what an optimizer keeps for all: that of the least name."""
        return min(var_list, key=lambda v: v.name)

    def value_container(self, value: Any) -> Any:
        """What a value is a component of: itself."""
        return value

    def read_var(self, v: Variable) -> Any:
        """A fresh array with the value of a variable."""
        return v.read_value()

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(context, element)`` for so many elements; gives the context."""
        context = MultiStepContext()
        context.last_step_outputs.update(initial_loop_values or {})
        for _ in range(iterations):
            fn(context, next(iterator))
        return context

    # Inside

    def _call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        group: bool,
    ) -> Any:
        own = [_unwrapped(value) for value in args]
        named = {key: _unwrapped(value) for key, value in (kwargs or {}).items()}
        with outside_of_replicas():
            result = fn(*own, **named)
        return None if group else result

    def _check_own(self, variable: Any) -> None:
        if not self.variable_created_in_scope(variable):
            raise ValueError(f"{variable!r} is no variable of this strategy")

    def _check_destination(self, destination: Any) -> None:
        if isinstance(destination, list | tuple) and len(destination) == 1:
            (destination,) = destination
        if isinstance(destination, list | tuple | set):
            raise ValueError(  # noqa: TRY004 - as TensorFlow has it
                f"one destination is needed, not {destination!r}"
            )
        if not isinstance(destination, str):
            return
        device, here = parse(destination), parse(self._worker_devices[0])
        if device.job not in (None, "ps", here.job) or (
            device.job != "ps" and device.task not in (None, here.task)
        ):
            raise ValueError(f"{destination!r} is not on this worker, {here}")


def _unwrapped(value: Any) -> Any:
    if isinstance(value, PerReplica):
        values = local_results(value)
        if len(values) > 1:
            raise ValueError("update takes no values of several replicas: reduce them first")
        return values[0]
    return value
