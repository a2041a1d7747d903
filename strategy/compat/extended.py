"""``strategy.extended``: the interface for libraries, like TensorFlow's StrategyExtended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strategy.placement import parse
from strategy.replicas.context import check_outside, outside_of_replicas
from strategy.replicas.reduce import PerReplica, local_results, reduced
from strategy.variable import Variable

if TYPE_CHECKING:
    from strategy.parameter_server_strategy import ParameterServerStrategy


class MultiStepContext:
    """The outputs of a loop of ``experimental_run_steps_on_iterator``.

    Attributes:
        last_step_outputs: Outputs of the last step, by name.
        non_tensor_outputs: Other outputs, by name.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set an output of this step. With ``reduce_op``, reduce the output over the replicas."""
        value = output if reduce_op is None else reduced(reduce_op, output, rounded=True)
        self.last_step_outputs[name] = value

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set an output of any type."""
        self.non_tensor_outputs[name] = output


class StrategyExtended:
    """The interface of a strategy for libraries.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica of this worker."""
        return self._strategy.worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables, on ps tasks, their GPUs, or this process."""
        return self._strategy.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        """Always True, because every worker runs its own program."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Always False, because shapes may change."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """True if this worker is the chief."""
        return self._strategy.is_chief

    @property
    def should_checkpoint(self) -> bool:
        """True if this worker is the chief."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """True if this worker is the chief."""
        return self._strategy.is_chief

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function on every replica of this worker; see :meth:`ParameterServerStrategy.run`.

        Raises:
            RuntimeError: The caller runs on a replica.
        """
        return self._strategy.run(fn, args, kwargs)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block, undivided, on the ps task of a given variable."""
        self._check_own(colocate_with_variable)
        with self._strategy.creator.placing_with(colocate_with_variable):
            yield

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable belongs to this strategy."""
        return isinstance(v, Variable) and v.strategy is self._strategy

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any) -> Any:
        """Return the sum or mean of the values of all replicas as a host array.

        Args:
            reduce_op: ``"sum"`` or ``"mean"``.
            value: A PerReplica, or one value.
            destinations: A device, a variable or an array. The result is in host memory of this
                worker for any destination.

        Raises:
            ValueError: The destination is on another worker, or there are several.
        """
        self._check_destination(destinations)
        return self._strategy.reduce(reduce_op, value)

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Iterable[tuple[Any, Any]]
    ) -> list[Any]:
        """Return the result of :meth:`reduce_to` for each pair of value and destination."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return the value itself, because all replicas share the memory of the worker."""
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
        """Call ``fn(var, *args, **kwargs)``, outside of replicas: assignments apply at once.

        Args:
            var: A variable of this strategy.
            fn: The function.
            args: Arguments of the function. A PerReplica of one value is replaced by the value.
            kwargs: Keyword arguments of the function, likewise.
            group: Return None in place of the result of the function.

        Raises:
            RuntimeError: The caller runs on a replica.
            ValueError: The variable belongs to another strategy, or an argument has values of
                several replicas.
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
        """Call ``fn(*args, **kwargs)``, for optimizer state that is kept once for all variables.

        Args:
            colocate_with: Result of :meth:`non_slot_devices`. New variables are created on the same
                ps task.
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
        """Return the variable with the smallest name, beside which to place non-slot variables."""
        return min(var_list, key=lambda v: v.name)

    def value_container(self, value: Any) -> Any:
        """Return the container of a value: the value itself."""
        return value

    def read_var(self, v: Variable) -> Any:
        """Return the value of a variable in a fresh array."""
        return v.read_value()

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(context, element)`` for ``iterations`` elements. Return the context."""
        context = MultiStepContext()
        context.last_step_outputs.update(initial_loop_values or {})
        for _ in range(iterations):
            fn(context, next(iterator))
        return context

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
        device, here = parse(destination), parse(self._strategy.worker_devices[0])
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
