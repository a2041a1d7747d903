"""``mpidist doctor`` on this machine."""

import json
import subprocess
import sys

from _cases.jobs import run_job

WRONG = """
import mpidist
from mpidist.launcher.probe import check_ranks
mpidist.ProcessGroup.all_reduce = mpidist.Window.put = lambda *_: None
check_ranks()
"""


def test_this_machine_is_well():
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "doctor", "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert [f for f in findings.values() if f["verdict"] == "problem"] == []
    assert done.returncode == 0
    assert findings["two ranks"]["fact"] == "a world of 2, thread level multiple"
    assert findings["one-sided"]["fact"] == "put and get work"
    assert findings["GPU memory"]["fact"].startswith("arrays on GPUs are staged through pinned")


def test_an_mpi_library_that_computes_wrongly(tmp_path):
    ended = run_job(tmp_path, ("-n", "2"), WRONG)
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines()]
    findings = {name: (verdict, fact) for name, verdict, fact, remedy in lines if remedy}
    assert findings == {
        "collectives": ("problem", "sums are wrong"),
        "one-sided": ("problem", "a put was lost"),
    }
