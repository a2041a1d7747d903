"""A dataset whose elements are made by the workers of a data service."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dataservice.auto_shard import EvaluatedElsewhere, auto_shard
from dataservice.calls import process_name
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    Scope,
    UnaryNode,
)
from dataservice.dataset.shuffling import Shuffle
from dataservice.dataset.spec import Spec
from dataservice.options import JobOptions, ShardingPolicy
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.fetcher import Fetcher
from dataservice.read.registration import Registration
from mpidist import open_endpoint
from mpidist.errors import InvalidArgumentError, UnimplementedError


class _Epochs:
    """Numbers of the epochs of one dataset in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def begin(self) -> int:
        """Return the number of an epoch that begins."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def resume(self, number: int) -> None:
        """Have the next epoch follow one that has been resumed."""
        with self._lock:
            self._next = number + 1


@dataclass(frozen=True, eq=False)
class Distributed(UnaryNode, EvaluatedElsewhere):
    """The elements of another node, evaluated by the workers of a data service.

    Attributes:
        parent: The dataset that the workers evaluate.
        protocol: Protocol of the dispatcher; None for the default one.
        service: Address of the dispatcher.
        job_name: The job to share; None for a job of this consumer alone.
        terms: How the job is read.
    """

    parent: Node
    protocol: str | None = field(repr=False)
    service: str = field(repr=False)
    job_name: str | None
    terms: JobOptions = field(repr=False)
    epochs: _Epochs = field(init=False, repr=False, default_factory=_Epochs)

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
        arguments = (self.parent, self.protocol, self.service, self.job_name, self.terms)
        return Distributed, arguments


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
        if not self._node.terms.mode.has_states:
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
        self._endpoint = open_endpoint(node.protocol, peer=node.service)
        self._finalizer = weakref.finalize(self, self._endpoint.close)

    def _start(self) -> Fetcher:
        if not self._finalizer.alive:  # closed
            raise StopIteration
        node = self._node
        fetcher = Fetcher(
            self._endpoint, node.service, node.job, node.registration, node.terms, self._request
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
