"""Tests on hosts of their own; see :mod:`_cases.hosts`.

Those in this folder need no MPI; those in ``mpi`` run under every vendor's.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from _cases.host_jobs import Jobs
from _cases.hosts import Hosts, problem

# What a dead job held may be given back a little after its end.
GONE_S = 10.0
TESTS = str(Path(__file__).resolve().parent.parent)


@pytest.fixture(scope="session")
def bed(tmp_path_factory):
    """The hosts, for all tests."""
    found = problem()
    assert not found, f"there can be no test bed here: {found}"
    made = Hosts(shared=[tmp_path_factory.getbasetemp()])
    yield made
    made.close()


@pytest.fixture
def hosts(bed):
    """The hosts; whatever a test leaves running or lying on them is an error, and removed."""
    yield bed
    bed.await_end(GONE_S)
    left = bed.remains()
    bed.clear()
    assert not left, f"left on the hosts: {left}"


@pytest.fixture
def jobs(hosts, tmp_path):
    """Starts jobs on several hosts; killed after the test."""
    made = Jobs(hosts, tmp_path)
    yield made
    made.close()


@pytest.fixture
def start(hosts):
    """Starts a Python process on a host, with a script and its arguments; killed after the test."""
    running = []

    def start(host, source, *arguments, env=None):
        command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
        process = subprocess.Popen(
            hosts.command(host, command),
            env={**os.environ, "PYTHONPATH": TESTS, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
