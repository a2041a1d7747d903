"""Settings of the servers, and how datasets are divided between workers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.config import config
from mpidist.errors import did_you_mean

# Shorter than for ranks that wait for each other: a trainer gives up after a minute without any
# data worker, and the log must say before that why it waits.
_STALL_S = 15.0


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
    def of(cls, processing_mode: str | ShardingPolicy) -> ShardingPolicy:
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


def stall_s() -> float:
    """Return the seconds after which a wait is reported: 15, or MPIDIST_STALL_S if shorter."""
    return min(_STALL_S, config.stall_s)


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
