"""The program of each rank under ``mpidist run``: a pytest that reports over a socket."""

import sys
import tempfile
from pathlib import Path

import pytest


def main(folder, *words):
    """Run a pytest with its socket for orders and its temporary files in a folder."""
    # Each rank has its own folder for temporary files. Pytests with a common folder remove
    # each other's old files when they end at the same time.
    own = tempfile.mkdtemp(prefix="tmp-", dir=folder)
    socket = Path(folder) / "socket"
    return pytest.main([f"--rank-socket={socket}", f"--basetemp={own}", *words])


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # Failed tests are reported already. Any other code is a fault of the launch.
    sys.exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code))
