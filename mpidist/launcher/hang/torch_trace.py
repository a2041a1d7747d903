"""The flight recorder in the format of torch, for ``torchfrtrace`` (torch 2.13).

torch's tool reads one file a rank, a pickled dict: ``version``, ``pg_config`` and ``entries``.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from mpidist.recorder import Entry, Recording, read_recording

_VERSION = "2.10"
# torch's tool knows the backends of torch only.
_BACKEND = "gloo"
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "all_gather_v": "all_gather",
    "scan": "all_reduce",
    "exscan": "all_reduce",
}


def write_torch_traces(folder: Path, target: Path) -> None:
    """Write ``rank_<r>`` for each rank that has a flight recorder.

    Args:
        folder: The run folder.
        target: Folder for the files. It is made if it does not exist.

    Raises:
        OSError: A file cannot be read or written.
    """
    target.mkdir(parents=True, exist_ok=True)
    size = json.loads((folder / "job.json").read_text(encoding="utf-8"))["ranks"]
    for rank in range(size):
        recording = read_recording(folder, rank)
        if recording is not None:
            (target / f"rank_{rank}").write_bytes(pickle.dumps(_dump(recording, rank)))


def _dump(recording: Recording, rank: int) -> dict[str, Any]:
    """Return the records of a rank as torch's dict."""
    config = {
        str(number): {"name": str(number), "desc": _described(name), "ranks": str(list(ranks))}
        for number, (name, ranks) in recording.groups.items()
    }
    messages = 0
    entries = []
    for number, entry in enumerate(recording.entries):
        messages += not entry.sequence
        entries.append(_entry(recording, entry, rank, number, messages))
    return {"version": _VERSION, "pg_config": config, "entries": entries}


def _described(name: str) -> str:
    return "default_pg" if name == "world" else name


def _entry(
    recording: Recording, entry: Entry, rank: int, number: int, messages: int
) -> dict[str, Any]:
    name, ranks = recording.groups[entry.group]
    kind = _NAMES.get(entry.name, entry.name)
    if not entry.sequence:
        arrow = "->" if entry.name == "send" else "<-"
        peer = ranks.index(entry.peer) if entry.peer in ranks else -1
        kind = f"{entry.name} {ranks.index(rank)}{arrow}{peer}"
    return {
        "record_id": number,
        "pg_id": entry.group,
        "process_group": (str(entry.group), _described(name)),
        "collective_seq_id": entry.sequence,
        "p2p_seq_id": messages,
        "op_id": number,
        "is_p2p": not entry.sequence,
        "profiling_name": f"{_BACKEND}:{kind}",
        "time_created_ns": int(entry.start * 1e9),
        "time_discovered_completed_ns": None if entry.end is None else int(entry.end * 1e9),
        "duration_ms": None if entry.end is None else 1e3 * (entry.end - entry.start),
        "state": "scheduled" if entry.end is None else "completed",
        "input_sizes": [list(entry.shape)],
        "input_dtypes": [entry.dtype],
        "output_sizes": [list(entry.shape)],
        "output_dtypes": [entry.dtype],
        "timeout_ms": 0,
        "frames": [{"name": "", "filename": entry.file, "line": entry.line}],
        "retired": entry.end is not None,
    }
