"""Memory that the ranks of a node share, and sockets that wake idle ranks."""

import contextlib
import socket
import time

import numpy as np
import pytest
from _cases.endpoints import LIMIT_S, Service, as_bytes, ask, pattern, wait_until
from _cases.jobs import run_ranks

from mpidist import open_endpoint
from mpidist.rpc import client
from mpidist.rpc import endpoint as endpoint_module


@pytest.fixture
def peers(world):
    from mpidist.mpi import world as mpi_world

    return mpi_world().peers


@pytest.mark.ranks(2, 3)
def test_each_has_a_section_that_all_see(world, peers):
    assert list(peers.sections) == list(range(world.size))
    own = peers.sections[world.rank][-8:]
    before = own.copy()
    world.Barrier()
    own[:] = world.rank + 1
    world.Barrier()
    for rank, section in peers.sections.items():
        assert (section[-8:] == rank + 1).all()
    world.Barrier()
    own[:] = before


@pytest.mark.ranks(3)
def test_a_sleeper_is_woken_by_what_arrives(world, peers, monkeypatch):
    """Polling is off: a rank that is not woken misses its deadline."""
    for module, name in ((endpoint_module, "_UNTIL_PERIOD_S"), (client, "_WAIT_S")):
        monkeypatch.setattr(module, name, 4 * LIMIT_S)
    with open_endpoint() as endpoint:
        Service(endpoint)
        ended = []
        endpoint.register("end", {"End": lambda request: ended.append(1)})
        address = world.bcast(str(endpoint.address))
        if world.rank == 0:
            assert endpoint.serve(lambda: len(ended) == 2, time.monotonic() + LIMIT_S)
        else:
            for number in range(60):
                if number % 3 == world.rank:  # others come while it is about to sleep
                    wait_until(lambda: peers.flags[peers.flag_offsets[0]])
                data = pattern(100 if number % 2 else 50_000, number)
                (got,) = ask(endpoint, address, "Echo", b"", [data]).buffers
                np.testing.assert_array_equal(as_bytes(got), data)
            for number in range(300):  # more than MPI sends at once
                endpoint.notify(address, "test/Note", b"k:%d" % number)
            ask(endpoint, address, "Echo")
            endpoint.call(address, "end/End").wait(LIMIT_S)
        world.Barrier()


@pytest.mark.ranks(2)
def test_strangers_that_wake_a_rank(world, peers):
    """Any process of the host can send to the socket; that only wakes the rank."""
    with open_endpoint() as endpoint:
        Service(endpoint)
        address = world.bcast(str(endpoint.address))
        if world.rank == 0:
            endpoint.serve_in_thread()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.setblocking(False)
                for number in range(50):
                    with contextlib.suppress(BlockingIOError):  # the socket is full
                        stranger.sendto(b"x" * number, peers.names[0])
                    assert ask(endpoint, address, "Echo", b"%d" % number).body == b"%d" % number
        world.Barrier()


def test_where_the_system_lets_them_share_nothing(tmp_path):
    source = """
        import logging, os
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        def refuse(name, flags):
            raise PermissionError(1, "not permitted")
        os.memfd_create = refuse
        from mpidist.mpi import world
        here = world()
        assert here.peers.sections == {}
        assert not any(here.peers.flags[offset] for offset in here.peers.flag_offsets)
    """
    ended = run_ranks(tmp_path, 3, source)
    assert ended.status == 0, ended.err
    assert ended.err.count("share no memory beside MPI's: {'[Errno 1] not permitted'}") == 3


def test_where_no_socket_can_be_bound(tmp_path):
    source = """
        import os, socket
        class Refuses(socket.socket):
            def bind(self, name):
                raise PermissionError(1, "not permitted")
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            socket.socket = Refuses
        from mpidist import open_endpoint
        from mpidist.mpi import world
        here = world()
        assert here.peers.sections == {}
        with open_endpoint() as endpoint:
            endpoint.register("a", {"Hello": lambda request: None})
            endpoint.serve_in_thread()
            for address in here.comm.allgather(str(endpoint.address)):
                endpoint.call(address, "a/Hello").wait()
            here.comm.Barrier()
    """
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err


def test_where_one_rank_cannot_open_the_memory(tmp_path):
    source = """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        from mpidist.mpi import node
        def refuse(reference):
            raise PermissionError(13, "not permitted")
        node.open_memfd = refuse
        from mpidist.mpi import world
        here = world()
        assert here.peers.sections == {}
        print("nothing shared")
    """
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err
    assert ended.out.count("nothing shared") == 2
    assert "share no memory beside MPI's: {'[Errno 13] not permitted'}" in ended.err
