"""Strategies of one name, one after the other."""

from _cases.jobs import run_job

BEGIN = """
import mpidist
import numpy as np
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers
"""
ONE_MORE = (
    BEGIN
    + """
resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        if resolver.task_id == 0:
            with ParameterServerStrategy(resolver, mode="sync"):
                pass
        strategy = ParameterServerStrategy(resolver, mode="sync")
        with strategy.scope():
            w = get_variable("w", shape=(3,), initializer="zeros")
        server.job_group("worker").barrier()  # a worker without a strategy is not waited for
        grads = np.full(3, 1.0 + strategy.worker_index, "f4")
        optimizers.SGD(1.0).apply_gradients([(grads, w)]).wait()
        print("mean", w.numpy().tolist(), flush=True)
"""
)


def test_workers_train_together_after_one_of_them_has_made_a_strategy_more(tmp_path):
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "2"), ONE_MORE)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["mean [-1.5, -1.5, -1.5]"] * 2


REUSED = (
    BEGIN
    + """
resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        for _ in range(3):
            with ParameterServerStrategy(transport="rma") as strategy, strategy.scope():
                v = get_variable("v", (300_000,), "f8", 0.0)
                optimizers.SGD(1.0).apply_gradients([(np.full(v.shape, -1.0), v)]).wait(30)
                print(np.unique(v.numpy()).tolist(), flush=True)
"""
)


def test_a_name_is_free_again_after_close(tmp_path):
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "1"), REUSED)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["[1.0]", "[2.0]", "[3.0]"]
