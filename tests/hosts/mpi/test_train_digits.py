"""The main job on several hosts: it learns as well as on one."""

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent.parent / "scripts" / "train_digits.py"


@pytest.mark.parametrize(
    ("places", "count", "tasks"),
    [
        ({"node1": 2, "node2": 1}, 3, ("--ps", "1", "--data", "0")),
        (dict.fromkeys(["node1", "node2", "node3"], 1), 5, ("--ps", "2", "--data", "1")),
    ],
    ids=["two hosts", "three hosts"],
)
def test_learns(jobs, places, count, tasks, tmp_path):
    words = [SCRIPT, *tasks, "--epochs", "15", "--quiet", "--output-dir", tmp_path]
    ended = jobs.ranks(places, words, count=count, timeout_s=120)
    assert ended.status == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("accuracy ")]
    assert float(line.split()[1]) > 0.95
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["workers"], results["step"]) == (2, 15 * 45)
