"""Stores of one host: HashStore for the threads of a process, FileStore for processes."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.errors import DistStoreError
from mpidist.mpi import Backoff
from mpidist.store.operations import ADDS, READS, Entries, execute
from mpidist.store.store import Store

if TYPE_CHECKING:
    import sqlite3

# The application id in the header of SQLite files; it marks the files of FileStore ("mpds").
_APPLICATION = 0x6D706473
_TABLES = (
    "CREATE TABLE entries (key BLOB PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE queues (place INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB, value BLOB NOT NULL)",
    "CREATE INDEX by_key ON queues (key, place)",
    f"PRAGMA application_id = {_APPLICATION}",
)
# Limit for the file lock. Other processes hold it for some milliseconds at a time, so the limit for
# keys can be too short for it.
_SHORTEST_LOCK_S = 5.0
_LONGEST_LOCK_S = 1e6  # SQLite counts milliseconds in 32 bits
# Longest time between two polls for a key. Every poll opens the file.
_LONGEST_SLEEP_S = 0.02


class HashStore(Store):
    """A store for the threads of one process; as torch's ``HashStore``.

    Example:
        >>> import mpidist as dist
        >>> store = dist.HashStore()
        >>> store.set("loss", "0.5")
        >>> store.get("loss")
        b'0.5'
        >>> store.add("batches", 10)
        10
        >>> dist.PrefixStore("trial", store).set("loss", "0.25")
        >>> store.get("trial/loss")
        b'0.25'
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries = Entries()
        self._changed = threading.Condition()

    def clone(self) -> HashStore:
        """Return another store with the same entries and a time limit of its own."""
        return copy.copy(self)

    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        with self._changed:
            result: list[bytes] | None = None

            def is_done() -> bool:
                nonlocal result
                result = execute(self._entries, operation, keys, values)
                return result is not None

            self._changed.wait_for(is_done, limit_s)
            if operation in ADDS:
                self._changed.notify_all()
            return result

    def __repr__(self) -> str:
        return "HashStore()"


class FileStore(Store):
    """A store in an SQLite file, for processes of one host; as torch's ``FileStore``, with queues.

    The file must be on a local file system. SQLite relies on file locks (fcntl), and its
    documentation warns that locks of network file systems, such as NFS, are often broken, which
    can damage the file (sqlite.org/faq.html, question 5). Between hosts use :class:`MPIStore`.

    A process that is killed leaves complete entries and no locks. A host that loses power may leave
    a damaged file.

    Args:
        file_name: Path of the file. The store creates it if it does not exist or is empty.
        world_size: Number of processes that use the file. The file is removed when all have closed
            it, or stays if the number is not positive.

    Raises:
        DistStoreError: The directory does not exist, the file cannot be created, or the file
            belongs to another program.
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
            raise DistStoreError(f"{self._here()}: this is not a regular file; give another path")
        with self._transaction("rwc", "IMMEDIATE", 0.0) as connection:
            self._prepare(connection)

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._path

    def clone(self) -> FileStore:
        """Return another store on the same file. It does not count in ``world_size``."""
        other = copy.copy(self)
        other._world_size = -1
        return other

    def close(self) -> None:
        """Close the store; idempotent. The last of ``world_size`` processes removes the file.

        Raises:
            DistStoreError: The file is missing or damaged.
        """
        if self._closed:
            return
        if self._world_size > 0:
            with self._transaction("rw", "IMMEDIATE", self._timeout.total_seconds()) as connection:
                # user_version is a field of the file header that SQLite does not use itself.
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

    # Internals

    def _execute(
        self, operation: str, keys: Sequence[str], values: Sequence[bytes], limit_s: float
    ) -> list[bytes] | None:
        if self._closed:
            raise DistStoreError(f"{self._here()} is closed")
        deadline = time.monotonic() + limit_s
        backoff = Backoff(spins=0, longest_s=_LONGEST_SLEEP_S)
        kind = "DEFERRED" if operation in READS else "IMMEDIATE"
        while True:
            with self._transaction("rw", kind, limit_s) as connection:
                result = execute(_FileEntries(connection), operation, keys, values)
            remaining = deadline - time.monotonic()
            if result is not None or remaining <= 0:
                return result
            time.sleep(min(backoff.next_sleep(), remaining))

    @contextmanager
    def _transaction(self, mode: str, kind: str, limit_s: float) -> Iterator[sqlite3.Connection]:
        """Open a connection and a transaction.

        Each transaction has a connection of its own, because a connection must not be used across
        a fork (sqlite.org/howtocorrupt.html, section 2.6).
        """
        import sqlite3  # slow, and missing in some builds of Python

        lock_s = min(max(limit_s, _SHORTEST_LOCK_S), _LONGEST_LOCK_S)
        try:
            uri = f"{Path(self._path).as_uri()}?mode={mode}"
            opened = sqlite3.connect(uri, uri=True, timeout=lock_s, isolation_level=None)
            with closing(opened) as connection:
                # Entries must survive the process, not a power loss, so no fsync is needed.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(f"BEGIN {kind}")
                yield connection
                connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise DistStoreError(
                f"{self._here()}: {error} (waited at most {lock_s:g} s for the lock of the file); "
                "the file must be writable, and be new or created by a FileStore"
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


class _FileEntries(Entries):
    """Entries in a transaction of the file."""

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
