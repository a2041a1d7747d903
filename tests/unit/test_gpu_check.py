"""The command that checks all on a machine with a GPU, on one without."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_without_a_gpu_it_says_why_and_fails(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('no CuPy here')")
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", "--json", results],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("1 passed, 1 failed: ['probe']\n")
    packages, probe = json.loads(results.read_text())["parts"]
    assert packages["passed"]
    assert "no CuPy here" in probe["output"]
    assert not probe["passed"]


def test_a_folder_without_wheels(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "gpu_check", "--wheels", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no wheels in" in done.stderr
