"""Datasets: descriptions of element sequences, one transformation a file."""

from dataservice.dataset.autotune import AUTOTUNE
from dataservice.dataset.dataset import Dataset
from dataservice.dataset.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from dataservice.dataset.options import Options
from dataservice.dataset.shard import SHARD_HINT
from dataservice.dataset.spec import ArraySpec

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "Dataset",
    "Options",
]
