"""Snapshots that a dispatcher has its workers write: how they begin and end on the disk."""

from __future__ import annotations

import contextlib
import logging
import secrets

from dataservice.dispatch.records import Iteration
from dataservice.dispatch.registry import Registry
from dataservice.proto import dataservice_pb2 as pb
from dataservice.snapshot import metadata
from mpidist.errors import Error, FailedPreconditionError, from_code

logger = logging.getLogger(__name__)


def begin_save(registry: Registry, body: pb.SaveRequest) -> None:
    """Local. Make a snapshot's folder, and give workers its parts.

    Raises:
        AlreadyExistsError: There is a snapshot, or something else.
        FailedPreconditionError: The folder cannot be written.
        FailedPreconditionError: No worker has registered.
        NotFoundError: The dataset is not known.
    """
    dataset = registry.dataset(body.dataset_id).request
    streams = len(registry.workers)
    if not streams:
        raise FailedPreconditionError(
            "no data worker has registered at this dispatcher, and each worker writes a stream: "
            "start the workers before distributed_save()"
        )
    if dataset.source_length < 0:
        streams = 1  # its parts depend on each other
    metadata.create(body.path, streams, dataset.summary, body.spec, body.compression or None)
    registry.save(body.dataset_id, body.path, streams, secrets.randbits(63))


def end_save(iteration: Iteration) -> None:
    """Local. Say of a save that has ended how it did; if this process dies, the next one does."""
    path, (code, message) = iteration.job.terms.path, iteration.failure
    try:
        if code:
            metadata.fail(path, from_code(code, message))
        else:
            metadata.finish(path)
    except (Error, OSError) as error:
        logger.exception("the snapshot %s cannot be completed", path)
        # Where not even that can be written, those who wait for it report that they do.
        with contextlib.suppress(Error, OSError):
            metadata.fail(path, error)
