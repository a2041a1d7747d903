"""What ``mpidist run`` starts on each rank: a pytest, whose verdict travels by the socket."""

import sys

import pytest

if __name__ == "__main__":
    code = pytest.main(sys.argv[1:])
    # Failed tests are reported already; anything but these is a fault of the launch.
    sys.exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code))
