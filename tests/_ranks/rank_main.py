"""What ``mpidist run`` starts on each rank: a pytest, whose verdict travels by the socket."""

import sys
import tempfile
from pathlib import Path

import pytest


def main(folder, *words):
    """Run a pytest that takes its orders from the socket in a folder, and keeps its files there."""
    # Each rank has a folder of its own for temporary files: pytests that share one remove
    # each other's old files when they end, at the same moment.
    own = tempfile.mkdtemp(prefix="tmp-", dir=folder)
    socket = Path(folder) / "socket"
    return pytest.main([f"--rank-socket={socket}", f"--basetemp={own}", *words])


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # Failed tests are reported already; anything but these is a fault of the launch.
    sys.exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code))
