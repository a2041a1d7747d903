"""The main job on several hosts: it learns as well as on one host."""

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
    check(jobs.ranks(places, words, count=count, timeout_s=120), tmp_path, epochs=15, least=0.95)


@pytest.mark.parametrize(
    ("option", "given", "tasks"),
    [
        ("--hosts", "node2,node1:2", ("--ps", "1", "--worker", "2")),
        (
            "--hostfile",
            "node1:2\nnode3 slots=2\nnode2\n",
            ("--ps", "2", "--worker", "2", "--data", "1"),
        ),
    ],
    ids=["two hosts", "three hosts"],
)
def test_learns_under_mpidist_run(jobs, option, given, tasks, tmp_path):
    if option == "--hostfile":
        (tmp_path / "given").write_text(given)
        given = str(tmp_path / "given")
    run = [*tasks, option, given, "--run-dir", str(tmp_path / "run"), str(SCRIPT)]
    words = ["--data", "0", "--epochs", "6", "--quiet", "--output-dir", str(tmp_path)]
    ended = jobs.mpidist_run({"node1": 2}, [*run, *words], timeout_s=120)
    check(ended, tmp_path, epochs=6, least=0.9)
    hosts = {json.loads(file.read_text())["host"] for file in (tmp_path / "run").glob("rank-*")}
    assert len(hosts) == (2 if option == "--hosts" else 3)


def check(ended, folder, *, epochs, least):
    """Check that two workers have trained well enough."""
    assert ended.status == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("accuracy ")]
    assert float(line.split()[1]) > least
    results = json.loads((folder / "results.json").read_text())
    assert (results["workers"], results["step"]) == (2, epochs * 45)
