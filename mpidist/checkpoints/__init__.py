"""Checkpoints: folders that are complete or absent, and a manager that saves during training."""
