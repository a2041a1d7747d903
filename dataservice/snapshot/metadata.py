"""The description and the progress of a snapshot: it has begun, is complete, or has failed."""

from __future__ import annotations

import base64
import dataclasses
import errno
import json
import os
import pickle
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle

from dataservice.dataset.spec import Spec
from dataservice.errors import code_and_message
from dataservice.payload import CODECS
from dataservice.snapshot.format import (
    CHUNKS,
    DONE,
    ERROR,
    METADATA,
    ChunkName,
    ChunkReader,
    head,
    stream_folder,
)
from mpidist.errors import (
    AlreadyExistsError,
    DataLossError,
    Error,
    FailedPreconditionError,
    NotFoundError,
    UnimplementedError,
    from_code,
)

FORMAT = 1

Counts = tuple[tuple[int, ...], ...]
"""For each stream, the number of elements of each of its chunks."""


@dataclass(frozen=True)
class Metadata:
    """The description of a snapshot. It is written when the save begins.

    Attributes:
        identity: 16 bytes that no other snapshot has.
        num_streams: The number of streams.
        dataset: The summary of the dataset.
        compression: The codec of the records; None for no compression.
        pickled_spec: The element_spec; see :func:`pack_spec`. It is unpickled only by readers,
            because a saver may lack the classes.
    """

    identity: bytes
    num_streams: int
    dataset: str
    compression: str | None
    pickled_spec: bytes

    def element_spec(self) -> Spec | None:
        """Return the element_spec; None if the saver did not know it.

        Raises:
            DataLossError: It is damaged, or refers to a class that is missing here.
        """
        try:
            return pickle.loads(self.pickled_spec)
        except Exception as error:
            raise DataLossError(
                f"cannot unpickle the element_spec of a snapshot of {self.dataset}: {error!r}"
            ) from error


@dataclass(frozen=True)
class Progress:
    """The progress of a save.

    Attributes:
        metadata: The description of the snapshot.
        counts: The committed chunks.
        done: Whether the save is complete.
    """

    metadata: Metadata
    counts: Counts
    done: bool


def pack_spec(spec: Spec | None) -> bytes:
    """Pickle an element_spec, or None if it is not known."""
    data: bytes = cloudpickle.dumps(spec, protocol=5)
    return data


# The life of a snapshot


def create(
    path: str,
    num_streams: int,
    dataset: str,
    pickled_spec: bytes,
    compression: str | None = None,
) -> Metadata:
    """Begin a snapshot: make its folder and all files that writers and readers need.

    Args:
        path: The folder. It may exist if it is empty.
        num_streams: The number of streams.
        dataset: The summary of the dataset.
        pickled_spec: See :func:`pack_spec`.
        compression: The codec of the records.

    Raises:
        AlreadyExistsError: The folder has a snapshot, complete or not, or other files.
        FailedPreconditionError: The folder cannot be written.
        ValueError: There are no streams.
    """
    if num_streams < 1:
        raise ValueError(f"a snapshot needs at least 1 stream, not {num_streams}")
    path = os.path.realpath(path)
    metadata = Metadata(secrets.token_bytes(16), num_streams, dataset, compression, pickled_spec)
    partial = f"{path}.partial-{secrets.token_hex(8)}"
    with writing(f"the snapshot {path!r}"):
        try:
            os.makedirs(os.path.join(partial, CHUNKS))
            for stream in range(num_streams):
                os.makedirs(stream_folder(partial, stream))
            write_facts(partial, METADATA, _facts_of(metadata))
            put_in_place(partial, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise AlreadyExistsError(_existing(path)) from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return metadata


def add_stream(path: str) -> None:
    """Add a stream to a snapshot that is being saved by this process alone.

    Raises:
        FailedPreconditionError: The folder cannot be written.
    """
    metadata = read(path)
    with writing(f"the snapshot {path!r}"):
        os.makedirs(stream_folder(path, metadata.num_streams), exist_ok=True)
        added = dataclasses.replace(metadata, num_streams=metadata.num_streams + 1)
        write_facts(path, METADATA, _facts_of(added))


def read(path: str) -> Metadata:
    """Return the description of a snapshot.

    Raises:
        DataLossError: It is damaged, or has another format.
        NotFoundError: There is no snapshot.
        UnimplementedError: The compression is unknown here.
    """
    facts = read_facts(path, METADATA)
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
    """Return the progress of the save of a snapshot.

    Raises:
        DataLossError: The snapshot is damaged.
        NotFoundError: There is no snapshot.
        OpError: The save has failed. This is the error that :func:`fail` was given.
    """
    metadata = read(path)
    failed = read_facts(path, ERROR)
    if failed is not None:
        raise from_code(failed["code"], f"the save of {path!r} has failed: {failed['message']}")
    done = read_facts(path, DONE)  # before the chunks are listed: then the list is complete
    try:
        counts = committed_chunks(path, metadata.num_streams)
    except DataLossError:
        if read(path) == metadata:
            raise
        return progress(path)  # a stream was added meanwhile, and has a chunk
    if done is not None:
        _compare(path, tuple(map(tuple, done["counts"])), counts)
    return Progress(metadata, counts, done is not None)


def finish(path: str) -> int:
    """Mark a snapshot as complete. Idempotent.

    Returns:
        The number of elements.

    Raises:
        DataLossError: Chunks are missing, or differ from the committed chunks.
        FailedPreconditionError: A stream is not finished, or a file cannot be written.
        OpError: The save has failed.
    """
    finished = _finished(path)
    counts = tuple(chunks for chunks in finished if chunks is not None)
    if len(counts) < len(finished):
        raise FailedPreconditionError(
            f"the snapshot {path!r} is not complete: streams "
            f"{[stream for stream, chunks in enumerate(finished) if chunks is None]} are not "
            "finished"
        )
    found = progress(path)
    _compare(path, counts, found.counts)
    if not found.done:
        with writing(f"the snapshot {path!r}"):
            write_facts(path, DONE, {"counts": counts})
    return sum(map(sum, counts))


def fail(path: str, error: BaseException) -> None:
    """Mark a snapshot as failed. Readers raise the error.

    Args:
        path: The folder of the snapshot.
        error: The cause. An OpError keeps its class. Any other error becomes an UnknownError that
            names it.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """
    code, message = code_and_message(error)
    with writing(f"the snapshot {path!r}"):
        write_facts(path, ERROR, {"code": code, "message": message})


def _existing(path: str) -> str:
    if read_facts(path, METADATA) is None:
        return f"cannot save to {path!r}: there is something already, and no snapshot"
    marks = (f"({mark}) " for mark in (DONE, ERROR) if read_facts(path, mark))
    return (
        f"there is a snapshot {next(marks, '')}at {path!r}, or one is being saved there: name "
        "another folder, or remove it first if nobody writes it any more"
    )


def _facts_of(metadata: Metadata) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "identity": metadata.identity.hex(),
        "num_streams": metadata.num_streams,
        "dataset": metadata.dataset,
        "compression": metadata.compression,
        "element_spec": base64.b64encode(metadata.pickled_spec).decode(),
    }


def _finished(path: str) -> list[tuple[int, ...] | None]:
    """Return the chunks of each finished stream, and None for the others."""
    folders = (stream_folder(path, stream) for stream in range(read(path).num_streams))
    marks = (read_facts(folder, DONE) for folder in folders)
    return [None if mark is None else tuple(mark["counts"]) for mark in marks]


def _compare(path: str, recorded: Counts, found: Counts) -> None:
    for stream, (expected, present) in enumerate(zip(recorded, found, strict=True)):
        if len(present) < len(expected):
            raise missing_chunk(path, stream, len(present))
        if present != expected:
            raise DataLossError(
                f"stream {stream} of the snapshot {path!r} has chunks of {list(present)} elements, "
                f"but was saved with {list(expected)}"
            )


# Committed chunks


def committed_chunks(snapshot: str, num_streams: int) -> Counts:
    """Return the committed chunks. Writers may commit more meanwhile.

    Raises:
        DataLossError: A file is no chunk, or belongs to a stream that does not exist, or a chunk is
            missing or present twice.
    """
    first = _list_chunks(snapshot)
    # A folder that changes is not listed at one instant: the list may lack a chunk and have the
    # next one, which was committed later. A second list has the chunk.
    found = set(first) if _is_gapless(first) else {*first, *_list_chunks(snapshot)}
    streams: list[dict[int, int]] = [{} for _ in range(num_streams)]
    for chunk in sorted(found, key=str):
        if chunk.stream >= num_streams:
            raise DataLossError(
                f"the snapshot {snapshot!r} has {num_streams} streams, so the chunk "
                f"{str(chunk)!r} is not one of its own"
            )
        if chunk.number in streams[chunk.stream]:
            raise DataLossError(
                f"the snapshot {snapshot!r} has chunk {chunk.number} of stream {chunk.stream} "
                f"twice; one of them is {str(chunk)!r}"
            )
        streams[chunk.stream][chunk.number] = chunk.elements
    for chunk in first:
        for number in range(chunk.number):
            if number not in streams[chunk.stream]:
                raise missing_chunk(snapshot, chunk.stream, number)
    return tuple(tuple(_leading(chunks)) for chunks in streams)


def open_chunk(snapshot: str, metadata: Metadata, chunk: ChunkName) -> ChunkReader:
    """Open a chunk of a snapshot.

    Args:
        snapshot: The folder of the snapshot.
        metadata: The description of the snapshot.
        chunk: The chunk.

    Raises:
        DataLossError: The chunk is missing, damaged, or belongs to another snapshot.
        FailedPreconditionError: It is compressed, and the package cramjam is not installed.
    """
    try:
        return ChunkReader(
            chunk.path(snapshot),
            head(metadata.identity, chunk.stream, chunk.number),
            chunk.elements,
            metadata.compression,
            "Copy it from where it is whole, or save the dataset again",
        )
    except FileNotFoundError as error:
        raise missing_chunk(snapshot, chunk.stream, chunk.number) from error


def missing_chunk(snapshot: str, stream: int, number: int) -> DataLossError:
    """Return the error for a missing chunk."""
    return DataLossError(
        f"chunk {number} of stream {stream} is missing from the snapshot {snapshot!r}: copy it "
        "from where the snapshot is whole, or save the dataset again"
    )


def _list_chunks(snapshot: str) -> list[ChunkName]:
    try:
        names = os.listdir(os.path.join(snapshot, CHUNKS))
    except FileNotFoundError as error:
        raise DataLossError(
            f"the snapshot {snapshot!r} is damaged: its folder {CHUNKS!r} is missing"
        ) from error
    return [ChunkName.parse(name) for name in names]


def _is_gapless(chunks: Iterable[ChunkName]) -> bool:
    present = {(chunk.stream, chunk.number) for chunk in chunks}
    return all(number == 0 or (stream, number - 1) in present for stream, number in present)


def _leading(chunks: dict[int, int]) -> Iterator[int]:
    """Yield the elements of chunks 0, 1, ... up to the first missing one."""
    number = 0
    while number in chunks:
        yield chunks[number]
        number += 1


# Files that are on the disk as a whole or not at all. The content is written under a temporary name
# and forced to the disk. Then one rename gives it its name.


def put_in_place(temporary: str, path: str) -> None:
    """Rename a file or folder, which is already on the disk, for good.

    The folder is forced to the disk, because a rename alone does not survive a loss of power.

    Args:
        temporary: The present name.
        path: The new name, in the same file system. An existing file or empty folder is replaced.
    """
    os.rename(temporary, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_facts(
    folder: str, name: str, facts: dict[str, Any], temporary_folder: str | None = None
) -> None:
    """Write facts in JSON with a checksum. An existing file is replaced, as a whole.

    Args:
        folder: The folder of the file.
        name: The name of the file.
        facts: The content.
        temporary_folder: The folder of the temporary file. By default the same folder.

    Raises:
        OSError: The file cannot be written. The temporary file is removed.
    """
    content = json.dumps(facts)
    whole = json.dumps({"crc32": zlib.crc32(content.encode()), "facts": facts})
    temporary = os.path.join(temporary_folder or folder, f"{name}.partial-{secrets.token_hex(4)}")
    try:
        with open(temporary, "w") as file:
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, os.path.join(folder, name))
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_facts(folder: str, name: str) -> dict[str, Any] | None:
    """Read the facts of :func:`write_facts`. Return None if there is no such file.

    Raises:
        DataLossError: The file is damaged.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
        facts: dict[str, Any] = content["facts"]
        crc, recorded = zlib.crc32(json.dumps(facts).encode()), content["crc32"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLossError(f"the file {path!r} of a snapshot is damaged: {error!r}") from error
    if crc != recorded:
        raise DataLossError(f"the file {path!r} of a snapshot is damaged: its checksum is wrong")
    return facts


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Turn an OSError into a FailedPreconditionError: the snapshot or cache cannot be written."""
    try:
        yield
    except Error:  # some of these are OSErrors, too
        raise
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write {name}: {error}; check the free space and the permissions of its folder"
        ) from error
