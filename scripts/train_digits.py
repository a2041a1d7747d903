"""Train a two-layer perceptron on handwritten digits, with parameter servers and a data service.

    mpidist run --ps 1 --worker 2 --data 1 scripts/train_digits.py
    mpidist run --ps 1 --worker 2 --data 1 scripts/train_digits.py --mode sync
    mpirun -n 4 python scripts/train_digits.py --ps 1 --data 1
    python scripts/train_digits.py

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn; a fifth of each digit
is held out. Workers pull the weights, compute a gradient, and push it: each at its own pace, or as
--mode has it. The last line printed is the accuracy on the held-out images.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpidist
from dataservice import Dataset, distribute
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, Variable, get_variable, initializers, optimizers

Array = NDArray[Any]


@dataclass
class Split:
    """Images of shape (n, 64), float32 in 0 to 1, and digits of shape (n,)."""

    images: Array
    digits: Array


@dataclass
class Point:
    """One point of the learning curve."""

    step: int
    epoch: int
    seconds: float
    loss: float
    accuracy: float
    updates_per_s: float
    staleness: float


@dataclass
class Meter:
    """What happened since the last point."""

    losses: list[float] = field(default_factory=list)
    pushes: list[mpidist.Work] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    def collect(self) -> None:
        """Take the staleness of the pushes that have been applied."""
        done = [push for push in self.pushes if push.is_completed()]
        self.pushes = [push for push in self.pushes if not push.is_completed()]
        applied = [push.result() for push in done]
        self.staleness += [float(np.mean(one.staleness)) for one in applied if one.contributed]


def main() -> None:
    """Run this rank's task."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ps", type=int, default=1, help="number of parameter servers")
    parser.add_argument("--data", type=int, default=1, help="number of data tasks; may be 0")
    parser.add_argument("--mode", default="async", help="async, sync, or ssp")
    parser.add_argument("--backup-workers", type=int, default=0, help="of mode sync")
    parser.add_argument("--staleness", type=int, help="bound of mode ssp, in steps")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--checkpoint-every", type=int, default=5, help="in epochs")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def train(args: argparse.Namespace, resolver: MPIClusterResolver, server: mpidist.Server) -> None:
    """Be a worker."""
    training, held_out = load_data()
    strategy = ParameterServerStrategy(
        resolver,
        mode=args.mode,
        backup_workers=args.backup_workers,
        staleness=args.staleness,
    )
    with strategy.scope():
        weights = make_weights(args)
    first_epoch = restore(strategy, args)
    if strategy.num_workers > 1:  # nobody saves the next checkpoint before all have this one
        server.job_group(resolver.task_type).barrier()
    optimizer = optimizers.Adam(args.learning_rate)
    batches = make_batches(args, resolver, training, first_epoch)

    def step(images: Array, digits: Array) -> tuple[float, mpidist.Work]:
        values = [weight.read_value() for weight in weights]
        loss, gradients = loss_and_gradients(values, images, digits)
        return loss, optimizer.apply_gradients(zip(gradients, weights, strict=True))

    reporter = Reporter(args, strategy, weights, held_out, first_epoch)
    with reporter:
        for epoch in range(first_epoch, args.epochs):
            for images, digits in strategy.experimental_distribute_dataset(batches):
                loss, push = strategy.run(step, args=(images, digits))
                reporter.step(loss, push)
            reporter.epoch(epoch + 1)
    strategy.finish()  # this worker's last update has been applied, and nobody waits for more
    if strategy.num_workers > 1:
        server.job_group("worker").barrier()  # and so has every worker's
    if strategy.is_chief:
        reporter.finish()


def load_data() -> tuple[Split, Split]:
    """The training images, and the held-out fifth: the same in every run."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(
        (images / 16).astype(np.float32), digits, test_size=0.2, stratify=digits, random_state=0
    )
    return Split(parts[0], parts[2]), Split(parts[1], parts[3])


def make_batches(
    args: argparse.Namespace, resolver: MPIClusterResolver, data: Split, first_epoch: int
) -> Dataset:
    """Shuffled batches: by the data service, or by this worker if there is none."""
    dataset = Dataset.from_tensor_slices((data.images, data.digits))
    dataset = dataset.shuffle(len(data.digits), seed=args.seed + 1000 * first_epoch)
    if "data" not in resolver.cluster_spec().jobs:
        return dataset.batch(args.batch_size).prefetch(2)
    service = resolver.master("data", 0)
    dataset = dataset.batch(args.batch_size)
    # Few requests at a time, so that no worker takes the whole of a small epoch for itself.
    return dataset.apply(
        distribute(
            "distributed_epoch", service=service, job_name="training", max_outstanding_requests=2
        )
    )


def make_weights(args: argparse.Namespace) -> list[Variable]:
    """Weights and biases of both layers: (64, hidden), (hidden,), (hidden, 10), (10,)."""
    first = initializers.he_normal(seed=args.seed)
    second = initializers.glorot_uniform(seed=args.seed + 1)
    return [
        get_variable("hidden/weights", (64, args.hidden), initializer=first),
        get_variable("hidden/biases", args.hidden, initializer="zeros"),
        get_variable("digits/weights", (args.hidden, 10), initializer=second),
        get_variable("digits/biases", 10, initializer="zeros"),
    ]


def forward(values: Sequence[Array], images: Array) -> tuple[Array, Array]:
    """Activations of the hidden layer, (n, hidden), and log-probabilities of digits, (n, 10)."""
    w1, b1, w2, b2 = values
    hidden = np.maximum(images @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(axis=1, keepdims=True)
    return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def loss_and_gradients(
    values: Sequence[Array], images: Array, digits: Array
) -> tuple[float, list[Array]]:
    """Mean cross entropy, and its derivative by each of the weights."""
    hidden, log_probabilities = forward(values, images)
    rows = np.arange(len(digits))
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
    """Share of images whose most probable digit is right."""
    _, log_probabilities = forward([weight.read_value() for weight in weights], data.images)
    return float((log_probabilities.argmax(axis=1) == data.digits).mean())


def restore(strategy: ParameterServerStrategy, args: argparse.Namespace) -> int:
    """Go on from the last checkpoint if asked to; the epoch to begin with."""
    if not args.resume:
        return 0
    latest = strategy.latest_checkpoint(str(args.output_dir / "checkpoints"))
    if latest is None:
        raise SystemExit(f"--resume: there is no checkpoint in {args.output_dir / 'checkpoints'}")
    strategy.restore(latest)
    return int(json.loads((Path(latest) / "training.json").read_text())["epoch"])


class Reporter:
    """What the chief shows and writes; on other workers it only counts."""

    def __init__(
        self,
        args: argparse.Namespace,
        strategy: ParameterServerStrategy,
        weights: Sequence[Variable],
        held_out: Split,
        first_epoch: int,
    ) -> None:
        self.args = args
        self.strategy = strategy
        self.weights = weights
        self.held_out = held_out
        self.meter = Meter()
        self.curve: list[Point] = []
        self.started = self.last_time = time.perf_counter()
        self.last_step = int(strategy.global_step)
        self.last_loss = float("nan")
        self.shown = strategy.is_chief and not args.quiet
        self.progress = Progress(
            TextColumn("epoch {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            disable=not self.shown,
        )
        self.task = self.progress.add_task("", total=args.epochs, completed=first_epoch)

    def __enter__(self) -> Reporter:
        self.progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.progress.stop()

    def step(self, loss: float, push: mpidist.Work) -> None:
        """Take note of one update."""
        self.meter.losses.append(loss)
        self.meter.pushes.append(push)
        self.meter.collect()

    def epoch(self, done: int) -> None:
        """Take note of the end of an epoch; the chief evaluates, and saves now and then."""
        if not self.strategy.is_chief:
            self.meter = Meter()
            return
        point = self.measure(done)
        self.progress.update(
            self.task,
            completed=done,
            description=f"loss {point.loss:.3f} accuracy {point.accuracy:.4f} "
            f"{point.updates_per_s:.0f} updates/s staleness {point.staleness:.2f}",
        )
        if done % self.args.checkpoint_every == 0 or done == self.args.epochs:
            self.save(done)

    def measure(self, epoch: int) -> Point:
        """A point of the learning curve."""
        for push in self.meter.pushes:
            push.wait()
        self.meter.collect()
        now, step = time.perf_counter(), int(self.strategy.global_step)
        point = Point(
            step=step,
            epoch=epoch,
            seconds=now - self.started,
            loss=float(np.mean(self.meter.losses)) if self.meter.losses else self.last_loss,
            accuracy=accuracy_of(self.weights, self.held_out),
            updates_per_s=(step - self.last_step) / (now - self.last_time),
            staleness=float(np.mean(self.meter.staleness)) if self.meter.staleness else 0.0,
        )
        self.curve.append(point)
        self.meter, self.last_time, self.last_step = Meter(), now, step
        self.last_loss = point.loss
        return point

    def save(self, epoch: int) -> str:
        """Write a checkpoint that knows its epoch."""
        directory = str(self.args.output_dir / "checkpoints")
        return self.strategy.save(directory, extra={"training.json": {"epoch": epoch}})

    def finish(self) -> None:
        """Evaluate once more, write everything, and print the accuracy."""
        accuracy = accuracy_of(self.weights, self.held_out)
        path = self.save(self.args.epochs)
        self.args.output_dir.mkdir(parents=True, exist_ok=True)
        plot(self.curve, self.args.output_dir / "learning_curve.png")
        results = {
            "accuracy": accuracy,
            "step": int(self.strategy.global_step),
            "seconds": time.perf_counter() - self.started,
            "workers": self.strategy.num_workers,
            "ps": self.args.ps,
            "checkpoint": path,
            "arguments": {key: str(value) for key, value in vars(self.args).items()},
            "curve": [asdict(point) for point in self.curve],
        }
        (self.args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(f"accuracy {accuracy:.4f}", flush=True)


def plot(curve: Sequence[Point], path: Path) -> None:
    """Loss and test accuracy over updates."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [point.step for point in curve]
    figure, loss_axis = plt.subplots(figsize=(7, 4), layout="constrained")
    loss_axis.plot(steps, [point.loss for point in curve], color="tab:blue")
    loss_axis.set(xlabel="updates", yscale="log")
    loss_axis.set_ylabel("training loss", color="tab:blue")
    accuracy_axis = loss_axis.twinx()
    accuracy_axis.plot(steps, [point.accuracy for point in curve], color="tab:orange")
    accuracy_axis.set_ylabel("held-out accuracy", color="tab:orange")
    accuracy_axis.set_ylim(0.8, 1.0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
