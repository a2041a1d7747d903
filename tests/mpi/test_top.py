"""Records of a job for observers: its counters in the run folder, and a timeline."""

import json
import os
import re
import subprocess
import sys

SCRIPT = """
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        strategy = ParameterServerStrategy(mode="sync")
        with strategy.scope():
            variable = get_variable("v", 100_000, initializer="zeros")
        for _ in range(20):
            variable.read_value()
            optimizers.SGD(0.1).apply_gradients([(np.ones(100_000, np.float32), variable)])
        variable.read_value()
"""


def mpidist(*arguments, **environ):
    ended = subprocess.run(
        [sys.executable, "-m", "mpidist", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environ,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_numbers_and_timelines(tmp_path):
    script, run, drawn = tmp_path / "train.py", tmp_path / "run", tmp_path / "drawn"
    script.write_text(SCRIPT)
    layout = ("--ps", "1", "--worker", "2", "--run-dir", str(run))
    mpidist("run", *layout, str(script), MPIDIST_TIMELINE=str(drawn))
    rows = [line.split() for line in mpidist("top", "--once", str(run)).splitlines()[-3:]]
    assert [row[:3] for row in rows] == [
        ["ps", "0", "0"],
        ["worker", "0", "1"],
        ["worker", "1", "2"],
    ]
    assert [row[4] for row in rows] == ["ended"] * 3
    numbers = [json.loads((run / f"state-{n}.json").read_text())["tasks"] for n in range(3)]
    served, *workers = [next(iter(tasks.values())) for tasks in numbers]
    nbytes = 4 * 100_000
    for worker in workers:
        assert worker["steps"] == 20
        assert worker["in_bytes"] == 21 * nbytes
        assert 20 * nbytes <= worker["out_bytes"] < 22 * nbytes  # plus the global step
    assert served["queued"] == 0
    assert served["steps"] >= 40
    assert served["in_bytes"] >= 40 * nbytes
    mpidist("timeline", str(drawn))
    events = json.loads((drawn / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    lasting = [event for event in events if event["ph"] == "X"]
    assert {"push", "apply"} <= {event["name"] for event in lasting}
    assert all(event["dur"] >= 0 for event in lasting)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"ps 0", "worker 0", "worker 1"}


WATCHED = """
import os, subprocess, sys, time
import numpy as np
import mpidist as dist

dist.init_process_group()
if dist.get_rank() == 0:
    dist.recv(np.zeros(1), src=1)
else:
    top = [sys.executable, "-m", "mpidist", "top", "--once", os.environ["MPIDIST_RUN_DIR"]]
    deadline, shown = time.monotonic() + 30, ""
    while "recv" not in shown and time.monotonic() < deadline:
        shown = subprocess.run(top, capture_output=True, text=True, check=True).stdout
    print(shown)
    dist.send(np.zeros(1), dst=0)
"""


def test_the_operation_of_a_rank_and_its_age(tmp_path):
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    shown = mpidist("run", "-n", "2", "--run-dir", str(tmp_path / "run"), str(script))
    waiting, watching = [line for line in shown.splitlines() if " running" in line]
    assert re.search(r" running +recv \d+ s", waiting)
    assert "recv" not in watching
