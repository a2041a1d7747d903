"""Train a convolutional network of torch on handwritten digits, with its parameters on ps tasks.

    mpidist run --ps 1 --worker 2 scripts/train_torch.py
    mpidist run --ps 2 --worker 2 --restarts 3 scripts/train_torch.py --mode sync
    python scripts/train_torch.py

Each step pulls the values into the parameters of the module and pushes the gradients that autograd
has computed. The servers apply Adam. The data are the 1,797 images of 8 x 8 pixels that come with
scikit-learn. A fifth of each digit is held out. The last line of the output has the accuracy on the
held-out images. After any end of the job, the next run continues at the last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from _checkpoints import remove_checkpoints
from _digits import load_digits

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, optimizers

try:
    import torch
    from torch import nn
    from torch.nn import functional

    from strategy.torch import ModuleVariables
except ModuleNotFoundError:
    sys.exit("torch computes here, and is not installed: pip install 'mpidist[torch]'")

Split = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Run the task of this rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ps", type=int, default=1, help="parameter servers; --ps of mpidist run counts instead"
    )
    parser.add_argument("--mode", default="async", help="async or sync")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/torch"))
    parser.add_argument(
        "--checkpoint-every", type=int, default=200, metavar="N", help="in steps of each worker"
    )
    parser.add_argument(
        "--anew", action="store_true", help="remove the checkpoints in the output folder first"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    resolver = MPIClusterResolver(jobs={"ps": args.ps, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            train(args, ParameterServerStrategy(resolver, mode=args.mode))


def train(args: argparse.Namespace, strategy: ParameterServerStrategy) -> None:
    """Train on one worker."""
    (images, digits), held_out = load_data()
    torch.manual_seed(args.seed)
    model = make_model()
    with strategy.scope():
        variables = ModuleVariables(model)
    optimizer = optimizers.Adam(args.learning_rate)
    steps = max(len(digits) // args.batch_size // strategy.num_workers, 1)  # of an epoch
    folder = args.output_dir / "checkpoints"
    if args.anew and strategy.is_chief:
        remove_checkpoints(folder)
    with strategy.checkpoints(folder, every=args.checkpoint_every) as checkpoints:
        for step in range(checkpoints.restore(), args.epochs * steps):
            epoch, number = divmod(step, steps)
            # The order depends on the epoch alone, so a restarted job needs no state of it.
            random = np.random.default_rng((args.seed, strategy.worker_index, epoch))
            order = torch.from_numpy(random.permutation(len(digits)))
            batch = order[number * args.batch_size : (number + 1) * args.batch_size]
            variables.pull()
            model.zero_grad()
            functional.cross_entropy(model(images[batch]), digits[batch]).backward()
            variables.push(optimizer)
            checkpoints.step()
    variables.pull()
    if strategy.is_chief:
        print(
            f"{int(strategy.global_step)} steps, held-out accuracy {accuracy(model, held_out):.3f}"
        )


def load_data() -> tuple[Split, Split]:
    """Return the images and digits for training, and the held-out ones.

    Images have shape (n, 1, 8, 8) and are float32 in 0 to 1.
    """
    training, held_out = load_digits()
    return as_tensors(*training), as_tensors(*held_out)


def as_tensors(images: np.ndarray, digits: np.ndarray) -> Split:
    """Convert images and digits to tensors, with a dimension for channels."""
    return torch.from_numpy(images).reshape(-1, 1, 8, 8), torch.from_numpy(digits)


def make_model() -> nn.Module:
    """Make a network of two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, held_out: Split) -> float:
    """Return the share of images for which the most probable digit is right."""
    images, digits = held_out
    with torch.no_grad():
        return float((model(images).argmax(1) == digits).float().mean())


if __name__ == "__main__":
    main()
