"""A dataset whose elements are made by the workers of a data service."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from dataservice.auto_shard import EvaluatedElsewhere, auto_shard
from dataservice.calls import process_name
from dataservice.config import ShardingPolicy
from dataservice.dataset.context import Context, Scope
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryNode,
)
from dataservice.dataset.shuffle import Shuffle
from dataservice.dataset.spec import Spec
from dataservice.options import JobOptions
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.fetch import Fetch
from dataservice.read.registration import Registration
from mpidist import Endpoint, open_endpoint
from mpidist.errors import InvalidArgumentError, UnimplementedError


class _Passes:
    """Numbers of the passes over one dataset in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> int:
        """The next number."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def go_on_after(self, number: int) -> None:
        """A pass has been taken up again."""
        with self._lock:
            self._next = number + 1


@dataclass(frozen=True, eq=False)
class Distributed(UnaryNode, EvaluatedElsewhere):
    """Elements of another node, made elsewhere; see :func:`distribute`.

    Attributes:
        parent: What workers evaluate.
        protocol: How the dispatcher is reached.
        service: Its address.
        job_name: The job to share; None for one of our own.
        terms: How it is read.
        registration: Makes the dataset known to the dispatcher.
    """

    parent: Node
    protocol: str | None = field(repr=False)
    service: str = field(repr=False)
    job_name: str | None
    terms: JobOptions = field(repr=False)
    registration: Registration = field(repr=False)
    passes: _Passes = field(init=False, repr=False, default_factory=_Passes)

    def cardinality(self) -> int:
        """Local. See :class:`Node`; known where every element of the parent comes once, to us."""
        count = self.parent.cardinality()
        if count in (0, INFINITE_CARDINALITY):
            return count
        job = self.terms.job
        alone = job.reading in (pb.PRIVATE, pb.ORDERED) and job.num_consumers == 1
        node = self.parent
        while isinstance(node, Shuffle):
            node = node.parent
        if alone and job.policy == pb.DYNAMIC and node.one_to_one:
            return count
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return self._given().element_spec()

    def sample(self) -> Node:
        """Return the sample of what workers evaluate, which is made here; see :class:`Node`."""
        return self._given().sample()

    def _given(self) -> Node:
        """Return the dataset that workers evaluate; where a hint stands, any part will do."""
        if self.terms.job.policy == pb.HINT:
            return auto_shard(self.parent, ShardingPolicy.HINT, 1, 0)
        return self.parent

    @property
    def distributed(self) -> bool:
        """Local. See :class:`Node`."""
        return self.job_name is not None

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        raise UnimplementedError(
            f"{self.summary()} reads from a data service, and cannot be split between the workers "
            "of another; use processing_mode 'parallel_epochs' there"
        )

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return DistributedIterator(self, self.passes.take(), context.scope)

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        job = self.terms.job
        shown = [pb.ShardingPolicy.Name(job.policy)]
        shown += [pb.Reading.Name(job.reading)] if job.reading != pb.PRIVATE else []
        return f"{self.parent.summary()}.distributed({', '.join(shown)})"

    @property
    def job(self) -> str:
        """Local. What a consumer of this node reads, in words."""
        name = "a job of its own" if self.job_name is None else f"job {self.job_name!r}"
        return f"{name}, {self.parent.summary()},"

    def __reduce__(self) -> tuple[type[Distributed], tuple[Any, ...]]:
        arguments = (self.protocol, self.service, self.job_name, self.terms, self.registration)
        return Distributed, (self.parent, *arguments)


class DistributedIterator(ElementIterator):
    """One iteration; its thread begins with the first element, and ends with the iterator."""

    def __init__(self, node: Distributed, repetition: int, scope: Scope | None) -> None:
        # Opened on this thread, because over mpi the first endpoint starts MPI.
        self._node = node
        self._endpoint: Endpoint | None = open_endpoint(node.protocol, peer=node.service)
        self._request = pb.IterationRequest(
            terms=node.terms.job,
            job_name=node.job_name or "",
            repetition=repetition,
            process=process_name(),
            consumer_index=node.terms.consumer_index or 0,
        )
        self._scope = scope
        self._fetch: Fetch | None = None
        self._finalizer = weakref.finalize(self, self._endpoint.close)

    def __next__(self) -> Any:
        if self._fetch is None:
            if self._request.state.over:
                raise StopIteration
            self._start()
        assert self._fetch is not None
        stream = self._fetch.stream
        try:
            return stream.next(self._fetch.thread.is_alive)
        except Exception as error:
            if error is stream.error:
                # Its thread has left. The frames of the error, which the stream keeps, refer to
                # this iterator: it would live as long as the finalizer.
                self._finalizer.detach()
            raise

    def get_state(self) -> bytes:
        """Local. Where all consumers of the job are that have had as many elements as this one.

        Raises:
            UnimplementedError: Consumers share a stream as they come, so that none knows where the
                others are.
        """
        if self._node.terms.job.reading in (pb.SHARED, pb.CACHED):
            raise UnimplementedError(
                f"the consumers of {self._node.job} share elements in no fixed order, so there "
                "is no state of one of them: give distribute() deterministic=True, "
                "num_consumers and consumer_index, or no job_name"
            )
        if self._fetch is None:
            if self._request.state.over:
                return self._request.state.SerializeToString(deterministic=True)
            self._start()
        assert self._fetch is not None
        return self._fetch.state().SerializeToString(deterministic=True)

    def set_state(self, state: bytes) -> None:
        """Local. See :class:`ElementIterator`.

        Raises:
            InvalidArgumentError: The state is of another number of parts.
        """
        begin = pb.State.FromString(state)
        _check_parts(begin, self._node.terms.job)
        if self._fetch is not None:
            self.close()
            self._endpoint = open_endpoint(self._node.protocol, peer=self._node.service)
            self._finalizer = weakref.finalize(self, self._endpoint.close)
            self._fetch = None
        self._request.state.CopyFrom(begin)
        self._request.repetition = begin.repetition
        self._node.passes.go_on_after(begin.repetition)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._finalizer()
        if self._fetch is not None:  # the finalizer may have been given up
            self._fetch.close()

    def _start(self) -> None:
        if not self._finalizer.alive:
            raise StopIteration
        assert self._endpoint is not None
        self._finalizer.detach()
        node = self._node
        self._fetch = Fetch(
            self._endpoint, node.service, node.job, node.registration, node.terms, self._request
        )
        self._finalizer = weakref.finalize(self, self._fetch.close)
        if self._scope is not None:
            self._scope.add(self._fetch.stream)


def _check_parts(begin: pb.State, job: pb.Terms) -> None:
    """A state has a place in every part; under coordinated reads, one for blocks of elements."""
    names = ["num_shards", "num_consumers"] if job.reading == pb.ROUNDS else ["num_shards"]
    for name in names:
        then, now = getattr(begin.terms, name), getattr(job, name)
        if then != now and not begin.over:
            raise InvalidArgumentError(
                f"the state belongs to an iterator with {name}={then}, but this one has "
                f"{name}={now}: give distribute() {name}={then}"
            )
