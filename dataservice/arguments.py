"""Checks of what users give to ``distribute`` and its companions."""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.compression import check_compression
from dataservice.config import ShardingPolicy, check_whole
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read.terms import Terms

# Parts of an iteration whose order is fixed: at most so many workers share the work.
NUM_SHARDS = 16

_DELIVERIES = {
    "exactly_once": pb.EXACTLY_ONCE,
    "at_least_once": pb.AT_LEAST_ONCE,
    "at_most_once": pb.AT_MOST_ONCE,
}
_TARGETS = {"AUTO": pb.AUTO, "ANY": pb.ANY, "LOCAL": pb.LOCAL}


@dataclass(frozen=True)
class CrossTrainerCache:
    """Has trainers share what workers make: see ``cross_trainer_cache`` of :func:`distribute`.

    Attributes:
        trainer_id: Tells trainers apart: readers with the same id share one stream.

    Raises:
        ValueError: It is empty.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not isinstance(self.trainer_id, str) or not self.trainer_id:
            raise ValueError(
                f"CrossTrainerCache needs a trainer_id that is not empty, not {self.trainer_id!r}"
            )


def service_of(service: str | tuple[str, str]) -> tuple[str | None, str]:
    """Local. Protocol (None: not told) and address of a dispatcher; ValueError if it is none."""
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


def terms_of(
    policy: ShardingPolicy,
    job_name: str | None,
    consumer_index: int | None,
    num_consumers: int | None,
    max_outstanding_requests: int | None,
    cross_trainer_cache: CrossTrainerCache | None,
    target_workers: str,
    start_timeout_s: float,
    delivery: str,
    deterministic: bool,
    num_shards: int | None,
    compression: str | None,
) -> Terms:
    """Local. What consumers of a job must agree on, and what they need not.

    Raises:
        FailedPreconditionError: The package that compresses is not installed.
        ValueError: An argument is wrong, or does not go with another.
    """
    check_compression(compression)
    if job_name is not None and (not isinstance(job_name, str) or not job_name):
        raise ValueError(f"job_name must be a string that is not empty, not {job_name!r}")
    _check_consumers(job_name, consumer_index, num_consumers)
    limit = max_outstanding_requests
    if limit != -1:
        check_whole("max_outstanding_requests, if neither None nor -1 (AUTOTUNE),", limit)
    check_whole("num_shards", num_shards)
    target = str(target_workers).upper()
    if target not in _TARGETS:
        raise ValueError(f"target_workers must be 'AUTO', 'ANY' or 'LOCAL', not {target_workers!r}")
    if delivery not in _DELIVERIES:
        raise ValueError(f"delivery must be one of {sorted(_DELIVERIES)}, not {delivery!r}")
    if not isinstance(start_timeout_s, int | float) or not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s must be positive, not {start_timeout_s!r}")
    job = pb.Terms(
        policy=pb.ShardingPolicy.Name(policy.value),
        delivery=_DELIVERIES[delivery],
        target=_TARGETS[target],
        reading=_reading(job_name, num_consumers, cross_trainer_cache, deterministic),
    )
    if job.reading in (pb.ORDERED, pb.ROUNDS):
        job.num_consumers = num_consumers or 1
        job.num_shards = NUM_SHARDS if num_shards is None else num_shards
    elif num_shards is not None:
        raise ValueError("num_shards needs deterministic=True or num_consumers")
    elif job.reading == pb.PRIVATE:
        job.num_consumers = 1
    _check_combination(job, deterministic)
    trainer = cross_trainer_cache.trainer_id if cross_trainer_cache is not None else ""
    most = None if limit == -1 else limit
    return Terms(start_timeout_s, most, job, compression, consumer_index or 0, trainer)


def _reading(
    job_name: str | None,
    num_consumers: int | None,
    cache: CrossTrainerCache | None,
    deterministic: bool,
) -> pb.Reading:
    if cache is not None:
        if not isinstance(cache, CrossTrainerCache):
            raise ValueError(f"cross_trainer_cache must be a CrossTrainerCache, not {cache!r}")
        if job_name is None:
            raise ValueError("cross_trainer_cache needs a job_name that the trainers share")
        if num_consumers is not None or deterministic:
            raise ValueError(
                "cross_trainer_cache does not go with num_consumers or deterministic=True: "
                "trainers that are late do not get all elements"
            )
        return pb.CACHED
    if deterministic:
        if job_name is not None and num_consumers is None:
            raise ValueError(
                "deterministic=True with a job_name needs num_consumers and consumer_index, which "
                "say who gets which elements"
            )
        return pb.ORDERED
    if num_consumers is not None:
        return pb.ROUNDS
    return pb.PRIVATE if job_name is None else pb.SHARED


def _check_consumers(
    job_name: str | None, consumer_index: int | None, num_consumers: int | None
) -> None:
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError("give both consumer_index and num_consumers, or neither")
    if num_consumers is None or consumer_index is None:
        return
    if job_name is None:
        raise ValueError("num_consumers needs a job_name that the consumers share")
    check_whole("num_consumers", num_consumers)
    check_whole("consumer_index", consumer_index, lowest=0)
    if consumer_index >= num_consumers:
        raise ValueError(
            f"consumer_index must be in [0, num_consumers), not {consumer_index} of {num_consumers}"
        )


def _check_combination(job: pb.Terms, deterministic: bool) -> None:
    if deterministic and job.policy != pb.DYNAMIC:
        raise ValueError(
            "deterministic=True needs processing_mode 'distributed_epoch': under the others there "
            "are as many copies or parts as workers"
        )
    if job.delivery == pb.AT_MOST_ONCE and job.reading in (pb.ROUNDS, pb.ORDERED):
        raise ValueError(
            "delivery='at_most_once' does not go with num_consumers or deterministic=True: where "
            "a part has been given up, consumers would not know whose turn it is"
        )
    if job.target == pb.LOCAL and job.reading in (pb.ROUNDS, pb.ORDERED):
        raise ValueError(
            "target_workers='LOCAL' does not go with num_consumers or deterministic=True: all "
            "consumers read from all workers"
        )
