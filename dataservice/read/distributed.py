"""A dataset whose elements are made by the workers of a data service."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from dataservice.auto_shard import EvaluatedElsewhere, auto_shard
from dataservice.calls import Caller, process_name
from dataservice.config import ShardingPolicy
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    Scope,
    UnaryNode,
)
from dataservice.dataset.shuffle import Shuffle
from dataservice.dataset.spec import Spec
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.consumer import Consumer
from dataservice.read.order import Order
from dataservice.read.ordered_stream import OrderedStream
from dataservice.read.registration import Registration
from dataservice.read.stream import Queue, Stream
from dataservice.read.terms import Terms
from dataservice.stall import missing_dispatcher
from mpidist import Endpoint, Work, open_endpoint
from mpidist.errors import Error, InvalidArgumentError, UnavailableError, UnimplementedError

# How long close() waits for the fetching thread.
_CLOSE_S = 5.0
# How long get_state() waits for a worker; what the dispatcher knows of the part will do as well.
_CHECKPOINT_S = 2.0


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
    terms: Terms = field(repr=False)
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
        node = self.parent
        if self.terms.job.policy == pb.HINT:
            # Where the hint stands, any part will do.
            node = auto_shard(node, ShardingPolicy.HINT, 1, 0)
        return node.element_spec()

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


class _Fetch:
    """The thread that fetches one iteration, and what it has found out.

    Args:
        node: What is read.
        endpoint: Calls go out from here; closed at the end.
        request: Which iteration to join; without the dataset.
    """

    def __init__(self, node: Distributed, endpoint: Endpoint, request: pb.IterationRequest) -> None:
        self.node = node
        self.endpoint = endpoint
        self.request = request
        self.stream = _stream(node, endpoint, request)
        self.dispatcher = Caller(endpoint, node.service, "dispatcher", lambda: self.stream.closed)
        self.consumer: Consumer | None = None
        self.client_id = 0
        self.joined = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dataservice-consumer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        terms = self.node.terms
        self.stream.waits_for = lambda: missing_dispatcher(self.node.service, terms.start_timeout_s)
        try:
            with self.endpoint:
                self.request.dataset_id = self.node.registration.register(
                    self.dispatcher, terms.start_timeout_s
                )
                iteration = self.dispatcher.ask(
                    "dispatcher/GetOrCreateIteration", self.request, pb.IterationReply
                )
                self.client_id = iteration.client_id
                consumer = Consumer(self.endpoint, self.dispatcher, self.stream, terms)
                self.consumer = consumer
                self.joined.set()
                consumer.run(iteration)
        except BaseException as error:
            self.stream.finish(error)
        else:
            self.stream.finish()
        finally:
            self.joined.set()

    def close(self) -> None:
        """Local. Give it up; idempotent."""
        self.stream.close()
        if self.thread is not threading.current_thread():
            self.thread.join(_CLOSE_S)

    def state(self) -> pb.State:
        """Local. Where the iteration is, as far as this consumer has used it.

        Raises:
            Exception: The dispatcher cannot be reached, or what ended the iteration.
        """
        self.joined.wait()
        begun = _begun(self.stream)
        consumer = self.consumer
        try:
            if consumer is None:
                raise InvalidArgumentError(f"this consumer of {self.node.job} reads nothing")
            parts = {part.part: part for part in begun.parts}
            asked = [
                (parts[number], self._ask_for_checkpoint(parts[number], task_id, worker))
                for number, (task_id, worker) in consumer.tasks.items()
                if number in parts
            ]
            for part, answer in asked:
                self._add_checkpoint(part, answer)
            request = pb.StateRequest(client_id=self.client_id, parts=begun.parts)
            state = self.dispatcher.ask("dispatcher/GetState", request, pb.State)
        except Error:
            if self.stream.over:
                # The thread is leaving: the dispatcher may have forgotten this consumer already.
                self.thread.join(_CLOSE_S)
            if not self.thread.is_alive():
                # Raises what ended it, if that was an error.
                return self._state_at_end()
            raise
        for name in ("position", "skip", "next_part", "begin_round"):
            setattr(state, name, getattr(begun, name))
        return state

    def _ask_for_checkpoint(
        self, part: pb.PartState, task_id: int, worker: str
    ) -> tuple[Caller, Work] | None:
        """Begin to ask a worker where a part can be taken up again."""
        request = pb.CheckpointRequest(task_id=task_id, index=part.start)
        caller = Caller(self.endpoint, worker, "data worker", lambda: self.stream.closed)
        try:
            work = caller.start("data_worker/GetCheckpoint", request, timeout=_CHECKPOINT_S)
        except UnavailableError:
            return None
        return caller, work

    def _add_checkpoint(self, part: pb.PartState, asked: tuple[Caller, Work] | None) -> None:
        """Where the part can be taken up again; without its worker the dispatcher knows."""
        if asked is None:
            return
        caller, work = asked
        try:
            found = pb.Checkpoint.FromString(caller.finish(work).body)
        except UnimplementedError:
            raise
        except Error:
            return
        part.checkpoint.CopyFrom(found)

    def _state_at_end(self) -> pb.State:
        self.stream.check()
        job = self.node.terms.job
        summary = self.node.registration.request.summary
        return pb.State(summary=summary, terms=job, repetition=self.request.repetition, over=True)


class DistributedIterator(ElementIterator):
    """One iteration; its thread begins with the first element, and ends with the iterator."""

    def __init__(self, node: Distributed, repetition: int, scope: Scope | None) -> None:
        # Opened on this thread, because over mpi the first endpoint starts MPI.
        self._node = node
        self._endpoint: Endpoint | None = open_endpoint(node.protocol)
        self._request = pb.IterationRequest(
            terms=node.terms.job,
            job_name=node.job_name or "",
            repetition=repetition,
            process=process_name(),
            consumer_index=node.terms.consumer_index,
        )
        self._scope = scope
        self._fetch: _Fetch | None = None
        self._finalizer = weakref.finalize(self, self._endpoint.close)

    def __next__(self) -> Any:
        if self._fetch is None:
            if self._request.state.over:
                raise StopIteration
            self._start()
        assert self._fetch is not None
        return self._fetch.stream.next(self._fetch.thread.is_alive)

    def get_state(self) -> bytes:
        """Local. Where all consumers of the job are that have had as many elements as this one.

        Raises:
            UnimplementedError: Consumers share a stream as they come, so that none knows where the
                others are.
        """
        if self._node.terms.job.reading in (pb.SHARED, pb.CACHED):
            raise UnimplementedError(
                f"the consumers of {self._node.job} share elements as they come, and none knows "
                "what the others have: give distribute() deterministic=True, num_consumers and "
                "consumer_index, or no job_name"
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
            self._endpoint = open_endpoint(self._node.protocol)
            self._finalizer = weakref.finalize(self, self._endpoint.close)
            self._fetch = None
        self._request.state.CopyFrom(begin)
        self._request.repetition = begin.repetition
        self._node.passes.go_on_after(begin.repetition)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._finalizer()

    def _start(self) -> None:
        if not self._finalizer.alive:
            raise StopIteration
        assert self._endpoint is not None
        self._finalizer.detach()
        self._fetch = _Fetch(self._node, self._endpoint, self._request)
        self._finalizer = weakref.finalize(self, self._fetch.close)
        if self._scope is not None:
            self._scope.add(self._fetch.stream)


def _stream(node: Distributed, endpoint: Endpoint, request: pb.IterationRequest) -> Stream:
    user = f"consumer {endpoint.address} of {node.job}"
    job, index = node.terms.job, node.terms.consumer_index
    begin = request.state if request.HasField("state") else None
    if job.reading == pb.ORDERED:
        return OrderedStream(user, Order(job.num_shards, job.num_consumers, index, begin))
    if job.reading == pb.ROUNDS:
        if begin is not None:
            begin = _in_blocks(begin, job.num_consumers)
        return OrderedStream(user, Order(job.num_shards, 1, 0, begin), job.num_consumers, index)
    starts = {part.part: part.start for part in begin.parts} if begin is not None else {}
    return Queue(user, starts)


def _check_parts(begin: pb.State, job: pb.Terms) -> None:
    """A state has a place in every part; under coordinated reads, one for blocks of elements."""
    names = ["num_shards", "num_consumers"] if job.reading == pb.ROUNDS else ["num_shards"]
    for name in names:
        then, now = getattr(begin.terms, name), getattr(job, name)
        if then != now and not begin.over:
            raise InvalidArgumentError(
                f"this is the state of an iterator with {name} {then}, and this one has {now}: "
                f"give distribute() {name}={then}"
            )


def _in_blocks(begin: pb.State, consumers: int) -> pb.State:
    """A state under coordinated reads, with blocks of elements counted as one."""
    blocks = pb.State()
    blocks.CopyFrom(begin)
    for part in blocks.parts:
        part.start //= consumers
    return blocks


def _begun(stream: Stream) -> pb.State:
    """Where the user of a stream is."""
    if isinstance(stream, OrderedStream):
        state: pb.State = stream.state()
        return state
    marks = sorted(stream.marks().items())
    return pb.State(parts=[pb.PartState(part=part, start=mark, total=-1) for part, mark in marks])
