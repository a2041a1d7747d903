"""Fit a linear model with a parameter server.

The ps task holds the variable. Each worker pulls the variable, computes its gradient and pushes
the gradient. The ps task applies the optimizer. Workers do not wait for each other (mode "async").

    $ mpidist run --ps 1 --worker 2 scripts/examples/linear_ps.py
    w = [ 2. -1.] after 1000 updates by 2 workers
    $ mpiexec -n 3 python scripts/examples/linear_ps.py
    w = [ 2. -1.] after 1000 updates by 2 workers

In one process, the parameter server is a thread:

    $ python scripts/examples/linear_ps.py
    w = [ 2. -1.] after 500 updates by 1 workers
"""

import numpy as np

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers


def train(strategy: ParameterServerStrategy, server: mpidist.Server) -> None:
    """Train on one worker."""
    with strategy.scope():
        w = get_variable("w", shape=(2,), dtype="float64", initializer="zeros")
    optimizer = optimizers.Adam(0.05)
    random = np.random.default_rng(strategy.worker_index)

    def step() -> mpidist.Work:
        x = random.normal(size=(16, 2))
        error = x @ w.read_value() - x @ [2.0, -1.0]
        return optimizer.apply_gradients([(x.T @ error / 16, w)])

    for _ in range(500):
        push = strategy.run(step)  # returns before the ps task has applied the gradient
    push.wait()
    server.job_group("worker").barrier()  # the updates of all workers have been applied
    if strategy.is_chief:
        updates, workers = int(strategy.global_step), strategy.num_workers
        print(f"w = {w.numpy().round(2)} after {updates} updates by {workers} workers")


resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})  # -1: all other ranks
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()  # returns when the workers have ended
    else:
        train(ParameterServerStrategy(resolver), server)
