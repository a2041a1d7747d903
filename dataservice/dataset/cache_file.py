"""The file of a ``cache``: a pickle an element, a list of their places, and the place of that.

It is written under another name, and gets its own when it is whole. While it is written it is
locked: so who writes next knows what has been left by processes that were killed, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import secrets
import struct
import weakref
from contextlib import suppress
from typing import Any, BinaryIO

import cloudpickle

from mpidist.errors import DataLossError, InvalidArgumentError

_MAGIC = b"mpidist-cache-1\n"
_END = struct.Struct("<Q16s")
_PART = re.compile(r"\.part-\d+-[0-9a-f]{8}")


class Writing:
    """Writes elements; what is not finished goes with this object, or with the process.

    Args:
        path: Of the file; the folder is made.
        summary: The dataset as text.
    """

    def __init__(self, path: str, summary: str) -> None:
        self._path = path
        self._summary = summary
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _remove_abandoned(path)
        self._file, self._part = _locked_part(path)
        self._places: list[int] = []
        self._finalizer = weakref.finalize(self, _discard, self._file, self._part, os.getpid())

    def add(self, element: Any) -> Any:
        """Local. Write the next element; what the pass shall give."""
        place = self._file.tell()
        cloudpickle.dump(element, self._file, protocol=5)
        self._places.append(place)
        return element

    def finish(self) -> None:
        """Local. There are no more: give the file its name."""
        place = self._file.tell()
        pickle.dump((self._summary, self._places), self._file, protocol=5)
        self._file.write(_END.pack(place, _MAGIC))
        self._file.flush()
        # Where locks do not reach other hosts, one may have removed it: then another pass writes.
        with suppress(FileNotFoundError):
            os.replace(self._part, self._path)
        self._finalizer.detach()
        self._file.close()
        _remove_abandoned(self._path)

    def give_up(self) -> None:
        """Local. Leave nothing."""
        self._finalizer()


class CacheFile:
    """The elements of a file.

    Args:
        path: The file.
        summary: The dataset as text.

    Raises:
        DataLossError: It is damaged, or something else.
        InvalidArgumentError: It is of another dataset.
    """

    def __init__(self, path: str, summary: str) -> None:
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - until close()
        except IsADirectoryError as error:
            raise DataLossError(f"the cache {path!r} is a folder; name a file") from error
        try:
            self._file.seek(-_END.size, os.SEEK_END)
            place, magic = _END.unpack(self._file.read())
            self._file.seek(place if magic == _MAGIC else 1 << 62)
            known, self._places = pickle.load(self._file)
        except Exception as error:
            self._file.close()
            raise DataLossError(
                f"the file {path!r} is not a cache, or is damaged ({error!r}): remove it"
            ) from error
        if known != summary:
            self._file.close()
            raise InvalidArgumentError(
                f"the cache {path!r} was written for {known}, not for {summary}: remove it, or "
                "use another file"
            )

    def __len__(self) -> int:
        return len(self._places)

    def element(self, index: int) -> Any:
        """Local. The element of an index."""
        self._file.seek(self._places[index])
        return pickle.load(self._file)

    def close(self) -> None:
        """Local. Read no more."""
        self._file.close()


def _locked_part(path: str) -> tuple[BinaryIO, str]:
    """A new file, locked for as long as it is open, and its name."""
    while True:
        part = f"{path}.part-{os.getpid()}-{secrets.token_hex(4)}"
        file = open(part, "xb")  # noqa: SIM115 - until finish() or give_up()
        with suppress(OSError):  # without locks nobody removes it
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(part):
            return file, part
        file.close()  # somebody saw it before it was locked


def _remove_abandoned(path: str) -> None:
    """Remove what processes that were killed have left of a file."""
    folder, name = os.path.split(path)
    for found in os.listdir(folder):
        if not found.startswith(name) or _PART.fullmatch(found, len(name)) is None:
            continue
        part = os.path.join(folder, found)
        # It is being written, or gone, or another user's.
        with suppress(OSError), open(part, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(part)


def _discard(file: BinaryIO, part: str, writer: int) -> None:
    if os.getpid() != writer:  # a forked process drops what its parent goes on with
        return
    with suppress(OSError):
        os.unlink(part)
    with suppress(OSError):  # what is still to be written may find no room
        file.close()
