"""The options of a dataset, as tf.data.Options."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

from dataservice.dataset.arguments import whole_or_none
from dataservice.dataset.base import Node, rewritten
from dataservice.dataset.execution import AUTOTUNE, ParallelMap
from dataservice.dataset.flattening import Interleave


class _Fields:
    """Base class of options: only the annotated attributes exist, and their values are checked."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__annotations__:
            raise self._unknown(name)
        super().__setattr__(name, self._checked(name, value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for methods
            raise AttributeError(name)
        raise self._unknown(name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # options can be changed

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"

    def _unknown(self, name: str) -> AttributeError:
        known = ", ".join(type(self).__annotations__)
        return AttributeError(
            f"{type(self).__name__} has no option {name!r}: those with an effect here are {known}"
        )

    def _checked(self, name: str, value: Any) -> Any:
        raise NotImplementedError


class ThreadingOptions(_Fields):
    """Options of threads; see :class:`Options`.

    Attributes:
        private_threadpool_size: The largest number of threads of each ``map`` and ``interleave``
            with ``num_parallel_calls``. AUTOTUNE means this number. None or 0: no limit. The
            processes of ``map(processes=True)`` are not limited.
    """

    private_threadpool_size: int | None

    def __init__(self) -> None:
        self.private_threadpool_size = None

    def _checked(self, name: str, value: Any) -> int | None:
        size = whole_or_none("ThreadingOptions", name, value)
        if size is not None and size < 0:
            raise ValueError(f"{name} must be at least 0, not {size}")
        return size


class Options(_Fields):
    """Options for :meth:`Dataset.with_options`.

    They have the names of ``tf.data.Options``. Only the options with an effect here exist. Others
    raise an AttributeError that names these. For example, ``autotune`` is missing, because AUTOTUNE
    stands for fixed numbers, and nothing is measured.

    Attributes:
        deterministic: The order of ``map(num_parallel_calls=..., deterministic=None)``: False lets
            the results come in the order in which they are ready. None means True.
        threading: The :class:`ThreadingOptions`.
    """

    deterministic: bool | None
    threading: ThreadingOptions

    def __init__(self) -> None:
        self.deterministic = None
        self.threading = ThreadingOptions()

    def merge(self, other: Options) -> Options:
        """Return these options, updated with the options that are set in ``other``."""
        merged = copy.deepcopy(self)
        if other.deterministic is not None:
            merged.deterministic = other.deterministic
        if other.threading.private_threadpool_size is not None:
            merged.threading.private_threadpool_size = other.threading.private_threadpool_size
        return merged

    def _checked(self, name: str, value: Any) -> Any:
        if name == "threading":
            if not isinstance(value, ThreadingOptions):
                raise TypeError(f"threading must be ThreadingOptions, not {value!r}")
        elif value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, not {value!r}")
        return value


def with_options_applied(node: Node, options: Options) -> Node:
    """Return a node with transformations that obey options; the same node if nothing changes."""
    if options == Options():
        return node
    threads = options.threading.private_threadpool_size or sys.maxsize

    def exceeds_limit(count: int) -> bool:
        return threads < sys.maxsize and (count == AUTOTUNE or count > threads)

    def configured(each: Node) -> Node:
        if isinstance(each, ParallelMap):
            if each.deterministic is None and options.deterministic is not None:
                each = dataclasses.replace(each, deterministic=options.deterministic)
            if exceeds_limit(each.calls) and not each.processes:
                each = dataclasses.replace(each, calls=threads)
        elif isinstance(each, Interleave) and exceeds_limit(each.ahead):
            each = dataclasses.replace(each, ahead=threads)
        return each

    return rewritten(node, configured)
