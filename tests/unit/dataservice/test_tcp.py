"""The data service between unrelated processes of one host."""

import subprocess
import sys

import numpy as np
import pytest

from dataservice import Dataset, DispatchServer, distribute

LIMIT_S = 60

WORKER = """
import sys
from dataservice import WorkerServer
worker = WorkerServer(port=0, dispatcher_address=sys.argv[1], protocol="tcp")
print("up", flush=True)
sys.stdin.read()
worker.stop()
"""
TRAINER = """
import sys
from dataservice import Dataset, distribute
dataset = Dataset.range(100).apply(distribute("distributed_epoch", sys.argv[1], job_name="job"))
print(sum(int(x) for x in dataset), flush=True)
"""


@pytest.fixture
def start():
    """Provide a starter of Python processes. A process gets a script and arguments."""
    running = []

    def start(script, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([sys.executable, "-c", script, *arguments], **pipes))
        return running[-1]

    yield start
    for process in running:
        process.communicate(timeout=LIMIT_S)


def test_processes_of_one_host(start):
    with DispatchServer(port=0, protocol="tcp") as dispatcher:
        assert dispatcher.target.startswith("tcp://localhost:")
        workers = [start(WORKER, dispatcher.target) for _ in range(2)]
        assert [worker.stdout.readline() for worker in workers] == ["up\n"] * 2
        dataset = Dataset.range(40).map(lambda x: np.full(20_000, x, np.float32)).batch(4)
        dataset = dataset.apply(distribute("distributed_epoch", dispatcher.target, job_name="a"))
        batches = list(dataset)
        for batch in batches:  # the last batch of each worker may be short
            np.testing.assert_array_equal(batch, np.repeat(batch[:, :1], 20_000, axis=1))
        assert sorted(int(x) for batch in batches for x in batch[:, 0]) == list(range(40))
        trainers = [start(TRAINER, dispatcher.target) for _ in range(2)]
        totals = [int(trainer.communicate(timeout=LIMIT_S)[0]) for trainer in trainers]
        assert sum(totals) == sum(range(100))
        for worker in workers:
            worker.communicate(timeout=LIMIT_S)
            assert worker.returncode == 0
