"""The settings of servers, and the options of ``distribute`` and related functions, with checks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dataservice.consumption import Mode, mode_for
from dataservice.payload import check_compression
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import did_you_mean

ProcessingMode = Literal["parallel_epochs", "distributed_epoch"]
Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]
_DELIVERIES = {
    "exactly_once": pb.EXACTLY_ONCE,
    "at_least_once": pb.AT_LEAST_ONCE,
    "at_most_once": pb.AT_MOST_ONCE,
}
_TARGETS = {"AUTO": pb.AUTO, "ANY": pb.ANY, "LOCAL": pb.LOCAL}


class ShardingPolicy(enum.IntEnum):
    """How the elements of a dataset are divided between data workers; TensorFlow's numbers.

    Attributes:
        OFF: Every worker evaluates the whole dataset; also called ``"parallel_epochs"``.
        DYNAMIC: Workers request splits of the source during the epoch, so that every element comes
            once; also called ``"distributed_epoch"``.
        FILE: Each of n workers reads every n-th file; all sources must be files.
        DATA: Each worker takes every n-th element of the whole dataset.
        FILE_OR_DATA: FILE if all sources are files, n or more of them; otherwise DATA.
        HINT: Each worker takes every n-th element at the place of
            ``shard(SHARD_HINT, SHARD_HINT)``.

    FILE, DATA, FILE_OR_DATA and HINT need ``DispatcherConfig.worker_addresses``, whose length is n.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5

    @classmethod
    def of(cls, processing_mode: ProcessingMode | ShardingPolicy) -> ShardingPolicy:
        """Return the policy that a processing mode names.

        Raises:
            ValueError: The mode is unknown.
        """
        if isinstance(processing_mode, ShardingPolicy):
            return processing_mode
        if isinstance(processing_mode, str) and processing_mode in _MODES:
            return _MODES[processing_mode]
        raise ValueError(
            f"unknown processing_mode {processing_mode!r}{did_you_mean(processing_mode, _MODES)}; "
            "give 'parallel_epochs', 'distributed_epoch' or a ShardingPolicy"
        )


_MODES = {"parallel_epochs": ShardingPolicy.OFF, "distributed_epoch": ShardingPolicy.DYNAMIC}


@dataclass(frozen=True)
class DispatcherConfig:
    """Settings of a DispatchServer; TensorFlow's names.

    Attributes:
        port: Number of its endpoint; 0 takes a free one.
        protocol: As for :class:`DispatchServer`.
        work_dir: Folder of the journal; used with fault_tolerant_mode.
        fault_tolerant_mode: True keeps a journal of all changes. A dispatcher that is started
            again on the same port and folder continues as if nothing had happened.
        worker_addresses: Addresses of all data workers, in the order of the parts that they take
            under the static policies (FILE, DATA, FILE_OR_DATA, HINT): ``host:port``, or ``host``
            or ``host:%port%`` for any one worker of a host. None: there is no static sharding.
        job_gc_check_interval_ms: Time between two checks for abandoned iterations and silent
            workers and consumers; None means 1,000.
        job_gc_timeout_ms: Time after which an iteration without consumers is forgotten; None means
            300,000; -1 never.
        worker_timeout_ms: Silence after which a worker counts as lost; None means 60,000. More
            than the workers' ``heartbeat_interval_ms``.
        client_timeout_ms: Silence after which a consumer counts as gone; None means 300,000. At
            least 1,000: the dispatcher holds a heartbeat for at most a second or a quarter of this
            time, and a consumer sends the next one up to 250 ms later.
        worker_max_concurrent_snapshots: The number of parts of snapshots that a worker writes at
            a time; 0 means 3.

    Raises:
        ValueError: ``fault_tolerant_mode`` without ``work_dir``, a wrong number, or
            ``worker_addresses`` that are not addresses, or name one twice.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Sequence[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    client_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0

    def __post_init__(self) -> None:
        if self.fault_tolerant_mode and self.work_dir is None:
            raise ValueError("fault_tolerant_mode needs a work_dir")
        _check_times(self, "job_gc_check_interval_ms", "worker_timeout_ms", "client_timeout_ms")
        if self.job_gc_timeout_ms != -1:
            _check_times(self, "job_gc_timeout_ms")
        snapshots = self.worker_max_concurrent_snapshots
        check_int("worker_max_concurrent_snapshots", snapshots, lowest=0)
        if self.worker_addresses is not None:
            _check_addresses(self.worker_addresses)


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of a WorkerServer; TensorFlow's names.

    Attributes:
        dispatcher_address: ``host:port`` of the dispatcher, with or without ``protocol://``.
        worker_address: The address by which others reach this worker, as ``host:port``;
            ``%port%`` stands for the number of its endpoint. None takes the endpoint's own address.
        port: Number of its endpoint; 0 takes a free one.
        protocol: As for :class:`WorkerServer`.
        heartbeat_interval_ms: Time between two heartbeats; None means 1,000.
        dispatcher_timeout_ms: Time for which to try to reach the dispatcher; None means 60,000.
        worker_tags: ``"COLOCATED"``: only consumers on the worker's own host read from it, unless
            they ask for ANY.
        cross_trainer_cache_size_bytes: Bytes of elements that are kept for trainers that share a
            cache, for each iteration; None means 1 GiB.
        data_transfer_protocol: Elements travel as calls do: leave None.
        data_transfer_address: Elements come from the worker's own address, too: leave None, or
            give that, with ``%dts_port%`` for its port.

    Raises:
        ValueError: The dispatcher's address is missing, a number is wrong, a tag is empty, or
            elements are to travel by another protocol.
    """

    dispatcher_address: str | None
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    worker_tags: Sequence[str] = ()
    cross_trainer_cache_size_bytes: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dispatcher_address, str) or not self.dispatcher_address:
            raise ValueError(
                "a worker needs the dispatcher_address, as DispatchServer.target gives it, not "
                f"{self.dispatcher_address!r}"
            )
        tags = self.worker_tags
        if not isinstance(tags, Sequence) or isinstance(tags, str) or not _are_texts(tags):
            raise ValueError(f"worker_tags must be a list of tags, not {tags!r}")
        _check_times(
            self,
            "heartbeat_interval_ms",
            "dispatcher_timeout_ms",
            "cross_trainer_cache_size_bytes",
        )
        check_transfer(self.data_transfer_protocol, self.protocol)
        given, own = self.data_transfer_address, self.worker_address or "localhost:%port%"
        if given is not None and given.replace("%dts_port%", "%port%") != own:
            raise ValueError(
                f"data_transfer_address={given!r} is not supported: elements come from the "
                f"worker's own address, {own!r}; leave it out, or set worker_address"
            )


@dataclass(frozen=True)
class CrossTrainerCache:
    """Lets trainers share elements: see ``cross_trainer_cache`` of :func:`distribute`.

    Attributes:
        trainer_id: The name of the trainer. Readers with the same id share one stream.

    Raises:
        ValueError: The id is empty.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.trainer_id, str) or not self.trainer_id:
            raise ValueError(
                f"CrossTrainerCache needs a trainer_id that is not empty, not {self.trainer_id!r}"
            )


def service_of(service: str | tuple[str, str]) -> tuple[str | None, str]:
    """Return the protocol (None if not given) and the address of a dispatcher.

    Raises:
        ValueError: ``service`` is not an address.
    """
    if isinstance(service, tuple) and len(service) == 2:
        protocol, address = service
    elif isinstance(service, str):
        protocol, _, address = service.rpartition("://")
    else:
        raise ValueError(
            f"service must be a dispatcher's target or a (protocol, address) pair, not {service!r}"
        )
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"service must name a dispatcher as [protocol://]host:port: {service!r}")
    return protocol or None, address


@dataclass(frozen=True)
class JobOptions:
    """The options with which a consumer reads a job.

    The fields are the arguments of :func:`distribute`, which describes them.

    Raises:
        FailedPreconditionError: The package of the codec is not installed.
        ValueError: An option is wrong, or conflicts with another option.
    """

    processing_mode: ProcessingMode | ShardingPolicy
    service: str | tuple[str, str]
    job_name: str | None = None
    consumer_index: int | None = None
    num_consumers: int | None = None
    max_outstanding_requests: int | None = None
    data_transfer_protocol: str | None = None
    compression: str | None = "AUTO"
    cross_trainer_cache: CrossTrainerCache | None = None
    target_workers: str = "AUTO"
    delivery: Delivery = "exactly_once"
    deterministic: bool = False
    num_shards: int | None = None
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        ShardingPolicy.of(self.processing_mode)
        check_transfer(self.data_transfer_protocol, self.protocol)
        check_compression(self.compression)
        name = self.job_name
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"job_name must be a string that is not empty, not {name!r}")
        self._check_consumers()
        if self.max_outstanding_requests != -1:
            check_int(
                "max_outstanding_requests, if neither None nor -1 (AUTOTUNE),",
                self.max_outstanding_requests,
            )
        check_int("num_shards", self.num_shards)
        if str(self.target_workers).upper() not in _TARGETS:
            raise ValueError(
                f"target_workers must be 'AUTO', 'ANY' or 'LOCAL', not {self.target_workers!r}"
            )
        if self.delivery not in _DELIVERIES:
            raise ValueError(
                f"delivery must be one of {sorted(_DELIVERIES)}, not {self.delivery!r}"
            )
        limit_s = self.start_timeout_s
        if not isinstance(limit_s, int | float) or not limit_s > 0:
            raise ValueError(f"start_timeout_s must be positive, not {limit_s!r}")
        cache = self.cross_trainer_cache
        if cache is not None and not isinstance(cache, CrossTrainerCache):
            raise ValueError(f"cross_trainer_cache must be a CrossTrainerCache, not {cache!r}")
        self.mode.check(self)

    @property
    def protocol(self) -> str | None:
        """The protocol of the dispatcher, if it is given."""
        return service_of(self.service)[0]

    @property
    def address(self) -> str:
        """The address of the dispatcher, without the protocol."""
        return service_of(self.service)[1]

    @property
    def max_outstanding(self) -> int | None:
        """The largest number of elements requested or held; None means a limit in bytes alone."""
        limit = self.max_outstanding_requests
        return None if limit == -1 else limit

    @property
    def own_index(self) -> int:
        """The index of this consumer; 0 if consumers have no indices."""
        return self.consumer_index or 0

    @property
    def trainer_id(self) -> str:
        """The id of this reader of a cross-trainer cache; empty without such a cache."""
        return self.cross_trainer_cache.trainer_id if self.cross_trainer_cache is not None else ""

    @property
    def mode(self) -> Mode:
        """The mode of consumption."""
        return mode_for(self)

    @cached_property
    def job(self) -> pb.Terms:
        """The options that all consumers of the job must agree on."""
        job = pb.Terms(
            policy=pb.ShardingPolicy.Name(ShardingPolicy.of(self.processing_mode).value),
            consumption=self.mode.number,
            delivery=_DELIVERIES[self.delivery],
            target=_TARGETS[str(self.target_workers).upper()],
        )
        self.mode.complete(job, self)
        return job

    def _check_consumers(self) -> None:
        index, count = self.consumer_index, self.num_consumers
        if (index is None) != (count is None):
            raise ValueError("give both consumer_index and num_consumers, or neither")
        if index is None or count is None:
            return
        if self.job_name is None:
            raise ValueError("num_consumers needs a job_name that the consumers share")
        check_int("num_consumers", count)
        check_int("consumer_index", index, lowest=0)
        if index >= count:
            raise ValueError(
                f"consumer_index must be in [0, num_consumers), not {index} of {count}"
            )


def seconds_of(milliseconds: int | None, default_s: float) -> float:
    """Return a setting in seconds; -1 is infinite."""
    if milliseconds is None:
        return default_s
    return float("inf") if milliseconds == -1 else milliseconds / 1000


def _check_addresses(addresses: Sequence[str]) -> None:
    if isinstance(addresses, str) or not _are_texts(addresses):
        raise ValueError(f"worker_addresses must be a list of addresses, not {addresses!r}")
    for one in addresses:
        if one[-1].isdigit() and addresses.count(one) > 1:
            raise ValueError(f"worker_addresses name the worker {one!r} more than once")


def _are_texts(values: Sequence[str]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def check_transfer(protocol: str | None, service_protocol: str | None) -> None:
    """Raise ValueError for a ``data_transfer_protocol`` other than the protocol of calls."""
    if protocol is not None and protocol not in (service_protocol, "grpc", "local"):
        raise ValueError(
            f"data_transfer_protocol={protocol!r} is not supported: elements use the protocol "
            "of the service, and shared memory within a host; leave it out"
        )


def check_int(name: str, value: int | None, lowest: int = 1) -> None:
    """Raise ValueError if a value is neither None nor a whole number from ``lowest`` on."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        least = "positive" if lowest == 1 else f"at least {lowest}"
        raise ValueError(f"{name} must be a whole number and {least}, not {value!r}")


def _check_times(config: object, *names: str) -> None:
    for name in names:
        check_int(name, getattr(config, name))
