"""torch's own tests of process groups, with our backend."""

import json
from collections import Counter

from _cases import torch_suite
from _cases.jobs import run_job

PASSING = 117  # the least number of tests; with gloo, 112 pass


def test_torchs_own_tests(tmp_path):
    results_file = tmp_path / "results.json"
    source = f"""\
        import runpy, sys
        sys.argv[1:] = [{str(results_file)!r}]
        runpy.run_path({torch_suite.__file__!r}, run_name="__main__")
    """
    job = run_job(tmp_path / "job", ["-n", "3"], source, timeout_s=300)
    assert job.status == 0, job.err
    results = json.loads(results_file.read_text())
    failed = {name: reason for name, (result, reason) in results.items() if result == "failed"}
    assert not failed, failed
    assert Counter(result for result, _ in results.values())["passed"] >= PASSING
