"""Datasets: descriptions of element sequences, one transformation a file."""

from dataservice.dataset.dataset import Dataset
from dataservice.dataset.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Dataset"]
