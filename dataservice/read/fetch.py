"""The thread that fetches one iteration for a user."""

from __future__ import annotations

import secrets
import threading

from dataservice.calls import Caller
from dataservice.options import JobOptions
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.consumer import Consumer
from dataservice.read.order import Order
from dataservice.read.ordered_stream import OrderedStream
from dataservice.read.registration import Registration
from dataservice.read.stream import Queue, Stream
from dataservice.stall import missing_dispatcher
from mpidist import Endpoint, Work
from mpidist.errors import Error, InvalidArgumentError, UnavailableError, UnimplementedError

# How long close() waits for the fetching thread.
_CLOSE_S = 5.0
# How long get_state() waits for a worker; what the dispatcher knows of the part will do as well.
_CHECKPOINT_S = 2.0


class Fetch:
    """The thread that fetches one iteration, and what it has found out.

    Args:
        endpoint: Calls go out from here; closed at the end.
        service: Address of the dispatcher.
        job: What is read, in words.
        registration: Makes the dataset known to the dispatcher.
        terms: How it is read.
        request: Which iteration to join; without the dataset.

    Attributes:
        stream: The elements.
        thread: The thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        service: str,
        job: str,
        registration: Registration,
        terms: JobOptions,
        request: pb.IterationRequest,
    ) -> None:
        self._endpoint = endpoint
        self._job = job
        self._registration = registration
        self._terms = terms
        self._request = request
        self.stream = _stream(f"consumer {endpoint.address} of {job}", terms, request)
        self._dispatcher = Caller(endpoint, service, "dispatcher", lambda: self.stream.closed)
        self._consumer: Consumer | None = None
        self._client_id = 0
        self._joined = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dataservice-consumer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        patience_s = self._terms.start_timeout_s
        peer, protocol = self._dispatcher.peer, self._endpoint.address.protocol
        self.stream.waits_for = lambda: missing_dispatcher(peer, protocol, patience_s)
        try:
            with self._endpoint:
                self._request.dataset_id = self._registration.register(self._dispatcher, patience_s)
                self._request.token = secrets.randbits(64)
                iteration = self._dispatcher.ask_patiently(
                    "dispatcher/GetOrCreateIteration", self._request, pb.IterationReply, patience_s
                )
                self._client_id = iteration.client_id
                consumer = Consumer(
                    self._endpoint,
                    self._dispatcher,
                    self.stream,
                    self._terms,
                    self._request.repetition,
                )
                self._consumer = consumer
                self._joined.set()
                consumer.run(iteration)
        except BaseException as error:
            self.stream.finish(error)
        else:
            self.stream.finish()
        finally:
            self._joined.set()

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
        self._joined.wait()
        begun = _begun(self.stream)
        consumer = self._consumer
        try:
            if consumer is None:
                raise InvalidArgumentError(
                    f"this consumer of {self._job} has no part of the dataset, and so no state"
                )
            parts = {part.part: part for part in begun.parts}
            asked = [
                (parts[number], self._ask_for_checkpoint(parts[number], task_id, worker))
                for number, (task_id, worker) in consumer.tasks.items()
                if number in parts
            ]
            for part, answer in asked:
                self._add_checkpoint(part, answer)
            request = pb.StateRequest(client_id=self._client_id, parts=begun.parts)
            state = self._dispatcher.ask_patiently(
                "dispatcher/GetState", request, pb.State, self._terms.start_timeout_s
            )
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
        caller = Caller(self._endpoint, worker, "data worker", lambda: self.stream.closed)
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
        job = self._terms.job
        summary = self._registration.request.summary
        return pb.State(summary=summary, terms=job, repetition=self._request.repetition, over=True)


def _stream(user: str, terms: JobOptions, request: pb.IterationRequest) -> Stream:
    job, index = terms.job, terms.consumer_index or 0
    begin = request.state if request.HasField("state") else None
    if job.reading == pb.ORDERED:
        return OrderedStream(user, Order(job.num_shards, job.num_consumers, index, begin))
    if job.reading == pb.ROUNDS:
        if begin is not None:
            begin = _in_blocks(begin, job.num_consumers)
        return OrderedStream(user, Order(job.num_shards, 1, 0, begin), job.num_consumers, index)
    starts = {part.part: part.start for part in begin.parts} if begin is not None else {}
    return Queue(user, starts)


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
