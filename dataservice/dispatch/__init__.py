"""The dispatcher: the registry of datasets, jobs, workers and consumers, and its service."""
