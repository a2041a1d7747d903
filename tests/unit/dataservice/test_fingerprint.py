"""Dataset.fingerprint."""

import functools
import subprocess
import sys
import threading

import numpy as np
import pytest

from dataservice import Dataset, Options, distribute

SCALE = 3
TABLE = np.arange(4)


def helper(i):
    return i * SCALE


class Affine:
    OFFSET = 1

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, i):
        return i * self.factor + self.OFFSET


def add(amount):
    return lambda i: i + amount


def recursive(i):
    return recursive(i - 1) if i else 0


DATASETS = {
    "range": lambda: Dataset.range(10),
    "range 11": lambda: Dataset.range(11),
    "range of int32": lambda: Dataset.range(10, output_type=np.int32),
    "slices": lambda: Dataset.from_tensor_slices(np.arange(10)),
    "other slices": lambda: Dataset.from_tensor_slices(np.arange(1, 11)),
    "slices of float": lambda: Dataset.from_tensor_slices(np.arange(10.0)),
    "slices in a dict": lambda: Dataset.from_tensor_slices({"a": np.arange(10)}),
    "slices in another dict": lambda: Dataset.from_tensor_slices({"b": np.arange(10)}),
    "text": lambda: Dataset.from_tensor_slices(["a", "b\0"]),
    "other text": lambda: Dataset.from_tensor_slices(["a", "c\0"]),
    "list": lambda: Dataset.from_source([1, 2, 3]),
    "other list": lambda: Dataset.from_source([1, 2, 4]),
    "map": lambda: Dataset.range(10).map(lambda i: i + 1),
    "other map": lambda: Dataset.range(10).map(lambda i: i + 2),
    "parallel map": lambda: Dataset.range(10).map(lambda i: i + 1, num_parallel_calls=2),
    "captured": lambda: Dataset.range(10).map(add(1)),
    "other captured": lambda: Dataset.range(10).map(add(2)),
    "default": lambda: Dataset.range(10).map(lambda i, by=1: i + by),
    "other default": lambda: Dataset.range(10).map(lambda i, by=2: i + by),
    "helper": lambda: Dataset.range(10).map(lambda i: helper(i)),
    "table": lambda: Dataset.range(4).map(lambda i: TABLE[i]),
    "inner code": lambda: Dataset.range(4).map(lambda i: sum(j + 1 for j in range(i))),
    "other inner code": lambda: Dataset.range(4).map(lambda i: sum(j + 2 for j in range(i))),
    "object": lambda: Dataset.range(10).map(Affine(1)),
    "other object": lambda: Dataset.range(10).map(Affine(2)),
    "method": lambda: Dataset.range(10).map(Affine(2).__call__),
    "partial": lambda: Dataset.range(10).map(functools.partial(max, 3)),
    "other partial": lambda: Dataset.range(10).map(functools.partial(max, 4)),
    "builtin": lambda: Dataset.range(10).map(abs),
    "ufunc": lambda: Dataset.range(10).map(np.negative),
    "numpy": lambda: Dataset.range(10).map(lambda i: np.mean(i)),
    "other numpy": lambda: Dataset.range(10).map(lambda i: np.median(i)),
    "recursive": lambda: Dataset.range(10).map(recursive),
    "set": lambda: Dataset.range(10).filter(lambda i: str(i) in {"1", "2", "3", "4"}),
    "other set": lambda: Dataset.range(10).filter(lambda i: str(i) in {"1", "2", "3", "5"}),
    "scan": lambda: Dataset.range(10).scan(0, lambda s, i: (s + i, s)),
    "other scan": lambda: Dataset.range(10).scan(1, lambda s, i: (s + i, s)),
    "flat": lambda: Dataset.range(3).flat_map(lambda i: Dataset.range(i)),
    "other flat": lambda: Dataset.range(3).flat_map(lambda i: Dataset.range(i).repeat(2)),
    "shuffle": lambda: Dataset.range(10).shuffle(5),
    "seed": lambda: Dataset.range(10).shuffle(5, seed=1),
    "cache": lambda: Dataset.range(10).cache(),
    "zip": lambda: Dataset.zip(Dataset.range(3), Dataset.range(4)),
    "other zip": lambda: Dataset.zip(Dataset.range(4), Dataset.range(3)),
    "windows": lambda: Dataset.range(9).window(3).flat_map(lambda w: w.batch(3)),
    "padded": lambda: Dataset.from_source([[1], [1, 2]]).padded_batch(2, padding_values=1),
    "otherwise padded": lambda: Dataset.from_source([[1], [1, 2]]).padded_batch(
        2, padding_values=2
    ),
}


def fingerprints():
    return {name: int(make().fingerprint()) for name, make in DATASETS.items()}


def test_fingerprints_differ_where_datasets_do():
    found = fingerprints()
    assert len(set(found.values())) == len(DATASETS)
    assert fingerprints() == found
    assert type(Dataset.range(3).fingerprint()) is np.uint64


def test_fingerprints_are_those_of_another_process():
    program = (
        "import importlib.util, os\n"
        f"spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.fingerprints())"
    )
    for seed in "12":  # of the hashes of text, and so of the order in sets
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            timeout=120,
        )
        assert eval(done.stdout) == fingerprints()


def test_globals_of_a_function_count(monkeypatch):
    before = fingerprints()
    monkeypatch.setitem(globals(), "SCALE", 4)
    monkeypatch.setitem(globals(), "TABLE", np.arange(1, 5))
    monkeypatch.setattr(Affine, "OFFSET", 2)
    changed = {name for name, found in fingerprints().items() if found != before[name]}
    assert changed == {"helper", "table", "object", "other object", "method"}


def test_options_are_a_part_of_it():
    options = Options()
    options.deterministic = False
    dataset = Dataset.range(3).map(abs, num_parallel_calls=2)
    assert dataset.fingerprint() != dataset.with_options(options).fingerprint()


def test_a_dataset_of_a_service(make_service):
    target = make_service(1).target
    there = [
        Dataset.range(n).apply(distribute("parallel_epochs", target, job_name="job")).fingerprint()
        for n in (3, 3, 4)
    ]
    assert there[0] == there[1] != there[2]


def test_an_object_that_cannot_be_pickled():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="has no fingerprint, because <unlocked"):
        Dataset.range(3).map(lambda i: (lock, i)[1]).fingerprint()
