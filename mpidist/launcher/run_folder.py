"""The records in the run folder of a job.

=========================  ======================  =======================================
File                       Written by              When
=========================  ======================  =======================================
``job.json``               ``mpidist run``         the job starts: the tasks of the ranks
``rank-<r>.json``          the runtime             MPI starts; job and task become known
``failure-<r>.json``       the runtime, or runner  before the rank ends the job
``state-<r>.json``         the runtime             every second: metrics, and long waits
``operations-<r>.ring``,   the runtime             each operation of a group; see
``operations-<r>.jsonl``                           :mod:`mpidist.recorder`
``checkpoint.json``        the runtime             a checkpoint is complete
``manager-<r>.json``       the runtime             a manager of checkpoints begins, or stops
``look.json``              a report on a hang      it begins
``look-<r>.json``          the wrapper             in a look: threads, children, stacks
``stacks-<r>.json``,       the runner              in a look: the stacks of its threads;
``stacks-<r>.txt``                                 by faulthandler while C code has the GIL
``stall.json``             the runtime             an operation waits for MPIDIST_STALL_S
``exit-<r>.json``          the wrapper             the rank has ended
``end.json``               ``mpidist run``         the job is over
=========================  ======================  =======================================

The wrapper is :mod:`mpidist.launcher.rank_wrapper`, and the runner is :mod:`mpidist.runner`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

_END = "end.json"
Records = dict[int, dict[str, Any]]
_FIELDS = {
    "rank": set[str](),
    "failure": {"pid", "host", "reason", "exit_code", "time"},
    "exit": {"pid", "host", "signal", "exit_code", "terminated", "time"},
    "state": {"waits", "time"},
    "look": {"number"},
    "manager": {"members", "step", "path", "stopped_by"},
}
_RECORD = re.compile(r"(rank|failure|exit|state|look|manager)-(\d+)\.json")
_OTHER = re.compile(
    r"printed-[0-9a-f]{8}|(operations|stacks)-\d+\.(ring|jsonl|json|txt)|(job|look|stall|end|checkpoint)\.json"
)


def clear_records(folder: Path) -> None:
    """Remove the records of an earlier job from a run folder."""
    for path in folder.iterdir():
        if _RECORD.fullmatch(path.name) or _OTHER.fullmatch(path.name):
            path.unlink()


def write_end(folder: Path, status: int) -> None:
    """Record that the job is over: ranks that the launcher ends leave no records.

    Args:
        folder: The run folder.
        status: Exit status of the job.
    """
    part = folder / f"{_END}.new"
    part.write_text(json.dumps({"status": status}), encoding="utf-8")
    part.replace(folder / _END)


def is_over(folder: Path) -> bool:
    """Return whether ``mpidist run`` has recorded the end of the job."""
    return (folder / _END).exists()


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Return a record of the whole job; {} if it has not been written.

    Args:
        folder: The run folder.
        name: Name of the file, without ``.json``.
    """
    try:
        record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn_once(f"the record {folder / name}.json is ignored: {error}")
        return {}
    return record


def read_records(folder: Path, kind: str, *, strict: bool = False) -> Records:
    """Return the records of one kind by rank.

    Args:
        folder: The run folder. If it does not exist (any more), there are no records.
        kind: ``rank``, ``failure``, ``state``, ``look``, ``manager`` or ``exit``.
        strict: Raise an error for a file that cannot be read, and leave the check of the fields to
            the caller. By default a warning is printed once, and the file is ignored.

    Raises:
        OSError: The folder or a file cannot be read.
        ValueError: A file is not JSON.
    """
    found = {}
    try:
        for path in folder.iterdir():
            name = _RECORD.fullmatch(path.name)
            if not name or name[1] != kind:
                continue
            try:
                # Writers replace the file as a whole.
                record = json.loads(path.read_text(encoding="utf-8"))
                if not strict:
                    _check(record, kind)
                found[int(name[2])] = record
            except (OSError, ValueError) as error:
                if strict:
                    raise
                if isinstance(error, FileNotFoundError):  # the job has ended
                    continue
                _warn_once(f"the record {path} is ignored: {error}")
    except FileNotFoundError:
        pass
    except OSError as error:
        if strict:
            raise
        _warn_once(f"the run folder cannot be read: {error}")
    return found


def _check(record: object, kind: str) -> None:
    """Raise a ValueError if a record has not the fields that this module uses."""
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004
    if missing := _FIELDS[kind] - record.keys():
        raise ValueError(f"it has no {min(missing)!r}")


@functools.cache
def _warn_once(text: str) -> None:
    sys.stderr.write(f"mpidist run: {text}\n")
