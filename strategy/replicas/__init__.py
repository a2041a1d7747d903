"""The replicas of a worker."""
