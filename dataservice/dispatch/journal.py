"""What a dispatcher must not forget when it ends, in a file."""

from __future__ import annotations

import functools
import os
import sqlite3
import struct
import weakref
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from dataservice.dispatch.journal_errors import damaged, explained
from dataservice.dispatch.journal_files import (
    COMMITS,
    Commits,
    Places,
    begin_commits,
    lock,
)
from dataservice.files import put_in_place
from mpidist.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

_NAME = "journal.sqlite"
_LOG = f"{_NAME}-wal"
# In the file's header: whose it is, and what is in it.
_APPLICATION = 0x6D706464
_FORMAT = 2
_MAKE = (
    "PRAGMA journal_mode = MEMORY",  # the file is nobody's yet
    "PRAGMA auto_vacuum = FULL",  # the file shrinks with what it holds
    # The checks are made at each start, too.
    "CREATE TABLE records (kind TEXT CHECK (typeof(kind) = 'text'), "
    "key INTEGER CHECK (typeof(key) = 'integer'), value BLOB CHECK (typeof(value) = 'blob'), "
    "checksum INTEGER CHECK (typeof(checksum) = 'integer'), PRIMARY KEY (kind, key)) WITHOUT ROWID",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORMAT}",
)
_READ = "SELECT kind, key, value, checksum FROM records"
_PUT = "INSERT OR REPLACE INTO records (kind, key, value, checksum) VALUES (?, ?, ?, ?)"
_REMOVE = "DELETE FROM records WHERE kind = ? AND key = ?"
_READ_CHECKSUM = "SELECT checksum FROM records WHERE kind = ? AND key = ?"
_READ_ONE = "SELECT value, checksum FROM records WHERE kind = ? AND key = ?"
# What each commit leaves of itself: how many there have been, and the sum of the checksums of all
# other records. Without its log, a file may have some pages of the last commit and some of earlier
# ones. A row like others, so that it seldom takes a page more; the dispatcher has no such kind.
_LAST = ("commit", 0)
_LAST_VALUE = struct.Struct("<QQ")
_SUM_END = 1 << 64
_SMALLEST_BYTES = 512  # SQLite's smallest page
# What a transaction of unusual size has made of the write-ahead log is given back down to this.
_LARGEST_LOG_BYTES = 4 << 20
# SQLite's limit of a row, less some room for the rest of the row.
_LARGEST_RECORD_BYTES = 10**9 - 10**4


class Journal:
    """Records that outlive the process, and the computer's loss of power.

    It holds the present state, not its history: a row for each record that there is. A commit is
    there as a whole or not at all, whenever the process is killed. One dispatcher at a time has a
    journal, and one thread at a time uses it, any thread; a fork of the process has it closed.

    Args:
        directory: Where it is, for nothing else; made if it does not exist, for this user alone.

    Raises:
        AbortedError: Another program is busy with the file.
        DataLossError: The journal is damaged, or lacks the last commits.
        FailedPreconditionError: Another dispatcher has it, it was written by another version, or
            the directory cannot be one.
        PermissionDeniedError: This user may not write there.
        ResourceExhaustedError: The disk is full.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory).absolute()
        with explained(self._directory), ExitStack() as undo:
            self._directory.mkdir(0o700, parents=True, exist_ok=True)
            # Closed when the journal is, and in forks.
            self._lock = undo.enter_context(lock(self._directory))
            self._connection = undo.enter_context(closing(_open(self._directory)))
            self._commits = undo.enter_context(closing(Commits(self._directory)))
            self._number, self._sum = _last(self._connection, self._directory)
            self._commits.check(self._number)
            self._places = Places(self._directory, self._lock, (_NAME,), (_LOG, COMMITS))
            undo.pop_all()
        _OPEN.add(self)

    def load(self) -> Mapping[str, Mapping[int, bytes]]:
        """Local. What was committed.

        Returns:
            The records, by kind and key; kinds without records are left out.

        Raises:
            DataLossError: The journal is damaged.
            FailedPreconditionError: The journal is closed.
        """
        self._check_open()
        tables: dict[str, dict[int, bytes]] = {}
        total = 0
        with explained(self._directory):
            for kind, key, value, checksum in self._connection.execute(_READ):
                if checksum != _checksum(kind, key, value):
                    raise damaged(self._directory, f"{kind} {key} has a wrong checksum")
                if (kind, key) != _LAST:
                    tables.setdefault(kind, {})[key] = value
                    total += checksum
        if total % _SUM_END != self._sum:
            raise damaged(self._directory, "records of the last commit are missing")
        return tables

    def commit(self, changes: Mapping[tuple[str, int], bytes | None]) -> None:
        """Local. Write records and remove others, all or none; on the disk when it returns.

        Args:
            changes: By kind and key (signed, of 64 bits): the record, or None to remove it.

        Raises:
            AbortedError: Another program is busy with the file; nothing is changed.
            DataLossError: The journal is damaged.
            FailedPreconditionError: The journal is closed, or somebody has removed or replaced its
                files, so that what is written would be lost.
            InvalidArgumentError: A record is too large; nothing is changed.
            ResourceExhaustedError: The disk is full; nothing is changed (or all, if it was only the
                number of commits that could not be written), and when there is room again the same
                changes can be made.
        """
        self._check_open()
        for (kind, key), value in changes.items():
            self.check_size(f"{kind} {key}", 0 if value is None else len(value))
        records = [
            (*name, value, _checksum(*name, value))
            for name, value in changes.items()
            if value is not None
        ]
        removed = [name for name, value in changes.items() if value is None]
        number, total = self._number + 1, self._sum + sum(record[-1] for record in records)
        with explained(self._directory):
            with self._connection as transaction:
                transaction.execute("BEGIN IMMEDIATE")
                self._places.check()  # another dispatcher may have come in our place
                for name in changes:
                    total -= (transaction.execute(_READ_CHECKSUM, name).fetchone() or (0,))[0]
                transaction.executemany(_PUT, records)
                transaction.executemany(_REMOVE, removed)
                transaction.execute(_PUT, _last_record(number, total))
            self._number, self._sum = number, total % _SUM_END
            self._commits.write(number)
            # Again: what was taken away meanwhile is not durable.
            self._places.check()

    def check_size(self, what: str, nbytes: int) -> None:
        """Local. Raise InvalidArgumentError if something is too large to be written."""
        if nbytes > _LARGEST_RECORD_BYTES:
            raise InvalidArgumentError(
                f"{what} has {nbytes} bytes, more than the {_LARGEST_RECORD_BYTES} that a "
                f"record of the dispatcher's journal in {self._directory} may have: keep large "
                "data in files that the dataset reads"
            )

    def damaged(self, what: str) -> DataLossError:
        """Local. The error of records that no dispatcher has written so."""
        return damaged(self._directory, what)

    def close(self) -> None:
        """Local. Let another have the journal; idempotent."""
        if not self._lock.closed:
            with explained(self._directory), self._lock, closing(self._commits):
                self._connection.close()

    def _check_open(self) -> None:
        if self._lock.closed:
            raise FailedPreconditionError(
                f"the dispatcher's journal in {self._directory} is closed in process {os.getpid()}"
                "; open it again, in one process"
            )


_OPEN: weakref.WeakSet[Journal] = weakref.WeakSet()


def _forget() -> None:
    """Local. Leave to the parent what is its: a fork would hold the lock longer than its holder."""
    for journal in _OPEN:
        journal._lock.close()
        journal._commits.close()


os.register_at_fork(after_in_child=_forget)


def _open(directory: Path) -> sqlite3.Connection:
    """Local. A connection to the file, which is made if it was never there."""
    path = directory / _NAME
    # SQLite would take either for a new file, and throw away what is in the write-ahead log.
    if path.exists():
        if path.stat().st_size < _SMALLEST_BYTES:
            raise damaged(directory, f"{_NAME} is truncated")
    elif (directory / _LOG).exists():
        raise damaged(directory, f"{_NAME} is missing, but its write-ahead log is there")
    else:
        begin_commits(directory)
        _make(path)
    with ExitStack() as undo:
        connection = undo.enter_context(closing(_connect(path)))
        _check(connection, directory)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise FailedPreconditionError(
                f"SQLite cannot keep a write-ahead log on the file system of {directory}: use a "
                "directory on another one"
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_LARGEST_LOG_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            f"PRAGMA user_version = {_FORMAT}"
        )  # fails where no commit could be made
        connection.execute("ROLLBACK")
        undo.pop_all()
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    """Local. A connection that begins no transaction by itself, for any thread."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # Text that is damaged is still read: its checksum tells.
    connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
    return connection


def _make(path: Path) -> None:
    """Local. Make the file, whole or not at all."""
    new = path.with_name(f"{_NAME}.new")
    new.unlink(missing_ok=True)  # of one that was killed here
    with closing(_connect(new)) as connection:
        for statement in _MAKE:
            connection.execute(statement)
        connection.execute(_PUT, _last_record(0, 0))
    put_in_place(new, path)


def _check(connection: sqlite3.Connection, directory: Path) -> None:
    """Local. Raise if the file is another program's or version's, or damaged."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION:
        raise FailedPreconditionError(
            f"{directory / _NAME} is another program's database; give another directory"
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT:
        raise FailedPreconditionError(
            f"the dispatcher's journal in {directory} has format {version}, and this version of "
            f"mpidist reads format {_FORMAT}; go on with the version that wrote it, or give "
            "another directory"
        )
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise damaged(directory, " ".join(found.split()))


def _checksum(kind: str, key: int, value: bytes) -> int:
    """Local. CRC-32 of a record and its place: SQLite would not see that a byte has changed."""
    return zlib.crc32(value, zlib.crc32(kind.encode() + key.to_bytes(8, "little", signed=True)))


def _last(connection: sqlite3.Connection, directory: Path) -> tuple[int, int]:
    """Local. What the last transaction has left: the number of commits, and the sum."""
    value, checksum = connection.execute(_READ_ONE, _LAST).fetchone() or (b"", 0)
    if checksum != _checksum(*_LAST, value) or len(value) != _LAST_VALUE.size:
        raise damaged(directory, "its number of commits is wrong")
    number, total = _LAST_VALUE.unpack(value)
    return number, total


def _last_record(number: int, total: int) -> tuple[str, int, bytes, int]:
    """Local. The row of which `_last` gives the content."""
    value = _LAST_VALUE.pack(number, total % _SUM_END)
    return *_LAST, value, _checksum(*_LAST, value)
