"""Learn word vectors from the source files of Python's standard library.

    mpidist run --ps 2 --worker 2 scripts/train_words.py
    mpidist run --ps 2 --worker 2 --restarts 3 scripts/train_words.py
    python scripts/train_words.py
    python scripts/train_words.py --gpus 1

The model is skip-gram with negative sampling (Mikolov et al., 2013): the vector of a word predicts
the words near it. Every worker reads its share of the files, pulls the rows of the words in a
batch, and pushes gradients of these rows only. With --gpus 1 the rows arrive on a GPU, which
computes the gradients. The last lines of the output are the nearest neighbours of some words.
After any end of the job, the next run with as many workers continues at the last checkpoint.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from _checkpoints import remove_checkpoints
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import mpidist
import mpidist.gpu
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import (
    IndexedSlices,
    ParameterServerStrategy,
    Variable,
    get_variable,
    optimizers,
    partitioners,
)

Array = NDArray[Any]

WORD = re.compile(r"[a-z]{2,}")
SHOWN = ("file", "thread", "string", "error", "socket", "integer")


def main() -> None:
    """Run the task of this rank."""
    args = parse_arguments()
    resolver = MPIClusterResolver(jobs={"ps": args.ps, "worker": -1})
    server = mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    )
    with server:
        if resolver.task_type == "ps":
            server.join()
        else:
            train(args, resolver)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ps", type=int, default=1, help="parameter servers; --ps of mpidist run counts instead"
    )
    parser.add_argument("--mode", default="async", help="async, sync, or ssp")
    parser.add_argument("--staleness", type=int, help="bound of mode ssp, in steps")
    parser.add_argument(
        "--gpus", type=int, default=0, choices=(0, 1), help="of each worker; needs CuPy"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--files", type=int, help="read so many files only")
    parser.add_argument("--words", type=int, default=8000, help="size of the vocabulary")
    parser.add_argument("--dimensions", type=int, default=64)
    parser.add_argument("--window", type=int, default=4, help="words on either side")
    parser.add_argument("--batch-size", type=int, default=2048, help="pairs of words")
    parser.add_argument("--negatives", type=int, default=256, help="drawn for each batch")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/words"))
    parser.add_argument(
        "--checkpoint-every", type=int, default=200, metavar="N", help="in steps of each worker"
    )
    parser.add_argument(
        "--anew", action="store_true", help="remove the checkpoints in the output folder first"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def train(args: argparse.Namespace, resolver: MPIClusterResolver) -> None:
    """Train on one worker."""
    texts = [tokens for path in files(args.files) if (tokens := words_of(path))]
    vocabulary = Vocabulary(texts, args.words)
    strategy = ParameterServerStrategy(
        resolver,
        mode=args.mode,
        staleness=args.staleness,
        num_gpus_per_worker=args.gpus,
        variable_partitioner=partitioners.FixedShardsPartitioner(
            resolver.cluster_spec().num_tasks("ps")
        ),
    )
    tables = make_tables(args, strategy, len(vocabulary.names))
    own = texts[strategy.worker_index :: strategy.num_workers] * args.epochs
    batches = Batches(args, vocabulary, own, strategy.worker_index)
    folder = args.output_dir / "checkpoints"
    if args.anew and strategy.is_chief:
        remove_checkpoints(folder)
    optimizer = optimizers.Adagrad(args.learning_rate)
    losses: list[float] = []
    shown = strategy.is_chief and not args.quiet
    with (
        strategy.checkpoints(
            folder, every=args.checkpoint_every, own={"batches": batches}
        ) as checkpoints,
        Progress(console=Console(stderr=True), disable=not shown) as progress,
    ):
        checkpoints.restore()
        bar = progress.add_task("files", total=len(own))
        for words in batches:
            losses.append(strategy.run(step, (tables, optimizer, *words)))
            checkpoints.step()
            progress.update(bar, completed=batches.text)
    if strategy.is_chief:
        report(vocabulary, tables[0].read_value(), losses)


def files(count: int | None) -> list[Path]:
    """Return the source files of the standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.relative_to(root).parts)
    ]
    return found[:count]


def words_of(path: Path) -> list[str]:
    """Return the words of a file in lower case."""
    return WORD.findall(path.read_text(encoding="utf-8", errors="ignore").lower())


class Vocabulary:
    """The most frequent words of all texts.

    Args:
        texts: Lists of words.
        size: Number of words to keep.

    Attributes:
        names: The words, in order of falling frequency.
        numbers: Position of each word in ``names``.
    """

    def __init__(self, texts: Sequence[Sequence[str]], size: int) -> None:
        counts = Counter(word for text in texts for word in text)
        kept = counts.most_common(size)
        self.names = [word for word, _ in kept]
        self.numbers = {word: number for number, word in enumerate(self.names)}
        share = np.array([count for _, count in kept]) / sum(counts.values())
        # Subsampling of frequent words, and the flattened distribution of negatives (power 3/4).
        self._kept = np.minimum(1, np.sqrt(1e-3 / share) + 1e-3 / share)
        self._ends = np.cumsum(share**0.75) / (share**0.75).sum()

    def draw(self, count: int, random: np.random.Generator) -> Array:
        """Draw the numbers of ``count`` words as negative samples."""
        return np.minimum(np.searchsorted(self._ends, random.random(count)), len(self.names) - 1)

    def batches(
        self, text: Sequence[str], window: int, size: int, random: np.random.Generator
    ) -> Iterator[tuple[Array, Array]]:
        """Yield shuffled batches of pairs of a word and a word near it."""
        known = np.array([self.numbers[word] for word in text if word in self.numbers], np.int64)
        known = known[random.random(len(known)) < self._kept[known]]
        pairs = [
            np.stack(pair)
            for distance in range(1, window + 1)
            for near, far in [(known[:-distance], known[distance:])]
            for pair in ((near, far), (far, near))
        ]
        both = np.concatenate(pairs, axis=1)
        both = both[:, random.permutation(both.shape[1])]
        for start in range(0, both.shape[1], size):
            yield both[0, start : start + size], both[1, start : start + size]


class Batches:
    """The batches of a worker: centers, contexts and negative samples.

    The random numbers of a batch depend on its place alone, so the place is the whole state.

    Args:
        args: Arguments of the command line.
        vocabulary: The vocabulary.
        texts: The texts of the worker, in all epochs.
        worker: Index of the worker.

    Attributes:
        text: Number of the text of the next batch.
        batch: Number of the next batch in it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        vocabulary: Vocabulary,
        texts: Sequence[Sequence[str]],
        worker: int,
    ) -> None:
        self.args, self.vocabulary, self.texts, self.worker = args, vocabulary, texts, worker
        self.text = self.batch = 0

    def __iter__(self) -> Iterator[tuple[Array, Array, Array]]:
        window, size = self.args.window, self.args.batch_size
        while self.text < len(self.texts):
            place = (self.args.seed, self.worker, self.text)
            text, random = self.texts[self.text], np.random.default_rng(place)
            pairs = self.vocabulary.batches(text, window, size, random)
            for centers, contexts in islice(pairs, self.batch, None):
                draw = np.random.default_rng((*place, self.batch))
                negatives = self.vocabulary.draw(self.args.negatives, draw)
                self.batch += 1
                yield centers, contexts, negatives
            self.text, self.batch = self.text + 1, 0

    def get_state(self) -> bytes:
        """Return the place of the next batch."""
        return f"{self.text} {self.batch}".encode()

    def set_state(self, state: bytes) -> None:
        """Continue at a place."""
        self.text, self.batch = map(int, state.split())


def make_tables(
    args: argparse.Namespace, strategy: ParameterServerStrategy, words: int
) -> list[Variable]:
    """Make the tables of vectors of words, and of words as neighbours.

    Both tables have the shape (words, dimensions).
    """
    shape = (words, args.dimensions)
    bound = 0.5 / args.dimensions
    first = np.random.default_rng(args.seed).uniform(-bound, bound, shape).astype(np.float32)
    with strategy.scope():
        return [
            get_variable("words", initializer=first),
            get_variable("neighbours", shape, initializer="zeros"),
        ]


def step(
    tables: Sequence[Variable],
    optimizer: optimizers.Adagrad,
    centers: Array,
    contexts: Array,
    negatives: Array,
) -> float:
    """Push the gradients of a batch and return its mean loss.

    The computation runs on a GPU if the replica has one.
    """
    outer = np.concatenate([contexts, negatives])
    of_center, of_outer = (
        pulled(table, ids) for table, ids in zip(tables, (centers, outer), strict=True)
    )
    of_context, of_negative = of_outer[: len(contexts)], of_outer[len(contexts) :]
    near = (of_center * of_context).sum(axis=1)
    far = of_center @ of_negative.T
    weight = 5 / len(negatives)  # the weight of five negatives for each pair
    loss = np.logaddexp(0, -near).mean() + weight * np.logaddexp(0, far).sum(axis=1).mean()
    by_near = -expit(-near)[:, None]
    by_far = weight * expit(far)
    by_center = by_near * of_context + by_far @ of_negative
    by_outer = module_of(of_center).concatenate([by_near * of_center, by_far.T @ of_center])
    optimizer.apply_gradients(
        [
            (IndexedSlices(by_center, centers), tables[0]),
            (IndexedSlices(by_outer, outer), tables[1]),
        ]
    )
    return float(loss)


def pulled(table: Variable, ids: Array) -> Any:
    """Pull each needed row once, and return the rows for ``ids``, on the GPU if there is one."""
    unique, places = np.unique(ids, return_inverse=True)
    rows = table.gather(unique)
    return rows[module_of(rows).asarray(places)]


def module_of(array: Any) -> Any:
    """Return NumPy, or CuPy for arrays on a GPU."""
    return np if isinstance(array, np.ndarray) else mpidist.gpu.cupy()


def expit(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def report(vocabulary: Vocabulary, table: Array, losses: Sequence[float]) -> None:
    """Print the loss and the nearest neighbours of some words."""
    learned = ""
    if losses:  # none if the last checkpoint is that of the end
        ends = max(len(losses) // 4, 1)  # the loss of single batches varies much
        learned = f", loss {np.mean(losses[:ends]):.3f} to {np.mean(losses[-ends:]):.3f}"
    print(f"{len(vocabulary.names)} words, {len(losses)} steps{learned}")
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    for word in SHOWN:
        if word in vocabulary.numbers:
            nearness = unit @ unit[vocabulary.numbers[word]]
            nearest = np.argsort(-nearness)[1:6]
            print(f"{word}: {', '.join(vocabulary.names[number] for number in nearest)}")


if __name__ == "__main__":
    main()
