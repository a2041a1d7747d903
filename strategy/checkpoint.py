"""Checkpoints: one safetensors file a server, and an index that makes them one.

A checkpoint is a folder ``step-<step>``. It is written under another name and renamed when it is
complete, so that a folder of that name is always whole, whatever was killed when.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpidist import errors
from strategy.owned_shard import OwnedShard

Array = NDArray[Any]

_INDEX = "index.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"step-\d+\.partial-\d+")


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
        for key, slot in shard.slots.items():
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
            f"cannot write the checkpoint {path!r}: {error}; the worker that saves and "
            "every ps task must be able to write into its folder"
        ) from error


class Writing:
    """Local. A checkpoint on its way to disk; a context manager that completes it at the end.

    Args:
        directory: Folder of all checkpoints; made if it does not exist.
        step: Global step.
        servers: Number of files.
        keep: How many complete checkpoints to keep, at least 1.
        extra: Names of more files that will be put into it.

    Attributes:
        paths: The file of each server.
        path: The folder, once complete.

    Raises:
        ValueError: ``keep`` is less than 1, or a file cannot have the name.
    """

    def __init__(
        self, directory: str, step: int, servers: int, keep: int, extra: Iterable[str] = ()
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep!r}")
        self._directory = os.path.abspath(directory)
        self._step = step
        self._keep = keep
        self.path = os.path.join(self._directory, f"step-{step}")
        # Of a name that nobody has used: a server that sees it sees this folder.
        self._partial = f"{self.path}.partial-{os.getpid()}-{secrets.token_hex(8)}"
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
        os.makedirs(self._directory, exist_ok=True)
        for name in os.listdir(self._directory):
            if _PARTIAL.match(name):  # of a job that was killed while it wrote
                shutil.rmtree(os.path.join(self._directory, name))
        os.makedirs(self._partial)
        return self

    def add(self, name: str, content: Any) -> None:
        """Local. Put a file into the checkpoint: bytes as they are, all else as JSON."""
        is_bytes = isinstance(content, bytes | bytearray | memoryview)
        with open(os.path.join(self._partial, name), "wb") as file:
            file.write(content if is_bytes else json.dumps(content).encode())
            file.flush()
            os.fsync(file.fileno())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._partial)
            return
        facts = {"format": _FORMAT, "step": self._step, "files": self._names}
        self.add(_INDEX, facts | {"id": secrets.token_hex(8)})
        if os.path.exists(self.path):
            _remove(self.path)  # an earlier save of the same step
        os.rename(self._partial, self.path)
        # The one just written stays, though an earlier training may have left higher steps.
        others = [old for old in checkpoints(self._directory) if old != self.path]
        for old in others[: max(len(others) - self._keep + 1, 0)]:
            _remove(old)


def _remove(path: str) -> None:
    """Remove a checkpoint; under its own name it is whole until it is gone."""
    doomed = f"{path}.partial-{os.getpid()}-old"
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def checkpoints(directory: str) -> list[str]:
    """Local. Complete checkpoints of a folder, oldest first; empty if there is no such folder."""
    if not os.path.isdir(directory):
        return []
    steps = [int(m[1]) for m in map(_NAME.fullmatch, os.listdir(directory)) if m]
    return [os.path.join(directory, f"step-{step}") for step in sorted(steps)]


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
        raise errors.NotFoundError(
            f"{path!r} is not a checkpoint, or is on another host alone: {_INDEX} cannot be read"
        )
    try:
        facts = json.loads(index)
    except ValueError as error:
        raise errors.DataLossError(f"the index of {path!r} is damaged: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise errors.DataLossError(f"{path!r} is not of checkpoint format {_FORMAT}")
    return list(facts["files"])
