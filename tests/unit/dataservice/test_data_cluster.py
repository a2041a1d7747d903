"""The processes of :mod:`_cases.data_cluster`: cleanup, and losses and restarts of all kinds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _cases.data_cluster import DataCluster
from _cases.data_process import ProcessEndedError
from _cases.endpoints import wait_until

from dataservice import Dataset, distribute

ROOT = Path(__file__).parents[3]
LEFT_ALONE = """
import sys
sys.path[:0] = sys.argv[1:]
from _cases.data_cluster import DataCluster
cluster = DataCluster(2)
cluster.pause_worker(0)
print(*(process.pid for process in (cluster.dispatcher, *cluster.workers)), flush=True)
sys.stdin.read()
"""


def runs(pid):
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def epoch(cluster):
    dataset = Dataset.range(100).apply(distribute("distributed_epoch", cluster.target))
    return sorted(int(element) for element in dataset)


def test_nothing_outlives_a_test_that_is_killed(tmp_path):
    command = [sys.executable, "-c", LEFT_ALONE, str(ROOT), str(ROOT / "tests")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # the killed process leaves its folder
    with subprocess.Popen(command, env=environment, **pipes) as alone:
        pids = [int(pid) for pid in alone.stdout.readline().split()]
        assert len(pids) == 3
        assert all(runs(pid) for pid in pids)
        alone.kill()
    wait_until(lambda: not any(runs(pid) for pid in pids))


def test_nothing_is_left_after_close():
    with DataCluster(2) as cluster:
        cluster.pause_worker(1)
        pids = [process.pid for process in (cluster.dispatcher, *cluster.workers)]
    assert not any(runs(pid) for pid in pids)


def test_workers_come_and_go():
    with DataCluster(2) as cluster:
        ports = [worker.port for worker in cluster.workers]
        cluster.kill_worker(0)
        cluster.stop_worker(1)
        cluster.restart_worker(0)
        cluster.restart_worker(1, same_port=False)
        assert cluster.workers[0].port == ports[0]
        assert cluster.workers[1].port != ports[1]
        assert cluster.add_worker() == 2
        cluster.pause_worker(2)
        cluster.resume_worker(2)
        assert epoch(cluster) == list(range(100))
        wait_until(lambda: cluster.num_tasks_on_workers() == 0)


def test_a_dispatcher_that_comes_back_has_its_port():
    with DataCluster(1) as cluster:
        target = cluster.target
        cluster.kill_dispatcher()
        cluster.restart_dispatcher()
        assert cluster.target == target == f"tcp://localhost:{cluster.dispatcher.port}"
        assert epoch(cluster) == list(range(100))


def test_what_a_process_is_asked_after_its_end():
    with DataCluster(0) as cluster:
        process = cluster.add_process("a process")
        assert process.run(lambda state, a, b: a + b, 3, 4) == 7
        with pytest.raises(ZeroDivisionError) as caught:
            process.run(lambda state: 1 / 0)
        assert "raised in the process a process" in caught.value.__notes__[0]
        process.end()
        with pytest.raises(ProcessEndedError, match="a process has ended"):
            process.run(lambda state: None)
