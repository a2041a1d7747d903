"""Tests in a Slurm of their own; see :mod:`_cases.slurm_bed`.

Those in this folder need no MPI; those in ``mpi`` run under every vendor's.
"""

import textwrap

import pytest
from _cases.leftovers import abandoned, shared_files
from _cases.slurm_bed import Bed, problem

# Slurm notices the end of a job a little later than its user.
GONE_S = 10.0


@pytest.fixture(scope="session")
def bed():
    """The nodes, for all tests."""
    found = problem()
    assert not found, f"there can be no test bed here: {found}"
    with Bed() as made:
        yield made


@pytest.fixture
def slurm(bed):
    """The nodes; whatever a test leaves running on them is an error, and ended."""
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
    """Writes a script, the common indentation removed; gives its path."""

    def write(source, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).lstrip())
        return path

    return write
