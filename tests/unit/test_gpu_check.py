"""The command that checks all on a machine with a GPU, and what it runs, on one without."""

import importlib.machinery
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "scripts" / "bench_gpu.py"

# The benchmarks where CuPy is the stand-in; what they measure there means nothing.
ON_STAND_IN = f"""
import runpy, sys
sys.path[:0] = {str(BENCH.parent)!r}, {str(ROOT / "tests")!r}
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
sys.argv[0] = {str(BENCH)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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


def test_all_parts_end_in_eight_minutes_and_their_tests_are_there(tmp_path, monkeypatch):
    path = str(ROOT / "scripts" / "gpu_check")
    loader = importlib.machinery.SourceFileLoader("gpu_check", path)
    check = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(check)
    monkeypatch.setattr(check, "make_environment", lambda: None)
    parts = list(check.parts(tmp_path))
    assert sum(limit_s for _, limit_s, _ in parts) <= 8 * 60
    names = [name for name, _, _ in parts]
    assert len(set(names)) == len(names)
    files = [word for _, _, words in parts for word in words if word.endswith(".py")]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_training_step_is_timed(tmp_path):
    words = ["--rounds", "1", "--largest", str(64 << 10), "--json", str(tmp_path / "bench.json")]
    done = subprocess.run(
        [sys.executable, "-c", ON_STAND_IN, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "bench-step.json").read_text())
    (row,) = table["rows"]
    assert len(row) == len(table["columns"])
    assert row[0] == "64 KiB"
    assert table["columns"][-1] == "hidden"
    assert all(math.isfinite(number) for number in row[1:])
    assert all(number > 0 for number in row[1:-1])
