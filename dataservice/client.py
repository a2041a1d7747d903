"""``distribute`` and its companions: datasets that a data service evaluates."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from dataservice.calls import RpcClient
from dataservice.compression import CODECS, check_compression
from dataservice.config import ShardingPolicy
from dataservice.dataset import Dataset
from dataservice.dataset.base import INFINITE_CARDINALITY, Node
from dataservice.dataset.indexed import CheckedSpec
from dataservice.options import CrossTrainerCache, JobOptions, service_of
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.distributed import Distributed
from dataservice.read.registration import Registered, Registration, find_dataset
from dataservice.snapshot.save import spec_for_saving
from mpidist import open_endpoint
from mpidist.errors import InvalidArgumentError

# Seconds for which register_dataset and distributed_save look for the dispatcher.
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
    """Have a dataset evaluated by the workers of a data service.

    All steps before it run on the workers, all steps after it here. Each iteration of the result,
    and each repetition of a ``repeat`` after it, is a new iteration of the job. When a worker is
    lost, others continue its part at the position of its consumers. A consumer that waits 15
    seconds for an element (MPIDIST_STALL_S if shorter) logs a warning that names the workers.

    Args:
        processing_mode: ``"parallel_epochs"``: every worker evaluates the whole dataset, so that
            n workers give n copies, in order if there is one worker. ``"distributed_epoch"``: the
            workers share the source, so that every element comes once. Or a ShardingPolicy.
        service: The dispatcher: ``DispatchServer.target``, ``resolver.master("data", 0)``,
            ``"host:port"``, or a pair of protocol and ``"host:port"``.
        job_name: Consumers that give the same name share one stream: each element goes to one of
            them. The k-th iteration of the result pairs with their k-th, so apply it once, outside
            the loop over epochs: a new result begins with the job's first iteration, which may be
            over. Elements fetched but not used by a consumer that leaves or dies go to the others.
            The last consumer waits until a dead one has timed out. All must give the same dataset:
            its operations, the code of its functions, its constants and arrays are compared.
            Globals that functions use and the contents of other objects are not compared: those of
            the first consumer serve all. None: a stream of this consumer's own.
        consumer_index: The index of this consumer, from 0 to ``num_consumers`` - 1.
        num_consumers: The number of consumers of the job. Without ``deterministic``, reads are
            coordinated: in every round each consumer gets one element of the same part of the
            dataset, one after the other there; the dataset must be infinite.
        max_outstanding_requests: Elements that may be requested or held here at a time. None or -1
            bounds only their memory; under a ``job_name`` alone they are a few at first, and then
            an eighth of the elements that this consumer has used, so that others get theirs.
        data_transfer_protocol: Elements travel as calls do: leave None.
        compression: The codec of elements on their way: ``"SNAPPY"``, ``"LZ4"``, ``"ZSTD"`` (extra
            ``compress``), None, or ``"AUTO"``: LZ4 from other hosts over tcp, if the way is slower
            than 0.5 GB/s and the first elements get smaller by a quarter.
        cross_trainer_cache: A CrossTrainerCache: every trainer of the job gets all elements that
            are still kept when it asks for them, and each is made once. For infinite datasets.
        target_workers: ``"AUTO"``: all workers but those with the tag COLOCATED on other hosts;
            ``"ANY"``: all; ``"LOCAL"``: those of this process.
        delivery: The effect of the loss of a worker. ``"exactly_once"``: every element comes once
            (once for each worker's copy, under ``"parallel_epochs"``). ``"at_least_once"``:
            elements that were under way may come again, without a wait for the consumers' reports.
            ``"at_most_once"``: its part ends there.
        deterministic: Elements come in an order that depends neither on the number of workers nor
            on that of consumers: one of each of ``num_shards`` parts of the source in turn, and
            dealt out to the consumers in turn. For datasets with one element for each element of
            the source, in the source's own order.
        num_shards: The number of parts under ``deterministic`` and ``num_consumers``, and so the
            largest number of workers that can share the work; None takes 16.
        start_timeout_s: Seconds for which the dispatcher, or all workers, may be missing before
            reading fails.

    Returns:
        A function for :meth:`Dataset.apply`. During the iteration of its result: UnavailableError
        if the dispatcher or all workers are missing or lost; DeadlineExceededError if one is stuck;
        InvalidArgumentError if the job exists with other parameters. An error of the dataset's
        functions on a worker has the same class here and a note that names the worker; one that is
        no Exception (SystemExit, KeyboardInterrupt) becomes an UnknownError.

    Raises:
        FailedPreconditionError: The package that compresses is not installed. When the function is
            applied: coordinated reads of a dataset that ends, or a cache of one.
        UnimplementedError: An argument asks for something that this version cannot do. When the
            function is applied: the dataset cannot be split, and the mode needs it.
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
        compression: Checked and not used, for programs that give it here. Readers choose theirs.
        dataset_id: The id of the dataset; None has the dispatcher choose.

    Returns:
        Its id; of an equal dataset that is known, or of one of the same id and structure, the same.

    Raises:
        InvalidArgumentError: The id belongs to a dataset with elements of another structure.
        UnavailableError: There is no dispatcher.
        ValueError: An argument is wrong, or an id is given and there is no element that shows the
            structure of elements.
    """
    check_compression(compression)
    if dataset_id is not None and (not isinstance(dataset_id, str) or not dataset_id):
        raise ValueError(f"dataset_id must be a string that is not empty, not {dataset_id!r}")
    registration = Registration(dataset.node, dataset_id or "", with_spec=True)

    def register(dispatcher: RpcClient) -> str:
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
    """Return a dataset that was registered, read through its data service.

    ``dataset_id`` is the id that :func:`register_dataset` has returned. ``element_spec`` describes
    the elements, and reading raises InvalidArgumentError at an element of another structure. None
    asks the dispatcher, which knows it if the dataset was given an id. The other arguments are
    those of :func:`distribute`. Jobs of the same name over different datasets are different jobs.

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
    info = _with_dispatcher(
        service, lambda dispatcher: find_dataset(dispatcher, str(dataset_id), start_timeout_s)
    )
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
    """Have the workers of a data service write a dataset to disk, without a wait for them.

    Each worker writes a stream of its own: a part of the source if the dataset can be split, else
    one worker writes the whole. The chunks of a lost worker are kept, and another one continues.
    :meth:`Dataset.load` reads it, with ``wait=True`` also while it is being written.

    Args:
        dataset: A dataset that ends.
        path: A folder that the dispatcher and all workers see; missing or empty.
        dispatcher_address: The dispatcher, as ``service`` of :func:`distribute`.
        compression: The codec of the files: ``"SNAPPY"``, ``"LZ4"``, ``"ZSTD"`` (extra
            ``compress``), None, or ``"AUTO"``, which does not compress.

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

    def save(dispatcher: RpcClient) -> None:
        request.dataset_id = registration.dataset_id(dispatcher, _PATIENCE_S)
        dispatcher.call("dispatcher/SaveDataset", request, pb.SaveRequest)

    _with_dispatcher(dispatcher_address, save)


def _with_dispatcher(service: str | tuple[str, str], what: Callable[[RpcClient], Any]) -> Any:
    protocol, address = service_of(service)
    with open_endpoint(protocol, peer=address) as endpoint:
        return what(RpcClient(endpoint, address, "dispatcher", lambda: False))


def _distributed(node: Node, options: JobOptions, job_name: str | None) -> Dataset:
    return Dataset(Distributed(node, options.protocol, options.address, job_name, options))


def _check_dataset(options: JobOptions, node: Node, summary: str) -> None:
    """Raise if a dataset cannot be split, or ends, and the options need another."""
    if options.job.policy == pb.DYNAMIC:
        node.source_length()
    options.mode.check_cardinality(summary, node.cardinality())
