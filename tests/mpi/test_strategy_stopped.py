"""A worker that stands still in the middle of a push, and goes on later."""

import pytest
from _cases.jobs import run_job

SCRIPT = """
import os, signal, threading, time
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.shared.one_sided import OneSidedRing
from strategy.shared.staging import Ring

SIZE, BLOCK = 1 << 20, 1 << 18
resolver = MPIClusterResolver({{"ps": 1, "worker": -1}})
job, task = resolver.task_type, resolver.task_id


def stops(ring):
    write = ring.write

    def stopping(self, flat, dtype, scale=1.0):
        ring.write = write
        self.write(flat[: 2 * BLOCK], dtype, scale)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.write(flat[2 * BLOCK :], dtype, scale)

    ring.write = stopping


def stands_still(pid):
    with open(f"/proc/{{pid}}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


with mpidist.Server(resolver.cluster_spec(), job, task) as server:
    if job == "ps":
        server.join()
    else:
        workers = server.job_group("worker")
        strategy = ParameterServerStrategy(transport={transport!r})
        with strategy.scope():
            large = get_variable("large", SIZE, initializer=0.0)
            other = get_variable("other", SIZE, initializer=0.0)
        pids = [None, None]
        workers.all_gather_object(pids, os.getpid())
        sgd = optimizers.SGD(1.0)
        workers.barrier()
        if task == 1:
            stops(Ring)
            stops(OneSidedRing)
            sgd.apply_gradients([(np.arange(SIZE), large)]).wait()
            sgd.apply_gradients([(np.ones(SIZE), large)]).wait()
        else:
            deadline = time.monotonic() + 20
            while not stands_still(pids[1]) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stands_still(pids[1])
            for _ in range(5):
                sgd.apply_gradients([(np.ones(SIZE), other)]).result()
            np.testing.assert_array_equal(other.numpy(), np.full(SIZE, -5.0))
            # It streams, and so waits, before it gives its Work.
            threading.Timer(0.2, os.kill, (pids[1], signal.SIGCONT)).start()
            sgd.apply_gradients([(np.ones(SIZE), large)]).result()
        workers.barrier()
        np.testing.assert_array_equal(large.numpy(), -np.arange(SIZE) - 2.0)
        workers.barrier()
"""


@pytest.mark.parametrize("transport", ["auto", "rma"])
def test_it_holds_up_only_who_wants_the_same_variable(tmp_path, transport):
    source = SCRIPT.format(transport=transport)
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "2"), source, timeout_s=60)
    assert ended.status == 0, ended.err
