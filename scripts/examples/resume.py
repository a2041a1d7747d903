"""Stop a training in the middle of an epoch, and continue it exactly where it stopped.

A checkpoint has the variables, the state of the optimizer and the state of the data iterator. The
arguments are the folder of the checkpoints and the step at which to stop. In mode "sync" the result
is the same without an interruption, and with another number of workers after the restart.

    $ mpidist run --ps 1 --worker 2 scripts/examples/resume.py whole 60
    steps 0 to 60: w = [ 1.399  -0.9727]
    $ mpidist run --ps 1 --worker 2 scripts/examples/resume.py parts 25
    steps 0 to 25: w = [ 0.669  -0.6361]
    $ python scripts/examples/resume.py parts 60
    steps 25 to 60: w = [ 1.399  -0.9727]
"""

import sys
from pathlib import Path

import numpy as np

import mpidist
from dataservice import Dataset
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

folder, last_step = sys.argv[1], int(sys.argv[2])


def train(strategy: ParameterServerStrategy) -> None:
    """Train on one worker."""
    with strategy.scope():
        w = get_variable("w", shape=(2,), dtype="float64", initializer="zeros")
    optimizer = optimizers.Adam(0.03)
    x = np.random.default_rng(0).normal(size=(320, 2))
    y = x @ [2.0, -1.0]
    # An epoch has 20 batches of 16 examples. repeat() shuffles each epoch in another order.
    batches = iter(Dataset.range(320).shuffle(320, seed=1).batch(16).repeat())
    first_step = 0
    checkpoint = strategy.latest_checkpoint(folder)
    if checkpoint is not None:
        first_step = strategy.restore(checkpoint)
        batches.set_state(Path(checkpoint, "data").read_bytes())
    for _ in range(first_step, last_step):
        own = next(batches)[strategy.worker_index :: strategy.num_workers]
        gradient = x[own].T @ (x[own] @ w.read_value() - y[own]) / len(own)
        push = optimizer.apply_gradients([(gradient, w)])
    push.wait()  # this step has the gradients of all workers
    if strategy.is_chief:
        strategy.save(folder, extra={"data": batches.get_state()})
        print(f"steps {first_step} to {last_step}: w = {w.numpy().round(4)}")


resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        train(ParameterServerStrategy(resolver, mode="sync"))
