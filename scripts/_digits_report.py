"""Output of train_digits: a progress bar, a learning curve, and a file of results."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import mpidist
from strategy import ParameterServerStrategy


@dataclass
class Point:
    """A point of the learning curve."""

    step: int
    epoch: int
    seconds: float
    loss: float
    accuracy: float
    updates_per_s: float
    staleness: float


@dataclass
class Meter:
    """Losses, pending pushes and staleness since the last point of the learning curve."""

    losses: list[float] = field(default_factory=list)
    pushes: list[mpidist.Work] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    def collect(self) -> None:
        """Record the staleness of the pushes that have been applied."""
        done = [push for push in self.pushes if push.is_completed()]
        self.pushes = [push for push in self.pushes if not push.is_completed()]
        applied = [push.result() for push in done]
        self.staleness += [float(np.mean(one.staleness)) for one in applied if one.contributed]


class Reporter:
    """Progress bar and learning curve of the chief.

    On other workers, a reporter only records losses and pushes.

    Args:
        args: Arguments of the command line.
        strategy: Strategy of the training.
        accuracy: Function that evaluates the weights.
        first_epoch: Number of epochs before this run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        strategy: ParameterServerStrategy,
        accuracy: Callable[[], float],
        first_epoch: int,
    ) -> None:
        self.args = args
        self.strategy = strategy
        self.accuracy = accuracy
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
        """Record the loss and the push of one update."""
        self.meter.losses.append(loss)
        self.meter.pushes.append(push)
        self.meter.collect()

    def settle(self) -> None:
        """Wait until all pushes of this worker have been applied."""
        for push in self.meter.pushes:
            push.wait()
        self.meter.collect()

    def epoch(self, done: int) -> None:
        """Record the end of an epoch. The chief evaluates the weights."""
        if not self.strategy.is_chief:
            self.meter = Meter(pushes=self.meter.pushes)
            return
        point = self.measure(done)
        self.progress.update(
            self.task,
            completed=done,
            description=f"loss {point.loss:.3f} accuracy {point.accuracy:.4f} "
            f"{point.updates_per_s:.0f} updates/s staleness {point.staleness:.2f}",
        )

    def measure(self, epoch: int) -> Point:
        """Add a point to the learning curve and return it."""
        self.settle()
        now, step = time.perf_counter(), int(self.strategy.global_step)
        point = Point(
            step=step,
            epoch=epoch,
            seconds=now - self.started,
            loss=float(np.mean(self.meter.losses)) if self.meter.losses else self.last_loss,
            accuracy=self.accuracy(),
            updates_per_s=(step - self.last_step) / (now - self.last_time),
            staleness=float(np.mean(self.meter.staleness)) if self.meter.staleness else 0.0,
        )
        self.curve.append(point)
        self.meter, self.last_time, self.last_step = Meter(), now, step
        self.last_loss = point.loss
        return point

    def finish(self, checkpoint: str) -> None:
        """Evaluate the weights, write all files, and print the accuracy."""
        accuracy = self.accuracy()
        self.args.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.args.output_dir / "learning_curve.png"
        plot(self.curve, path)
        results = {
            "accuracy": accuracy,
            "step": int(self.strategy.global_step),
            "seconds": time.perf_counter() - self.started,
            "workers": self.strategy.num_workers,
            "ps": self.strategy.cluster_resolver.cluster_spec().num_tasks("ps"),
            "checkpoint": checkpoint,
            "arguments": {key: str(value) for key, value in vars(self.args).items()},
            "curve": [asdict(point) for point in self.curve],
        }
        (self.args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(f"accuracy {accuracy:.4f}", flush=True)
        if not self.args.quiet:
            print(f"learning curve: {path}", flush=True)


def plot(curve: Sequence[Point], path: Path) -> None:
    """Draw the loss, the accuracy and the staleness over the updates, one panel each."""
    from matplotlib.figure import Figure  # a slow import that only the chief needs

    steps = [point.step for point in curve]
    figure = Figure(figsize=(7, 8), layout="constrained")
    figure.suptitle("Handwritten digits")
    loss, accuracy, staleness = figure.subplots(3, sharex=True)
    loss.plot(steps, [point.loss for point in curve], label="training loss", color="tab:blue")
    loss.set(ylabel="loss", yscale="log")
    shares = [point.accuracy for point in curve]
    accuracy.plot(steps, shares, label="accuracy on held-out digits", color="tab:orange")
    accuracy.set(ylabel="accuracy")
    stale = [point.staleness for point in curve]
    label = "updates that a gradient had not seen (mean)"
    staleness.plot(steps, stale, label=label, color="tab:green")
    staleness.set(ylabel="staleness", xlabel="updates of the variables")
    for panel in (loss, accuracy, staleness):
        panel.legend()
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
