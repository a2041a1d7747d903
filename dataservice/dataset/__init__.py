"""Datasets: descriptions of sequences of elements."""

from dataservice.dataset.base import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from dataservice.dataset.dataset import Dataset
from dataservice.dataset.execution import AUTOTUNE
from dataservice.dataset.indexed import SHARD_HINT
from dataservice.dataset.options import Options
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
