"""The flight recorder: the last operations of this rank, in a mapped file of the run folder.

The kernel keeps the pages of a mapped file when a process ends, so the file is whole also after
SIGKILL. ``operations-<rank>.ring`` has a record for each of the last 256 operations.
``operations-<rank>.jsonl``, which only grows, has the groups, calls and lines to which the records
refer by number. ``mpidist doctor --hang`` and ``mpidist top`` read both.

A record takes half a microsecond. Finding the line of the script takes as long again, so only
messages, and the collectives that are compared between ranks, have a line.
"""

from __future__ import annotations

import itertools
import json
import logging
import mmap
import os
import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from types import CodeType, FrameType
from typing import Any, Protocol

from mpidist.config import config

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<ddiiq")  # start, end, call, line, number of the collective
_SIZE = _RECORD.size
_pack = _RECORD.pack_into
SLOTS = 256
"""The number of operations that are kept."""
_MOST_TEXTS = 5000  # calls of a group, and lines; further ones are recorded without details
_HIDDEN = ("mpidist", "strategy", "dataservice", "contextlib", "torch")


def script_frame(depth: int) -> FrameType:
    """Return the frame that called this package, or torch above it.

    Args:
        depth: Number of frames to skip.
    """
    frame = sys._getframe(depth + 1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _HIDDEN:
            break
        frame = frame.f_back
    return frame


class Completed(Protocol):
    """The handle of an asynchronous operation."""

    @property
    def error(self) -> BaseException | None:
        """The error, or None."""


class Recorded(Protocol):
    """An operation as the recorder needs it.

    Attributes:
        sequence: Number of the collective in its group, from 1; 0 for a message.
        slot: Place of the record.
    """

    sequence: int
    slot: int

    def recorded(self) -> dict[str, Any]:
        """Return the call for the file of texts: name, arguments, peer, tag, dtype and shape."""


class Recorder:
    """The files of this rank.

    Args:
        folder: The run folder.
        rank: The rank.

    Attributes:
        ring: The mapped records.
        slots: Iterator over the positions of the records in bytes, which never ends.

    Raises:
        OSError: The files cannot be made.
    """

    def __init__(self, folder: str, rank: int) -> None:
        path = os.path.join(folder, f"operations-{rank}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._texts = os.open(f"{path}.jsonl", flags, 0o666)
        with open(f"{path}.ring", "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, SLOTS * _SIZE)  # a full disk would be SIGBUS later
            self.ring = mmap.mmap(file.fileno(), SLOTS * _SIZE)
        self.slots = itertools.cycle(range(0, SLOTS * _SIZE, _SIZE))
        self._numbers = itertools.count(1)
        # By code and position. The code object keeps its id from being used again.
        self._lines: dict[tuple[int, int], tuple[int, CodeType]] = {}

    def line_of(self, frame: FrameType) -> int:
        """Return the number of the line at which a frame is; 0 after too many lines."""
        key = id(frame.f_code), frame.f_lasti
        found = self._lines.get(key)
        if found is None:
            if len(self._lines) >= _MOST_TEXTS:
                return 0
            place = {"file": frame.f_code.co_filename, "at": frame.f_lineno}
            found = self._lines[key] = self.add_text("line", place), frame.f_code
        return found[0]

    def add_text(self, kind: str, text: dict[str, Any]) -> int:
        """Write a text to which records refer. Return its number."""
        number = next(self._numbers)
        try:
            line = json.dumps({kind: number, **text}, default=str)
            os.write(self._texts, f"{line}\n".encode())
        except OSError as error:  # a full disk must not end the job
            logger.warning("the flight recorder cannot write: %s", error)
        return number


class GroupRecorder:
    """Records the operations of one group.

    Args:
        recorder: The files of this rank.
        number: Number of the group, equal on all members.
        name: Name of the group.
        ranks: World ranks of the members.

    Attributes:
        times: The records as numbers of 8 bytes: the start of each operation, then its end.
    """

    def __init__(self, recorder: Recorder, number: int, name: str, ranks: Sequence[int]) -> None:
        self._recorder = recorder
        self._group = number
        self._slots, self._ring = recorder.slots, recorder.ring
        self.times = memoryview(self._ring).cast("d")
        self._integers = memoryview(self._ring).cast("i")
        self._calls: dict[Hashable, int] = {}
        recorder.add_text("group", {"number": number, "name": name, "ranks": list(ranks)})

    def begin(self, op: Recorded, facts: Hashable) -> int:
        """Record the start of an operation. Return the place of its end in ``times``.

        Args:
            op: The operation. It gets the place, too.
            facts: Facts that tell calls apart.
        """
        call = self._calls.get(facts)
        if call is None:
            call = self._add_call(op, facts)
        at = next(self._slots)
        _pack(self._ring, at, time(), 0.0, call, 0, op.sequence)
        op.slot = at = (at >> 3) + 1
        return at

    def _add_call(self, op: Recorded, facts: Hashable) -> int:
        text = {"group": self._group, **op.recorded()}
        if len(self._calls) >= _MOST_TEXTS:  # further calls have only their name
            facts = text["name"]
            text |= {"text": text["name"], "peer": -1, "tag": 0, "dtype": "", "shape": []}
        if facts not in self._calls:
            self._calls[facts] = self._recorder.add_text("call", text)
        return self._calls[facts]

    def end(self, op: Recorded, *, failed: bool = False) -> None:
        """Record the end of an operation; a negative time if it has raised an error."""
        self.times[op.slot] = -time() if failed else time()

    def end_callback(self, op: Recorded) -> Callable[[Completed], None]:
        """Return a function that records the end of an operation when its Work has ended."""
        at = op.slot
        start = self.times[at - 1]

        def end(work: Completed) -> None:
            if self.times[at - 1] == start:  # otherwise a later operation has the slot
                self.times[at] = time() if work.error is None else -time()

        return end

    def locate(self, op: Recorded) -> None:
        """Record the line of the script that calls the operation."""
        self._integers[2 * op.slot + 3] = self._recorder.line_of(script_frame(2))


@dataclass(frozen=True)
class Entry:
    """A recorded operation.

    Attributes:
        slot: Place of the record, as in :class:`mpidist.mpi.pending.Wait`.
        start: Start, in seconds since the epoch.
        end: End; None if it is pending.
        failed: Whether it has raised an error.
        group: Number of the group.
        sequence: Number of the collective in its group; 0 for a message.
        name: ``"all_reduce"``, ...
        call: The call with its arguments.
        peer: World rank of the root or peer, or -1.
        tag: Tag of a message.
        dtype: Name of the dtype of the array; "" without an array.
        shape: Shape of the array.
        file: File of the script; "" if it is not known.
        line: Line of the script.
    """

    slot: int
    start: float
    end: float | None
    failed: bool
    group: int
    sequence: int
    name: str
    call: str
    peer: int
    tag: int
    dtype: str
    shape: tuple[int, ...]
    file: str
    line: int


@dataclass(frozen=True)
class Recording:
    """The records of one rank.

    Attributes:
        groups: Name and members of each group, by number.
        entries: The operations, in the order of their starts.
    """

    groups: dict[int, tuple[str, tuple[int, ...]]]
    entries: list[Entry]


def read_recording(folder: Path, rank: int) -> Recording | None:
    """Return the records of a rank; None if it has not written any.

    A record that the rank is writing may mix two operations.
    """
    try:
        ring = (folder / f"operations-{rank}.ring").read_bytes()
        lines = (folder / f"operations-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    texts: dict[str, dict[int, dict[str, Any]]] = {"group": {}, "call": {}, "line": {}}
    for line in lines:
        try:
            text = json.loads(line)
        except ValueError:  # the last line is being written
            continue
        kind = next(iter(text))
        texts[kind][text["number" if kind == "group" else kind]] = text
    entries = []
    for at in range(0, len(ring) // _SIZE * _SIZE, _SIZE):
        start, end, call, place, sequence = _RECORD.unpack_from(ring, at)
        facts = texts["call"].get(call)
        if not start or facts is None:
            continue
        where = texts["line"].get(place, {"file": "", "at": 0})
        ended = abs(end) if end else None
        entries.append(
            Entry(
                at // 8 + 1, start, ended, end < 0, facts["group"], sequence,
                facts["name"], facts["text"], facts["peer"], facts["tag"],
                facts["dtype"], tuple(facts["shape"]), where["file"], where["at"],
            )
        )  # fmt: skip
    entries.sort(key=lambda entry: entry.start)
    groups = {
        number: (text["name"], tuple(text["ranks"])) for number, text in texts["group"].items()
    }
    return Recording(groups, entries)


_recorder: Recorder | None = None


def start_recorder(rank: int) -> None:
    """Record the operations of the groups that are made from now on, if there is a run folder."""
    global _recorder
    if config.run_dir is not None:
        try:
            _recorder = Recorder(config.run_dir, rank)
        except OSError as error:
            logger.warning("the flight recorder cannot record: %s", error)


def group_recorder(number: int, name: str, ranks: Sequence[int]) -> GroupRecorder | None:
    """Return the recorder of a new group; None without a run folder.

    Args:
        number: Number of the group, equal on all members.
        name: Name of the group.
        ranks: World ranks of the members.
    """
    return None if _recorder is None else GroupRecorder(_recorder, number, name, ranks)
