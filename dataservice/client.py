"""``distribute`` and its companions: datasets that are evaluated by a data service."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from dataservice.arguments import CrossTrainerCache, service_of, terms_of
from dataservice.calls import Caller
from dataservice.compression import CODECS, check_compression
from dataservice.config import ShardingPolicy, check_transfer
from dataservice.dataset import Dataset
from dataservice.dataset.node import INFINITE_CARDINALITY, Node
from dataservice.dataset.promised import Promised
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.distributed import Distributed
from dataservice.read.registration import Registered, Registration, find_dataset
from dataservice.read.terms import Terms
from dataservice.snapshot.save import spec_for_saving
from mpidist import open_endpoint
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

# For how long register_dataset and from_dataset_id look for the dispatcher.
_PATIENCE_S = 60.0


def distribute(
    processing_mode: str | ShardingPolicy,
    service: str | tuple[str, str],
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    delivery: str = "exactly_once",
    deterministic: bool = False,
    num_shards: int | None = None,
    start_timeout_s: float = 60.0,
) -> Callable[[Dataset], Dataset]:
    """Local. Have a dataset evaluated by the workers of a data service.

    Everything before it runs on the workers, everything after it here. Each iteration of the
    result, and each repetition of a ``repeat`` after it, is a new iteration of the job. When a
    worker is lost, others go on with its part from where its consumers are. Whoever waits 15
    seconds for an element (MPIDIST_STALL_S if shorter) logs a warning that names the workers.

    Args:
        processing_mode: ``"parallel_epochs"``: every worker gives the whole dataset, so that n
            workers give n copies, in order if there is one worker. ``"distributed_epoch"``: the
            workers share the source, so that every element comes once. Or a ShardingPolicy.
        service: The dispatcher: ``DispatchServer.target``, ``resolver.master("data", 0)``,
            ``"host:port"``, or a pair of protocol and ``"host:port"``.
        job_name: Consumers that give the same name share one stream: each element goes to one of
            them. The k-th iteration of the result pairs with their k-th, so apply it once, outside
            the loop over epochs: a new result begins with the job's first iteration, which may be
            over. What a consumer that leaves or dies has fetched and not used, others get, and
            while one that died is waited for, the last of them does not end. They must give the
            same dataset: that is compared as its text, in which functions are names, so the first
            one's functions serve all. None: a stream of our own.
        consumer_index: Which of ``num_consumers`` this is.
        num_consumers: How many consumers the job has, from 0 on. Without ``deterministic``, reads
            are coordinated: in every round each consumer gets one element of the same part of the
            dataset, one after the other there; the dataset must be without end.
        max_outstanding_requests: Elements that may be requested or held here at a time. None or -1
            bounds only their memory; under a ``job_name`` alone they are a few at first, and then
            an eighth of what this consumer has used, so that others get theirs.
        data_transfer_protocol: Elements travel as calls do: leave None.
        compression: What elements are compressed with on their way: ``"SNAPPY"``, ``"LZ4"``,
            ``"ZSTD"`` (extra ``compress``), None, or ``"AUTO"``: LZ4 from other hosts over tcp, if
            the way is slower than 0.5 GB/s and the first elements get smaller by a quarter.
        cross_trainer_cache: A CrossTrainerCache: every trainer of the job gets all elements that
            are still kept when it comes for them, and each is made once. For datasets without end.
        target_workers: ``"AUTO"``: all workers but those with the tag COLOCATED on other hosts;
            ``"ANY"``: all; ``"LOCAL"``: those of this process.
        delivery: What the loss of a worker does. ``"exactly_once"``: every element comes once
            (once for each worker's copy, under ``"parallel_epochs"``). ``"at_least_once"``: those
            that were under way may come again, and nobody waits for consumers to settle.
            ``"at_most_once"``: its part ends there.
        deterministic: Elements come in an order that depends neither on the number of workers nor
            on that of consumers: one of each of ``num_shards`` parts of the source in turn, and
            dealt out to the consumers in turn. For datasets with one element for each of the
            source, in the source's own order.
        num_shards: How many parts there are under ``deterministic`` and ``num_consumers``, and so
            how many workers can share the work; None takes 16.
        start_timeout_s: Seconds for which the dispatcher, or all workers, may be missing before
            reading fails.

    Returns:
        A function for :meth:`Dataset.apply`. During the iteration of its result: UnavailableError
        if the dispatcher or all workers are missing or lost; DeadlineExceededError if one is stuck;
        InvalidArgumentError if the job exists with other parameters; and what a function of the
        dataset raises on a worker, as the same class with a note that names the worker, or as
        UnknownError if it is no Exception (SystemExit, KeyboardInterrupt).

    Raises:
        FailedPreconditionError: The package that compresses is not installed. When the function is
            applied: coordinated reads of a dataset that
            ends, or a cache of one.
        UnimplementedError: An argument asks for something that this version cannot do. When the
            function is applied: the dataset cannot be split, and the mode needs it.
        ValueError: An argument is wrong.
    """
    policy = ShardingPolicy.of(processing_mode)
    protocol, address = service_of(service)
    check_transfer(data_transfer_protocol, protocol)
    terms = terms_of(
        policy,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        cross_trainer_cache,
        target_workers,
        start_timeout_s,
        delivery,
        deterministic,
        num_shards,
        compression,
    )

    def transformation(dataset: Dataset) -> Dataset:
        node = dataset.node
        if policy is ShardingPolicy.DYNAMIC:
            node.source_length()
        _check_endless(terms, node.cardinality(), node.summary())
        return Dataset(Distributed(node, protocol, address, job_name, terms))

    return transformation


def register_dataset(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Local. Make a dataset known to a dispatcher, for :func:`from_dataset_id` in any process.

    Args:
        service: As for :func:`distribute`.
        dataset: The dataset.
        compression: Checked, for programs that give it here; readers choose their own.
        dataset_id: What to call it; None has the dispatcher choose.

    Returns:
        Its id; of an equal dataset that is known, or of one of the same id and structure, the same.

    Raises:
        InvalidArgumentError: The id belongs to a dataset with elements of another structure.
        UnavailableError: There is no dispatcher.
        ValueError: An argument is wrong, or an id is given and there is no element that says what
            elements are like.
    """
    check_compression(compression)
    if dataset_id is not None and (not isinstance(dataset_id, str) or not dataset_id):
        raise ValueError(f"dataset_id must be a string that is not empty, not {dataset_id!r}")
    registration = Registration(dataset.node, dataset_id or "", with_spec=True)

    def register(dispatcher: Caller) -> str:
        return registration.register(dispatcher, _PATIENCE_S).name

    name: str = _with_dispatcher(service, register)
    return name


def from_dataset_id(
    processing_mode: str | ShardingPolicy,
    service: str | tuple[str, str],
    dataset_id: str,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    compression: str | None = "AUTO",
    delivery: str = "exactly_once",
    deterministic: bool = False,
    num_shards: int | None = None,
    start_timeout_s: float = 60.0,
) -> Dataset:
    """Local. A dataset that was registered, read through its data service.

    Args:
        processing_mode: As for :func:`distribute`, like the others.
        service: See there.
        dataset_id: What :func:`register_dataset` gave.
        element_spec: What elements are like; reading raises InvalidArgumentError at another one.
            None asks the dispatcher, which knows if the dataset was given an id.
        job_name: See there; jobs of the same name over different datasets are different.
        consumer_index: See there.
        num_consumers: See there.
        max_outstanding_requests: See there.
        data_transfer_protocol: See there.
        cross_trainer_cache: See there.
        target_workers: See there.
        compression: See there.
        delivery: See there.
        deterministic: See there.
        num_shards: See there.
        start_timeout_s: See there.

    Raises:
        NotFoundError: There is no dataset of this id.
        UnavailableError: There is no dispatcher.
        ValueError: An argument is wrong.
    """
    policy = ShardingPolicy.of(processing_mode)
    protocol, address = service_of(service)
    check_transfer(data_transfer_protocol, protocol)
    terms = terms_of(
        policy,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        cross_trainer_cache,
        target_workers,
        start_timeout_s,
        delivery,
        deterministic,
        num_shards,
        compression,
    )
    info = _with_dispatcher(
        service, lambda dispatcher: find_dataset(dispatcher, str(dataset_id), start_timeout_s)
    )
    _check_endless(terms, info.cardinality, info.summary)
    spec = pickle.loads(info.spec) if info.spec else element_spec
    node: Node = Registered(
        str(dataset_id), info.summary, info.cardinality, info.source_length, spec
    )
    if policy is ShardingPolicy.DYNAMIC:
        node.source_length()
    name = f"{dataset_id}/{job_name}" if job_name is not None else None
    node = Distributed(node, protocol, address, name, terms)
    return Dataset(node if element_spec is None else Promised(node, element_spec))


def distributed_save(
    dataset: Dataset,
    path: str | os.PathLike[str],
    dispatcher_address: str | tuple[str, str],
    compression: str | None = "AUTO",
) -> None:
    """Local. Have the workers of a data service write a dataset to disk; does not wait for them.

    Each worker writes a stream of its own: every n-th element, where the dataset can be split, or
    the whole. What a worker that is lost has written is kept, and another one goes on after it.
    :meth:`Dataset.load` reads it, with ``wait=True`` also while it is being written.

    Args:
        dataset: A dataset that ends.
        path: A folder that the dispatcher and all workers see; missing or empty.
        dispatcher_address: The dispatcher, as ``service`` of :func:`distribute`.
        compression: Of what is written: ``"SNAPPY"``, ``"LZ4"``, ``"ZSTD"`` (extra ``compress``),
            None, or ``"AUTO"``, which does not.

    Raises:
        AlreadyExistsError: There is a snapshot at the path, or something else.
        FailedPreconditionError: The package that compresses is not installed, the dispatcher
            cannot write there, or no worker has registered at it.
        InvalidArgumentError: The dataset has no end.
        UnavailableError: There is no dispatcher.
        ValueError: The compression is unknown, or the address none.
    """
    check_compression(compression)
    node = dataset.node
    if node.cardinality() == INFINITE_CARDINALITY:
        raise InvalidArgumentError(
            f"{node.summary()} is infinite and cannot be saved: call take(n) before "
            "distributed_save()"
        )
    registration = Registration(node)
    request = pb.SaveRequest(
        path=os.path.abspath(path),
        compression=compression if compression in CODECS else "",
        spec=spec_for_saving(dataset),
    )

    def save(dispatcher: Caller) -> None:
        request.dataset_id = registration.dataset_id(dispatcher, _PATIENCE_S)
        dispatcher.ask("dispatcher/SaveDataset", request, pb.SaveRequest)

    _with_dispatcher(dispatcher_address, save)


def _with_dispatcher(service: str | tuple[str, str], what: Callable[[Caller], Any]) -> Any:
    protocol, address = service_of(service)
    with open_endpoint(protocol, peer=address) as endpoint:
        return what(Caller(endpoint, address, "dispatcher", lambda: False))


def _check_endless(terms: Terms, cardinality: int, summary: str) -> None:
    reads = {
        pb.ROUNDS: "coordinated reads (num_consumers) need",
        pb.CACHED: "a cross_trainer_cache needs",
    }
    what = reads.get(terms.job.reading)
    if what is not None and cardinality >= 0 and cardinality != INFINITE_CARDINALITY:
        raise FailedPreconditionError(
            f"{what} an infinite dataset, but {summary} has {cardinality} elements: call "
            "repeat() before distribute()"
        )
