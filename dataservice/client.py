"""``distribute``: a dataset whose elements are made by the workers of a data service."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataservice.calls import Caller
from dataservice.config import ShardingPolicy
from dataservice.consumer import Consumer, Terms
from dataservice.dataset import Dataset
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    Scope,
    UnaryNode,
)
from dataservice.proto import dataservice_pb2 as pb
from dataservice.stall import missing_dispatcher
from dataservice.stream import Stream
from dataservice.wire import Parcel, pack_dataset
from mpidist import Endpoint, open_endpoint
from mpidist.errors import UnimplementedError

# How long close() waits for the fetching thread.
_CLOSE_S = 5.0


def distribute(
    processing_mode: str | ShardingPolicy,
    service: str | tuple[str, str],
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: object = None,
    target_workers: str = "AUTO",
    *,
    start_timeout_s: float = 60.0,
) -> Callable[[Dataset], Dataset]:
    """Local. Have a dataset evaluated by the workers of a data service.

    Everything before it runs on the workers, everything after it here. Each iteration of the
    result, and each repetition of a ``repeat`` after it, is a new iteration of the job. Whoever
    waits 15 seconds for an element (MPIDIST_STALL_S if shorter) logs a warning that names the
    workers.

    Args:
        processing_mode: ``"parallel_epochs"``: every worker gives the whole dataset, so that n
            workers give n copies, in order if there is one worker. ``"distributed_epoch"``: the
            workers share the source, so that every element comes once. Or a ShardingPolicy.
        service: The dispatcher: ``DispatchServer.target``, ``resolver.master("data", 0)``,
            ``"host:port"``, or a pair of protocol and ``"host:port"``.
        job_name: Consumers that give the same name share one stream: each element goes to one of
            them. The k-th iteration of the result pairs with their k-th, so apply it once, outside
            the loop over epochs: a new result begins with the job's first iteration, which may be
            over. What a consumer that leaves early has fetched and not used, the others do not
            get; max_outstanding_requests bounds it. None: a stream of our own.
        consumer_index: Not implemented (coordinated reads); leave None.
        num_consumers: Not implemented (coordinated reads); leave None.
        max_outstanding_requests: Elements that may be requested or held here at a time. None
            bounds only their memory.
        data_transfer_protocol: Not implemented; leave None.
        compression: ``"AUTO"`` or None; neither compresses.
        cross_trainer_cache: Not implemented; leave None.
        target_workers: ``"AUTO"`` or ``"ANY"``: all workers.
        start_timeout_s: Seconds for which the dispatcher, and then the first worker, may be
            missing before reading fails.

    Returns:
        A function for :meth:`Dataset.apply`. During the iteration of its result: UnavailableError
        if the dispatcher or a worker is missing or lost; DeadlineExceededError if one is stuck;
        InvalidArgumentError if the job exists with other parameters; and what a function of the
        dataset raises on a worker, as the same class with a note that names the worker, or as
        UnknownError if it is no Exception (SystemExit, KeyboardInterrupt).

    Raises:
        UnimplementedError: An argument asks for something that this version cannot do. When the
            function is applied: the dataset cannot be split, and the mode needs it.
        ValueError: An argument is wrong.
    """
    policy = ShardingPolicy.of(processing_mode)
    if job_name is not None and (not isinstance(job_name, str) or not job_name):
        raise ValueError(f"job_name must be a string that is not empty, not {job_name!r}")
    _check_consumers(job_name, consumer_index, num_consumers)
    limit = max_outstanding_requests
    if limit is not None and limit < 1:
        raise ValueError(f"max_outstanding_requests must be positive, not {limit}")
    _check_transfer(data_transfer_protocol, compression, cross_trainer_cache, target_workers)
    if not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s must be positive, not {start_timeout_s}")
    protocol, address = _service(service)
    terms = Terms(start_timeout_s, limit)

    def transformation(dataset: Dataset) -> Dataset:
        if policy is ShardingPolicy.DYNAMIC:
            dataset.node.source_indices()
        return Dataset(Distributed(dataset.node, protocol, address, policy, job_name, terms))

    return transformation


@dataclass(eq=False)
class _InThisProcess:
    """Attributes: numbers of iterations, and the description pickled for the dispatcher."""

    iterations: itertools.count[int] = field(default_factory=itertools.count)
    request: tuple[pb.RegisterDatasetRequest, Parcel] | None = None


@dataclass(frozen=True, eq=False)
class Distributed(UnaryNode):
    """Elements of another node, made elsewhere; see :func:`distribute`."""

    parent: Node
    protocol: str | None
    service: str
    policy: ShardingPolicy
    job_name: str | None
    terms: Terms = field(repr=False)
    _here: _InThisProcess = field(init=False, repr=False, default_factory=_InThisProcess)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

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
        return DistributedIterator(self, next(self._here.iterations), context.scope)

    @property
    def job(self) -> str:
        """Local. What a consumer of this node reads, in words."""
        name = "a job of its own" if self.job_name is None else f"job {self.job_name!r}"
        return f"{name}, {self.parent.summary()},"

    def register(self, dispatcher: Caller) -> int:
        """Local. The dispatcher's id of what is to be evaluated; raises as Caller.ask."""
        if self._here.request is None:
            object.__setattr__(self._here, "request", _registration(self.parent, self.policy))
        assert self._here.request is not None
        request, parcel = self._here.request
        method, kind = "dispatcher/GetOrRegisterDataset", pb.RegisterDatasetReply
        known = dispatcher.ask_patiently(method, request, kind, self.terms.start_timeout_s)
        if known.dataset_id:
            return known.dataset_id
        whole = pb.RegisterDatasetRequest()
        whole.CopyFrom(request)
        whole.pickle = parcel.pickle
        return dispatcher.ask(method, whole, kind, parcel.buffers).dataset_id

    def __reduce__(self) -> tuple[type[Distributed], tuple[Any, ...]]:
        arguments = (self.protocol, self.service, self.policy, self.job_name, self.terms)
        return Distributed, (self.parent, *arguments)


class DistributedIterator(ElementIterator):
    """One iteration; its thread ends when the iterator is closed or dropped."""

    def __init__(self, node: Distributed, repetition: int, scope: Scope | None) -> None:
        # Opened on this thread, because over mpi the first endpoint starts MPI.
        endpoint = open_endpoint(node.protocol)
        self._stream = Stream(f"consumer {endpoint.address} of {node.job}")
        self._ready: deque[Any] = deque()
        self._thread = threading.Thread(
            target=_fetch,
            args=(endpoint, node, repetition, self._stream),
            name="dataservice-consumer",
            daemon=True,
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut, self._stream, self._thread)
        if scope is not None:
            scope.add(self._stream)

    def __next__(self) -> Any:
        if not self._ready:
            self._ready = self._stream.take(self._thread.is_alive)
        return self._ready.popleft()

    def get_state(self) -> Any:
        """Local. UnimplementedError: where the workers are, no consumer knows."""
        raise UnimplementedError("what is read from a data service has no state of its own yet")

    def set_state(self, state: Any) -> None:
        """Local. UnimplementedError."""
        self.get_state()

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._ready.clear()
        self._finalizer()


def _shut(stream: Stream, thread: threading.Thread) -> None:
    stream.close()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_S)


def _fetch(endpoint: Endpoint, node: Distributed, repetition: int, stream: Stream) -> None:
    stream.waits_for = lambda: missing_dispatcher(node.service, node.terms.start_timeout_s)
    try:
        with endpoint:
            dispatcher = Caller(endpoint, node.service, "dispatcher", lambda: stream.closed)
            request = pb.IterationRequest(
                dataset_id=node.register(dispatcher),
                policy=pb.ShardingPolicy.Name(node.policy.value),
                job_name=node.job_name or "",
                repetition=repetition,
            )
            iteration = dispatcher.ask(
                "dispatcher/GetOrCreateIteration", request, pb.IterationReply
            )
            Consumer(endpoint, dispatcher, stream, node.terms).run(iteration)
    except BaseException as error:
        stream.finish(error)
    else:
        stream.finish()


def _registration(node: Node, policy: ShardingPolicy) -> tuple[pb.RegisterDatasetRequest, Parcel]:
    parcel = pack_dataset(node)
    length = len(node.source_indices()) if policy is ShardingPolicy.DYNAMIC else -1
    request = pb.RegisterDatasetRequest(
        digest=parcel.digest(), summary=node.summary(), source_length=length
    )
    return request, parcel


def _service(service: str | tuple[str, str]) -> tuple[str | None, str]:
    if isinstance(service, tuple) and len(service) == 2:
        protocol, address = service
    elif isinstance(service, str):
        protocol, _, address = service.rpartition("://")
    else:
        raise ValueError(
            f"service must be a dispatcher's target or a (protocol, address) pair, not {service!r}"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"service must name a dispatcher as [protocol://]host:port: {service!r}")
    return protocol or None, address


def _check_consumers(
    job_name: str | None, consumer_index: int | None, num_consumers: int | None
) -> None:
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError("give both consumer_index and num_consumers, or neither")
    if num_consumers is None or consumer_index is None:
        return
    if job_name is None:
        raise ValueError("num_consumers needs a job_name that the consumers share")
    if num_consumers < 1 or not 0 <= consumer_index < num_consumers:
        raise ValueError(
            f"consumer_index must be in [0, num_consumers), not {consumer_index} of {num_consumers}"
        )
    raise UnimplementedError("coordinated reads (num_consumers) are not implemented; leave it out")


def _check_transfer(
    protocol: str | None, compression: str | None, cache: object, target_workers: str
) -> None:
    if protocol is not None:
        raise UnimplementedError("data_transfer_protocol is not implemented; leave it out")
    if compression not in ("AUTO", None, "SNAPPY"):
        raise ValueError(f"compression must be 'AUTO', None or 'SNAPPY', not {compression!r}")
    if compression == "SNAPPY":
        raise UnimplementedError("compression 'SNAPPY' is not implemented; give 'AUTO' or None")
    if cache is not None:
        raise UnimplementedError("cross_trainer_cache is not implemented; leave it out")
    target = str(target_workers).upper()
    if target not in ("AUTO", "ANY", "LOCAL"):
        raise ValueError(f"target_workers must be 'AUTO', 'ANY' or 'LOCAL', not {target_workers!r}")
    if target == "LOCAL":
        raise UnimplementedError("target_workers 'LOCAL' is not implemented; give 'AUTO' or 'ANY'")
