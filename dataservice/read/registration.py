"""Making a dataset known to a dispatcher."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from dataservice.auto_shard import auto_shard, nodes_below
from dataservice.calls import Caller
from dataservice.config import ShardingPolicy
from dataservice.dataset.node import Node
from dataservice.dataset.spec import Spec
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Parcel, pack_dataset
from mpidist.errors import Error, FailedPreconditionError, UnimplementedError


@dataclass(eq=False)
class Registration:
    """A dataset, as it is told to a dispatcher; pickled when that is first done.

    Attributes:
        node: The dataset; None if it was registered before, by whatever process.
        name: What it is to be called, or is called; empty for what the dispatcher chooses.
        described: Whether to tell what elements are like, for those who find it by its name.
        request: What is told of it.
    """

    node: Node | None
    name: str = ""
    described: bool = False
    _parcel: Parcel | None = field(default=None, repr=False)
    _request: pb.RegisterDatasetRequest | None = field(default=None, repr=False)

    @property
    def request(self) -> pb.RegisterDatasetRequest:
        """Local. See above, without the pickle."""
        if self._request is None:
            assert self.node is not None
            self._parcel = _packed(self.node)
            self._request = _request_of(self.node, self._parcel, self.name, self.described)
        return self._request

    def register(self, dispatcher: Caller, patience_s: float) -> int:
        """Local. The dispatcher's id of the dataset; raises as Caller.ask_patiently."""
        if self.node is None:
            return self.find(dispatcher, patience_s).dataset_id
        return self.tell(dispatcher, patience_s).dataset_id

    def find(self, dispatcher: Caller, patience_s: float) -> pb.DatasetInfo:
        """Local. What the dispatcher knows of the dataset of this name; or NotFoundError."""
        request = pb.DatasetInfoRequest(name=self.name)
        return dispatcher.ask_patiently(
            "dispatcher/GetDatasetInfo", request, pb.DatasetInfo, patience_s
        )

    def tell(self, dispatcher: Caller, patience_s: float) -> pb.RegisterDatasetReply:
        """Local. Register the dataset, if it is not."""
        request = self.request
        assert self._parcel is not None
        method, kind = "dispatcher/GetOrRegisterDataset", pb.RegisterDatasetReply
        known = dispatcher.ask_patiently(method, request, kind, patience_s)
        if known.dataset_id:
            return known
        whole = pb.RegisterDatasetRequest()
        whole.CopyFrom(request)
        whole.pickle = self._parcel.pickle
        reply = dispatcher.get_patiently(method, whole, patience_s, buffers=self._parcel.buffers)
        return kind.FromString(reply.body)

    def __reduce__(self) -> tuple[type[Registration], tuple[Node | None, str, bool]]:
        return Registration, (self.node, self.name, self.described)


def _packed(node: Node) -> Parcel:
    """A description as workers get it; TypeError names the step that cannot be sent."""
    try:
        return pack_dataset(node)
    except Error:  # of a step of ours, which tells more
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


def _request_of(
    node: Node, parcel: Parcel, name: str, described: bool
) -> pb.RegisterDatasetRequest:
    try:
        length = node.source_length()
    except (FailedPreconditionError, UnimplementedError):
        # The former of a shard that ShardingPolicy.HINT fills in, where no source is split.
        length = -1
    return pb.RegisterDatasetRequest(
        digest=parcel.digest(),
        summary=node.summary(),
        source_length=length,
        name=name,
        spec=_pickled_spec(node, needed=bool(name)) if described else b"",
        cardinality=node.cardinality(),
    )


def _pickled_spec(node: Node, *, needed: bool) -> bytes:
    try:
        return pickle.dumps(_spec_of(node))
    except ValueError:  # there is no element to look at
        if needed:
            raise
        return b""


def _spec_of(node: Node) -> Spec:
    try:
        return node.element_spec()
    except FailedPreconditionError:
        # Of a shard that ShardingPolicy.HINT fills in: any part will do.
        return auto_shard(node, ShardingPolicy.HINT, 1, 0).element_spec()
