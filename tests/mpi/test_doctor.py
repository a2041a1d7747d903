"""``mpidist doctor`` on this machine."""

import json
import subprocess
import sys


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
