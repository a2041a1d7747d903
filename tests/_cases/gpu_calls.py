"""Counts the calls of CUDA that an operation makes, with the stand-in for CuPy."""

from contextlib import contextmanager

import pytest

from mpidist.gpu import pinned_pool, staging

KINDS = {1: "to device", 2: "to host", 3: "on device"}


@contextmanager
def counted_calls(xp):
    """Count copies by direction, recorded events, waits of the host, and allocations.

    Memory that CuPy's pool has kept is no allocation. A wait is an event that the host queried
    more than once until it was done. The pool of uploads queries once.
    """
    counts = {"to device": 0, "to host": 0, "events": 0, "waits": 0, "allocations": 0}
    queries = {}  # of events that are not done
    copy, query, record = xp.cuda.runtime.memcpyAsync, xp.cuda.runtime.eventQuery, xp.Event.record

    def counted_copy(target, source, size, kind, stream):
        counts[KINDS[kind]] += 1
        return copy(target, source, size, kind, stream)

    def counted_query(event):
        status = query(event)
        queries[event] = queries.get(event, 0) + 1
        if status == 0 and queries.pop(event) > 1:
            counts["waits"] += 1
        return status

    def counted_record(event, stream=None):
        counts["events"] += 1
        return record(event, stream)

    def counted_wait(itself):
        def wait(*args):
            counts["waits"] += 1
            return itself(*args)

        return wait

    def counted_allocation(itself):
        def allocate(*args):
            counts["allocations"] += 1
            return itself(*args)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xp.cuda.runtime, "memcpyAsync", counted_copy)
        patch.setattr(xp.cuda.runtime, "eventQuery", counted_query)
        patch.setattr(xp.Event, "record", counted_record)
        for kind in (xp.Stream, xp.Event, xp.Device):
            patch.setattr(kind, "synchronize", counted_wait(kind.synchronize))
        for name in ("PinnedMemory", "alloc_pinned_memory"):
            patch.setattr(xp.cuda, name, counted_allocation(getattr(xp.cuda, name)))
        patch.setattr(xp, "_new_memory", counted_allocation(xp._new_memory))
        yield counts


def lent_bytes(pool=None):
    """Pinned memory that arrays use."""
    pool = pinned_pool.pool if pool is None else pool
    return sum(block.nbytes for block in pool._leases.lent())


def idle_bytes(pool=None):
    """Pinned memory that is kept for later arrays."""
    pool = pinned_pool.pool if pool is None else pool
    return sum(block.nbytes for blocks in pool._idle.values() for block in blocks)


def device_bytes(xp, device=0):
    """Memory of a device that arrays use; that of uploads may go back to the pool later."""
    waiting = sum(nbytes for _, nbytes, _ in staging._waiting.get(device, ()))
    with xp.cuda.Device(device):
        return xp.get_default_memory_pool().used_bytes() - waiting
