"""Checkpoints: their files, their consistent cut, and the lock of saves and restores."""
