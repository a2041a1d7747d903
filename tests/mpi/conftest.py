"""Tests on real ranks.

A test with the mark ``ranks`` runs on every rank of a launched world, once per number of ranks::

    @pytest.mark.ranks(2, 3, timeout=30)
    def test_sum(world):
        assert world.allreduce(1) == world.size

* ``world`` is a duplicate of ``MPI.COMM_WORLD``, a new one for each test. A test that needs no
  communicator of its own may leave it out, and start MPI as a user would.
* Tests of one file with the same number of ranks share a launch, in the order of the file. What
  they leave behind (a default group, a started Server) is theirs to clean, in fixtures.
  ``own_launch=True`` gives a test a launch for itself.
* The test passes if it passes on all ranks. If a rank fails, the others have a few seconds to end
  the test; all stacks are shown if they do not. ``timeout`` (seconds, 60 by default) ends a test
  likewise. After a failure the remaining tests get a new launch. Nothing is tried twice.
* All ranks must skip, or none. Assert after communication, not between, so that the ranks agree.
* Hypothesis draws other examples on each rank: give them all the same seed, and collect nothing
  from its database (``@settings(derandomize=True, database=None)``).
* ``rank_count`` is the number of ranks.

Tests here without the mark are ordinary tests, for example of the launcher itself.
"""

import pytest


@pytest.fixture
def world(rank_count):
    """Return a communicator of all ranks for this test alone."""
    from mpi4py import MPI

    # Never freed: free() is collective, and a failing rank must not wait here for the others.
    return MPI.COMM_WORLD.Dup()
