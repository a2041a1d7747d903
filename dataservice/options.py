"""The options of ``distribute`` and related functions, with their checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dataservice.compression import check_compression
from dataservice.config import ShardingPolicy, check_int, check_transfer
from dataservice.consumption import Mode, mode_for
from dataservice.proto import dataservice_pb2 as pb

_DELIVERIES = {
    "exactly_once": pb.EXACTLY_ONCE,
    "at_least_once": pb.AT_LEAST_ONCE,
    "at_most_once": pb.AT_MOST_ONCE,
}
_TARGETS = {"AUTO": pb.AUTO, "ANY": pb.ANY, "LOCAL": pb.LOCAL}


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

    processing_mode: str | ShardingPolicy
    service: str | tuple[str, str]
    job_name: str | None = None
    consumer_index: int | None = None
    num_consumers: int | None = None
    max_outstanding_requests: int | None = None
    data_transfer_protocol: str | None = None
    compression: str | None = "AUTO"
    cross_trainer_cache: CrossTrainerCache | None = None
    target_workers: str = "AUTO"
    delivery: str = "exactly_once"
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
