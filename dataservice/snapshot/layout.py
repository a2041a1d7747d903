"""The folder of a snapshot: names in it, and files that are there whole or not at all.

::

    metadata                          what the snapshot is
    DONE                              numbers of elements of all chunks, when it is complete
    ERROR                             why it never will be
    chunks/chunk_<stream>_<number>_<elements>
    streams/stream_<stream>/DONE      how many chunks the stream has, when it is finished
    streams/stream_<stream>/attempt_<attempt>/   what a writer has not committed

Everything gets its name by a rename, so that whatever bears one is whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dataservice.files import write_whole
from mpidist.errors import DataLossError, Error, FailedPreconditionError

METADATA = "metadata"
DONE = "DONE"
ERROR = "ERROR"
CHUNKS = "chunks"

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_CHUNK = re.compile(rf"chunk_{_NUMBER}_{_NUMBER}_{_NUMBER}")

Counts = tuple[tuple[int, ...], ...]
"""For each stream, the number of elements of each of its chunks."""


@dataclass(frozen=True)
class ChunkName:
    """What the name of a chunk says.

    Attributes:
        stream: Of which stream it is.
        number: Which of the stream's chunks, from 0.
        elements: How many elements are in it.
    """

    stream: int
    number: int
    elements: int

    @classmethod
    def parse(cls, name: str) -> ChunkName:
        """Local. The inverse of ``str``.

        Raises:
            DataLossError: No chunk has such a name.
        """
        match = _CHUNK.fullmatch(name)
        if match is None:
            raise DataLossError(
                f"{name!r} is not the name of a chunk: remove it if it was copied there; "
                "otherwise the snapshot is damaged"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"chunk_{self.stream}_{self.number}_{self.elements}"

    def path(self, snapshot: str) -> str:
        """Local. The file, in the folder of a snapshot."""
        return os.path.join(snapshot, CHUNKS, str(self))


def stream_folder(snapshot: str, stream: int) -> str:
    """Local. The folder of a stream."""
    return os.path.join(snapshot, "streams", f"stream_{stream}")


def committed_chunks(snapshot: str, num_streams: int) -> Counts:
    """Local. The chunks that are there; more may come meanwhile.

    Raises:
        DataLossError: A name is no chunk's, or one of a stream that does not exist; or a chunk is
            missing, or there twice.
    """
    first = _list_chunks(snapshot)
    # A folder that changes is not listed at one instant: a chunk may be left out though the next
    # one, committed later, is there. A list made after that has it.
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
    return tuple(tuple(_leading(numbers)) for numbers in streams)


def missing_chunk(snapshot: str, stream: int, number: int) -> DataLossError:
    """Local. The error that a chunk is not there."""
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


def _leading(numbers: dict[int, int]) -> Iterator[int]:
    """The elements of chunks 0, 1, ... up to the first that is not there yet."""
    number = 0
    while number in numbers:
        yield numbers[number]
        number += 1


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Local. FailedPreconditionError in place of what says that a file cannot be written."""
    try:
        yield
    except Error:  # some of these are of the system's kinds too
        raise
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the snapshot {path!r}: {error}; check the free space and the "
            "permissions of its folder"
        ) from error


def put(folder: str, name: str, facts: dict[str, Any], *, by_way_of: str | None = None) -> None:
    """Write a file of facts in JSON with a checksum. An existing one is replaced.

    Args:
        folder: The folder of the file.
        name: The name of the file.
        facts: The content.
        by_way_of: The folder that the file is written in, and renamed from. By default the same.
    """
    content = json.dumps(facts)
    told = json.dumps({"crc32": zlib.crc32(content.encode()), "facts": facts})
    temporary = os.path.join(by_way_of or folder, f"{name}.partial-{secrets.token_hex(4)}")
    write_whole(os.path.join(folder, name), told.encode(), temporary)


def get(folder: str, name: str) -> dict[str, Any] | None:
    """Local. What :func:`put` has written; None if there is no such file.

    Raises:
        DataLossError: It is damaged.
    """
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
        facts: dict[str, Any] = content["facts"]
        crc, told = zlib.crc32(json.dumps(facts).encode()), content["crc32"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLossError(f"the file {path!r} of a snapshot is damaged: {error!r}") from error
    if crc != told:
        raise DataLossError(f"the file {path!r} of a snapshot is damaged: its checksum is wrong")
    return facts
