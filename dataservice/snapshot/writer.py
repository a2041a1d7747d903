"""Write the streams of a snapshot. A kill at any instant neither loses nor doubles an element."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dataservice.payload import Compressor
from dataservice.snapshot import format, metadata
from dataservice.snapshot.format import BUFFER_BYTES, ChunkName, ChunkWriter
from mpidist.errors import AbortedError, AlreadyExistsError, FailedPreconditionError

# Large enough that a large dataset has few files. A lost writer repeats at most one chunk.
CHUNK_BYTES = 256 << 20

_ATTEMPT = re.compile(r"attempt_([0-9]+)")
_UNCOMMITTED = "chunk"


class StreamWriter:
    """Writes one stream. One thread may use it.

    Appended elements count once they are committed, together with the state of the iterator behind
    them. A later attempt at the stream continues from there::

        with StreamWriter(path, stream, attempt) as writer:
            if writer.state is not None:
                elements.set_state(writer.state)
            for element in elements:
                writer.append(element)
                if writer.full:
                    writer.commit(elements.get_state())
            writer.finish(elements.get_state())

    Args:
        path: The folder of the snapshot, which exists.
        stream: The stream.
        attempt: A number above the numbers of all earlier attempts. Earlier attempts can commit
            nothing from now on, even if their processes still run.
        chunk_bytes: The size at which a chunk is full.

    Attributes:
        state: The state to continue from; None for the beginning.
        elements: The number of elements that all attempts have committed.
        finished: Whether the stream is finished, so that there is nothing to do.

    Raises:
        AbortedError: A later attempt has begun.
        AlreadyExistsError: Another writer has this number of attempt.
        DataLossError: The snapshot is damaged.
        FailedPreconditionError: The folder cannot be written, or elements are to be compressed and
            the package cramjam is not installed.
        NotFoundError: There is no snapshot.
        UnimplementedError: The compression of the snapshot is unknown here.
        ValueError: The snapshot has no such stream, or the attempt is negative.
    """

    def __init__(
        self, path: str, stream: int, attempt: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._metadata = metadata.read(path)
        if not 0 <= stream < self._metadata.num_streams:
            raise ValueError(
                f"the snapshot {path!r} has {self._metadata.num_streams} streams, so there is "
                f"no stream {stream}"
            )
        if attempt < 0:
            raise ValueError(f"attempts are numbered from 0, not {attempt}")
        codec = self._metadata.compression
        self._compressor = Compressor(codec) if codec else None
        self._snapshot = path
        self._stream = stream
        self._stream_folder = format.stream_folder(path, stream)
        self._folder = os.path.join(self._stream_folder, f"attempt_{attempt}")
        self._uncommitted = os.path.join(self._folder, _UNCOMMITTED)
        self._chunk_bytes = chunk_bytes
        self._chunk: ChunkWriter | None = None
        self._counts: list[int] = []
        self._last: ChunkName | None = None
        self._closed = False
        self.state: bytes | None = None
        self.elements = 0
        self.finished = False
        with self._unless_fenced():
            self._fence(attempt)
            self._resume()

    def append(self, element: Any) -> None:
        """Add an element to the chunk. It is pickled at once.

        Raises:
            Exception: The element cannot be pickled. The writer can still be used.
            AbortedError: A later attempt has begun.
            FailedPreconditionError: The file cannot be written.
        """
        self._check_open()
        pieces = format.pack_element(element, self._compressor)
        with self._unless_fenced():
            if self._chunk is None:
                file = open(self._uncommitted, "wb", BUFFER_BYTES)  # noqa: SIM115 - until commit()
                head = format.head(self._metadata.identity, self._stream, len(self._counts))
                self._chunk = ChunkWriter(file, head)
            self._chunk.write(pieces)

    @property
    def full(self) -> bool:
        """True if the chunk is full and should be committed."""
        return self._chunk is not None and self._chunk.file.tell() >= self._chunk_bytes

    def commit(self, state: bytes) -> None:
        """Make a chunk of the elements since the last commit. Without elements, do nothing.

        Args:
            state: The state of the iterator behind the last element.

        Raises:
            AbortedError: A later attempt has begun, and has to write these elements.
            FailedPreconditionError: The file cannot be written.
        """
        self._check_open()
        if self._chunk is None:
            return
        chunk = ChunkName(self._stream, len(self._counts), self._chunk.elements)
        with self._unless_fenced():
            self._chunk.finish(state)
            self._chunk.close()
            # This rename commits the elements and the state. A later attempt has removed the
            # folder, and then it fails.
            metadata.put_in_place(self._uncommitted, chunk.path(self._snapshot))
            self._chunk = None
            if self._last is not None:
                _drop_state(self._last.path(self._snapshot))
        self._last = chunk
        self._counts.append(chunk.elements)
        self.elements += chunk.elements
        self.state = state

    def finish(self, state: bytes) -> None:
        """Commit the rest, and mark the stream as finished. Idempotent.

        Args:
            state: See :meth:`commit`.

        Raises:
            AbortedError: A later attempt has begun.
            FailedPreconditionError: The file cannot be written.
        """
        if not self.finished:
            self.commit(state)
            facts = {"counts": self._counts}
            with self._unless_fenced():
                metadata.write_facts(self._stream_folder, format.DONE, facts, self._folder)
            self.finished = True

    def close(self) -> None:
        """Give up the uncommitted elements. Idempotent."""
        if self._chunk is not None:
            self._chunk.close()
            with suppress(OSError):
                os.unlink(self._uncommitted)
            self._chunk = None
        self._closed = True

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Inside

    def _check_open(self) -> None:
        if self._closed or self.finished:
            raise FailedPreconditionError(
                f"the writer of stream {self._stream} of {self._snapshot!r} is closed, has failed, "
                "or is finished"
            )

    def _fence(self, attempt: int) -> None:
        """Take the stream from earlier attempts.

        A writer commits by renaming files out of a folder of its own. Without the folder it cannot,
        on any file system. It makes the folder before it looks for others. If two attempts begin at
        the same time, the later one therefore sees the folder of the earlier one, and removes it.
        """
        try:
            os.mkdir(self._folder)
        except FileExistsError as error:
            raise AlreadyExistsError(
                f"attempt {attempt} at stream {self._stream} of {self._snapshot!r} was started "
                "before: number attempts in ascending order"
            ) from error
        for name in os.listdir(self._stream_folder):
            match = _ATTEMPT.match(name)
            other = int(match[1]) if match else attempt
            if other > attempt:
                shutil.rmtree(self._folder, ignore_errors=True)
            elif other < attempt:
                _remove(os.path.join(self._stream_folder, name))

    def _resume(self) -> None:
        """Read the progress of earlier attempts."""
        streams = metadata.committed_chunks(self._snapshot, self._metadata.num_streams)
        self._counts = list(streams[self._stream])
        self.elements = sum(self._counts)
        self.finished = metadata.read_facts(self._stream_folder, format.DONE) is not None
        if self._counts:
            self._last = ChunkName(self._stream, len(self._counts) - 1, self._counts[-1])
            reader = metadata.open_chunk(self._snapshot, self._metadata, self._last)
            try:
                self.state = reader.state()
            finally:
                reader.close()
        os.stat(self._folder)  # fails if a later attempt may have changed all this meanwhile

    @contextmanager
    def _unless_fenced(self) -> Iterator[None]:
        """Turn errors into an AbortedError if a later attempt has begun, which causes them."""
        try:
            with metadata.writing(f"the snapshot {self._snapshot!r}"):
                yield
        except Exception as error:
            self.close()  # a partly written chunk must not be committed
            if isinstance(error, AlreadyExistsError) or os.path.isdir(self._folder):
                raise
            raise AbortedError(
                f"{os.path.basename(self._folder)} at stream {self._stream} of the snapshot "
                f"{self._snapshot!r} can write nothing more: a later attempt has begun, or the "
                "snapshot was removed"
            ) from error


def _remove(folder: str) -> None:
    """Remove the folder of an earlier attempt, whose writer may still make files in it."""
    doomed = f"{folder}.{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):  # another attempt removes it as well
        os.rename(folder, doomed)
        # The rename alone is not enough: a writer on another host may know the folder by its inode.
        shutil.rmtree(doomed)


def _drop_state(path: str) -> None:
    """Cut off a state that is no longer the last. It may be as large as the elements."""
    with open(path, "r+b") as file:
        file.seek(-format.TAIL.size, os.SEEK_END)
        offset = format.state_offset(file.read())
        if offset is not None:
            file.truncate(offset)
