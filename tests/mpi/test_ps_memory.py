"""Memory of ps tasks, mapped and read by MPI's Get."""

import logging
import resource

import numpy as np
import pytest

from mpidist import errors
from mpidist.ps_memory import PsMemory

SIZE = 3 << 20


@pytest.fixture
def memory(world):
    """Rank 0 is ps 0, the last rank ps 1."""
    return PsMemory(range(world.size), {0: 0, 1: world.size - 1})


@pytest.mark.ranks(2, 3)
def test_segments_are_mapped_and_read(world, memory):
    """Each owner allocates and attaches alone, more than once."""
    owner = {0: 0, world.size - 1: 1}.get(world.rank)
    for size in (100, SIZE):
        fact = segment = None
        if owner is not None:
            segment = memory.allocate(size)
            segment.memory[:] = 16 * owner + 5
            fact = owner, segment.reference, memory.attach(segment)
        facts = [one for one in world.allgather(fact) if one is not None]
        memory.sync()
        for index, reference, address in facts:
            mapped = memory.map(index, reference)
            read = np.zeros(size, np.uint8)
            memory.get(index, address, read)
            assert np.unique(mapped[:size]).tolist() == np.unique(read).tolist() == [16 * index + 5]
            memory.get(index, address + size - 8, read[:8])
            assert memory.map(index, reference) is mapped
        world.Barrier()
        if segment is not None:
            segment.memory[1] = 99
        memory.sync()
        world.Barrier()
        memory.sync()
        for index, reference, address in facts:
            memory.get(index, address, read)
            assert read[1] == memory.map(index, reference)[1] == 99
        world.Barrier()


@pytest.mark.ranks(2)
def test_a_process_without_descriptors_for_shared_memory(world, memory, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
    segment = memory.allocate(SIZE)
    assert not segment.memory.any()
    assert segment.reference == b""
    assert memory.map(0, segment.reference) is None
    assert f"rank {world.rank} cannot share memory" in caplog.text
    references = world.allgather(memory.allocate(1).reference)
    assert references == [b""] * 2
    monkeypatch.undo()
    (reference, _) = world.allgather(memory.allocate(64).reference)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
    assert (memory.map(0, reference) is None) == (world.rank == 1)
    world.Barrier()


@pytest.mark.ranks(2)
def test_memory_of_another_node_is_not_mapped(world, memory, monkeypatch):
    (reference, _) = world.allgather(memory.allocate(64).reference)
    monkeypatch.setattr(memory, "is_near", lambda index: False)
    assert memory.map(0, reference) is None
    world.Barrier()


@pytest.mark.ranks(2)
def test_a_window_that_was_freed(world, memory):
    address = memory.attach(memory.allocate(64))
    window = memory._window
    window.free()
    with pytest.raises(errors.FailedPreconditionError, match="was freed"):
        memory.get(0, address, np.zeros(8, np.uint8))
    window.__init__(world)  # it is freed once more at the end
