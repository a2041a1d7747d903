"""Tests in a private Slurm cluster, see :mod:`_cases.slurm_bed`.

Tests in this folder need no MPI. Tests in ``mpi`` run under every vendor's MPI.
"""

import textwrap

import pytest
from _cases.leftovers import abandoned, shared_files
from _cases.slurm_bed import Bed, problem

# Slurm notices the end of a job a little later than its user.
GONE_S = 10.0


@pytest.fixture(scope="session")
def bed():
    """Create the nodes for all tests."""
    found = problem()
    assert not found, f"there can be no test bed here: {found}"
    with Bed() as made:
        yield made


@pytest.fixture
def slurm(bed):
    """Provide the nodes. End the processes that a test leaves there, and fail the test."""
    before = shared_files()
    yield bed
    bed.await_end(GONE_S)
    left = bed.remains()
    if left:
        bed.clear()
        bed.await_end(GONE_S)
    assert not left, f"left on the nodes: {left}"
    lost = abandoned(before, timeout_s=1.0)
    assert not lost, f"left in shared memory: {lost}"


@pytest.fixture
def script(tmp_path):
    """Provide a writer of dedented scripts. The writer returns the path of the script."""

    def write(source, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).lstrip())
        return path

    return write
