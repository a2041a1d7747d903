"""Checkpoints in folders: written atomically, found, locked and removed."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpidist import errors
from strategy.protocol.cluster import Host

if TYPE_CHECKING:
    from strategy.server.shard import Shard


class CheckpointLock:
    """A mutex for saves and restores. A second acquisition by the same thread is an error.

    A server refuses concurrent saves by two workers, but not by two threads of one worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Hold the lock in the ``with`` block.

        Args:
            call: The method that needs the lock, for the message.

        Raises:
            FailedPreconditionError: This thread holds the lock.
        """
        me = threading.get_ident()
        if self._holder == me:
            raise errors.FailedPreconditionError(
                f"{call} was called in the middle of a save or restore by the same thread, "
                f"probably in a signal handler: set a flag there, and call {call} when the save "
                "or restore has returned"
            )
        with self._lock:
            try:
                self._holder = me
                yield
            finally:
                self._holder = None


_locks: WeakKeyDictionary[Host, CheckpointLock] = WeakKeyDictionary()
_finding = threading.Lock()


def checkpoint_lock_of(host: Host) -> CheckpointLock:
    """Return the lock that all strategies of a host share."""
    with _finding:
        return _locks.setdefault(host, CheckpointLock())


Array = NDArray[Any]

_INDEX = "index.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)(\.old-[0-9a-f]+)?")
_FILE = re.compile(r"ps-\d+-of-\d+\.safetensors")
_PARTIAL = re.compile(r"step-\d+(\.old-[0-9a-f]+)?\.partial-.*")
_WRITER = re.compile(r"-by-(\d{1,9})-on-(.*)")
# A temporary folder without changes for this time is abandoned, even if its writer is on another
# host and cannot be checked.
_ABANDONED_S = 3600.0


def write_shards(path: str, shards: Iterable[Shard]) -> None:
    """Write the variables and slots of one server to a file.

    Args:
        path: Path of the file.
        shards: All shards of the server.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """
    tensors: dict[str, Array] = {}
    steps: dict[str, dict[str, int]] = {}
    parts: dict[str, dict[str, Any]] = {}
    reduced: dict[str, list[str]] = {}  # slots without an element for each element of the variable
    for shard in shards:
        if not shard.version:  # no worker has pushed the initial value
            continue
        tensors[f"{shard.name}:data"] = shard.data
        steps[shard.name] = shard.steps
        for key, slot in shard.slots_on_host().items():
            tensors[f"{shard.name}:slot:{key}"] = slot
            if slot.size != shard.layout.size:
                reduced.setdefault(shard.name, []).append(key)
        if shard.origin.variable != shard.name:
            parts[shard.name] = asdict(shard.origin)
    facts = {"steps": steps, "parts": parts, "reduced": reduced}
    with reported(path):
        with open(path, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(tensors, path, metadata={key: json.dumps(fact) for key, fact in facts.items()})
        os.chmod(path, mode)  # the umask's; safetensors gives the file to its owner alone
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def reported(path: str) -> Iterator[None]:
    """Convert errors of writing a checkpoint to FailedPreconditionError."""
    try:
        yield
    except errors.Error:  # errors of messages, some of which are OSErrors too
        raise
    except (OSError, SafetensorError) as error:
        raise errors.FailedPreconditionError(
            f"cannot write the checkpoint {path!r}: {error}; there must be room for it, and the "
            "worker that saves and every ps task must be able to write into its folder"
        ) from error


class Writing:
    """A checkpoint that is being written, as a context manager that completes it at the exit.

    Args:
        directory: Folder of all checkpoints; created if it does not exist.
        step: Global step when the save begins; see :meth:`take_step`.
        servers: Number of servers.
        keep: Number of complete checkpoints to keep, at least 1.
        extra: Names of additional files; see :meth:`add`.
        variables: Names of the variables. A restore warns about names that its program lacks.

    Attributes:
        paths: Path of each server's file in the temporary folder.
        path: Path of the complete checkpoint.

    Raises:
        ValueError: ``keep`` is less than 1, or a name in ``extra`` is not valid.
        FailedPreconditionError: The folder cannot be written, at the entry or the exit.
    """

    def __init__(
        self,
        directory: str,
        step: int,
        servers: int,
        keep: int,
        extra: Iterable[str] = (),
        variables: Iterable[str] = (),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep!r}")
        self._directory = os.path.abspath(directory)
        self._step = step
        self._keep = keep
        self._variables = list(variables)
        self.path = os.path.join(self._directory, f"step-{step}")
        # The name is unique, so a server that sees a folder of this name sees this folder.
        writer = f"by-{os.getpid()}-on-{socket.gethostname()}"
        self._partial = f"{self.path}.partial-{secrets.token_hex(8)}-{writer}"
        self._names = [f"ps-{i}-of-{servers}.safetensors" for i in range(servers)]
        self.paths = [os.path.join(self._partial, name) for name in self._names]
        for name in extra:
            if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
                raise ValueError(
                    f"{name!r} cannot be a file in the checkpoint {self.path!r}: give it a name "
                    "without a path"
                )
            if name in (_INDEX, *self._names):
                raise ValueError(
                    f"the checkpoint {self.path!r} has a file {name!r} itself: give yours another "
                    "name"
                )

    def __enter__(self) -> Writing:
        with reported(self.path):
            os.makedirs(self._directory, exist_ok=True)
            _tidy(self._directory)
            os.mkdir(self._partial)
        return self

    def add(self, name: str, content: Any) -> None:
        """Write a file into the checkpoint: bytes unchanged, another object as JSON."""
        is_bytes = isinstance(content, bytes | bytearray | memoryview)
        data = content if is_bytes else json.dumps(content).encode()
        with reported(self.path), open(os.path.join(self._partial, name), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def take_step(self, name: str) -> None:
        """Name the checkpoint by the global step in its files.

        Other workers may have pushed between the begin of the save and its consistent cut.

        Args:
            name: Name of the variable of the global step.
        """
        for path in self.paths:
            with reported(self.path), safe_open(path, "numpy") as file:
                keys: list[str] = file.keys()
                if f"{name}:data" in keys:
                    self._step = int(file.get_tensor(f"{name}:data"))
        self.path = os.path.join(self._directory, f"step-{self._step}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._complete()
        finally:  # a save that failed leaves no files
            shutil.rmtree(self._partial, ignore_errors=True)

    def _complete(self) -> None:
        facts: dict[str, Any] = {"format": _FORMAT, "step": self._step, "files": self._names}
        facts["variables"] = self._variables
        # Two checkpoints may be saved within one tick of the clock, and their order must be known.
        latest = max(map(_saved_ns, checkpoints(self._directory)), default=0)
        facts["saved_ns"] = max(time.time_ns(), latest + 1)
        self.add(_INDEX, facts | {"id": secrets.token_hex(8)})
        with reported(self.path):
            _put_in_place(self._partial, self.path)
        with suppress(OSError):  # the checkpoint is complete; the next save tidies again
            _tidy(self._directory)
            # The new checkpoint stays even if another job has saved later checkpoints meanwhile.
            for old in checkpoints(self._directory)[: -self._keep]:
                if old != self.path:
                    _remove(old)


def _put_in_place(partial: str, path: str) -> None:
    """Rename a temporary folder to its final path. An earlier checkpoint there becomes old."""
    while True:
        try:
            os.rename(partial, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        # Loop, because another job that saves here may rename the old checkpoint back, or put its
        # own checkpoint there.
        with suppress(FileNotFoundError):
            os.rename(path, f"{path}.old-{secrets.token_hex(8)}")


def _tidy(directory: str) -> None:
    """Clean up a folder after killed saves. Each step keeps a complete checkpoint."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        match = _NAME.fullmatch(name)
        if match and match[2]:
            own_path = os.path.join(directory, f"step-{match[1]}")
            if index_of(own_path) is not None:
                _remove(path)
            else:
                with suppress(OSError):  # another checkpoint has this name now
                    os.rename(path, own_path)
        elif _PARTIAL.fullmatch(name) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str) -> bool:
    """Return whether a temporary folder is abandoned, as far as this host can tell."""
    writer = _WRITER.search(os.path.basename(path))
    if writer is None:  # the folder was being removed
        return True
    if writer[2] == socket.gethostname():
        try:
            os.kill(int(writer[1]), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # the process belongs to another user
    try:
        with os.scandir(path) as entries:
            changed = max((entry.stat().st_mtime for entry in entries), default=0.0)
        changed = max(changed, os.stat(path).st_mtime)
    except OSError:  # the folder has just been renamed or removed
        return False
    return time.time() - changed > _ABANDONED_S


def _remove(path: str) -> None:
    """Remove a checkpoint. The folder is renamed first, so its path is never partial."""
    doomed = f"{path}.partial-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):  # another job that saves here has removed it
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def checkpoints(directory: str) -> list[str]:
    """Return the complete checkpoints of a folder, by time of save; [] without a folder.

    The step does not give the order. A training that starts anew in the folder, or continues from
    an earlier checkpoint, saves lower steps than the training before it.
    """
    if not os.path.isdir(directory):
        return []
    found: dict[int, str] = {}
    # In reverse order, step-<step> follows step-<step>.old-... and replaces its entry.
    for name in sorted(os.listdir(directory), reverse=True):
        if match := _NAME.fullmatch(name):
            found[int(match[1])] = name
    paths = [os.path.join(directory, found[step]) for step in sorted(found)]
    return sorted(paths, key=_saved_ns)


def _saved_ns(path: str) -> int:
    """Return the time of a save in ns since the epoch, or 0 if the index file lacks it."""
    saved = _fact(index_of(path), "saved_ns")
    return saved if isinstance(saved, int) else 0


def variables_in(index: bytes) -> list[str]:
    """Return the names of a checkpoint's variables, or [] if the index file lacks them."""
    names = _fact(index, "variables")
    return [str(name) for name in names] if isinstance(names, list) else []


def _fact(index: bytes | None, name: str) -> Any:
    """Return an entry of an index file; None if the entry is missing or the file is damaged."""
    try:
        facts = json.loads(index or b"")
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None


def index_of(path: str) -> bytes | None:
    """Return the content of an index file; None if unreadable. No two index files are equal."""
    try:
        with open(os.path.join(path, _INDEX), "rb") as file:
            return file.read()
    except OSError:
        return None


def files_in(path: str, index: bytes | None) -> list[str]:
    """Return the paths of the servers' files of a checkpoint.

    Args:
        path: Folder of the checkpoint.
        index: Content of the index file; None if the file cannot be read.

    Raises:
        NotFoundError: The index file cannot be read.
        DataLossError: The index file is damaged, or has another format.
    """
    if index is None:
        within = ", ".join(os.path.basename(one) for one in checkpoints(path))
        hint = f"; it holds {within}: latest_checkpoint() gives the last" if within else ""
        raise errors.NotFoundError(
            f"{path!r} is not a checkpoint, or is on another host alone: {_INDEX} cannot be read"
            f"{hint}"
        )
    try:
        facts = json.loads(index)
    except (ValueError, RecursionError) as error:
        raise errors.DataLossError(
            f"the index of {path!r} is damaged ({error}); restore an older one"
        ) from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise errors.DataLossError(f"{path!r} is not of checkpoint format {_FORMAT}")
    files = facts.get("files")
    if not isinstance(files, list) or not files or not all(map(_is_file, files)):
        raise errors.DataLossError(
            f"the index of {path!r} is damaged (its files are {files!r}); restore an older one"
        )
    return [os.path.join(path, name) for name in files]


def _is_file(name: object) -> bool:
    """Return whether this is the name of a server's file. Such a name has no path."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None
