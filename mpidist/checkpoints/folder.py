"""Checkpoints in folders: written atomically, found and removed."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mpidist.errors import (
    DataLossError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from mpidist.mpi.records import write_checkpoint

logger = logging.getLogger(__name__)

_INDEX = "index.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)(\.old-[0-9a-f]+)?")
_FILE = re.compile(r"(ps|rank)-\d+-of-\d+\.safetensors")
_PARTIAL = re.compile(r"step-\d+(\.old-[0-9a-f]+)?\.partial-.*")
_WRITER = re.compile(r"-by-(\d{1,9})-on-(.*)")
_MOST_NAMES = 10  # in a message
_WRITTEN_BY = {"ps": "a strategy", "rank": "mpidist.Checkpoints"}
# A temporary folder without changes for this time is abandoned, even if its writer is on another
# host and cannot be checked.
_ABANDONED_S = 3600.0


@contextmanager
def reported(path: str) -> Iterator[None]:
    """Convert errors of writing a checkpoint to FailedPreconditionError."""
    try:
        yield
    except Error:  # errors of messages, some of which are OSErrors too
        raise
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write the checkpoint {path!r}: {error}; there must be room for it, and every "
            "process that writes a part must be able to write into its folder"
        ) from error


def check_writable(directory: str) -> None:
    """Make a folder for checkpoints, and check that files can be written there.

    Raises:
        FailedPreconditionError: They cannot.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write checkpoints into {directory!r}: {error}; give another folder"
        ) from error


class Writing:
    """A checkpoint that is being written.

    As a context manager it begins at the entry, and is completed at the exit, or removed after an
    error.

    Args:
        directory: Folder of all checkpoints; created if it does not exist.
        step: The step; see :meth:`name_by`.
        parts: Number of files with arrays, one for each process that writes.
        keep: Number of complete checkpoints to keep, at least 1.
        extra: Names of additional files; see :meth:`add`.
        variables: Names of the variables or arrays. A restore warns about names that its program
            lacks.
        writer: Beginning of the names of the files with arrays: ``"ps"`` or ``"rank"``.

    Attributes:
        paths: Path of each file with arrays in the temporary folder.
        path: Path of the complete checkpoint.
        step: The step.
        facts: More entries of the index file.

    Raises:
        ValueError: ``keep`` is less than 1, or a name in ``extra`` is not valid.
        FailedPreconditionError: The folder cannot be written, when it begins or is completed.
    """

    def __init__(
        self,
        directory: str,
        step: int,
        parts: int,
        keep: int,
        extra: Iterable[str] = (),
        variables: Iterable[str] = (),
        writer: str = "ps",
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep!r}")
        self._directory = os.path.abspath(directory)
        self._keep = keep
        self.facts: dict[str, Any] = {"variables": list(variables)}
        # The name is unique, so a process that sees a folder of this name sees this folder.
        owner = f"by-{os.getpid()}-on-{socket.gethostname()}"
        self._partial = os.path.join(
            self._directory, f"step-{step}.partial-{secrets.token_hex(8)}-{owner}"
        )
        self._names = [f"{writer}-{i}-of-{parts}.safetensors" for i in range(parts)]
        self.paths = [os.path.join(self._partial, name) for name in self._names]
        self.name_by(step)
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

    def name_by(self, step: int) -> None:
        """Set the step, and name the checkpoint by it."""
        self.step = step
        self.path = os.path.join(self._directory, f"step-{step}")

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._complete()
        finally:  # a save that failed leaves no files
            shutil.rmtree(self._partial, ignore_errors=True)

    def _complete(self) -> None:
        facts: dict[str, Any] = {"format": _FORMAT, "step": self.step, "files": self._names}
        facts |= self.facts
        # Two checkpoints may be saved within one tick of the clock, and their order must be known.
        latest = max(map(_saved_ns, checkpoints(self._directory)), default=0)
        facts["saved_ns"] = max(time.time_ns(), latest + 1)
        self.add(_INDEX, facts | {"id": secrets.token_hex(8)})
        with reported(self.path):
            _put_in_place(self._partial, self.path)
        write_checkpoint(self.step, self.path)
        with suppress(OSError):  # the checkpoint is complete; the next save tidies again
            _tidy(self._directory)
            # The new checkpoint stays even if another job has saved later checkpoints meanwhile.
            for old in checkpoints(self._directory)[: -self._keep]:
                # A folder without an index may belong to another program.
                if old != self.path and index_of(old) is not None:
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
    saved = fact(index_of(path), "saved_ns")
    return saved if isinstance(saved, int) else 0


def warn_of_others(path: str, index: bytes | None, names: Collection[str]) -> None:
    """Log a warning if a checkpoint has more arrays than the program.

    Args:
        path: Folder of the checkpoint.
        index: Content of its index file.
        names: Names of the arrays of the program.
    """
    stored = fact(index, "variables")
    stored = map(str, stored) if isinstance(stored, list) else ()
    others = [name for name in stored if name not in names]
    if others:
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        logger.warning(
            "the checkpoint %s has %s%s, which the program does not have at restore(): they are "
            "not restored, and later checkpoints will not have them",
            path, others[:_MOST_NAMES], more,
        )  # fmt: skip


def fact(index: bytes | None, name: str) -> Any:
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


def is_damaged(path: str) -> bool:
    """Return whether a folder has an index file that cannot be understood."""
    index = index_of(path)
    return index is not None and fact(index, "format") is None


def files_in(path: str, index: bytes | None, writer: str) -> list[str]:
    """Return the paths of the files with arrays of a checkpoint.

    Args:
        path: Folder of the checkpoint.
        index: Content of the index file; None if the file cannot be read.
        writer: See :class:`Writing`.

    Raises:
        NotFoundError: The index file cannot be read.
        InvalidArgumentError: The checkpoint has another writer.
        DataLossError: The index file is damaged, or has another format.
    """
    if index is None:
        within = ", ".join(os.path.basename(one) for one in checkpoints(path))
        hint = f"; it holds {within}: latest_checkpoint() gives the last" if within else ""
        raise NotFoundError(
            f"{path!r} is not a checkpoint, or is on another host alone: {_INDEX} cannot be read"
            f"{hint}"
        )
    try:
        facts = json.loads(index)
    except (ValueError, RecursionError) as error:
        raise DataLossError(
            f"the index of {path!r} is damaged ({error}); restore an older one"
        ) from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise DataLossError(f"{path!r} is not of checkpoint format {_FORMAT}")
    files = facts.get("files")
    names = files if isinstance(files, list) else []
    matches = [_FILE.fullmatch(str(name)) for name in names]  # so no name has a path
    writers = {match[1] if match else "" for match in matches}
    if len(writers) != 1 or "" in writers:
        raise DataLossError(
            f"the index of {path!r} is damaged (its files are {files!r}); restore an older one"
        )
    if writer not in writers:
        raise InvalidArgumentError(
            f"the checkpoint {path!r} was written by {_WRITTEN_BY[writers.pop()]}, and "
            f"{_WRITTEN_BY[writer]} cannot restore it: give another folder"
        )
    return [os.path.join(path, name) for name in names]
