"""Train one model in the modes "async" and "sync".

In mode "async" every push is an update, and workers do not wait for each other. In mode "sync" an
update takes the mean of the gradients of all workers. So the result equals the result of one
process with the batches of all workers.

    $ mpidist run --ps 1 --worker 2 scripts/examples/sync_and_async.py
    async: 200 updates, w = [ 2. -1.]
    sync: 100 updates, w = [ 2. -1.], as in one process: True
    $ python scripts/examples/sync_and_async.py
    async: 100 updates, w = [ 2. -1.]
    sync: 100 updates, w = [ 2. -1.], as in one process: True
"""

import numpy as np

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers


def gradient(w: np.ndarray, step: int, worker: int) -> np.ndarray:
    """Return the gradient of a linear model for the batch of one worker in one step."""
    x = np.random.default_rng((step, worker)).normal(size=(16, 2))
    return x.T @ (x @ w - x @ [2.0, -1.0]) / 16


def train(strategy: ParameterServerStrategy, mode: str, workers: mpidist.ProcessGroup) -> None:
    """Train on one worker."""
    with strategy.scope():
        w = get_variable(f"{mode}/w", shape=(2,), dtype="float64", initializer="zeros")
    optimizer = optimizers.SGD(0.1)
    for step in range(100):
        own = gradient(w.read_value(), step, workers.rank())
        push = optimizer.apply_gradients([(own, w)])
    push.wait()
    workers.barrier()
    value = w.numpy()
    # Version 1 is the initial value, and each update adds 1.
    text = f"{mode}: {w.version - 1} updates, w = {value.round(2)}"
    if mode == "sync":
        alone = np.zeros(2)
        for step in range(100):
            alone -= 0.1 * np.mean([gradient(alone, step, n) for n in range(workers.size())], 0)
        text += f", as in one process: {np.allclose(value, alone, rtol=1e-12)}"
    if strategy.is_chief:
        print(text)


resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        for mode in ("async", "sync"):  # strategies with different modes have different names
            with ParameterServerStrategy(resolver, mode=mode, name=mode) as strategy:
                train(strategy, mode, server.job_group("worker"))
