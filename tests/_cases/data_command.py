"""Servers of a data service, as a user starts them: ``python -m dataservice``."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import dataservice

_ROOT = Path(dataservice.__file__).parents[1]
# A machine that is busy takes long to start Python.
_LIMIT_S = 60.0


class Command:
    """One server; a context manager that leaves nothing of it.

    Args:
        words: What follows ``python -m dataservice``.
        env: Added to the environment.

    Attributes:
        said: The line that it printed when it was up.
    """

    def __init__(self, *words, env=None):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dataservice", *words],
            env={**os.environ, "PYTHONPATH": str(_ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self._first_line()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.stop(signal.SIGKILL)

    def stop(self, number=signal.SIGTERM):
        """Have it end by a signal; its exit status."""
        self._process.send_signal(number)  # does nothing to one that has ended
        status = self._process.wait(_LIMIT_S)
        self._process.stdout.close()
        return status

    def _first_line(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            begin = time.monotonic()
            if not selector.select(_LIMIT_S):
                self.stop(signal.SIGKILL)
                raise AssertionError(f"nothing was printed in {time.monotonic() - begin:.0f} s")
        return self._process.stdout.readline().strip()
