"""Tests on virtual hosts, see :mod:`_cases.hosts`.

Tests in this folder need no MPI. Tests in ``mpi`` run under every vendor's MPI.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from _cases.host_jobs import Jobs
from _cases.hosts import Hosts, problem

# The system may release the resources of a dead job a little after its end.
GONE_S = 10.0
TESTS = str(Path(__file__).resolve().parent.parent)


@pytest.fixture(scope="session")
def bed(tmp_path_factory):
    """Create the hosts for all tests."""
    found = problem()
    assert not found, f"there can be no test bed here: {found}"
    made = Hosts(shared=[tmp_path_factory.getbasetemp()])
    yield made
    made.close()


@pytest.fixture
def hosts(bed):
    """Provide the hosts. Remove processes and files that a test leaves there, and fail the test."""
    yield bed
    bed.await_end(GONE_S)
    left = bed.remains()
    bed.clear()
    assert not left, f"left on the hosts: {left}"


@pytest.fixture
def jobs(hosts, tmp_path):
    """Provide a starter of jobs on several hosts. The jobs are killed after the test."""
    made = Jobs(hosts, tmp_path)
    yield made
    made.close()


@pytest.fixture
def start(hosts):
    """Provide a starter of Python scripts on a host. The processes are killed after the test."""
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
