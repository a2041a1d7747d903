"""Errors that do not depend on assert: they are the same under ``python -O``."""

import subprocess
import sys

import pytest

UNSTARTED_SERVER = """
server = mpidist.Server({"ps": ["h:1"], "worker": ["h:1"]}, "worker", start=False)
"""
STOPPED_SERVER = """
server = mpidist.Server({"ps": ["h:1"], "worker": ["h:1"]}, "worker")
server.stop()
"""
MISUSES = {
    "memory of a Server that is not started": (
        UNSTARTED_SERVER,
        "server.memory",
        "the Server inproc://h:1 is not running; start() it",
    ),
    "memory of a Server that was stopped": (
        STOPPED_SERVER,
        "server.memory",
        "the Server inproc://h:1 was stopped; make a new one",
    ),
    "address of a task of a Server that is not started": (
        UNSTARTED_SERVER,
        "server.task_address('ps', 0)",
        "the Server inproc://h:1 is not running; start() it",
    ),
    "dispatcher target before start": (
        "from dataservice import DispatchServer; server = DispatchServer(start=False)",
        "server.target",
        "a DispatchServer has no target before it is started",
    ),
    "join of a worker that is not started": (
        "from dataservice import WorkerServer; server = WorkerServer(0, 'h:1', start=False)",
        "server.join()",
        "the WorkerServer has not been started",
    ),
}
SCRIPT = """
import mpidist
{setup}
try:
    {use}
except mpidist.errors.FailedPreconditionError as error:
    print(error.message)
"""


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["plain", "-O"])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_an_error(misuse, flags):
    setup, use, message = MISUSES[misuse]
    script = SCRIPT.format(setup=setup, use=use)
    ended = subprocess.run(
        [sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ended.stderr == ""
    assert message in ended.stdout
