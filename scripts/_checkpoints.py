"""The checkpoints of an earlier training in the output folder."""

import os
import shutil
from pathlib import Path


def remove_checkpoints(folder: Path) -> None:
    """Remove a folder of checkpoints, but not in a job that was started again."""
    if all(os.environ.get(name, "0") == "0" for name in ("MPIDIST_RESTART", "SLURM_RESTART_COUNT")):
        shutil.rmtree(folder, ignore_errors=True)
