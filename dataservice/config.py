"""What servers and ``distribute`` can be told."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import mpidist
from mpidist.errors import UnimplementedError

# Sooner than for ranks that wait for each other: a trainer gives up after a minute without any
# data worker, and is to be told before that why it stands still.
_STALL_S = 15.0


class ShardingPolicy(enum.IntEnum):
    """How the elements of a dataset are divided between data workers; TensorFlow's numbers.

    Attributes:
        OFF: Every worker gives the whole dataset; also called ``"parallel_epochs"``.
        DYNAMIC: Workers take parts of the source as they go, so that every element comes once;
            also called ``"distributed_epoch"``.
        FILE: Not implemented.
        DATA: Not implemented.
        FILE_OR_DATA: Not implemented.
        HINT: Not implemented.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5

    @classmethod
    def of(cls, processing_mode: str | ShardingPolicy) -> ShardingPolicy:
        """Local. The policy that a processing mode names.

        Raises:
            UnimplementedError: This version has no such policy.
            ValueError: The mode is unknown.
        """
        if isinstance(processing_mode, ShardingPolicy):
            policy = processing_mode
        elif processing_mode in _MODES:
            policy = _MODES[processing_mode]
        else:
            raise ValueError(
                f"unknown processing_mode {processing_mode!r}; give 'parallel_epochs', "
                "'distributed_epoch' or a ShardingPolicy"
            )
        if policy not in (cls.OFF, cls.DYNAMIC):
            raise UnimplementedError(
                f"ShardingPolicy.{policy.name} is not implemented; use OFF or DYNAMIC"
            )
        return policy


_MODES = {"parallel_epochs": ShardingPolicy.OFF, "distributed_epoch": ShardingPolicy.DYNAMIC}


@dataclass(frozen=True)
class DispatcherConfig:
    """Settings of a DispatchServer; TensorFlow's names.

    Attributes:
        port: Number of its endpoint; 0 takes a free one.
        protocol: As for :class:`DispatchServer`.
        work_dir: Not implemented; leave None.
        fault_tolerant_mode: Not implemented; leave False.
        worker_addresses: Not implemented; leave None.
        job_gc_check_interval_ms: How often to look for what is abandoned; None means 1,000.
        job_gc_timeout_ms: After how long an iteration without consumers is forgotten; None means
            300,000; -1 never.
        worker_timeout_ms: After how long a silent worker counts as lost; None means 60,000.
        client_timeout_ms: After how long a silent consumer counts as gone; None means 300,000.

    Raises:
        UnimplementedError: A setting that is not implemented is given.
        ValueError: ``fault_tolerant_mode`` without ``work_dir``, or a time that is no time.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: tuple[str, ...] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    client_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        if self.fault_tolerant_mode and self.work_dir is None:
            raise ValueError("fault_tolerant_mode needs a work_dir")
        for name in ("work_dir", "fault_tolerant_mode", "worker_addresses"):
            if getattr(self, name):
                raise UnimplementedError(
                    f"DispatcherConfig.{name} is not implemented; leave it out"
                )
        _check_times(self, "job_gc_check_interval_ms", "worker_timeout_ms", "client_timeout_ms")
        if self.job_gc_timeout_ms != -1:
            _check_times(self, "job_gc_timeout_ms")


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of a WorkerServer; TensorFlow's names.

    Attributes:
        dispatcher_address: ``host:port`` of the dispatcher, with or without ``protocol://``.
        worker_address: What others shall call this worker, as ``host:port``; ``%port%`` stands
            for the number of its endpoint. None takes the endpoint's own address.
        port: Number of its endpoint; 0 takes a free one.
        protocol: As for :class:`WorkerServer`.
        heartbeat_interval_ms: How often to tell the dispatcher; None means 1,000.
        dispatcher_timeout_ms: How long to try to reach the dispatcher; None means 60,000.

    Raises:
        ValueError: The dispatcher's address is missing, or a time is no time.
    """

    dispatcher_address: str | None
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.dispatcher_address:
            raise ValueError(
                "a worker needs the dispatcher_address, as DispatchServer.target gives it"
            )
        _check_times(self, "heartbeat_interval_ms", "dispatcher_timeout_ms")


def stall_s() -> float:
    """Local. Seconds after which a wait for data is reported: 15, or MPIDIST_STALL_S if shorter."""
    return min(_STALL_S, mpidist.settings.stall_s)


def seconds_of(milliseconds: int | None, default_s: float) -> float:
    """Local. A setting in seconds; -1 is infinite."""
    if milliseconds is None:
        return default_s
    return float("inf") if milliseconds == -1 else milliseconds / 1000


def _check_times(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")
