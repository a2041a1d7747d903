"""Saving a dataset by this process alone."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dataservice.dataset.spec import Spec
from dataservice.snapshot import metadata
from dataservice.snapshot.writer import CHUNK_BYTES, StreamWriter

if TYPE_CHECKING:
    from dataservice.dataset import Dataset

# Nobody takes up a save that was killed: the states that its chunks hold are empty.
_NO_STATE = b""


def save(
    dataset: Dataset,
    path: str | os.PathLike[str],
    num_shards: int = 1,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Local. Write the elements of one pass to disk; see :meth:`Dataset.save`.

    Args:
        dataset: What to save.
        path: Of the folder; it may be there if it is empty.
        num_shards: How many streams to write; element i goes to stream i modulo num_shards.
        chunk_bytes: At how many bytes a chunk is full, and can be read by who waits.

    Raises:
        AlreadyExistsError: There is a snapshot, or something else.
        FailedPreconditionError: The folder cannot be written.
        ValueError: There are no shards.
        Exception: What the dataset raises; whoever loads the snapshot is told.
    """
    folder = os.path.abspath(path)
    spec = spec_for_saving(dataset)
    metadata.create(folder, num_shards, dataset.node.summary(), spec)
    try:
        with ExitStack() as stack:
            writers = [
                stack.enter_context(StreamWriter(folder, stream, 0, chunk_bytes=chunk_bytes))
                for stream in range(num_shards)
            ]
            with iter(dataset) as elements:
                for number, element in enumerate(elements):
                    writer = writers[number % num_shards]
                    writer.append(element)
                    if writer.full:
                        writer.commit(_NO_STATE)
            for writer in writers:
                writer.finish(_NO_STATE)
        metadata.finish(folder)
    except BaseException as error:
        metadata.fail(folder, error)
        raise


def spec_for_saving(dataset: Dataset) -> bytes:
    """Local. The element_spec of a dataset, pickled, if it can be known."""
    spec: Spec | None = None
    # There may be no element to look at; or a function has raised it, and will again when saving.
    with contextlib.suppress(ValueError):
        spec = dataset.element_spec
    return metadata.pack_spec(spec)
