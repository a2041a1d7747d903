"""What lies beside the journal's database: who has it, and how many commits it has had."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import struct
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from dataservice.dispatch.journal_errors import damaged
from dataservice.files import write_whole
from mpidist.errors import FailedPreconditionError

LOCK = "lock"
COMMITS = "commits"

_NUMBER = struct.Struct("<QI")  # and its checksum
_SECTOR_BYTES = 512


def lock(directory: Path) -> io.FileIO:
    """Local. The file that nobody else can lock while it is open; it says who has it."""
    with ExitStack() as undo:
        file = undo.enter_context(io.FileIO(directory / LOCK, "a+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "which is just starting"
            raise FailedPreconditionError(
                f"another dispatcher, {holder}, uses the journal in {directory}: stop it, or "
                "use another directory"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}".encode())
        undo.pop_all()
    return file


class Commits:
    """The number of the database's commits, in a file outside it.

    SQLite takes a write-ahead log up to the first byte that is wrong, and a log that is missing
    for one that was not needed: both look like fewer commits. Hence this number, which is written
    after each. It may be less than the database's own, after a kill between the two, or after a
    loss of power: it does not wait for the disk. It is never more, unless commits were lost.

    It is there twice, each in a sector of its own, so that one bad place does not make a sound
    journal unusable. It is on the disk before there is a database, so that none is without it but
    by somebody's hand; nobody can tell then whether the log was whole, and the journal is refused.

    Args:
        directory: The journal's.

    Attributes:
        least: How many there have been at least, when it was opened.

    Raises:
        DataLossError: The file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._file = io.FileIO(directory / COMMITS, "r+")
        except FileNotFoundError as error:
            raise damaged(
                directory, f"{COMMITS} is missing, so lost commits cannot be detected"
            ) from error
        least = _read(self._file)
        if least is None:
            self._file.close()
            raise damaged(directory, f"{COMMITS} has no readable number")
        self.least = least

    def check(self, number: int) -> None:
        """Local. Raise DataLossError if the database says that it has had fewer."""
        if number < self.least:
            raise damaged(
                self._directory,
                f"the last {self.least - number} of {self.least} commits are lost: the "
                "write-ahead log (-wal) is missing, truncated or damaged",
            )

    def write(self, number: int) -> None:
        """Local. Say that the database has had so many."""
        os.pwrite(self._file.fileno(), _written(number), 0)

    def close(self) -> None:
        """Local. Leave the file as it is."""
        self._file.close()


def begin_commits(directory: Path) -> None:
    """Local. Make the file for a database that there is not yet.

    Raises:
        DataLossError: There was one, and it is gone.
    """
    if not (directory / COMMITS).exists():
        write_whole(directory / COMMITS, _written(0), directory / f"{COMMITS}.new")
        return
    with closing(Commits(directory)) as commits:
        if commits.least:
            raise damaged(directory, f"the database is missing, after {commits.least} commits")


class Places:
    """Files at their places, to be missed if somebody takes them away.

    What is written to a file that was removed is gone with its process, and where another has come
    in its place, another dispatcher may be writing.

    Args:
        directory: The journal's.
        lock: Held.
        same: Names of files that must be the same ones.
        there: Names of files that need only be there: those that are written by each commit. To
            ask when a file was written makes the file system write down each time after that.
    """

    def __init__(
        self, directory: Path, lock: io.FileIO, same: Iterable[str], there: Iterable[str]
    ) -> None:
        self._directory = directory
        self._same = {str(directory / name): _identity(directory / name) for name in same}
        # As it is held: at its place there may be another's already.
        self._same[str(directory / LOCK)] = _identity(lock.fileno())
        self._there = [str(directory / name) for name in there]

    def check(self) -> None:
        """Local. Raise if one has been removed or replaced.

        Raises:
            FailedPreconditionError: One has. It is no DataLossError: when all are back, so is all
                that was written.
        """
        for path, known in self._same.items():
            now = _identity(path)
            if now != known:
                raise self._missed(path, "removed" if now is None else "replaced")
        for path in self._there:
            if not os.access(path, os.F_OK):
                raise self._missed(path, "removed")

    def _missed(self, path: str, what: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the dispatcher's journal in {self._directory}: {os.path.basename(path)} was {what} "
            f"while this dispatcher, process {os.getpid()}, had it, and what it writes now would "
            "be lost; put back what was there, or end this dispatcher and start another"
        )


def _written(number: int) -> bytes:
    """Local. A number of commits, twice."""
    content = number.to_bytes(8, "little")
    return _NUMBER.pack(number, zlib.crc32(content)).ljust(_SECTOR_BYTES, b"\0") * 2


def _read(file: io.FileIO) -> int | None:
    """Local. The inverse of `_written`; the larger where they differ; None if there is none."""
    content = file.read(2 * _SECTOR_BYTES)
    numbers = []
    for start in (0, _SECTOR_BYTES):
        sector = content[start : start + _NUMBER.size].ljust(_NUMBER.size, b"\0")
        number, checksum = _NUMBER.unpack(sector)
        if checksum == zlib.crc32(sector[:8]):
            numbers.append(number)
    return max(numbers, default=None)


def _identity(path: str | Path | int) -> tuple[int, int] | None:
    """Local. Which file is at a place, or open; None for none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
