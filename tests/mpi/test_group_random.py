"""Every collective against NumPy, over random dtypes, shapes, layouts, roots and groups."""

import numpy as np
import pytest
from _cases.collectives import BY_PARTS, COLLECTIVES, check, reduce, scan

from mpidist import ProcessGroup

SEEDS = 15


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_collective(world, collective):
    check(collective, world, range(SEEDS))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("collective", BY_PARTS, ids=lambda c: c.__name__)
def test_parts_as_messages_in_segments(world, monkeypatch, collective, timeout):
    monkeypatch.setattr("mpidist.group.process_group.MIN_MESSAGE_BYTES", 1)
    for module in ("operation", "mpi_backend", "process_group"):
        monkeypatch.setattr(f"mpidist.group.{module}.LARGEST_COUNT", 7)
    monkeypatch.setattr("mpidist.group.operation._SEGMENT_COUNT", 5)
    monkeypatch.setattr("mpidist.group.mpi_pipelines._MIN_SENT_AS_COPY_BYTES", 40)
    check(collective, world, range(SEEDS, SEEDS + 8), timeout)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", [reduce, scan], ids=lambda c: c.__name__)
def test_pipelines_of_small_segments(world, monkeypatch, collective):
    monkeypatch.setattr("mpidist.group.mpi_pipelines._MIN_PIPELINE_BYTES", 0)
    monkeypatch.setattr("mpidist.group.mpi_pipelines._MAX_SEGMENT_BYTES", 24)
    check(collective, world, range(SEEDS + 8, 2 * SEEDS + 8))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["float32", "complex128", "int16", "float16", "bool"])
def test_large_reductions_in_pipelines(world, kind):
    group = ProcessGroup(world.Dup(), "pipelined")
    rank, size, count = group.rank(), group.size(), 1_500_001
    parts = [np.arange(n, n + count) % 7 for n in range(size)]

    def array():
        return (parts[rank] > 5 if kind == "bool" else parts[rank]).astype(kind)

    def total(ranks):
        whole = sum(parts[n] > 5 if kind == "bool" else parts[n] for n in ranks)
        return np.asarray(whole).astype(kind)

    for root in range(size):
        reduced = array()
        group.reduce(reduced, group_dst=root)
        np.testing.assert_array_equal(reduced, total(range(size)) if rank == root else array())
    scanned, before = array(), array()
    group.scan(scanned)
    np.testing.assert_array_equal(scanned, total(range(rank + 1)))
    group.exscan(before)
    np.testing.assert_array_equal(before, total(range(rank)) if rank else array())
    group.free()
