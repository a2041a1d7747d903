"""The flight recorder in torch's format, read by torch's own tool."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import mpidist.torch

dist.init_process_group("mpidist")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
if dist.get_rank() == 1:
    sys.exit("no more batches")
dist.all_reduce(torch.ones(4))
"""


def run(*words, status=0):
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env=os.environ
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_torchfrtrace_names_the_missing_rank(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mpidist"]
    job, traces = str(tmp_path / "job"), str(tmp_path / "traces")
    run(*command, "run", "-n", "2", "--run-dir", job, str(tmp_path / "program.py"), status=1)
    run(*command, "doctor", "--hang", job, "--torch-trace", traces)
    report = run(str(Path(sys.prefix) / "bin" / "torchfrtrace"), traces)
    assert "Not all ranks joining collective, sequence number: 5" in report
    assert "missing ranks: {1}" in report
    assert "gloo:all_reduce" in report
