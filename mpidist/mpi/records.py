"""Records that a rank writes into the run folder, for ``mpidist run`` and ``mpidist top``."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpidist.config import config

logger = logging.getLogger(__name__)

STALLS_AGAIN = 10
"""Factor of MPIDIST_STALL_S at which a wait is reported again."""


@dataclass
class Identity:
    """Names of this rank, for messages and records.

    Attributes:
        rank: Rank in the MPI world.
        pid: Process id.
        host: Host name.
        job: Job name; None until it is known.
        task: Task index; None until it is known.
    """

    rank: int
    pid: int
    host: str
    job: str | None = None
    task: int | None = None

    def __str__(self) -> str:
        task = f" ({self.job} {self.task})" if self.job is not None else ""
        return f"rank {self.rank}{task} on {self.host}"


def write_rank(identity: Identity, started: float) -> None:
    """Write ``rank-<rank>.json``: the identity, and the time at which the rank started MPI."""
    _write(f"rank-{identity.rank}.json", {**asdict(identity), "started": started})


def write_failure(identity: Identity, reason: str, trace: str, code: int) -> None:
    """Write ``failure-<rank>.json``: the reason for which this rank ends the job."""
    facts = {"reason": reason, "traceback": trace, "exit_code": code, "time": time.time()}
    _write(f"failure-{identity.rank}.json", {**asdict(identity), **facts})


def write_state(
    identity: Identity,
    tasks: dict[str, dict[str, float]],
    waits: Sequence[dict[str, Any]],
    counts: dict[int, int],
) -> None:
    """Write ``state-<rank>.json``: the activity of the rank, and the time.

    Args:
        identity: The rank.
        tasks: Metrics by name, by job and index of the rank's tasks.
        waits: The long waits of the rank; see :class:`mpidist.mpi.pending.Wait`.
        counts: Number of the last collective that the rank has begun, by group number.
    """
    state = {"time": time.time(), "tasks": tasks, "waits": waits, "counts": counts}
    _write(f"state-{identity.rank}.json", state)


def write_stall(identity: Identity, what: str, waited_s: float) -> bool:
    """Write ``stall.json``, so that ``mpidist run`` reports on the job.

    Args:
        identity: The rank.
        what: The wait, in words.
        waited_s: Its time so far, in seconds.

    Returns:
        Whether there is a run folder.
    """
    stall = {
        "rank": identity.rank,
        "what": what,
        "waited_s": waited_s,
        "stall_s": config.stall_s,
        "again": waited_s > STALLS_AGAIN * config.stall_s,
    }
    _write("stall.json", stall, str(identity.rank))  # several ranks write it
    return config.run_dir is not None


def write_checkpoint(step: int, path: str) -> None:
    """Write ``checkpoint.json``: a complete checkpoint. ``mpidist run`` counts it as progress."""
    _write("checkpoint.json", {"step": step, "path": path}, str(os.getpid()))


def write_manager(rank: int, members: int, step: int, path: str | None, stopped_by: int) -> None:
    """Write ``manager-<rank>.json``: whether this rank saves when it gets SIGUSR1.

    Args:
        rank: Rank in the group whose members save together.
        members: Size of this group; 0 if this rank no longer handles the signal.
        step: Number of steps of this rank.
        path: The last checkpoint, or None.
        stopped_by: The signal after which the job has saved and stops; 0 if it goes on.
    """
    facts = {"members": members, "step": step, "path": path, "stopped_by": stopped_by}
    _write(f"manager-{rank}.json", facts)


def _write(name: str, record: dict[str, Any], part: str = "new") -> None:
    if config.run_dir is None:
        return
    path = os.path.join(config.run_dir, name)
    try:
        with open(f"{path}.{part}", "w") as file:
            json.dump(record, file, default=float)  # metrics may be numbers of NumPy
        os.replace(f"{path}.{part}", path)
    except OSError as error:
        # The folder may be gone while a job ends. That must not hide the reason.
        logger.warning("cannot write %s: %s", path, error)
