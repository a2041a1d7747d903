"""What a dispatcher must not forget when it ends, in a file."""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import os
import socket
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from mpidist.errors import (
    AbortedError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnknownError,
)

_NAME = "journal.sqlite"
# In the file's header: whose it is, and what is in it.
_APPLICATION = 0x6D706464
_FORMAT = 1
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
_SMALLEST_BYTES = 512  # SQLite's smallest page
# What a transaction of unusual size has made of the write-ahead log is given back down to this.
_LARGEST_LOG_BYTES = 4 << 20
# SQLite's limit of a row, less some room for the rest of the row.
_LARGEST_RECORD_BYTES = 10**9 - 10**4

# SQLite's own word for a full disk is FULL; quotas and limits come as errors of writing.
_FAILURES: dict[int, type[OpError]] = {
    sqlite3.SQLITE_FULL: ResourceExhaustedError,
    sqlite3.SQLITE_IOERR_WRITE: ResourceExhaustedError,
    sqlite3.SQLITE_IOERR_FSYNC: ResourceExhaustedError,
    sqlite3.SQLITE_IOERR_SHMSIZE: ResourceExhaustedError,
    sqlite3.SQLITE_CORRUPT: DataLossError,
    sqlite3.SQLITE_NOTADB: DataLossError,
    sqlite3.SQLITE_ERROR: DataLossError,  # the table is not as it was made
    sqlite3.SQLITE_IOERR_READ: DataLossError,
    sqlite3.SQLITE_IOERR_SHORT_READ: DataLossError,
    sqlite3.SQLITE_READONLY: PermissionDeniedError,
    sqlite3.SQLITE_CANTOPEN: PermissionDeniedError,
    sqlite3.SQLITE_PERM: PermissionDeniedError,
    sqlite3.SQLITE_BUSY: AbortedError,
}
_SYSTEM_FAILURES: dict[int | None, type[OpError]] = {
    errno.ENOSPC: ResourceExhaustedError,
    errno.EDQUOT: ResourceExhaustedError,
    errno.EFBIG: ResourceExhaustedError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
}
_TO_DO: dict[type[OpError], str] = {
    ResourceExhaustedError: "the disk or a quota is full, a file has reached its limit (ulimit -f) "
    "or the disk fails; make room and try again",
    DataLossError: "the journal is damaged; put a copy of the directory in its place, or move it "
    "away and start without what it held",
    PermissionDeniedError: "let this user read and write the directory and what is in it, or give "
    "another directory",
    AbortedError: "another program is busy with the file; end that program",
    FailedPreconditionError: "give a directory that this user can make, read and write, on a file "
    "system with locks",
    UnknownError: "see whether the file system is well, or give another directory",
}


class Journal:
    """Records that outlive the process, and the computer's loss of power.

    It holds the present state, not its history: a row for each record that there is. A commit is
    there as a whole or not at all, whenever the process is killed. One dispatcher at a time has a
    journal, and one thread at a time uses it, any thread; a fork of the process has it closed.

    Args:
        directory: Where it is, for nothing else; made if it does not exist, for this user alone.

    Raises:
        AbortedError: Another program is busy with the file.
        DataLossError: The journal is damaged.
        FailedPreconditionError: Another dispatcher has it, it was written by another version, or
            the directory cannot be one.
        PermissionDeniedError: This user may not write there.
        ResourceExhaustedError: The disk is full.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory).absolute()
        with _explained(self._directory), ExitStack() as undo:
            self._directory.mkdir(0o700, parents=True, exist_ok=True)
            # Closed when the journal is, and in forks.
            self._lock = undo.enter_context(_lock(self._directory))
            self._connection = undo.enter_context(closing(_open(self._directory)))
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
        with _explained(self._directory):
            for kind, key, value, checksum in self._connection.execute(_READ):
                if checksum != _checksum(kind, key, value):
                    raise _damaged(self._directory, f"{kind} {key} is not what was written")
                tables.setdefault(kind, {})[key] = value
        return tables

    def commit(self, changes: Mapping[tuple[str, int], bytes | None]) -> None:
        """Local. Write records and remove others, all or none; on the disk when it returns.

        Args:
            changes: By kind and key (signed, of 64 bits): the record, or None to remove it.

        Raises:
            AbortedError: Another program is busy with the file; nothing is changed.
            DataLossError: The journal is damaged.
            FailedPreconditionError: The journal is closed.
            InvalidArgumentError: A record is too large; nothing is changed.
            ResourceExhaustedError: The disk is full; nothing is changed, and when there is room
                again the journal goes on.
        """
        self._check_open()
        records, removed = [], []
        for (kind, key), value in changes.items():
            if value is None:
                removed.append((kind, key))
            elif len(value) > _LARGEST_RECORD_BYTES:
                raise InvalidArgumentError(
                    f"{kind} {key} has {len(value)} bytes, and the dispatcher's journal in "
                    f"{self._directory} takes {_LARGEST_RECORD_BYTES} a record; keep large data "
                    "in files that the dataset reads"
                )
            else:
                records.append((kind, key, value, _checksum(kind, key, value)))
        with _explained(self._directory), self._connection as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            transaction.executemany(_PUT, records)
            transaction.executemany(_REMOVE, removed)

    def close(self) -> None:
        """Local. Let another have the journal; idempotent."""
        if not self._lock.closed:
            with _explained(self._directory), self._lock:
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


os.register_at_fork(after_in_child=_forget)


def _lock(directory: Path) -> io.FileIO:
    """Local. The file that nobody else can lock while it is open; it says who has it."""
    with ExitStack() as undo:
        lock = undo.enter_context(io.FileIO(directory / "lock", "a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().decode(errors="replace") or "which is just starting"
            raise FailedPreconditionError(
                f"another dispatcher, {holder}, has the journal in {directory}; end it, or give "
                "this one another directory"
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on host {socket.gethostname()}".encode())
        undo.pop_all()
    return lock


def _open(directory: Path) -> sqlite3.Connection:
    """Local. A connection to the file, which is made if it was never there."""
    path = directory / _NAME
    # SQLite would take either for a new file, and throw away what is in the write-ahead log.
    if path.exists():
        if path.stat().st_size < _SMALLEST_BYTES:
            raise _damaged(directory, f"{_NAME} is cut off")
    elif path.with_name(f"{_NAME}-wal").exists():
        raise _damaged(directory, f"{_NAME} is missing, beside its write-ahead log")
    else:
        _make(path)
    with ExitStack() as undo:
        connection = undo.enter_context(closing(_connect(path)))
        _check(connection, directory)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise FailedPreconditionError(
                f"the file system of {directory} cannot have a write-ahead log; give a directory "
                "on another one"
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
    new.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # the name outlives a loss of power, too
    finally:
        os.close(directory)


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
        raise _damaged(directory, " ".join(found.split()))


def _checksum(kind: str, key: int, value: bytes) -> int:
    """Local. CRC-32 of a record and its place: SQLite would not see that a byte has changed."""
    return zlib.crc32(value, zlib.crc32(kind.encode() + key.to_bytes(8, "little", signed=True)))


def _damaged(directory: Path, what: str) -> OpError:
    """Local. The error of a journal that is not what was written."""
    return _error(DataLossError, directory, what)


def _error(kind: type[OpError], directory: Path, what: object) -> OpError:
    """Local. An error of a kind, with what to do."""
    return kind(f"the dispatcher's journal in {directory}: {what}; {_TO_DO[kind]}")


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Local. Turn errors of SQLite and the system into errors that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
        # An extended code has the plain one in its lower byte.
        kind = _FAILURES.get(code) or _FAILURES.get(code & 0xFF, UnknownError)
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise _error(kind, directory, f"{error} ({name})") from error
    except UnicodeDecodeError as error:  # of SQLite's message, with names from the file
        raise _damaged(directory, "its table has no readable name") from error
    except OSError as error:
        kind = _SYSTEM_FAILURES.get(error.errno, FailedPreconditionError)
        raise _error(kind, directory, error) from error
