"""The example with word vectors: it learns from the standard library, launched and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "scripts" / "train_words.py")
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
def test_it_learns(layout, arguments):
    launcher = ("-m", "mpidist", "run", *layout) if layout else ()
    command = (sys.executable, *launcher, SCRIPT, *arguments, *SMALL)
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
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
