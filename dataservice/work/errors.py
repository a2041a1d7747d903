"""Errors inside a data worker."""

from __future__ import annotations


class WithdrawnError(Exception):
    """The dispatcher has given the task's part to another worker, or given it up."""
