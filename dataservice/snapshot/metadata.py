"""What a snapshot says of itself: that it exists, is complete, or has failed."""

from __future__ import annotations

import base64
import errno
import os
import pickle
import secrets
import shutil
from dataclasses import dataclass
from typing import Any

import cloudpickle

from dataservice.compression import CODECS
from dataservice.dataset.spec import Spec
from dataservice.errors import code_and_message
from dataservice.files import put_in_place
from dataservice.snapshot import layout
from dataservice.snapshot.layout import Counts
from mpidist.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    UnimplementedError,
    from_code,
)

FORMAT = 1


@dataclass(frozen=True)
class Metadata:
    """What is known of a snapshot from its beginning.

    Attributes:
        identity: 16 bytes that no other snapshot has.
        num_streams: How many streams write it.
        dataset: The summary of the dataset.
        compression: The name of what its records are compressed with; None if they are not.
        pickled_spec: The element_spec; see :func:`pack_spec`. Who only saves need not unpickle it.
    """

    identity: bytes
    num_streams: int
    dataset: str
    compression: str | None
    pickled_spec: bytes

    def element_spec(self) -> Spec | None:
        """Local. What elements are like; None if the saver did not know.

        Raises:
            DataLossError: It is damaged, or refers to a class that is not here.
        """
        try:
            return pickle.loads(self.pickled_spec)
        except Exception as error:
            raise DataLossError(
                f"cannot unpickle the element_spec of a snapshot of {self.dataset}: {error!r}"
            ) from error


@dataclass(frozen=True)
class Progress:
    """How far a save has come.

    Attributes:
        metadata: What it saves.
        counts: The chunks that are there.
        done: Whether these are all.
    """

    metadata: Metadata
    counts: Counts
    done: bool


def pack_spec(spec: Spec | None) -> bytes:
    """Local. Pickle an element_spec; None if it is not known."""
    data: bytes = cloudpickle.dumps(spec, protocol=5)
    return data


def create(
    path: str,
    num_streams: int,
    dataset: str,
    pickled_spec: bytes,
    compression: str | None = None,
) -> Metadata:
    """Local. Begin a snapshot: make its folder, with all that writers and readers look for.

    Args:
        path: Of the folder; it may be there if it is empty.
        num_streams: How many streams will write it.
        dataset: The summary of the dataset.
        pickled_spec: See :func:`pack_spec`.
        compression: The name of what writers will compress with.

    Raises:
        AlreadyExistsError: There is a snapshot, whatever has become of it, or something else.
        FailedPreconditionError: The folder cannot be written.
        ValueError: There are no streams.
    """
    if num_streams < 1:
        raise ValueError(f"a snapshot needs at least 1 stream, not {num_streams}")
    path = os.path.realpath(path)
    metadata = Metadata(secrets.token_bytes(16), num_streams, dataset, compression, pickled_spec)
    partial = f"{path}.partial-{secrets.token_hex(8)}"
    with layout.writing(path):
        try:
            os.makedirs(os.path.join(partial, layout.CHUNKS))
            for stream in range(num_streams):
                os.makedirs(layout.stream_folder(partial, stream))
            layout.put(partial, layout.METADATA, _facts(metadata))
            put_in_place(partial, path)  # replaces an empty folder, and nothing else
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise AlreadyExistsError(_what_is_there(path)) from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return metadata


def _what_is_there(path: str) -> str:
    if layout.get(path, layout.METADATA) is None:
        return f"cannot save to {path!r}: there is something already, and no snapshot"
    how = next((f"({m}) " for m in (layout.DONE, layout.ERROR) if layout.get(path, m)), "")
    return (
        f"there is a snapshot {how}at {path!r}, or one is being saved there: name another folder, "
        "or remove it first if nobody writes it any more"
    )


def read(path: str) -> Metadata:
    """Local. The metadata of a snapshot.

    Raises:
        DataLossError: It is damaged, or of another format.
        NotFoundError: There is no snapshot.
        UnimplementedError: Its compression is unknown here.
    """
    facts = layout.get(path, layout.METADATA)
    if facts is None:
        raise NotFoundError(
            f"there is no snapshot at {path!r}: check the path, and that this host shares the "
            "saver's file system; wait=True waits for a save to begin"
        )
    if facts.get("format") != FORMAT:
        raise DataLossError(
            f"the snapshot {path!r} has format {facts.get('format')!r}, not {FORMAT}: load it "
            "with the version of mpidist that saved it"
        )
    compression = facts["compression"]
    if compression not in (None, *CODECS):
        raise UnimplementedError(
            f"the snapshot {path!r} is compressed with {compression!r}, which is unknown here: "
            "load it with the version of mpidist that saved it"
        )
    return Metadata(
        bytes.fromhex(facts["identity"]),
        facts["num_streams"],
        facts["dataset"],
        compression,
        base64.b64decode(facts["element_spec"]),
    )


def progress(path: str) -> Progress:
    """Local. How far the save of a snapshot has come.

    Raises:
        DataLossError: It is damaged.
        NotFoundError: There is no snapshot.
        OpError: The save has failed: what :func:`fail` was given.
    """
    metadata = read(path)
    failed = layout.get(path, layout.ERROR)
    if failed is not None:
        raise from_code(failed["code"], f"the save of {path!r} has failed: {failed['message']}")
    done = layout.get(path, layout.DONE)  # before the list, so that the list is complete if it is
    counts = layout.committed_chunks(path, metadata.num_streams)
    if done is not None:
        _compare(path, tuple(map(tuple, done["counts"])), counts)
    return Progress(metadata, counts, done is not None)


def _compare(path: str, told: Counts, found: Counts) -> None:
    for stream, (expected, present) in enumerate(zip(told, found, strict=True)):
        if len(present) < len(expected):
            raise layout.missing_chunk(path, stream, len(present))
        if present != expected:
            raise DataLossError(
                f"stream {stream} of the snapshot {path!r} has chunks of {list(present)} elements, "
                f"but was saved with {list(expected)}"
            )


def unfinished_streams(path: str) -> list[int]:
    """Local. The streams that a writer has yet to finish.

    Raises:
        DataLossError: A marker is damaged.
        NotFoundError: There is no snapshot.
    """
    return [stream for stream, told in enumerate(_finished(path)) if told is None]


def _finished(path: str) -> list[tuple[int, ...] | None]:
    """The chunks of each stream that is finished, None for others."""
    folders = (layout.stream_folder(path, stream) for stream in range(read(path).num_streams))
    markers = (layout.get(folder, layout.DONE) for folder in folders)
    return [None if marker is None else tuple(marker["counts"]) for marker in markers]


def finish(path: str) -> int:
    """Local. Say that a snapshot is complete; idempotent.

    Returns:
        The number of its elements.

    Raises:
        DataLossError: Chunks are missing, or are not what has been written.
        FailedPreconditionError: A stream is not finished, or a file cannot be written.
        OpError: The save has failed.
    """
    finished = _finished(path)
    counts = tuple(told for told in finished if told is not None)
    if len(counts) < len(finished):
        raise FailedPreconditionError(
            f"the snapshot {path!r} is not complete: streams {unfinished_streams(path)} are not "
            "finished"
        )
    found = progress(path)
    _compare(path, counts, found.counts)
    if not found.done:
        with layout.writing(path):
            layout.put(path, layout.DONE, {"counts": counts})
    return sum(map(sum, counts))


def fail(path: str, error: BaseException) -> None:
    """Local. Say that a snapshot will never be complete; readers raise what it was.

    Args:
        path: Of the snapshot.
        error: An OpError is raised as its class, any other one as an UnknownError that names it.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """
    code, message = code_and_message(error)
    with layout.writing(path):
        layout.put(path, layout.ERROR, {"code": code, "message": message})


def _facts(metadata: Metadata) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "identity": metadata.identity.hex(),
        "num_streams": metadata.num_streams,
        "dataset": metadata.dataset,
        "compression": metadata.compression,
        "element_spec": base64.b64encode(metadata.pickled_spec).decode(),
    }
