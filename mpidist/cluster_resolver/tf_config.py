"""Resolver for the cluster in the variable TF_CONFIG."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.host_list import is_number

_Kind = TypeVar("_Kind")

VARIABLE = "TF_CONFIG"
_BYTE_ORDER_MARK = os.fsdecode(b"\xef\xbb\xbf")
_SHOWN = 500  # characters of a value in a message
_NO_TASK = (
    f'{VARIABLE} does not say which task this process is: it needs "task": {{"type": ..., '
    '"index": ...}; or give task_type and task_id'
)


class TFConfigClusterResolver(ClusterResolver):
    """Resolver for TF_CONFIG, which TensorFlow's launchers and Kubernetes operators set.

    TF_CONFIG is JSON: ``{"cluster": {"ps": ["a:2222"], "worker": ["b:2222"]}, "task": {"type":
    "worker", "index": 0}}``. It may have ``rpc_layer``, ``environment`` and ``session_master``.

    Args:
        task_type: Job of this process, in place of the variable's.
        task_id: Index of this process, in place of the variable's.
        rpc_layer: Protocol of the addresses, in place of the variable's.
        environment: Value of :attr:`environment`, in place of the variable's.

    Every call reads the variable. A variable that is not valid raises InvalidArgumentError, which
    is a ValueError.

    Example:
        >>> import json
        >>> import os
        >>> from mpidist.cluster_resolver import TFConfigClusterResolver
        >>> cluster = {"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]}
        >>> task = {"type": "worker", "index": 1}
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        >>> resolver = TFConfigClusterResolver()
        >>> resolver.task_type, resolver.task_id
        ('worker', 1)
        >>> resolver.cluster_spec().num_tasks("worker")
        2
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._given: tuple[str | None, int | None, str | None] = (task_type, task_id, rpc_layer)
        self._environment = environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, or None."""
        if self._given[0] is not None:
            return self._given[0]
        return _text(_part(_read(), "task"), "type")

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._given = (value, *self._given[1:])

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None."""
        if self._given[1] is not None:
            return self._given[1]
        index = _part(_read(), "task").get("index")
        if index is None:
            return None
        if isinstance(index, str) and is_number(index):
            return int(index)
        if isinstance(index, bool) or not isinstance(index, int):
            raise InvalidArgumentError(
                f"the task's index in {VARIABLE} is {_shown(index)}, and must be a number"
            )
        return index

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._given = (self._given[0], value, self._given[2])

    @property
    def rpc_layer(self) -> str | None:
        """The protocol of the addresses, or None."""
        return self._given[2] if self._given[2] is not None else _text(_read(), "rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._given = (*self._given[:2], value)

    @property
    def environment(self) -> str:
        """The environment in the variable, or the empty string."""
        if self._environment is not None:
            return self._environment
        return _text(_read(), "environment") or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster; without a cluster in the variable, it has no tasks."""
        cluster = _part(_read(), "cluster")
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            problem = _cut(str(error))
            raise InvalidArgumentError(
                f"the cluster in {VARIABLE} is not valid: {problem}"
            ) from error

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task; see :class:`ClusterResolver`.

        Returns:
            The ``session_master`` of TF_CONFIG, if given; the empty string if the cluster has fewer
            than two tasks; or the address.

        Raises:
            FailedPreconditionError: TF_CONFIG does not say which task this process is.
            ValueError: The task does not exist.
        """
        session_master = _text(_read(), "session_master")
        if session_master is not None:
            return session_master
        if len(self.cluster_spec().tasks()) < 2:
            return ""
        address = super().master(task_type, task_id, rpc_layer)
        if not address:
            raise FailedPreconditionError(_NO_TASK)
        return address

    def check_task(self) -> None:
        """Check that the task of this process is given and is in the cluster.

        An evaluator may be missing in the cluster.

        Raises:
            FailedPreconditionError: The task is not given.
            ValueError: The cluster does not have the task.
        """
        if self.task_type is None or self.task_id is None:
            raise FailedPreconditionError(_NO_TASK)
        spec = self.cluster_spec()
        if self.task_type != "evaluator" or "evaluator" in spec.jobs:
            spec.task_address(self.task_type, self.task_id)


def _read() -> dict[str, Any]:
    # Windows tools put a byte-order mark before JSON, which Python's parser refuses.
    text = os.environ.get(VARIABLE, "").removeprefix(_BYTE_ORDER_MARK)
    if not text.strip():
        return {}
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, or too many digits
        raise InvalidArgumentError(
            f"{VARIABLE} cannot be read as JSON ({error}): {_shown(text)}"
        ) from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{VARIABLE} must be a JSON object, not {_shown(text)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for repeated keys, which json would ignore."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {_shown(key)} repeats")
        found[key] = value
    return found


def _text(value: dict[str, Any], name: str) -> str | None:
    return _checked(value, name, str, "a string")


def _part(value: dict[str, Any], name: str) -> dict[str, Any]:
    return _checked(value, name, dict, "an object") or {}


def _checked(value: dict[str, Any], name: str, kind: type[_Kind], shown: str) -> _Kind | None:
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise InvalidArgumentError(f'"{name}" of {VARIABLE} must be {shown}, not {_shown(found)}')
    return found


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
