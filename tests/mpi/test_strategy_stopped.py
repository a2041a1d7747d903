"""A worker that is stopped in the middle of a push and resumes later."""

import pytest
from _cases.jobs import run_job

SCRIPT = """
import os, signal, threading, time
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

SIZE = 12 << 20  # 48 MiB: three slices
resolver = MPIClusterResolver({{"ps": 1, "worker": -1}})
job, task = resolver.task_type, resolver.task_id


def stop_before_second_slice(endpoint):
    call, slices = endpoint.call, []

    def stopping(peer, method, *arguments, **options):
        if method == "ps/PushSlice":
            slices.append(method)
            if len(slices) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
        return call(peer, method, *arguments, **options)

    endpoint.call = stopping


def is_stopped(pid):
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
        pids = [None, None]
        workers.all_gather_object(pids, os.getpid())
        sgd = optimizers.SGD(1.0)
        workers.barrier()
        if task == 1:
            stop_before_second_slice(server.endpoint)
            sgd.apply_gradients([(np.arange(SIZE), large)]).wait()
            sgd.apply_gradients([(np.ones(SIZE), large)]).wait()
        else:
            deadline = time.monotonic() + 20
            while not is_stopped(pids[1]) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert is_stopped(pids[1])
            for _ in range(5):
                sgd.apply_gradients([(np.ones(SIZE), large)]).result()
            np.testing.assert_array_equal(large.numpy(), np.full(SIZE, -5.0))
            os.kill(pids[1], signal.SIGCONT)
        workers.barrier()
        np.testing.assert_array_equal(large.numpy(), -np.arange(SIZE) - 6.0)
        workers.barrier()
"""


@pytest.mark.parametrize("transport", ["auto", "rma"])
def test_it_holds_up_nobody(tmp_path, transport):
    source = SCRIPT.format(transport=transport)
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "2"), source, timeout_s=60)
    assert ended.status == 0, ended.err
