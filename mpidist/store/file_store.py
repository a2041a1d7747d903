"""A store in a file, for the processes that can open it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.errors import DistStoreError
from mpidist.runtime import Backoff
from mpidist.store.base import Store
from mpidist.store.operations import READS, carry_out

if TYPE_CHECKING:
    import sqlite3

# Says in the file's header whose it is.
_APPLICATION = 0x6D706473
_TABLES = (
    "CREATE TABLE entries (key BLOB PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE queues (place INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB, value BLOB NOT NULL)",
    "CREATE INDEX by_key ON queues (key, place)",
    f"PRAGMA application_id = {_APPLICATION}",
)
# Others hold the file for some milliseconds at a time: a short limit for keys is none for them.
_SHORTEST_LOCK_S = 5.0
_LONGEST_LOCK_S = 1e6  # SQLite counts milliseconds in 32 bits
# Every look opens the file.
_LONGEST_SLEEP_S = 0.02


class FileStore(Store):
    """A store in a file, for processes of one node or on a shared file system.

    As torch's ``FileStore``, with queues. The file system must have locks that work (fcntl), as
    NFS does unless it is mounted without. A process that is killed leaves whole entries behind and
    holds up nobody; a computer that loses power may leave a damaged file.

    Args:
        file_name: The file; it is made if it does not exist or is empty.
        world_size: How many processes use it: when as many have closed it, it is removed. It stays
            if that is not positive.

    Raises:
        DistStoreError: The directory does not exist, the file cannot be made, or it is no store's.
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        super().__init__()
        self._path = os.path.abspath(os.fsdecode(file_name))
        self._world_size = index(world_size)
        self._closed = False
        directory = os.path.dirname(self._path)
        if not os.path.isdir(directory):
            raise DistStoreError(
                f"{self._here()}: the directory {directory} does not exist; make it first, or give "
                "another path"
            )
        if "\0" in self._path or (os.path.exists(self._path) and not os.path.isfile(self._path)):
            raise DistStoreError(f"{self._here()}: this is no regular file; give another path")
        with self._transaction("rwc", "IMMEDIATE", 0.0) as connection:
            self._prepare(connection)

    @property
    def path(self) -> str:
        """The file's path."""
        return self._path

    def clone(self) -> FileStore:
        """Local. Another store on the same file; it counts as no process of its own."""
        other = copy.copy(self)
        other._world_size = -1
        return other

    def close(self) -> None:
        """Local. Use the store no more; the last of ``world_size`` removes the file; idempotent.

        Raises:
            DistStoreError: The file is gone, or damaged.
        """
        if self._closed:
            return
        if self._world_size > 0:
            with self._transaction("rw", "IMMEDIATE", self._timeout.total_seconds()) as connection:
                # SQLite leaves this number of the file's header to its users.
                closed = connection.execute("PRAGMA user_version").fetchone()[0] + 1
                connection.execute(f"PRAGMA user_version = {closed}")
            if closed >= self._world_size:
                os.unlink(self._path)
        self._closed = True

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"

    # Inside

    def _carry_out(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        if self._closed:
            raise DistStoreError(f"{self._here()} is closed")
        deadline = time.monotonic() + limit_s
        backoff = Backoff(spins=0, longest_s=_LONGEST_SLEEP_S)
        kind = "DEFERRED" if operation in READS else "IMMEDIATE"
        while True:
            with self._transaction("rw", kind, limit_s) as connection:
                result = carry_out(_FileEntries(connection), operation, keys, values)
            remaining = deadline - time.monotonic()
            if result is not None or remaining <= 0:
                return result
            time.sleep(min(backoff.next_sleep(), remaining))

    @contextmanager
    def _transaction(self, mode: str, kind: str, limit_s: float) -> Iterator[sqlite3.Connection]:
        """A connection of its own: what one connection knows must not be shared by a fork."""
        import sqlite3  # slow, and some builds of Python do without

        lock_s = min(max(limit_s, _SHORTEST_LOCK_S), _LONGEST_LOCK_S)
        try:
            uri = f"{Path(self._path).as_uri()}?mode={mode}"
            opened = sqlite3.connect(uri, uri=True, timeout=lock_s, isolation_level=None)
            with closing(opened) as connection:
                # What is written need not outlive the computer, only the process.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(f"BEGIN {kind}")
                yield connection
                connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise DistStoreError(
                f"{self._here()}: {error} (waited {lock_s:g} s at most for others to let go of the "
                "file); it must be a file that a FileStore has made, or none, and writable"
            ) from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application == 0 and tables == 0:
            for statement in _TABLES:
                connection.execute(statement)
        elif application != _APPLICATION:
            raise DistStoreError(
                f"{self._here()}: the file is another program's database; give another path"
            )


class _FileEntries:
    """Entries in a transaction; see :class:`mpidist.store.operations.Entries`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def get(self, key: str) -> bytes | None:
        found = self._execute("SELECT value FROM entries WHERE key = ?", (key.encode(),))
        row = found.fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: str, value: bytes) -> None:
        self._execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (key.encode(), value))

    def remove(self, key: str) -> bool:
        done = self._execute("DELETE FROM entries WHERE key = ?", (key.encode(),))
        return done.rowcount > 0

    def names(self) -> list[str]:
        return [key.decode() for (key,) in self._execute("SELECT key FROM entries")]

    def count(self) -> int:
        return int(self._execute("SELECT count(*) FROM entries").fetchone()[0])

    def push(self, key: str, value: bytes) -> None:
        self._execute("INSERT INTO queues (key, value) VALUES (?, ?)", (key.encode(), value))

    def pop(self, key: str) -> bytes | None:
        first = "SELECT place, value FROM queues WHERE key = ? ORDER BY place LIMIT 1"
        row = self._execute(first, (key.encode(),)).fetchone()
        if row is None:
            return None
        self._execute("DELETE FROM queues WHERE place = ?", row[:1])
        return bytes(row[1])

    def length(self, key: str) -> int:
        found = self._execute("SELECT count(*) FROM queues WHERE key = ?", (key.encode(),))
        return int(found.fetchone()[0])
