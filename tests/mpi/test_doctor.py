"""``mpidist doctor`` on this machine."""

import json
import subprocess
import sys

from mpidist.cli import way_probe


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
    assert findings["GPU memory"]["fact"].startswith("by way of the host: ")
    assert findings["GPU memory"]["fact"].endswith("does not say that it takes device memory")


def test_the_probe_of_ways_where_all_goes_through_the_host(monkeypatch):
    """Without a GPU, too: it must tell the setting, and not fail at it."""
    monkeypatch.setenv("MPIDIST_GPU_WAY", "staged")
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", way_probe.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["table"].startswith("MPIDIST_GPU_WAY=staged: all arrays on")
