"""What a consumer was told."""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.proto import dataservice_pb2 as pb


@dataclass(frozen=True)
class Terms:
    """What ``distribute`` was told.

    Attributes:
        start_timeout_s: How long the dispatcher, and all workers, may be missing.
        max_outstanding: Elements requested or held at a time; None for no bound but memory's.
        job: What all consumers of the job must agree on.
        compression: As given to ``distribute``.
        consumer_index: Which of them this is, where they are told apart.
        trainer_id: Whose window on a cache this reads.
    """

    start_timeout_s: float
    max_outstanding: int | None
    job: pb.Terms
    compression: str | None = None
    consumer_index: int = 0
    trainer_id: str = ""
