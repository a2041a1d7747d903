"""Writing one stream of a snapshot, so that nothing is lost or doubled whatever is killed when."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from dataservice.compression import Compressor
from dataservice.files import put_in_place
from dataservice.snapshot import frames, layout, metadata
from dataservice.snapshot.layout import ChunkName
from dataservice.snapshot.reader import ChunkReader
from mpidist.errors import AbortedError, AlreadyExistsError, FailedPreconditionError

# Large enough that few files make a large dataset; a loss of the writer costs at most so much work.
CHUNK_BYTES = 256 << 20

_BUFFER_BYTES = 1 << 20
_ATTEMPT = re.compile(r"attempt_([0-9]+)")
_UNCOMMITTED = "chunk"


class StreamWriter:
    """Writes one stream; for one thread.

    Elements that are appended count when they are committed, together with the state that the pass
    over the dataset has behind them. A later attempt at the stream goes on from there::

        with StreamWriter(path, stream, attempt) as writer:
            if writer.state is not None:
                elements.set_state(writer.state)
            for element in elements:
                writer.append(element)
                if writer.full:
                    writer.commit(elements.get_state())
            writer.finish(elements.get_state())

    Args:
        path: Folder of the snapshot, which exists.
        stream: Which of its streams.
        attempt: Higher than those of all attempts before. Earlier ones can commit nothing from now
            on, though their processes may still run.
        chunk_bytes: At how many bytes a chunk is full.

    Attributes:
        state: Where to go on; None from the beginning.
        elements: How many elements have been committed, by all attempts.
        finished: Whether the stream has come to its end; then there is nothing to do.

    Raises:
        AbortedError: A later attempt has begun.
        AlreadyExistsError: Another writer has this number of attempt.
        DataLossError: The snapshot is damaged.
        FailedPreconditionError: The folder cannot be written, or elements are to be compressed and
            the package cramjam is not installed.
        NotFoundError: There is no snapshot.
        UnimplementedError: Its compression is unknown here.
        ValueError: It has no such stream, or the attempt is negative.
    """

    def __init__(
        self,
        path: str,
        stream: int,
        attempt: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._metadata = metadata.read(path)
        if not 0 <= stream < self._metadata.num_streams:
            raise ValueError(
                f"the snapshot {path!r} has {self._metadata.num_streams} streams, so there is "
                f"no stream {stream}"
            )
        if attempt < 0:
            raise ValueError(f"attempts are numbered from 0, not {attempt}")
        self._snapshot = path
        self._stream = stream
        self._stream_folder = layout.stream_folder(path, stream)
        self._folder = os.path.join(self._stream_folder, f"attempt_{attempt}")
        self._chunk_bytes = chunk_bytes
        codec = self._metadata.compression
        self._compressor = Compressor(codec) if codec else None
        self._file: BinaryIO | None = None
        self._appended = 0
        self._counts: list[int] = []
        self._last: ChunkName | None = None
        self._closed = False
        self.state: bytes | None = None
        self.elements = 0
        self.finished = False
        with self._unless_fenced():
            self._fence(attempt)
            self._take_up()

    def append(self, element: Any) -> None:
        """Local. Add an element to the chunk; it is pickled at once.

        Raises:
            Exception: It cannot be pickled.
            AbortedError: A later attempt has begun.
            FailedPreconditionError: The file cannot be written.
        """
        self._check_open()
        pieces = frames.record(frames.ELEMENT, frames.pack(element, self._compressor))
        with self._unless_fenced():
            self._write(pieces)
        self._appended += 1

    @property
    def full(self) -> bool:
        """Local. Whether it is time to commit."""
        return self._file is not None and self._file.tell() >= self._chunk_bytes

    def commit(self, state: bytes) -> None:
        """Local. Make a chunk of the elements appended since the last one; without any, do nothing.

        Args:
            state: Of the pass behind the last element.

        Raises:
            AbortedError: A later attempt has begun; these elements are its to write.
            FailedPreconditionError: The file cannot be written.
        """
        self._check_open()
        if not self._appended:
            return
        chunk = ChunkName(self._stream, len(self._counts), self._appended)
        with self._unless_fenced():
            file = self._write(frames.record(frames.END, [frames.COUNT.pack(self._appended)]))
            place = file.tell()
            self._write([*frames.record(frames.STATE, [state]), frames.tail(place)])
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._file = None
            # The moment at which elements and state count. A later attempt has removed the folder.
            put_in_place(self._uncommitted, chunk.path(self._snapshot))
            if self._last is not None:
                _drop_state(self._last.path(self._snapshot))
        self._last = chunk
        self._counts.append(self._appended)
        self.elements += self._appended
        self.state = state
        self._appended = 0

    def finish(self, state: bytes) -> None:
        """Local. Commit the rest, and say that the stream has come to its end; idempotent.

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
                layout.put(self._stream_folder, layout.DONE, facts, by_way_of=self._folder)
            self.finished = True

    def close(self) -> None:
        """Local. Give up what is not committed; idempotent."""
        if self._file is not None:
            # Closing flushes what is given up: that there is no room for it does not matter.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                os.unlink(self._uncommitted)
            self._file = None
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

    @property
    def _uncommitted(self) -> str:
        return os.path.join(self._folder, _UNCOMMITTED)

    def _write(self, pieces: list[frames.Buffer]) -> BinaryIO:
        if self._file is None:
            self._file = open(self._uncommitted, "wb", _BUFFER_BYTES)  # noqa: SIM115 - till commit()
            self._file.write(frames.head(self._metadata.identity, self._stream, len(self._counts)))
        for piece in pieces:
            self._file.write(piece)
        return self._file

    def _fence(self, attempt: int) -> None:
        """Take the stream from earlier attempts.

        A writer commits by renaming files out of a folder of its own. Without the folder it cannot,
        on any file system. It makes the folder before it looks for others: of two that begin at the
        same time, the later attempt sees the earlier one, whose folder it removes.
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

    def _take_up(self) -> None:
        """Find out how far earlier attempts have come."""
        counts = layout.committed_chunks(self._snapshot, self._metadata.num_streams)[self._stream]
        self._counts = list(counts)
        self.elements = sum(counts)
        self.finished = layout.get(self._stream_folder, layout.DONE) is not None
        if counts:
            self._last = ChunkName(self._stream, len(counts) - 1, counts[-1])
            reader = ChunkReader(self._snapshot, self._metadata, self._last)
            try:
                self.state = reader.state()
            finally:
                reader.close()
        os.stat(self._folder)  # a later attempt may have changed all this meanwhile

    @contextmanager
    def _unless_fenced(self) -> Iterator[None]:
        """AbortedError in place of what fails because a later attempt has begun."""
        try:
            with layout.writing(self._snapshot):
                yield
        except Exception as error:
            self.close()  # what is written in part must not be committed
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
        # A name alone would not do where a writer on another host knows the folder without it.
        shutil.rmtree(doomed)


def _drop_state(path: str) -> None:
    """Cut off a state that is no longer the last: it may be as large as the elements."""
    with open(path, "r+b") as file:
        file.seek(-frames.TAIL.size, os.SEEK_END)
        place = frames.place_of_state(file.read())
        if place is not None:
            file.truncate(place)
