"""Checkpoints on disk, and on their way to who sees no disk."""
