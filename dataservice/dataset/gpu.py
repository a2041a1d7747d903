"""``Dataset.prefetch_to_device``: elements on a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.base import (
    Context,
    ElementIterator,
    Failure,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.execution import Pool, PrefetchIterator
from mpidist.errors import UnimplementedError
from mpidist.gpu import PrefetchBatch, Prefetcher, device_count, has_dtype, make_current

_OWN = "elements are copied to the GPU of the trainer, not to a GPU of a data worker"
_NAME = re.compile(r"(?:.*/)?(?:device:)?(?:GPU|cuda):(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class PrefetchToDevice(UnaryNode):
    """Copies elements to a GPU.

    Attributes:
        parent: The node below.
        device: The number of the GPU.
        buffer_size: The number of elements to hold there.
    """

    parent: Node
    device: int
    buffer_size: int

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(
                f"prefetch_to_device needs a buffer_size of at least 1, not {self.buffer_size}"
            )

    @property
    def on_device(self) -> bool:
        return True

    def source_length(self) -> int:
        raise self.cannot_be_split(_OWN)

    def __reduce__(self) -> Any:
        raise UnimplementedError(
            f"{self.summary()} cannot be evaluated in another process: {_OWN}; use it after "
            "distribute"
        )

    def _iterate(self, context: Context) -> ElementIterator:
        count = device_count()
        if self.device >= count:
            raise ValueError(
                f"there is no GPU {self.device} here, only {count}: prefetch_to_device counts "
                "those that CUDA_VISIBLE_DEVICES shows, from 0"
            )
        return _DeviceIterator(self, context)


class _DeviceIterator(UnaryIterator):
    """One pass. A thread copies elements, and the stream that takes one waits for its copy."""

    def __init__(self, node: PrefetchToDevice, context: Context) -> None:
        self._delivery = Prefetcher(node.device)
        # The pool belongs to this pass, because the device that its thread makes current stays so.
        pool = Pool("dataservice-prefetch")
        ahead = PrefetchIterator(
            lambda below: _SendingIterator(node.parent.iterate(below), self._delivery),
            context,
            node.buffer_size,
            pool,
            threads=1,
        )
        super().__init__(ahead)

    def __next__(self) -> Any:
        sent: _Sent = next(self._parent)
        return sent.hand_over()

    def get_state(self) -> Any:
        # Elements on their way are in the state as they are on the host.
        elements, *rest = super().get_state()
        return [one.host if isinstance(one, _Sent) else one for one in elements], *rest

    def set_state(self, state: Any) -> None:
        elements, *rest = state
        sent = [one if isinstance(one, Failure) else _Sent(one, self._delivery) for one in elements]
        super().set_state((sent, *rest))


class _SendingIterator(UnaryIterator):
    def __init__(self, parent: ElementIterator, delivery: Prefetcher) -> None:
        super().__init__(parent)
        self._delivery = delivery

    def __next__(self) -> _Sent:
        # This thread computes elements, and must get no context on another device.
        make_current(self._delivery.device)
        return _Sent(next(self._parent), self._delivery)


class _Sent:
    """An element that is being copied to a GPU.

    Args:
        host: The element.
        delivery: Copies the numbers to the device. The other leaves stay as they are.
    """

    def __init__(self, host: Any, delivery: Prefetcher) -> None:
        self.host = host
        self._leaves = tree.flatten(tree.to_numpy(host))
        self._numbers = [n for n, leaf in enumerate(self._leaves) if _is_number(leaf)]
        numbers = [np.asarray(self._leaves[n]) for n in self._numbers]
        self._parcel: PrefetchBatch = delivery.send(numbers)

    def hand_over(self) -> Any:
        leaves = list(self._leaves)
        for place, array in zip(self._numbers, self._parcel.hand_over(), strict=True):
            leaves[place] = array
        return tree.unflatten(self.host, leaves)


def device_number(device: int | str) -> int:
    """Return the number of a GPU.

    Args:
        device: The number, or a name such as ``"GPU:1"``.

    Raises:
        ValueError: The text is not a name, or the number is negative.
        TypeError: It is neither a number nor a name.
    """
    if isinstance(device, str):
        match = _NAME.fullmatch(device)
        if match is None:
            raise ValueError(f"{device!r} is not a GPU: expected 'GPU:0', or its number")
        return int(match[1])
    if isinstance(device, bool) or not hasattr(device, "__index__"):
        raise TypeError(f"a GPU is named by a number, or as 'GPU:0', not by {device!r}")
    if device < 0:
        raise ValueError(f"{device!r} is not the number of a GPU")
    return device.__index__()


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and has_dtype(leaf.dtype)
