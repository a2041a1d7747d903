"""The data worker: evaluates parts of datasets, and gives their elements to consumers."""
