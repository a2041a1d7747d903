"""Checkpoints: one safetensors file a server, and an index that makes them one.

A checkpoint is a folder ``step-<step>``. It is written under another name and renamed when it is
complete, so that a folder of that name is always whole, whatever was killed when. An earlier one of
the same step gets a name of its own first (``step-<step>.old-...``), under which it counts until
the new one is there. All else that begins with the name is partial: being written, or removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpidist import errors

if TYPE_CHECKING:
    from strategy.server.owned_shard import OwnedShard

Array = NDArray[Any]

_INDEX = "index.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)(\.old-[0-9a-f]+)?")
_FILE = re.compile(r"ps-\d+-of-\d+\.safetensors")
_PARTIAL = re.compile(r"step-\d+(\.old-[0-9a-f]+)?\.partial-.*")
_WRITER = re.compile(r"-by-(\d{1,9})-on-(.*)")
# Of a partial one that nobody has changed for so long, the writer is gone, on whatever host.
_ABANDONED_S = 3600.0


def write_shards(path: str, shards: Iterable[OwnedShard]) -> None:
    """Local. Write one server's variables and slots.

    Args:
        path: The file.
        shards: What to write.

    Raises:
        FailedPreconditionError: The file cannot be written.
    """
    tensors: dict[str, Array] = {}
    steps: dict[str, dict[str, int]] = {}
    initials: dict[str, dict[str, float]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for shard in shards:
        tensors[f"{shard.name}:data"] = shard.data
        steps[shard.name], initials[shard.name] = shard.steps, shard.initials
        for key, slot in shard.slots_on_host().items():
            tensors[f"{shard.name}:slot:{key}"] = slot
        if shard.origin.variable != shard.name:
            parts[shard.name] = asdict(shard.origin)
    facts = {"steps": steps, "initials": initials, "parts": parts}
    with reported(path):
        save_file(tensors, path, metadata={key: json.dumps(fact) for key, fact in facts.items()})
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def reported(path: str) -> Iterator[None]:
    """Local. FailedPreconditionError in place of what says that a file cannot be written."""
    try:
        yield
    except errors.Error:  # of messages, some of which are of the system's kinds too
        raise
    except (OSError, SafetensorError) as error:
        raise errors.FailedPreconditionError(
            f"cannot write the checkpoint {path!r}: {error}; there must be room for it, and the "
            "worker that saves and every ps task must be able to write into its folder"
        ) from error


class Writing:
    """Local. A checkpoint on its way to disk; a context manager that completes it at the end.

    Args:
        directory: Folder of all checkpoints; made if it does not exist.
        step: Global step when the save begins; see :meth:`take_step`.
        servers: Number of files.
        keep: How many complete checkpoints to keep, at least 1.
        extra: Names of more files that will be put into it.
        variables: Names of the variables, for who restores fewer.

    Attributes:
        paths: The file of each server.
        path: The folder, once complete.

    Raises:
        ValueError: ``keep`` is less than 1, or a file cannot have the name.
        FailedPreconditionError: The folder cannot be written; when it is entered, or left.
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
        # Of a name that nobody has used: a server that sees it sees this folder.
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
        """Local. Put a file into the checkpoint: bytes as they are, all else as JSON."""
        is_bytes = isinstance(content, bytes | bytearray | memoryview)
        data = content if is_bytes else json.dumps(content).encode()
        with reported(self.path), open(os.path.join(self._partial, name), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def take_step(self, name: str) -> None:
        """Name the checkpoint by the step that its files contain.

        Other workers may have pushed between the begin of the save and its consistent cut.

        Args:
            name: The name of the variable that counts the steps.
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
        finally:  # of one that failed nothing stays
            shutil.rmtree(self._partial, ignore_errors=True)

    def _complete(self) -> None:
        facts: dict[str, Any] = {"format": _FORMAT, "step": self._step, "files": self._names}
        facts["variables"] = self._variables
        # Two may be saved within a tick of the clock.
        latest = max(map(_saved_ns, checkpoints(self._directory)), default=0)
        facts["saved_ns"] = max(time.time_ns(), latest + 1)
        self.add(_INDEX, facts | {"id": secrets.token_hex(8)})
        with reported(self.path):
            _put_in_place(self._partial, self.path)
        with suppress(OSError):  # the checkpoint is there; the next save removes what stays now
            _tidy(self._directory)
            # The one just written stays, though another job may have saved later ones meanwhile.
            for old in checkpoints(self._directory)[: -self._keep]:
                if old != self.path:
                    _remove(old)


def _put_in_place(partial: str, path: str) -> None:
    """Give a complete checkpoint its name; an earlier one of this name is left under another."""
    while True:
        try:
            os.rename(partial, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        # Again and again: another job that saves here may put it back, or its own there.
        with suppress(FileNotFoundError):
            os.rename(path, f"{path}.old-{secrets.token_hex(8)}")


def _tidy(directory: str) -> None:
    """Bring a folder in order after saves that were killed, and lose nothing that is whole."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        match = _NAME.fullmatch(name)
        if match and match[2]:
            own_path = os.path.join(directory, f"step-{match[1]}")
            if index_of(own_path) is not None:
                _remove(path)
            else:
                with suppress(OSError):  # another one has got the name by now
                    os.rename(path, own_path)
        elif _PARTIAL.fullmatch(name) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str) -> bool:
    """Whether nobody writes a partial checkpoint any more, as far as this can be told from here."""
    writer = _WRITER.search(os.path.basename(path))
    if writer is None:  # it is being removed
        return True
    if writer[2] == socket.gethostname():
        try:
            os.kill(int(writer[1]), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's
    try:
        with os.scandir(path) as entries:
            changed = max((entry.stat().st_mtime for entry in entries), default=0.0)
        changed = max(changed, os.stat(path).st_mtime)
    except OSError:  # it has just been completed, or removed
        return False
    return time.time() - changed > _ABANDONED_S


def _remove(path: str) -> None:
    """Remove a checkpoint; under its own name it is whole until it is gone."""
    doomed = f"{path}.partial-{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):  # another job that saves here has removed it
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def checkpoints(directory: str) -> list[str]:
    """Local. Complete checkpoints of a folder, the last saved last; empty without such a folder.

    Steps say nothing of that: a training that begins anew in the folder, or goes on from an earlier
    checkpoint, has lower ones than what the one before has left.
    """
    if not os.path.isdir(directory):
        return []
    found: dict[int, str] = {}
    for name in sorted(os.listdir(directory), reverse=True):  # one that was put aside comes first
        if match := _NAME.fullmatch(name):
            found[int(match[1])] = name
    paths = [os.path.join(directory, found[step]) for step in sorted(found)]
    return sorted(paths, key=_saved_ns)


def _saved_ns(path: str) -> int:
    """When a checkpoint was saved, in nanoseconds since the epoch; 0 if its index does not say."""
    saved = _fact(index_of(path), "saved_ns")
    return saved if isinstance(saved, int) else 0


def variables_in(index: bytes) -> list[str]:
    """Local. Names of the variables of a checkpoint, as far as its index says them."""
    names = _fact(index, "variables")
    return [str(name) for name in names] if isinstance(names, list) else []


def _fact(index: bytes | None, name: str) -> Any:
    """What an index says of something; None if nothing, or if it is damaged."""
    try:
        facts = json.loads(index or b"")
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None


def index_of(path: str) -> bytes | None:
    """Local. What the index of a checkpoint says, which is like no other's; None without one."""
    try:
        with open(os.path.join(path, _INDEX), "rb") as file:
            return file.read()
    except OSError:
        return None


def names_in(path: str, index: bytes | None) -> list[str]:
    """Local. Names of the files of a checkpoint.

    Args:
        path: A folder ``step-<step>``.
        index: Its index.

    Raises:
        NotFoundError: It is not a checkpoint.
        DataLossError: Its index is damaged, or of another format.
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
    return files


def _is_file(name: object) -> bool:
    """Whether a server's file can have this name: none is looked for elsewhere."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None
