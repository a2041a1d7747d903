"""``distribute`` and related functions: datasets that a data service evaluates."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from dataservice.calls import dispatcher_of
from dataservice.dataset import Dataset
from dataservice.dataset.base import INFINITE_CARDINALITY, Node
from dataservice.dataset.indexed import CheckedSpec
from dataservice.options import (
    CrossTrainerCache,
    Delivery,
    JobOptions,
    ProcessingMode,
    ShardingPolicy,
)
from dataservice.payload import CODECS, check_compression
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.distributed import Distributed, Registered, Registration, find_dataset
from dataservice.snapshot.save import spec_for_saving
from mpidist.errors import InvalidArgumentError

# How long register_dataset and distributed_save try to reach the dispatcher, in seconds.
_PATIENCE_S = 60.0


def distribute(
    processing_mode: ProcessingMode | ShardingPolicy,
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
    delivery: Delivery = "exactly_once",
    deterministic: bool = False,
    num_shards: int | None = None,
    start_timeout_s: float = 60.0,
) -> Callable[[Dataset], Dataset]:
    """Return a transformation that evaluates a dataset on the workers of a data service.

    Transformations before it run on the workers. Transformations after it run in this process. Each
    iteration of the result, and each repetition of a ``repeat`` after it, is a new iteration (one
    epoch) of the job. When a worker is lost, other workers continue its part at the position of the
    consumers. A consumer that waits 15 seconds for an element (MPIDIST_STALL_S if shorter) logs a
    warning that names the workers.

    Args:
        processing_mode: ``"parallel_epochs"``: every worker evaluates the whole dataset, so that
            n workers give n copies, in order if there is one worker. ``"distributed_epoch"``: the
            workers share the source, so that every element comes once. Or a ShardingPolicy.
        service: The dispatcher: ``DispatchServer.target``, ``resolver.master("data", 0)``,
            ``"host:port"``, or a pair of protocol and ``"host:port"``.
        job_name: Consumers with the same name share the elements of one job: each element goes to
            one consumer. Iteration k of one consumer is iteration k of all. Apply ``distribute``
            once, outside the loop over epochs: a new result begins with the job's first iteration,
            which may be over. If a consumer leaves or dies, its unconsumed elements go to the other
            consumers. The last consumer waits until a dead consumer has timed out. All consumers
            must give the same dataset: operations, code of functions, constants and arrays are
            compared. Globals that functions use and the contents of other objects are not compared,
            and the workers use those of the first consumer. None: a job of this consumer alone.
        consumer_index: The index of this consumer, from 0 to ``num_consumers`` - 1.
        num_consumers: The number of consumers of the job. Without ``deterministic``, reads are
            coordinated: in every round the consumers get successive elements of one part of the
            dataset, one each. The dataset must be infinite.
        max_outstanding_requests: The largest number of elements that this consumer requests or
            buffers at a time. None or -1 limits only their memory. With a ``job_name`` alone, the
            limit is then four elements for each task at first, and later an eighth of the consumed
            elements, so that other consumers get their share.
        data_transfer_protocol: Leave None: elements use the protocol of the service, and shared
            memory within a host.
        compression: The codec of elements in messages: ``"SNAPPY"``, ``"LZ4"``, ``"ZSTD"`` (extra
            ``compress``), None, or ``"AUTO"``: LZ4 from other hosts over tcp, if the connection is
            slower than 0.5 GB/s and the first elements get smaller by a quarter.
        cross_trainer_cache: A CrossTrainerCache: each element is computed once, and every trainer
            of the job gets all elements that the worker's window still holds. For infinite
            datasets.
        target_workers: ``"AUTO"``: all workers but those with the tag COLOCATED on other hosts;
            ``"ANY"``: all; ``"LOCAL"``: those of this process.
        delivery: The effect of the loss of a worker. ``"exactly_once"``: every element comes once
            (once for each worker's copy, under ``"parallel_epochs"``). ``"at_least_once"``:
            elements may come again, and no worker waits for the reports of consumers.
            ``"at_most_once"``: the part of the lost worker ends at the loss.
        deterministic: Elements come in an order that depends neither on the number of workers nor
            on the number of consumers: from each of ``num_shards`` parts of the source in turn, and
            to each consumer in turn. For datasets with one element for each element of the source,
            in the source's own order.
        num_shards: The number of parts under ``deterministic`` and ``num_consumers``, and so the
            largest number of workers that can share the work; None takes 16.
        start_timeout_s: How long to wait for the dispatcher, or for a worker if all are missing, in
            seconds. After that the iteration fails.

    Returns:
        A function for :meth:`Dataset.apply`. The iteration of its result raises UnavailableError if
        the dispatcher or all workers are missing or lost, DeadlineExceededError if a worker hangs,
        and InvalidArgumentError if the job exists with other parameters. An error of a user's
        function on a worker keeps its class, and gets a note that names the worker. SystemExit and
        KeyboardInterrupt, which are no Exceptions, become an UnknownError.

    Raises:
        FailedPreconditionError: The package of the codec is not installed. When the function is
            applied: coordinated reads or a cross_trainer_cache of a dataset that ends.
        UnimplementedError: This version does not support an argument. When the function is applied:
            the mode must split the dataset, and the dataset cannot be split.
        ValueError: An argument is wrong.

    Example:
        >>> from dataservice import Dataset, DispatchServer, WorkerServer, distribute
        >>> dispatcher = DispatchServer()
        >>> worker = WorkerServer(dispatcher_address=dispatcher.target)
        >>> dataset = Dataset.range(10).batch(5)
        >>> dataset = dataset.apply(distribute("distributed_epoch", dispatcher.target))
        >>> [batch.tolist() for batch in dataset]
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        >>> worker.stop()
        >>> dispatcher.stop()
    """
    options = JobOptions(
        processing_mode,
        service,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        compression,
        cross_trainer_cache,
        target_workers,
        delivery,
        deterministic,
        num_shards,
        start_timeout_s,
    )

    def transformation(dataset: Dataset) -> Dataset:
        node = dataset.node
        _check_dataset(options, node, node.summary())
        return _distributed(node, options, job_name)

    return transformation


def register_dataset(
    service: str | tuple[str, str],
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Register a dataset at a dispatcher, for :func:`from_dataset_id` in any process.

    Args:
        service: As for :func:`distribute`.
        dataset: The dataset.
        compression: Checked, but ignored: it serves programs written for tf.data. Readers choose
            the codec.
        dataset_id: The id of the dataset. None lets the dispatcher choose.

    Returns:
        The id of the dataset. A dataset that is registered again gets the same id. So does a
        dataset with a known ``dataset_id`` and the same structure.

    Raises:
        InvalidArgumentError: The id belongs to a dataset with elements of another structure.
        UnavailableError: There is no dispatcher.
        ValueError: An argument is wrong, or an id is given for a dataset that has no element, so
            that the structure of its elements is unknown.
    """
    check_compression(compression)
    if dataset_id is not None and (not isinstance(dataset_id, str) or not dataset_id):
        raise ValueError(f"dataset_id must be a string that is not empty, not {dataset_id!r}")
    registration = Registration(dataset.node, dataset_id or "", with_spec=True)
    with dispatcher_of(service) as dispatcher:
        return registration.register(dispatcher, _PATIENCE_S).name


def from_dataset_id(
    processing_mode: ProcessingMode | ShardingPolicy,
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
    delivery: Delivery = "exactly_once",
    deterministic: bool = False,
    num_shards: int | None = None,
    start_timeout_s: float = 60.0,
) -> Dataset:
    """Return a dataset that was registered, read through its data service.

    ``dataset_id`` is the result of :func:`register_dataset`. ``element_spec`` describes the
    elements: an element of another structure raises InvalidArgumentError. None takes the spec from
    the dispatcher, if it has the spec. The other arguments are described at :func:`distribute`.
    Jobs of the same name over different datasets are different jobs.

    Raises:
        NotFoundError: There is no dataset of this id.
        UnavailableError: There is no dispatcher.
        ValueError: An argument is wrong.
    """
    options = JobOptions(
        processing_mode,
        service,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        data_transfer_protocol,
        compression,
        cross_trainer_cache,
        target_workers,
        delivery,
        deterministic,
        num_shards,
        start_timeout_s,
    )
    with dispatcher_of(service) as dispatcher:
        info = find_dataset(dispatcher, str(dataset_id), start_timeout_s)
    spec = pickle.loads(info.spec) if info.spec else element_spec
    node = Registered(
        str(dataset_id), info.summary, info.cardinality, info.source_length, spec, info.identity
    )
    _check_dataset(options, node, info.summary)
    name = f"{dataset_id}/{job_name}" if job_name is not None else None
    dataset = _distributed(node, options, name)
    return dataset if element_spec is None else Dataset(CheckedSpec(dataset.node, element_spec))


def distributed_save(
    dataset: Dataset,
    path: str | os.PathLike[str],
    dispatcher_address: str | tuple[str, str],
    compression: str | None = "AUTO",
) -> None:
    """Start to save a dataset to disk on the workers of a data service. Return at once.

    If the dataset can be split, each worker writes a part of the source to a stream of its own.
    Otherwise one worker writes the whole dataset. After the loss of a worker its chunks are kept,
    and another worker continues its stream. :meth:`Dataset.load` reads the snapshot. With
    ``wait=True`` it also reads a snapshot that is still being written.

    Args:
        dataset: A dataset that ends.
        path: A folder that the dispatcher and all workers see; missing or empty.
        dispatcher_address: The dispatcher, as ``service`` of :func:`distribute`.
        compression: The codec of the files: ``"SNAPPY"``, ``"LZ4"``, ``"ZSTD"`` (extra
            ``compress``), None, or ``"AUTO"``, which does not compress.

    Raises:
        AlreadyExistsError: The folder contains a snapshot or other files.
        FailedPreconditionError: The package of the codec is not installed, the dispatcher cannot
            write to the folder, or no worker has registered at the dispatcher.
        InvalidArgumentError: The dataset has no end.
        UnavailableError: There is no dispatcher.
        ValueError: The codec is unknown, or ``dispatcher_address`` is not an address.
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
    with dispatcher_of(dispatcher_address) as dispatcher:
        request.dataset_id = registration.dataset_id(dispatcher, _PATIENCE_S)
        dispatcher.call("dispatcher/SaveDataset", request, pb.SaveRequest)


def _distributed(node: Node, options: JobOptions, job_name: str | None) -> Dataset:
    return Dataset(Distributed(node, job_name, options))


def _check_dataset(options: JobOptions, node: Node, summary: str) -> None:
    """Raise if the options need a dataset that can be split, or an infinite one."""
    if options.job.policy == pb.DYNAMIC:
        node.source_length()
    options.mode.check_cardinality(summary, node.cardinality())
