"""A script that torchrun starts: each process would be a job of its own."""

import os
import subprocess
import sys


def test_processes_of_torchrun_are_no_job():
    variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import mpidist; mpidist.init_process_group()"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "start the script with mpidist run -n 4" in done.stderr
