"""The command gpu_check on a machine without a GPU, and the checks that it runs."""

import importlib.machinery
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "scripts" / "bench_gpu.py"

# Runs the benchmarks on the CuPy stand-in. The measured times mean nothing.
ON_STAND_IN = f"""
import runpy, sys
sys.path[:0] = {str(BENCH.parent)!r}, {str(ROOT / "tests")!r}
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
sys.argv[0] = {str(BENCH)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


HANGING = """
import signal, threading

def test_that_ends():
    pass

def test_that_hangs():
    if {deaf}:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def check():
    """Return the command as a module."""
    path = str(ROOT / "scripts" / "gpu_check")
    loader = importlib.machinery.SourceFileLoader("gpu_check", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def started(tmp_path, *words, **modules):
    """Run the command with some modules replaced. Return the ended process and its JSON."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", "--json", results, *words],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, json.loads(results.read_text()) if results.exists() else None


def test_without_a_gpu_it_says_why_and_fails(tmp_path):
    done, results = started(tmp_path, cupy="raise ImportError('no CuPy here')")
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("2 passed, 1 failed: ['probe']\n")
    _, packages, probe = results["parts"]
    assert packages["passed"]
    assert "no CuPy here" in probe["output"]
    assert not probe["passed"]


def test_packages_that_cannot_be_imported_are_told_with_the_reason(tmp_path):
    broken = "import a_package_that_it_needs"
    done, results = started(tmp_path, cupy="", hypothesis=broken, safetensors="1 / 0")
    assert done.stdout.endswith("1 passed, 1 failed: ['packages']\n"), done.stderr
    output = results["parts"][1]["output"]
    missing = "No module named 'a_package_that_it_needs'"
    assert f'hypothesis: ModuleNotFoundError("{missing}")' in output
    assert "safetensors: ZeroDivisionError('division by zero')" in output
    assert "--wheels" in output
    assert "cupy" not in output


def test_an_environment_that_cannot_be_made_is_a_part_that_failed(tmp_path):
    done, results = started(tmp_path, venv="raise SystemExit('ensurepip is not here')")
    assert done.returncode == 1, done.stderr
    (part,) = results["parts"]
    assert part["name"] == "environment"
    assert not part["passed"]
    assert "ensurepip is not here" in part["output"]
    assert "python3-venv" in part["output"]
    assert results["benchmarks"] == []


def test_a_folder_without_wheels(tmp_path):
    done, _ = started(tmp_path, "--wheels", tmp_path)
    assert done.returncode == 2
    assert "no wheels in" in done.stderr


# Seconds on an NVIDIA H200 with 16 cores, the larger of two runs.
SEEN_S = {
    "arrays": 6.7, "copies": 9.0, "backends": 27.1, "windows": 2.1, "datasets": 3.1,
    "strategies": 25.1, "servers": 36, "groups": 15.6, "clusters": 22.4,
}  # fmt: skip


def test_tests_get_two_to_three_times_what_they_took(check):
    given = {name: limit_s - check.STOP_S for name, (limit_s, _) in check.TESTS.items()}
    assert given.keys() == SEEN_S.keys()
    assert [n for n, seen_s in SEEN_S.items() if not 2 * seen_s <= given[n] <= 3 * seen_s] == []


def test_all_parts_end_in_ten_minutes_and_their_tests_are_there(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "fill_environment", lambda: None)
    parts = list(check.parts(tmp_path, tmp_path))
    assert check.DEVICES_S + sum(limit_s for _, limit_s, _ in parts) <= 10 * 60
    assert min(limit_s for _, limit_s, _ in parts) > check.STOP_S
    names = [name for name, _, _ in parts]
    assert len(set(names)) == len(names)
    files = [word for _, _, words in parts[1:] for word in words if word.endswith(".py")]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_pip_is_there_only_for_wheels(check, tmp_path):
    commands = [next(check.parts(wheels, tmp_path))[2] for wheels in (None, tmp_path)]
    assert ["--without-pip" in words for words in commands] == [True, False]


@pytest.mark.parametrize("deaf", [False, True], ids=["to interrupt", "to kill"])
def test_a_part_that_hangs_tells_where(check, tmp_path, monkeypatch, deaf):
    if deaf:
        monkeypatch.setattr(check, "STOP_S", 2)
    file = tmp_path / "test_part.py"
    file.write_text(HANGING.format(deaf=deaf))
    options = check.pytest_options(check.STOP_S + 1, tmp_path / "part.xml")
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    result = check.run("part", check.STOP_S + 6, command, tmp_path)
    assert not result["passed"]
    assert result["last_test"].endswith("test_part.py::test_that_hangs")
    assert result["output"].endswith(f"had begun is {result['last_test']}")
    assert "Timeout (0:00:00.500000)!" in result["output"]
    assert "in test_that_hangs" in result["output"]
    assert ("KeyboardInterrupt" in result["output"]) is not deaf
    assert result.get("tests", {}).get("passed") == (None if deaf else 1)


def test_a_part_that_is_stopped_leaves_nothing_of_its_group(check, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    child = f"""
import signal
signal.alarm(60)
held = open({str(fifo)!r}, "wb", 0)
held.write(b"x")
signal.pause()
"""
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    command = [sys.executable, "-c", parent]
    status, _ = check.finish(command, check.STOP_S + 3, tmp_path / "output.txt")
    assert status is None
    assert os.read(reading, 1) == b"x"
    assert select.select([reading], [], [], 30)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_what_cannot_be_started(check, tmp_path):
    status, output = check.finish(["/no/such/program"], check.STOP_S + 1, tmp_path / "out.txt")
    assert status == 127
    assert "/no/such/program" in output


@pytest.mark.parametrize(
    ("job", "cpu", "gpu", "same"),
    [
        ("digits", "accuracy 0.9611", "accuracy 0.9667", True),
        ("digits", "accuracy 0.9611", "accuracy 0.1028", False),
        ("digits", "accuracy 0.9611", "", False),
        ("digits", "", "accuracy 0.9611", False),
        ("words", "loss 3.237 to 2.467", "loss 3.237 to 2.466", True),
        ("words", "loss 3.237 to 2.467", "loss 3.237 to 3.237", False),
        ("words", "loss 3.237 to 2.467", "loss nan to nan", False),
    ],
)
def test_jobs_on_the_gpu_must_come_to_the_same(check, job, cpu, gpu, same):
    jobs = {}
    parts = {
        place: {"passed": True, "output": text} for place, text in (("cpu", cpu), ("gpu", gpu))
    }
    for place, part in parts.items():
        check.compare(job, place, part, jobs)
    assert jobs[job]["same"] is same
    assert parts["gpu"]["passed"] is same
    assert parts["cpu"]["passed"] is bool(cpu)
    assert jobs[job]["tolerance"] == 0.02
    if same:
        assert jobs[job]["cpu"].keys() == jobs[job]["gpu"].keys() != set()


def test_jobs_that_fail_have_no_figures(check):
    part, jobs = {"passed": False, "output": "accuracy 0.9611"}, {}
    check.compare("digits", "cpu", part, jobs)
    assert jobs["digits"]["cpu"] is None


def test_jobs_print_what_is_compared(check, tmp_path):
    """The jobs run without a GPU, and with less data."""
    jobs = {}
    less = {"digits": ["--epochs", "1"], "words": ["--files", "5"]}
    for name, (_, words, _, _) in check.JOBS.items():
        command = [sys.executable, *words, *less[name], "--gpus", "0", "--quiet"]
        command += ["--output-dir", str(tmp_path / name)]
        part = check.run(f"{name}_on_cpu", 60, command, tmp_path)
        check.compare(name, "cpu", part, jobs)
        assert part["passed"], part["output"]
    assert 0 < jobs["digits"]["cpu"]["accuracy"] < 1
    assert jobs["words"]["cpu"]["first"] > jobs["words"]["cpu"]["last"] > 0


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
