"""How a dispatcher learns of a dataset, and how others find the dataset by its name."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dataservice.auto_shard import auto_shard, nodes_below
from dataservice.calls import RpcClient
from dataservice.dataset.base import Context, ElementIterator, Node
from dataservice.dataset.fingerprint import identity
from dataservice.dataset.spec import Spec
from dataservice.options import ShardingPolicy
from dataservice.payload import Parcel, pack_dataset
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import Error, FailedPreconditionError, UnimplementedError


@dataclass(frozen=True)
class Registered(Node):
    """A dataset that was registered, perhaps by another process: the parent of Distributed nodes.

    Attributes:
        name: Its name at the dispatcher.
        text: Its description.
        count: Its cardinality.
        length: The number of its source indices; -1 if it cannot be split.
        spec: Its element_spec; None if unknown.
        identity_hash: Its identity, see :func:`identity`.
    """

    name: str
    text: str
    count: int = field(repr=False)
    length: int = field(repr=False)
    spec: Any = field(repr=False)
    identity_hash: bytes = field(repr=False)

    def cardinality(self) -> int:
        return self.count

    def source_length(self) -> int:
        if self.length < 0:
            raise self.cannot_be_split("its parts depend on each other")
        return self.length

    def element_spec(self) -> Spec:
        if self.spec is None:
            raise ValueError(
                f"the element_spec of {self.summary()} is not known: give element_spec to "
                "from_dataset_id()"
            )
        return self.spec

    def summary(self) -> str:
        return self.text

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # with the identity, which cannot be computed here

    def _iterate(self, context: Context) -> ElementIterator:
        raise UnimplementedError(f"{self.summary()} can only be read through its data service")


class Registration:
    """Registers one dataset at dispatchers; pickles the dataset once, when that is first done.

    Args:
        node: The dataset.
        name: Its name at the dispatcher; empty to have the dispatcher choose one.
        with_spec: Whether to send the element_spec, for readers that find the dataset by its name.
    """

    def __init__(self, node: Node, name: str = "", *, with_spec: bool = False) -> None:
        self._node = node
        self._name = name
        self._with_spec = with_spec

    @property
    def is_indexed(self) -> bool:
        """True if the dataset is known to be indexed, see :class:`Node`."""
        return self._node.indexed_length() is not None

    def dataset_id(self, dispatcher: RpcClient, limit_s: float) -> int:
        """Return the dispatcher's id of the dataset. Register the dataset if necessary.

        Raises:
            NotFoundError: The dataset is a :class:`Registered`, and the dispatcher has none of its
                name.
            UnavailableError: No dispatcher has answered for ``limit_s`` seconds.
        """
        if isinstance(self._node, Registered):
            return find_dataset(dispatcher, self._node.name, limit_s).dataset_id
        return self.register(dispatcher, limit_s).dataset_id

    def register(self, dispatcher: RpcClient, limit_s: float) -> pb.RegisterDatasetReply:
        """Send the dataset to the dispatcher, if the dispatcher does not know it.

        Raises:
            TypeError: The dataset cannot be pickled.
            UnavailableError: No dispatcher has answered for ``limit_s`` seconds.
        """
        request, parcel = self._message
        method, kind = "dispatcher/GetOrRegisterDataset", pb.RegisterDatasetReply
        known = dispatcher.call_with_retry(method, request, kind, limit_s)
        if known.dataset_id:
            return known
        whole = pb.RegisterDatasetRequest(pickle=parcel.pickle)
        whole.MergeFrom(request)
        reply = dispatcher.fetch_with_retry(method, whole, limit_s, buffers=parcel.buffers)
        return kind.FromString(reply.body)

    @cached_property
    def _message(self) -> tuple[pb.RegisterDatasetRequest, Parcel]:
        """The request without the pickle, and the pickle."""
        node, parcel = self._node, _packed(self._node)
        try:
            length = node.source_length()
        except (FailedPreconditionError, UnimplementedError):
            # The former is of a shard that ShardingPolicy.HINT fills in: no source is split there.
            length = -1
        request = pb.RegisterDatasetRequest(
            digest=parcel.digest(),
            identity=identity(node),
            summary=node.summary(),
            source_length=length,
            name=self._name,
            spec=self._pickled_spec() if self._with_spec else b"",
            cardinality=node.cardinality(),
        )
        return request, parcel

    def _pickled_spec(self) -> bytes:
        node = self._node
        try:
            try:
                spec = node.element_spec()
            except FailedPreconditionError:
                # Of a shard that ShardingPolicy.HINT fills in: any part will do.
                spec = auto_shard(node, ShardingPolicy.HINT, 1, 0).element_spec()
        except ValueError:  # the dataset has no element to look at
            if self._name:
                raise
            return b""
        return pickle.dumps(spec)


def find_dataset(dispatcher: RpcClient, name: str, limit_s: float) -> pb.DatasetInfo:
    """Return the description of a dataset that was registered.

    Raises:
        NotFoundError: The dispatcher has no dataset of this name.
        UnavailableError: No dispatcher has answered for ``limit_s`` seconds.
    """
    request = pb.DatasetInfoRequest(name=name)
    return dispatcher.call_with_retry("dispatcher/GetDatasetInfo", request, pb.DatasetInfo, limit_s)


def _packed(node: Node) -> Parcel:
    """Return the pickle for workers. The TypeError names the step that cannot be pickled."""
    try:
        return pack_dataset(node)
    except Error:  # of one of our steps, which says more
        raise
    except Exception as error:
        step = _first_unpicklable(node) or node
        raise TypeError(
            f"{step.summary()} cannot be sent to data workers: its last step uses an object "
            f"that cannot be pickled ({error}). Create the object inside the function, or "
            "define it in a module that workers can import"
        ) from error


def _first_unpicklable(node: Node) -> Node | None:
    for below in nodes_below(node):
        found = _first_unpicklable(below)
        if found is not None:
            return found
    try:
        pack_dataset(node)
    except Exception:
        return node
    return None
