"""The example with word vectors: it learns from the standard library, launched and alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "scripts" / "train_words.py")

# The example where CuPy is the stand-in.
ON_STAND_IN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
sys.argv[0] = {SCRIPT!r}
sys.path.insert(0, {str(ROOT / "scripts")!r})
concatenate, calls = stand_in_cupy.concatenate, []
stand_in_cupy.concatenate = lambda arrays: calls.append(0) or concatenate(arrays)
runpy.run_path(sys.argv[0], run_name="__main__")
print(len(calls), "steps on the GPU")
"""
SMALL = ("--quiet", "--files", "15", "--words", "1000", "--dimensions", "24", "--epochs", "1")


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((), ()),
        (("--ps", "1", "--worker", "2"), ("--mode", "ssp", "--staleness", "4")),
        (("--ps", "2", "--worker", "2"), ("--ps", "2")),
    ],
    ids=["alone", "ssp", "two servers"],
)
def test_it_learns(layout, arguments, tmp_path):
    launcher = ("-m", "mpidist", "run", *layout) if layout else ()
    command = (sys.executable, *launcher, SCRIPT, *arguments, *SMALL)
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary, *lines = ended.stdout.splitlines()
    found = re.fullmatch(r"1000 words, \d+ steps, loss (\d\.\d+) to (\d\.\d+)", summary)
    assert found, ended.stdout
    assert float(found[2]) < 0.98 * float(found[1])
    assert lines
    for line in lines:
        word, neighbours = line.split(": ")
        assert word not in neighbours.split(", ")
        assert len(neighbours.split(", ")) == 5


def test_on_a_gpu_it_learns_what_it_learns_on_the_cpu(tmp_path):
    def shown(gpus):
        small = ("--files", "8", "--words", "300", "--dimensions", "8", "--epochs", "1")
        ended = subprocess.run(
            (sys.executable, "-c", ON_STAND_IN, "--quiet", "--anew", "--gpus", gpus, *small),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        *lines, steps = ended.stdout.splitlines()
        return lines, int(steps.split()[0])

    lines, steps = shown("0")
    assert "300 words" in lines[0]
    assert not steps
    on_gpu, steps = shown("1")
    assert on_gpu == lines
    assert f"{steps} steps" in lines[0]
