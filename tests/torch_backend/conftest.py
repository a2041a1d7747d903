"""Fixtures for tests of the torch backend. The tests run where torch is installed."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import mpidist.torch  # noqa: F401


@pytest.fixture
def backend():
    """Make torch's default group of all ranks, and destroy it after the test."""
    dist.init_process_group("mpidist", timeout=timedelta(seconds=20))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world(rank_count):
    """Return a communicator of all ranks for this test alone."""
    from mpi4py import MPI

    # Never freed: free() is collective, and a failing rank must not wait here for the others.
    return MPI.COMM_WORLD.Dup()
