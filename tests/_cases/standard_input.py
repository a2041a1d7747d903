"""Standard input of the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def input_of_this_process(path: Path) -> Iterator[Callable[[], int]]:
    """Read standard input from a file; gives a function that returns the number of bytes read."""
    before = os.dup(0)
    try:
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)
        yield lambda: os.lseek(0, 0, os.SEEK_CUR)
    finally:
        os.dup2(before, 0)
        os.close(before)
