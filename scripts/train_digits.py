"""Train a two-layer perceptron on handwritten digits, with parameter servers and a data service.

    mpidist run --ps 1 --worker 2 --data 1 scripts/train_digits.py
    mpidist run --ps 1 --worker 2 --data 1 scripts/train_digits.py --mode sync
    mpirun -n 4 python scripts/train_digits.py --ps 1 --data 1
    python scripts/train_digits.py
    python scripts/train_digits.py --gpus 1

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn. A fifth of each digit is
held out. Each step of a worker pulls the weights, computes a gradient, and pushes it. In mode
async, the default, workers do not wait for each other. At the end, the chief prints the accuracy on
the held-out images, and without --quiet also the path of the learning curve.

The workers get batches in turn, in an order that depends only on the seed. After any end of the
job, the next run continues with the batch after the last checkpoint in --output-dir. The number of
workers and data tasks may change, but a run with a data service cannot continue a run without one,
or the reverse. ``mpidist run --restarts 3`` starts the job again by itself. With --data-service the
batches come from a service outside of the job: python -m dataservice.
"""

from __future__ import annotations

import argparse
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _checkpoints import remove_checkpoints
from _digits import load_digits
from _digits_report import Reporter
from numpy.typing import NDArray

import mpidist
import mpidist.gpu
from dataservice import Dataset, distribute
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import (
    ParameterServerStrategy,
    Variable,
    get_variable,
    initializers,
    optimizers,
    read_values,
)

Array = NDArray[Any]
Batch = tuple[Array, Array]

# Shards of the dataset, which limit the useful data workers. The 1,437 images are 3 x 479, so all
# shards have the same size.
DATA_PARTS = 3


@dataclass
class Split:
    """Images of shape (n, 64), float32 in 0 to 1, and digits of shape (n,)."""

    images: Array
    digits: Array


def main() -> None:
    """Run the task of this rank."""
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    jobs = {"ps": args.ps, "worker": -1, "data": args.data}
    resolver = MPIClusterResolver(jobs=jobs)
    server = mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    with server:
        if resolver.task_type in ("ps", "data"):
            server.join()
        else:
            train(args, resolver, server)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ps", type=int, default=1, help="parameter servers; --ps of mpidist run counts instead"
    )
    parser.add_argument("--data", type=int, help="number of data tasks; may be 0; by default 1")
    parser.add_argument(
        "--data-service", metavar="tcp://HOST:PORT", help="a dispatcher elsewhere; no data tasks"
    )
    parser.add_argument("--mode", default="async", help="async, sync, or ssp")
    parser.add_argument(
        "--backup-workers", type=int, default=0, help="of mode sync; one checkpoint, at the end"
    )
    parser.add_argument("--staleness", type=int, help="bound of mode ssp, in steps")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker; needs CuPy")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument(
        "--checkpoint-every", type=float, default=5, help="in epochs; may be a fraction"
    )
    parser.add_argument(
        "--anew", action="store_true", help="remove the checkpoints in the output folder first"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.data is None:
        args.data = 0 if args.data_service else 1
    if args.data and args.data_service:
        parser.error("--data-service stands in for data tasks: leave out --data, or give it 0")
    if not args.checkpoint_every > 0:
        parser.error(f"--checkpoint-every must be positive, not {args.checkpoint_every:g}")
    return args


def train(args: argparse.Namespace, resolver: MPIClusterResolver, server: mpidist.Server) -> None:
    """Train on one worker."""
    training, held_out = load_data()
    strategy = ParameterServerStrategy(
        resolver,
        mode=args.mode,
        backup_workers=args.backup_workers,
        staleness=args.staleness,
        num_gpus_per_worker=args.gpus,
    )
    with strategy.scope():
        weights = make_weights(args)
    folder = args.output_dir / "checkpoints"
    if args.anew and strategy.is_chief:
        remove_checkpoints(folder)
    name = [f"digits-{secrets.token_hex(8)}"]
    if strategy.num_workers > 1:
        server.job_group("worker").broadcast_object_list(name)
    optimizer = optimizers.Adam(args.learning_rate)
    dataset, per_epoch = make_batches(args, resolver, strategy, training, name[0])
    feed = Feed(dataset, per_epoch, strategy)
    rounds = max(1, round(args.checkpoint_every * per_epoch / strategy.num_workers))
    # With backup workers, workers take different numbers of steps.
    every = None if args.backup_workers else rounds
    checkpoints = strategy.checkpoints(folder, every=every, extra={"data": feed})
    checkpoints.restore()
    first_epoch = feed.used // per_epoch
    reporter = Reporter(args, strategy, lambda: accuracy_of(weights, held_out), first_epoch)

    def step(images: Array, digits: Array) -> tuple[float, mpidist.Work]:
        values = read_values(weights)  # on the GPU of this replica, if it has one
        loss, gradients = loss_and_gradients(values, images, digits)
        return loss, optimizer.apply_gradients(zip(gradients, weights, strict=True))

    with reporter:
        for epoch in range(first_epoch, args.epochs):
            for batch in feed.rounds():
                if batch is None:  # so that modes sync and ssp do not wait for this worker
                    strategy.sync_mode.pass_over().wait()
                else:
                    reporter.step(*step_of_all_replicas(strategy, step, batch))
                checkpoints.step()
            reporter.epoch(epoch + 1)
    checkpoints.close()  # all pushes of all workers are applied and saved
    if strategy.is_chief:
        reporter.finish(str(checkpoints.path))


def step_of_all_replicas(
    strategy: ParameterServerStrategy, step: Callable[..., Any], batch: Batch
) -> tuple[float, mpidist.Work]:
    """Run a step on all replicas, with a part of the batch for each replica.

    Return the mean loss and the push of all replicas.
    """
    parts = [np.array_split(array, strategy.num_replicas_in_sync) for array in batch]
    values = [
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: part[context.replica_id_in_sync_group]
        )
        for part in parts
    ]
    losses, works = strategy.run(step, values)
    return float(strategy.reduce("mean", losses)), strategy.experimental_local_results(works)[0]


def load_data() -> tuple[Split, Split]:
    """Return the images for training and the held-out images.

    The split is the same in every run.
    """
    training, held_out = load_digits()
    return Split(*training), Split(*held_out)


def make_batches(
    args: argparse.Namespace,
    resolver: MPIClusterResolver,
    strategy: ParameterServerStrategy,
    data: Split,
    job_name: str,
) -> tuple[Dataset, int]:
    """Return a dataset of the shuffled batches of an epoch, and their number.

    The batches come from the data service, if there is one.
    """

    def pick(rows: Array) -> Batch:
        return data.images[rows], data.digits[rows]

    count = len(data.digits)
    dataset = Dataset.range(count).shuffle(count, seed=args.seed).batch(args.batch_size).map(pick)
    if args.data_service is None and "data" not in resolver.cluster_spec().jobs:
        return dataset.prefetch(2), len(dataset)
    apply = distribute(
        "distributed_epoch",
        service=args.data_service or resolver.master("data", 0),
        job_name=job_name,
        num_consumers=strategy.num_workers,
        consumer_index=strategy.worker_index,
        deterministic=True,  # the same order for any number of workers and data tasks
        num_shards=DATA_PARTS,
    )
    parts = [len(range(part, count, DATA_PARTS)) for part in range(DATA_PARTS)]
    return dataset.apply(apply), sum(math.ceil(part / args.batch_size) for part in parts)


def make_weights(args: argparse.Namespace) -> list[Variable]:
    """Return the weights and biases of both layers.

    The shapes are (64, hidden), (hidden,), (hidden, 10) and (10,).
    """
    first = initializers.he_normal(seed=args.seed)
    second = initializers.glorot_uniform(seed=args.seed + 1)
    return [
        get_variable("hidden/weights", (64, args.hidden), initializer=first),
        get_variable("hidden/biases", args.hidden, initializer="zeros"),
        get_variable("digits/weights", (args.hidden, 10), initializer=second),
        get_variable("digits/biases", 10, initializer="zeros"),
    ]


def forward(values: Sequence[Array], images: Array) -> tuple[Array, Array]:
    """Compute the forward pass.

    Return the activations of the hidden layer, (n, hidden), and the log-probabilities of the
    digits, (n, 10).
    """
    w1, b1, w2, b2 = values
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def loss_and_gradients(
    values: Sequence[Array], images: Array, digits: Array
) -> tuple[float, list[Array]]:
    """Return the mean cross entropy and its gradients with respect to the weights.

    The computation runs on a GPU if the weights are there.
    """
    xp = np if isinstance(values[0], np.ndarray) else mpidist.gpu.cupy()
    images, digits, rows = xp.asarray(images), xp.asarray(digits), xp.arange(len(digits))
    hidden, log_probabilities = forward(values, images)
    loss = -float(log_probabilities[rows, digits].mean())
    by_logits = np.exp(log_probabilities)
    by_logits[rows, digits] -= 1
    by_logits /= len(digits)
    by_hidden = by_logits @ values[2].T
    by_hidden[hidden == 0] = 0
    return loss, [
        images.T @ by_hidden,
        by_hidden.sum(axis=0),
        hidden.T @ by_logits,
        by_logits.sum(axis=0),
    ]


def accuracy_of(weights: Sequence[Variable], data: Split) -> float:
    """Return the share of images for which the most probable digit is right."""
    _, log_probabilities = forward(read_values(weights), data.images)
    return float((log_probabilities.argmax(axis=1) == data.digits).mean())


class Feed:
    """The batches of this worker, in rounds.

    In a round, each worker gets one batch. The last round of an epoch may have fewer batches.

    Args:
        dataset: All batches of an epoch. A data service divides them among the workers itself.
        per_epoch: Number of batches of an epoch.
        strategy: Strategy of the training.

    Attributes:
        used: Number of batches that all workers have used, with the batches of this round.
    """

    def __init__(self, dataset: Dataset, per_epoch: int, strategy: ParameterServerStrategy) -> None:
        self.dealt_out = dataset.distributed
        self.per_epoch = per_epoch
        self.index, self.workers = strategy.worker_index, strategy.num_workers
        self.used = 0
        self.elements = iter(dataset.repeat())

    def rounds(self) -> Iterator[Batch | None]:
        """Yield this worker's batches for the rest of the epoch.

        Yield None in a last round without a batch for this worker.
        """
        end = (self.used // self.per_epoch + 1) * self.per_epoch
        while self.used < end:
            count = min(self.workers, end - self.used)
            batch = self.take(count)
            self.used += count
            yield batch

    def take(self, count: int) -> Batch | None:
        """Return this worker's batch of a round with ``count`` batches, or None."""
        if self.dealt_out:
            return next(self.elements) if self.index < count else None
        batches = [next(self.elements) for _ in range(count)]
        return batches[self.index] if self.index < count else None

    def get_state(self) -> bytes:
        """Return the number of used batches and the state behind them, for all workers."""
        return b"%d %b" % (self.used, self.elements.get_state())

    def set_state(self, state: bytes) -> None:
        """Continue behind the used batches."""
        used, _, elements = state.partition(b" ")
        self.used = int(used)
        self.elements.set_state(elements)


if __name__ == "__main__":
    main()
