"""What goes wrong with the dispatcher's journal, in words that say what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mpidist.errors import (
    AbortedError,
    DataLossError,
    FailedPreconditionError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnknownError,
)

E = TypeVar("E", bound=OpError)

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


def damaged(directory: Path, what: str) -> DataLossError:
    """Local. The error of a journal that is not what was written."""
    return error_of(DataLossError, directory, what)


def error_of(kind: type[E], directory: Path, what: object) -> E:
    """Local. An error of a kind, with what to do."""
    return kind(f"the dispatcher's journal in {directory}: {what}; {_TO_DO[kind]}")


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Local. Turn errors of SQLite and the system into errors that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
        # An extended code has the plain one in its lower byte.
        kind = _FAILURES.get(code) or _FAILURES.get(code & 0xFF, UnknownError)
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise error_of(kind, directory, f"{error} ({name})") from error
    except UnicodeDecodeError as error:  # of SQLite's message, with names from the file
        raise damaged(directory, "its table has no readable name") from error
    except OSError as error:
        kind = _SYSTEM_FAILURES.get(error.errno, FailedPreconditionError)
        raise error_of(kind, directory, error) from error
