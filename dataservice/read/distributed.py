"""Datasets whose elements are made by the workers of a data service, and their registration."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dataservice.auto_shard import auto_shard
from dataservice.calls import RpcClient, process_name
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Epochs,
    Node,
    Scope,
    UnaryNode,
)
from dataservice.dataset.fingerprint import identity
from dataservice.dataset.shuffling import Shuffle
from dataservice.dataset.spec import Spec
from dataservice.options import JobOptions, ShardingPolicy
from dataservice.payload import Parcel, pack_dataset
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.fetcher import Fetcher
from mpidist import open_endpoint
from mpidist.errors import (
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)


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
    for below in node.inputs():
        found = _first_unpicklable(below)
        if found is not None:
            return found
    try:
        pack_dataset(node)
    except Exception:
        return node
    return None


@dataclass(frozen=True, eq=False)
class Distributed(UnaryNode):
    """The elements of another node, evaluated by the workers of a data service.

    Attributes:
        parent: The dataset that the workers evaluate.
        job_name: The job to share; None for a job of this consumer alone.
        terms: How the job is read, and from which dispatcher.
    """

    parent: Node
    job_name: str | None
    terms: JobOptions = field(repr=False)
    epochs: Epochs = field(init=False, repr=False, default_factory=Epochs)

    @cached_property
    def registration(self) -> Registration:
        """The registration of the parent, which is pickled once for all epochs."""
        return Registration(self.parent)

    def cardinality(self) -> int:
        # The parent's, where every element comes once, and to this consumer.
        count = self.parent.cardinality()
        if count in (0, INFINITE_CARDINALITY):
            return count
        job = self.terms.job
        alone = job.num_consumers == 1
        node = self.parent
        while isinstance(node, Shuffle):
            node = node.parent
        if alone and job.policy == pb.DYNAMIC and node.indexed_length() is not None:
            return count
        return UNKNOWN_CARDINALITY

    def input_fields(self) -> dict[str, tuple[Node, ...]]:
        return {}  # the workers evaluate the parent

    def element_spec(self) -> Spec:
        return self._local().element_spec()

    def sample(self) -> Node:
        return self._local().sample()

    def _local(self) -> Node:
        """Return the dataset that workers evaluate; where a hint stands, any part will do."""
        if self.terms.job.policy == pb.HINT:
            return auto_shard(self.parent, ShardingPolicy.HINT, 1, 0)
        return self.parent

    @property
    def distributed(self) -> bool:
        return self.job_name is not None

    def source_length(self) -> int:
        raise UnimplementedError(
            f"{self.summary()} reads from a data service, and cannot be split between the workers "
            "of another; use processing_mode 'parallel_epochs' there"
        )

    def _iterate(self, context: Context) -> ElementIterator:
        return DistributedIterator(self, self.epochs.begin(), context.scope)

    def summary(self) -> str:
        policy = pb.ShardingPolicy.Name(self.terms.job.policy)
        return f"{self.parent.summary()}.distributed({policy}, {self.terms.mode.name})"

    def identity_values(self) -> Iterable[Any]:
        # A state fits a job of another name, and a service at another address.
        policy = pb.ShardingPolicy.Name(self.terms.job.policy)
        return self.parent, policy, self.terms.mode.name

    @property
    def job(self) -> str:
        """The job and its dataset, for messages."""
        name = "a job of its own" if self.job_name is None else f"job {self.job_name!r}"
        return f"{name}, {self.parent.summary()},"

    def __reduce__(self) -> tuple[type[Distributed], tuple[Any, ...]]:
        return Distributed, (self.parent, self.job_name, self.terms)


class DistributedIterator(ElementIterator):
    """One epoch. A thread fetches the elements, from the first ``next()`` on.

    Args:
        node: The dataset.
        epoch: Number of the epoch in the job.
        scope: Closes the buffer when the epoch is given up; None if no other thread gives it up.
    """

    def __init__(self, node: Distributed, epoch: int, scope: Scope | None) -> None:
        self._node = node
        self._scope = scope
        self._request = pb.IterationRequest(
            terms=node.terms.job,
            job_name=node.job_name or "",
            repetition=epoch,
            process=process_name(),
            consumer_index=node.terms.own_index,
        )
        self._fetcher: Fetcher | None = None
        self._using = threading.RLock()
        self._open()

    def __next__(self) -> Any:
        fetcher = self._fetcher
        if fetcher is None:
            if self._request.state.over:
                raise StopIteration
            fetcher = self._start()
        try:
            with self._using:  # threads may share an iterator
                return fetcher.buffer.next()
        except Exception as error:
            if error is fetcher.buffer.error:
                # Its thread has ended. The frames of the error, which the buffer keeps, refer to
                # this iterator: it would live as long as the finalizer.
                self._finalizer.detach()
            raise

    def get_state(self) -> bytes:
        """Return the state of all consumers that have had as many elements as this one.

        Raises:
            UnimplementedError: Consumers share the elements in no fixed order, so that none knows
                the positions of the others.
        """
        if not self._node.terms.mode.seeks:
            raise UnimplementedError(
                f"the consumers of {self._node.job} share elements in no fixed order, so there "
                "is no state of one of them: give distribute() deterministic=True, "
                "num_consumers and consumer_index, or no job_name"
            )
        fetcher = self._fetcher
        if fetcher is None:
            if self._request.state.over:
                return self._request.state.SerializeToString(deterministic=True)
            fetcher = self._start()
        return fetcher.get_state().SerializeToString(deterministic=True)

    def set_state(self, state: bytes) -> None:
        """Continue from a state; see :class:`ElementIterator`.

        Raises:
            InvalidArgumentError: The state has another number of parts.
        """
        begin = pb.State.FromString(state)
        _check_parts(begin, self._node.terms)
        if self._fetcher is not None:
            self.close()
            self._fetcher = None
            self._open()
        self._request.state.CopyFrom(begin)
        self._request.repetition = begin.repetition
        self._node.epochs.resume(begin.repetition)

    def close(self) -> None:
        self._finalizer()
        if self._fetcher is not None:  # the finalizer may have been detached
            self._fetcher.close()

    def _open(self) -> None:
        # On the user's thread, because over mpi the first endpoint starts MPI.
        node = self._node
        self._endpoint = open_endpoint(node.terms.protocol, peer=node.terms.address)
        self._finalizer = weakref.finalize(self, self._endpoint.close)

    def _start(self) -> Fetcher:
        if not self._finalizer.alive:  # closed
            raise StopIteration
        node = self._node
        fetcher = Fetcher(
            self._endpoint,
            node.job,
            node.registration.dataset_id,
            node.terms,
            self._request,
            indexed=node.parent.indexed_length() is not None,
        )
        fetcher.start()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, fetcher.close)
        self._fetcher = fetcher
        if self._scope is not None:
            self._scope.add(fetcher.buffer)
        return fetcher


def _check_parts(begin: pb.State, options: JobOptions) -> None:
    """Raise if a state has no position in every part, or under coordinated reads in every group."""
    for name in options.mode.fixed_terms:
        then, now = getattr(begin.terms, name), getattr(options.job, name)
        if then != now and not begin.over:
            raise InvalidArgumentError(
                f"the state belongs to an iterator with {name}={then}, but this one has "
                f"{name}={now}: give distribute() {name}={then}"
            )
