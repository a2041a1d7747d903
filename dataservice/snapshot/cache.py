"""The file of a ``cache``: one chunk. Its state has the offsets of the elements.

The file is written under another name, and gets its own when it is complete. It is locked while it
is written. A later writer recognises the files of killed processes by the missing lock, and removes
them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import weakref
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from dataservice.snapshot import format
from dataservice.snapshot.metadata import put_in_place, writing
from dataservice.snapshot.reader import ChunkReader
from dataservice.snapshot.writer import BUFFER_BYTES, ChunkWriter
from mpidist.errors import DataLossError, InvalidArgumentError

# The state has the number of elements, their offsets, the offset of the end, and the summary.
_OFFSET = np.dtype("<u8")
_HEAD = format.head(b"cache".ljust(16), 0, 0)
_PART = re.compile(r"\.part-\d+-[0-9a-f]{8}")


class CacheWriter:
    """Writes the file of a cache. An unfinished file goes with this object, or with the process.

    Args:
        path: The file. Its folder is made.
        summary: The dataset as text.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """

    def __init__(self, path: str, summary: str) -> None:
        self._path = path
        self._summary = summary
        self._offsets: list[int] = []
        with writing(f"the cache {path!r}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _remove_abandoned(path)
            file, self._part = _locked_part(path)
            self._chunk = ChunkWriter(file, _HEAD)
        self._finalizer = weakref.finalize(self, _discard, self._chunk, self._part, os.getpid())

    def add(self, element: Any) -> Any:
        """Write the next element, and return it.

        Raises:
            Exception: The element cannot be pickled. The others are still written.
            FailedPreconditionError: The file cannot be written. It is given up.
        """
        pieces = format.pack_element(element, None)
        if self._finalizer.alive:
            try:
                with writing(f"the cache {self._path!r}"):
                    offset = self._chunk.file.tell()
                    self._chunk.write(pieces)
            except BaseException:
                self.give_up()  # a record may be written in part
                raise
            self._offsets.append(offset)
        return element

    def finish(self) -> None:
        """Complete the file, and give it its name.

        Raises:
            FailedPreconditionError: The file cannot be written. It is given up.
        """
        if not self._finalizer.alive:
            return
        self._offsets.append(self._chunk.file.tell())
        # The summary may have file names that are not UTF-8.
        summary = self._summary.encode("utf-8", "surrogatepass")
        index = np.array(self._offsets, _OFFSET).tobytes() + summary
        try:
            with writing(f"the cache {self._path!r}"):
                self._chunk.finish(format.COUNT.pack(self._chunk.elements) + index)
                # On a file system without locks between hosts, another host may have removed the
                # file. Then a later iteration writes the cache.
                with suppress(FileNotFoundError):
                    put_in_place(self._part, self._path)
        finally:
            self.give_up()  # which finds no file if it has its name
        _remove_abandoned(self._path)

    def give_up(self) -> None:
        """Remove the unfinished file. Idempotent."""
        self._finalizer()


class CacheFile:
    """The elements of a file.

    Args:
        path: The file.
        summary: The dataset as text.

    Raises:
        DataLossError: The file is damaged, or is no cache.
        InvalidArgumentError: It is the cache of another dataset.
    """

    def __init__(self, path: str, summary: str) -> None:
        remedy = "Remove it, and the next iteration writes the cache anew"
        try:
            self._reader = ChunkReader(path, _HEAD, None, None, remedy)
        except IsADirectoryError as error:
            raise DataLossError(f"the cache {path!r} is a folder; name a file") from error
        except DataLossError as error:
            raise _misfit(path) from error
        try:
            known = self._read_index()
        except DataLossError as error:
            self.close()
            raise _misfit(path) from error
        if known != summary:
            self.close()
            raise InvalidArgumentError(
                f"the cache {path!r} was written for {known}, not for {summary}: remove it, or "
                "use another file"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def element(self, index: int) -> Any:
        """Return the element of an index.

        Raises:
            DataLossError: It is damaged. The others can still be read.
            FailedPreconditionError: It cannot be unpickled here.
        """
        self._reader.position = int(self._offsets[index]), index
        return self._reader.read()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._reader.close()

    def _read_index(self) -> str:
        """Read the offsets of the elements and of the end. Return the summary."""
        state = self._reader.state()
        (count,) = format.COUNT.unpack_from(state)
        self._offsets = np.frombuffer(state, _OFFSET, count + 1, format.COUNT.size)
        with suppress(StopIteration):
            self.element(count)  # checks the end
        summary = state[format.COUNT.size + self._offsets.nbytes :]
        return summary.decode("utf-8", "surrogatepass")


def _misfit(path: str) -> DataLossError:
    return DataLossError(f"the file {path!r} is not a cache, or is damaged: remove it")


def _locked_part(path: str) -> tuple[BinaryIO, str]:
    """Make a new file, which is locked as long as it is open. Return it and its name."""
    while True:
        part = f"{path}.part-{os.getpid()}-{secrets.token_hex(4)}"
        file = open(part, "xb", BUFFER_BYTES)  # noqa: SIM115 - until finish() or give_up()
        with suppress(OSError):  # without locks no process removes it
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(part):
            return file, part
        file.close()  # another process removed it before it was locked


def _remove_abandoned(path: str) -> None:
    """Remove the unfinished files of killed processes."""
    folder, name = os.path.split(path)
    for found in os.listdir(folder):
        if not found.startswith(name) or _PART.fullmatch(found, len(name)) is None:
            continue
        part = os.path.join(folder, found)
        # The file may be locked by its writer, already removed, or another user's.
        with suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)


def _discard(chunk: ChunkWriter, part: str, writer: int) -> None:
    if os.getpid() != writer:
        # A forked process drops the iterator that its parent continues. Closing the file must not
        # write the buffer, which the parent writes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), chunk.file.fileno())
        return
    with suppress(OSError):
        os.unlink(part)
    chunk.close()
