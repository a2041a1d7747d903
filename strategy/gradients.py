"""The push of gradients: layout, finite check, clip, compress, and the description of a step."""

from __future__ import annotations

import logging
import math
import threading
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpidist import Work, errors
from strategy.array_like import IndexedSlices
from strategy.client.changes import Change, converted, entries_of, global_norm
from strategy.client.connection import Connection, PushResult
from strategy.client.pull import RemoteVariable
from strategy.client.sync_modes import SyncMode
from strategy.optimizers import Applied, Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.layout import FLOATING
from strategy.protocol.push_message import JOINED_BYTES, ONE
from strategy.replicas.context import current_replica
from strategy.replicas.gpu import leaving, usable_elsewhere
from strategy.replicas.reduce import PerReplica, reduced
from strategy.schedules import Schedule, described
from strategy.variable import Variable

logger = logging.getLogger(__name__)

Array = NDArray[Any]

Policy = Literal["error", "skip", "pass"]
POLICIES = get_args(Policy)

# The dtypes for which np.vdot calls BLAS.
_VECTORS = (np.dtype(np.float32), np.dtype(np.float64))
_TWO_STREAMS_BYTES = 1 << 20
_PART = 1 << 17  # elements to check at once, so that temporary arrays stay in the cache


class NanPolicy:
    """A check of gradients before they are pushed.

    Args:
        policy: ``"error"`` raises an error for gradients with NaN or infinite elements. ``"skip"``
            does not push them, and logs one warning. ``"pass"`` does not check gradients.
        worker: Index of this worker, for messages.

    Attributes:
        skipped: Number of calls of ``apply_gradients`` that pushed nothing.

    Raises:
        ValueError: The policy is unknown.
    """

    def __init__(self, policy: str, worker: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown nan policy {policy!r}; the known ones are {POLICIES}")
        self._policy = policy
        self._worker = worker
        self.skipped = 0

    def allows(self, changes: Sequence[Change]) -> bool:
        """Return whether to push gradients.

        Raises:
            InvalidArgumentError: A gradient is not finite, and the policy is ``"error"``.
        """
        names = not_finite(changes) if self._policy != "pass" else []
        if not names:
            return True
        problem = f"gradients of worker {self._worker} have NaN or infinite elements: {names}"
        if self._policy == "error":
            raise errors.InvalidArgumentError(
                f"{problem}; nothing was pushed. Make the strategy with nan='skip' to leave such "
                "gradients out, or with nan='pass' to apply them"
            )
        if self.skipped == 0:
            logger.warning("%s; this push is skipped, and later ones without a warning", problem)
        self.skipped += 1
        return False


def not_finite(changes: Sequence[Change]) -> list[str]:
    """Return the names of variables whose changes have NaN or infinite elements.

    Elements that overflow the dtype of the variable count as infinite.
    """
    names = [
        remote.origin.variable
        for change in changes
        if not _is_finite(change.data, change.dtype)
        for remote, data in change.divided()
        if len(change.remotes) == 1 or not _is_finite(data, change.dtype)
    ]
    return list(dict.fromkeys(names))


def _is_finite(data: Array, dtype: np.dtype[Any]) -> bool:
    kind = data.dtype
    if kind in _VECTORS:
        # Memory-bound. The products of finite elements may overflow, so infinity proves nothing.
        if math.isfinite(_sum_of_products(data)) and kind == dtype:
            return True
    elif kind.kind in "biu" and dtype != np.float16:  # integers overflow float16 only
        return True
    flat = data.reshape(-1)
    parts = [flat[start : start + _PART] for start in range(0, flat.size, _PART)]
    with np.errstate(over="ignore", invalid="ignore"):
        if kind in FLOATING:
            return all(np.isfinite(_largest(part).astype(dtype)) for part in parts)
        return all(np.isfinite(part.astype(dtype)).all() for part in parts)


def _sum_of_products(data: Array) -> Any:
    """Return a sum of products of all elements. It is NaN or infinite if an element is.

    Large arrays are multiplied half by half: two streams are read from memory a third faster.
    """
    if data.nbytes < _TWO_STREAMS_BYTES:
        return np.vdot(data, data)
    flat = data.reshape(-1)
    half = flat.size // 2
    with np.errstate(over="ignore", invalid="ignore"):
        return np.vdot(flat[:half], flat[half : 2 * half]) + 0 * flat[-1]  # for an odd size


def _largest(part: Array) -> Any:
    """Return the largest magnitude; NaN counts as larger than all numbers.

    Without signs, floating-point numbers have the order of the integers with the same bits, and NaN
    is last (IEEE 754-2019, 3.4). For halves this is ten times as fast as NumPy's maximum.
    """
    unsigned = np.dtype(f"u{part.itemsize}")
    magnitudes = part.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return magnitudes.max(keepdims=True).view(part.dtype)[0]


_HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
_LARGEST = float(np.finfo(np.float16).max)


Residuals = dict[str, tuple[Array, Array]]
"""The residuals of error feedback before and after a push.

The keys are names of variables or, for a divided variable, the names of its parts.
"""


class Compressor:
    """Compressor of the gradients of one worker; keeps the residuals of error feedback.

    Args:
        compression: None for no compression. ``"fp16"`` or ``"bf16"`` sends gradients in half
            precision; values beyond the range of float16 are clipped. ``("topk", share)`` sends
            only the largest elements of each gradient, and adds the rest to the next gradient
            (error feedback; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018). ``"fp16"``
            and ``"bf16"`` also compress gradients of rows. ``"topk"`` sends gradients of rows
            unchanged.

    Raises:
        ValueError: The compression is unknown, or the share is not in (0, 1].
    """

    def __init__(self, compression: Any) -> None:
        self._half: np.dtype[Any] | None = None
        self._share = 1.0
        self._text = ""
        self._behind: dict[str, Array] = {}
        self._lock = threading.Lock()
        if isinstance(compression, str) and compression in _HALVES:
            self._half, self._text = _HALVES[compression], compression
        elif (
            isinstance(compression, tuple | list)
            and len(compression) == 2
            and compression[0] == "topk"
        ):
            share = compression[1]
            if not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(f"'topk' sends a share of the elements from 0 to 1, not {share!r}")
            self._share, self._text = float(share), f"topk, {float(share)!r}"
        elif compression is not None:
            raise ValueError(
                f"unknown compression {compression!r}; the known ones are None, 'fp16', 'bf16' and "
                "('topk', share)"
            )

    def __str__(self) -> str:
        """Return a text that is equal on workers with the same compression."""
        return self._text

    @property
    def is_on(self) -> bool:
        """True if gradients are compressed."""
        return bool(self._text)

    def apply(self, changes: Sequence[Change]) -> Residuals:
        """Compress gradients, and keep the residuals for the next push.

        The data of the changes is replaced. The caller's arrays are not written.

        Args:
            changes: The gradients. Only gradients of float32 and float64 variables are compressed.

        Returns:
            The residuals before and after, for :meth:`undo`.
        """
        residuals: Residuals = {}
        if not self.is_on:
            return residuals
        try:
            for change in changes:
                if change.dtype.kind != "f" or change.remotes[0].layout.is_half:
                    continue
                if self._half is not None:
                    self._halve(change, self._half)
                elif change.ids is None:
                    self._select(change, residuals)
        except BaseException:
            self.undo(residuals)
            raise
        return residuals

    def undo(self, residuals: Residuals) -> None:
        """Restore the residuals before a push that has failed or came too late for its step.

        Args:
            residuals: The result of :meth:`apply` for the push.
        """
        with self._lock:
            for name, (before, after) in residuals.items():
                now = self._behind[name]
                # Another push may have sent a part of the residual meanwhile.
                self._behind[name] = before if now is after else now + (before - after)

    def _halve(self, change: Change, dtype: np.dtype[Any]) -> None:
        flat = converted(change)
        if dtype == np.float16:
            np.clip(flat, -_LARGEST, _LARGEST, out=flat)
        change.data, change.wire, change.scale = flat.astype(dtype), dtype, 1.0

    def _select(self, change: Change, residuals: Residuals) -> None:
        total = converted(change)
        name = change.remotes[0].name
        with self._lock:
            before = self._behind.get(name)
            if before is None:
                before = np.zeros_like(total)
            total += before
            count = min(max(1, round(self._share * total.size)), total.size)
            element_ids = np.argpartition(np.abs(total), total.size - count)[total.size - count :]
            element_ids.sort()
            change.data, change.element_ids, change.scale = (
                total[element_ids],
                element_ids.astype(np.int64),
                1.0,
            )
            total[element_ids] = 0
            residuals[name] = before, total
            self._behind[name] = total


Pairs = Sequence[tuple[Any, Variable]]

_NOTE = "It is the gradient of variable {!r}."


class _ReplicaGradients:
    """The gradients of one replica, as a leaf: a merge call combines trees leaf by leaf."""

    def __init__(self, optimizer: Optimizer, pairs: Pairs) -> None:
        self.optimizer = optimizer
        self.pairs = pairs


@dataclass
class _Group:
    """Small variables of one server and dtype, whose gradients travel in one array.

    Attributes:
        positions: Positions of the variables in the list of variables, in the order in which the
            variables were created, which is their order in the server's buckets.
        remotes: The variables.
        shapes: Their shapes.
        dtype: Their dtype.
        rule: Number of the optimizer.
        entries: The entries of push messages.
    """

    positions: list[int]
    remotes: Sequence[RemoteVariable]
    shapes: Sequence[tuple[int, ...]]
    dtype: np.dtype[Any]
    rule: int
    entries: bytes = b""

    def change(self, gradients: Sequence[Any]) -> Change | None:
        """Return one change for all variables; None if a gradient must be converted."""
        for gradient, shape in zip(gradients, self.shapes, strict=True):
            if (
                gradient.__class__ is not np.ndarray
                or gradient.dtype != self.dtype
                or gradient.shape != shape
            ):
                return None
        data = gradients[0] if len(gradients) == 1 else np.concatenate(gradients, axis=None)
        change = Change(self.remotes, self.rule, data, entries=self.entries)
        if not self.entries:
            self.entries = change.entries = entries_of(change)
        return change


class PushLayout:
    """The prepared layout of the pushes of a list of variables by one optimizer.

    Args:
        optimizer: The optimizer.
        variables: Different variables of one strategy.
        together: Whether the gradients of small variables may travel in one array. Gradients that
            need a conversion never do.

    Attributes:
        variables: The argument.
    """

    def __init__(
        self, optimizer: Optimizer, variables: Sequence[Variable], *, together: bool
    ) -> None:
        self.variables = variables
        small: dict[tuple[Connection, np.dtype[Any]], list[int]] = {}
        self._others: list[int] = []
        for position, variable in enumerate(variables):
            remote = variable.remotes[0]
            is_small = 0 < remote.layout.data_bytes < JOINED_BYTES
            if together and is_small and len(variable.remotes) == 1:
                key = remote.connection, remote.layout.dtype
                small.setdefault(key, []).append(position)
            else:
                self._others.append(position)
        self._groups: list[_Group] = []
        for (connection, dtype), positions in small.items():
            positions.sort(key=lambda position: variables[position].remotes[0].number)
            remotes = tuple([variables[position].remotes[0] for position in positions])
            shapes = [variables[position].shape for position in positions]
            rule = connection.rule_of(optimizer)
            self._groups.append(_Group(positions, remotes, shapes, dtype, rule))
        self._results = self._indices_of_results()
        self._has_parts = any(len(variable.remotes) > 1 for variable in variables)

    def changes(
        self, gradients: Sequence[Any], rule_of: Callable[[Connection], int], rate: float
    ) -> list[list[Change]]:
        """Return lists of changes: one for each joined group, and one for each other variable.

        Args:
            gradients: One for each variable.
            rule_of: Returns the number of the optimizer over a connection.
            rate: The learning rate; 0 if a schedule computes the rate.
        """

        def changes_of(position: int) -> list[Change]:
            return gradient_changes(rule_of, rate, gradients[position], self.variables[position])

        # Joined groups come last, so that small arrays fill up the last message.
        divided = [changes_of(position) for position in self._others]
        for group in self._groups:
            change = group.change([gradients[position] for position in group.positions])
            if change is not None:
                change.rate = rate
                divided.append([change])
                continue
            divided += [changes_of(position) for position in group.positions]
        return divided

    def applied(self, result: PushResult | None) -> Applied:
        """Return the result of a push for the caller of the optimizer.

        Args:
            result: The versions and the staleness in the order of the changes; the last ones are of
                the global step. None if the push came too late.
        """
        if result is None:
            return Applied((), (), contributed=False)
        versions, staleness = result
        if not self._has_parts:
            own = [indices[0] for indices in self._results]
            return Applied(
                tuple([versions[index] for index in own]),
                tuple([staleness[index] for index in own]),
            )
        return Applied(
            tuple(
                variable.version_of([versions[index] for index in own])
                for variable, own in zip(self.variables, self._results, strict=True)
            ),
            tuple(max([staleness[index] for index in own]) for own in self._results),
        )

    def _indices_of_results(self) -> list[range]:
        """Return, for each variable, the indices of its parts in the order of the changes."""
        grouped = [position for group in self._groups for position in group.positions]
        indices = [range(0)] * len(self.variables)
        begin = 0
        for position in self._others + grouped:
            end = begin + len(self.variables[position].remotes)
            indices[position] = range(begin, end)
            begin = end
        return indices


_MAX_LAYOUTS = 64


class GradientPusher:
    """The push of gradients by one worker.

    Args:
        strategy: The strategy to which all variables and replicas must belong.
        global_step: The variable that each push advances by one.
        nan: The policy for gradients with NaN or infinite elements.
        compressor: The gradient compression.
        sync_mode: The synchronization mode, which decides when a push waits for other workers.
        before_first: Called before the first push.
    """

    def __init__(
        self,
        strategy: object,
        global_step: Variable,
        nan: NanPolicy,
        compressor: Compressor,
        sync_mode: SyncMode,
        before_first: Callable[[], None],
    ) -> None:
        self._strategy = strategy
        self._before_first: Callable[[], None] | None = before_first
        self._global_step = global_step
        self._nan = nan
        self._compressor = compressor
        self._sync_mode = sync_mode
        self._layouts: WeakKeyDictionary[Optimizer, dict[tuple[int, ...], PushLayout]] = (
            WeakKeyDictionary()
        )
        self._step_entries = b""

    def push(self, optimizer: Optimizer, pairs: Pairs) -> Work:
        """Push gradients. In a step of several replicas, push the means of their gradients.

        Args:
            optimizer: The optimizer.
            pairs: Gradients and their variables, at least one pair.

        Returns:
            A Work with an :class:`Applied` as its result.
        """
        if self._before_first is not None:
            begin, self._before_first = self._before_first, None
            begin()
        layout = self._layout_of(optimizer, [var for _, var in pairs])
        context = current_replica.get()
        if context is not None and context.strategy is not self._strategy:
            raise ValueError(
                f"variable {pairs[0][1].name!r} does not belong to the strategy that runs this "
                "step: was it made outside of strategy.scope()?"
            )
        if context is not None and context.num_replicas_in_sync > 1:
            moved = [(usable_elsewhere(grad), var) for grad, var in pairs]
            own = _ReplicaGradients(optimizer, moved)
            work: Work = context.merge_call(self._push_means, (own,))
            return work
        return self._push(optimizer, [grad for grad, _ in pairs], layout)

    def _layout_of(self, optimizer: Optimizer, variables: Sequence[Variable]) -> PushLayout:
        """Return the prepared layout of pushes.

        Raises:
            ValueError: The variables are of another strategy, or one comes twice.
        """
        layouts = self._layouts.get(optimizer)
        if layouts is None:
            layouts = self._layouts[optimizer] = {}
        key = tuple(map(id, variables))  # the layout keeps the variables
        layout = layouts.get(key)
        if layout is None:
            if any(var.strategy is not self._strategy for var in variables):
                raise ValueError("all variables of one apply_gradients must belong to one strategy")
            names = [var.name for var in variables]
            if len(set(names)) < len(names):
                twice = sorted({name for name in names if names.count(name) > 1})
                raise ValueError(f"variables come twice: {twice}; add their gradients first")
            if len(layouts) >= _MAX_LAYOUTS:
                layouts.clear()
            # Norms and residuals of top-k compression are of single variables.
            together = optimizer.clipnorm is None and not self._compressor.is_on
            layout = layouts[key] = PushLayout(optimizer, variables, together=together)
        return layout

    def _push_means(self, _: object, each: PerReplica) -> Work:
        """Push the means of the replicas' gradients with the optimizer of the first replica."""
        names = [[var.name for _, var in replica.pairs] for replica in each.values]
        if any(own != names[0] for own in names):
            raise ValueError(f"replicas have gradients of different variables: {names}")
        variables = [var for _, var in each.values[0].pairs]
        grads = [[grad for grad, _ in replica.pairs] for replica in each.values]
        means = [reduced("mean", PerReplica(own)) for own in zip(*grads, strict=True)]
        optimizer = each.values[0].optimizer
        return self._push(optimizer, means, self._layout_of(optimizer, variables))

    def _push(self, optimizer: Optimizer, grads: Sequence[Any], layout: PushLayout) -> Work:
        variables = layout.variables
        rate = optimizer.learning_rate  # read once: another thread may set it
        # This starts all downloads from GPUs before the first one is awaited.
        grads = [
            grad if grad.__class__ is np.ndarray else _to_host(grad, var)
            for grad, var in zip(grads, variables, strict=True)
        ]
        divided = layout.changes(
            grads, lambda one: one.rule_of(optimizer), 0.0 if callable(rate) else rate
        )
        changes = [change for parts in divided for change in parts]
        if not self._nan.allows(changes):
            return self._sync_mode.pass_over().then(lambda _: Applied((), (), contributed=False))
        _clip(optimizer, divided)
        residuals = self._compressor.apply(changes)

        def describe() -> str:
            return describe_step(optimizer, rate, list(zip(grads, variables, strict=True)))

        try:
            changes.append(self._count_step())
            work = self._sync_mode.push(changes, describe)
        except BaseException:
            self._compressor.undo(residuals)
            raise
        if residuals:
            work.add_done_callback(partial(_undo_uncounted, self._compressor, residuals))
        values = changes[0].connection.metrics.values
        values["steps"] += 1

        def applied(result: PushResult | None) -> Applied:
            made = layout.applied(result)
            values["changes"] += len(made.staleness)
            values["staleness"] += sum(made.staleness)
            return made

        return work.then(applied)

    def _count_step(self) -> Change:
        """Return the change that adds one to the global step."""
        change = Change(self._global_step.remotes, pb.ADD, ONE, entries=self._step_entries)
        if not change.entries:
            change.entries = self._step_entries = entries_of(change)
        return change


def describe_step(optimizer: Optimizer, rate: float | Schedule, pairs: Pairs) -> str:
    """Describe the variables and the optimizer of a step.

    The text is equal on all workers. In mode ``"sync"`` the first server compares the texts.
    """
    names = [
        f"rows of {var.name}" if isinstance(grad, IndexedSlices) else var.name
        for grad, var in pairs
    ]
    numbers: Any = optimizer.hyperparameters
    if isinstance(optimizer, Function):
        numbers = f"{_described_function(optimizer.update)} and slots {optimizer.slots()}"
    shown = f"learning rate {rate!r}"
    if callable(rate):
        shown = f"learning rate schedule {described(rate)}"
    return f"{names} for {type(optimizer).__name__} {optimizer.name!r} with {numbers}, {shown}"


def _described_function(function: Callable[..., Any]) -> str:
    """Describe a function by its module and name, and by a checksum if its code is in Python."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{function.__module__}.{name}"
    # The repr of code has an address, and the order of a set differs between processes.
    plain = [each for each in code.co_consts if not isinstance(each, types.CodeType | frozenset)]
    text = repr((code.co_names, plain)).encode(errors="surrogatepass")
    checksum = zlib.crc32(text, zlib.crc32(code.co_code))
    return f"{function.__module__}.{name} (code {checksum:08x})"


def gradient_changes(
    rule_of: Callable[[Connection], int], rate: float, grad: Any, variable: Variable
) -> list[Change]:
    """Return checked changes for the parts of a variable; see :meth:`Variable.changes`.

    Args:
        rule_of: Returns the number of the optimizer over a connection.
        rate: The learning rate; 0 if a schedule computes the rate.
        grad: The gradient.
        variable: The variable.
    """
    if grad.__class__ is not np.ndarray:
        number = isinstance(grad, int | float | complex)
        if variable.shape and (number or getattr(grad, "shape", None) == ()):
            raise _scalar_gradient_error(variable)
    elif grad.shape == () and variable.shape:
        raise _scalar_gradient_error(variable)
    try:
        changes = variable.changes(grad, rule_of)
    except TypeError as error:
        error.add_note(_NOTE.format(variable.name))
        raise
    for change in changes:
        change.rate = rate
    return changes


def _scalar_gradient_error(variable: Variable) -> ValueError:
    return ValueError(
        f"the gradient of variable {variable.name!r} is a number, and the variable has shape "
        f"{variable.shape}"
    )


def _to_host(grad: Any, variable: Variable) -> Any:
    """Start the download of a gradient from a GPU. Return host arrays unchanged."""
    if type(grad).__name__ == "IndexedSlices" and not isinstance(grad, IndexedSlices):
        return IndexedSlices(grad.values, grad.indices)  # TensorFlow's
    try:
        return leaving(grad)
    except TypeError as error:
        error.add_note(_NOTE.format(variable.name))
        raise


def _clip(optimizer: Optimizer, divided: Sequence[Sequence[Change]]) -> None:
    """Clip gradients: scale the changes, or replace their data.

    The caller's arrays are not written. See :meth:`PushLayout.changes` for ``divided``.
    """
    limit = optimizer.clipvalue
    if limit is not None:
        with np.errstate(over="ignore"):  # a limit beyond the range of a dtype is infinite
            for parts in divided:
                for change in parts:
                    change.data = np.clip(change.data, -limit, limit)
    if optimizer.clipnorm is not None:
        for parts in divided:
            _scale_down(parts, optimizer.clipnorm)
    if optimizer.global_clipnorm is not None:
        _scale_down([change for parts in divided for change in parts], optimizer.global_clipnorm)


def _scale_down(changes: Sequence[Change], limit: float) -> None:
    norm = global_norm(changes)
    if norm > limit:
        for change in changes:
            change.scale = limit / norm


def _undo_uncounted(compressor: Compressor, residuals: Residuals, push: Work) -> None:
    """Undo the compression of gradients if their push has failed or came too late."""
    if push.error is not None or push.result() is None:
        compressor.undo(residuals)
