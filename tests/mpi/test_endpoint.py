"""Endpoints over MPI: the cases of every transport, and features of ranks."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from _cases.endpoints import CASES, LIMIT_S, NAMES, Service, as_bytes, ask, pattern, wait_until
from _cases.jobs import run_ranks
from _cases.second_answers import HANDLERS, answer_of, check_answer, check_log, serve

import mpidist
from mpidist import DistNetworkError, Endpoint, Reply, errors, open_endpoint
from mpidist.rpc.mpi import mpi_transport


@pytest.fixture
def served(world):
    """Open an endpoint on each rank. The first endpoint serves on a thread during the test."""
    endpoint = open_endpoint()
    address = world.bcast(str(endpoint.address))
    if world.rank == 0:
        Service(endpoint)
        endpoint.serve_in_thread()
    yield endpoint, address
    world.Barrier()
    endpoint.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(world, served, case):
    endpoint, address = served
    if world.rank:  # all at the same time
        case(endpoint, address, b"key of rank %d" % world.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_endpoint_that_calls_itself(world, served, case):
    endpoint, address = served
    if world.rank == 0:
        case(endpoint, address, b"key")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_second_answer_is_logged(world, caplog, handler):
    with open_endpoint() as endpoint:
        address = world.bcast(str(endpoint.address))
        if world.rank == 0:
            serve(endpoint, handler)
        answer = answer_of(endpoint, address) if world.rank else None
        world.Barrier()
        if world.rank == 0:
            check_log(caplog, handler, "rank 1")
        else:
            check_answer(handler, answer)


@pytest.mark.ranks(3)
def test_all_call_all(world):
    with open_endpoint() as endpoint:
        Service(endpoint)
        endpoint.serve_in_thread()
        addresses = world.allgather(str(endpoint.address))
        sizes = [100, 3 << 20, 17_000, (1 << 20) + 1]
        works = [
            (peer, size, endpoint.call(address, "test/Echo", b"%d" % peer, [pattern(size, peer)]))
            for size in sizes
            for peer, address in enumerate(addresses)
        ]
        for peer, size, work in works:
            reply = work.result(LIMIT_S)
            assert reply.body == b"%d" % peer
            np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(size, peer))
        world.Barrier()


@pytest.mark.ranks(2)
def test_serving_on_the_main_thread(world):
    with open_endpoint() as endpoint:
        address = world.bcast(str(endpoint.address))
        if world.rank == 0:
            service, ended = Service(endpoint), []
            endpoint.register("end", {"End": lambda request: ended.append(1)})
            assert endpoint.serve(lambda: bool(ended))
            assert service.counter == 50
            assert endpoint.serve(lambda: False, deadline=0.0) is False
        else:
            for number in range(50):
                assert ask(endpoint, address, "Count").body == b"%d" % (number + 1)
            endpoint.call(address, "end/End").wait(LIMIT_S)


@pytest.mark.ranks(2)
def test_request_to_an_endpoint_that_opens_later(world):
    number = 1_000_000 * world.size  # of rank 0, and not used before
    if world.rank == 1:
        with open_endpoint() as endpoint:
            host = endpoint.address.host
            address = f"mpi://{host}:{number}"
            works = [
                endpoint.call(address, "test/Echo", b"%d" % size, [pattern(size)])
                for size in (10, 100_000, 0)
            ]
            world.send("sent", 0)
            for work, size in zip(works, (10, 100_000, 0), strict=True):
                reply = work.result(LIMIT_S)
                assert reply.body == b"%d" % size
                np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(size))
            world.send("done", 0)
    else:
        with open_endpoint() as other:
            world.recv(source=1)
            while other.progress():  # the requests arrive before their receiving endpoint opens
                pass
            with open_endpoint(number=number) as endpoint:
                Service(endpoint)
                endpoint.serve_in_thread()
                world.recv(source=1)


@pytest.mark.ranks(2)
def test_request_to_an_endpoint_that_was_closed(world):
    number = 2_000_000 * world.size
    with open_endpoint() as endpoint:
        if world.rank == 0:
            open_endpoint(number=number).close()
            world.send("closed", 1)
            ended = []
            endpoint.register("end", {"End": lambda request: ended.append(1)})
            world.send(str(endpoint.address), 1)
            endpoint.serve(lambda: bool(ended))
        else:
            world.recv(source=0)
            address = world.recv(source=0)
            closed = f"mpi://{endpoint.address.host}:{number}"
            for size in (10, 100_000):
                with pytest.raises(errors.UnavailableError, match=f"{number} was closed before"):
                    endpoint.call(closed, "test/Echo", b"", [pattern(size)]).wait(LIMIT_S)
            endpoint.call(address, "end/End").wait(LIMIT_S)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nbytes", [0, 10, 1 << 20])
def test_a_number_that_is_no_rank_and_no_endpoint(world, nbytes):
    size = world.size
    with open_endpoint() as endpoint:
        endpoint.serve_in_thread()
        host = endpoint.address.host
        said = {}
        for number in (777 * size + 1, 778 * size, 779 * size + world.rank):  # not used before
            work = endpoint.call(f"mpi://{host}:{number}", "test/Echo", b"", [pattern(nbytes)])
            with pytest.raises(DistNetworkError) as info:
                work.result(LIMIT_S)
            said[number] = str(info.value)
        world.Barrier()
    for number, text in said.items():
        assert f"nothing serves mpi://{host}:{number}, which test/Echo was sent to" in text
        assert (
            f"rank {number % size} has no endpoint {number} (the ranks are 0 to {size - 1}" in text
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("host", ["nowhere", "127.0.0.2.example", "localhost.localdomain"])
def test_a_host_that_is_not_that_of_the_rank(world, served, host):
    endpoint, _ = served
    for call in (endpoint.call, endpoint.notify):
        for rank in range(world.size):
            with pytest.raises(
                DistNetworkError, match=rf"{host}:{rank} .* rank {rank} of 2, whose"
            ):
                call(f"mpi://{host}:{rank}", "test/Echo")


@pytest.mark.ranks(2)
def test_names_of_the_host_of_a_rank(world, served):
    endpoint, address = served
    own = endpoint.address.host
    number = address.rpartition(":")[2]
    for host in (own, own.upper(), f"{own}.cluster.example", "localhost", "127.0.0.1"):
        assert ask(endpoint, f"mpi://{host}:{number}", "Echo", b"here").body == b"here"


@pytest.mark.ranks(2)
def test_further_endpoints_of_a_rank_are_found_by_their_numbers(world):
    """Open endpoints with automatic and with chosen numbers."""
    size, rank = world.size, world.rank
    with (
        open_endpoint() as first,
        open_endpoint() as second,
        open_endpoint(number=9 * size + rank) as chosen,
    ):
        for endpoint in (first, second, chosen):
            Service(endpoint)
            endpoint.serve_in_thread()
        addresses = world.allgather([str(one.address) for one in (first, second, chosen)])
        for address in addresses[1 - rank]:
            assert ask(first, address, "Echo", b"here").body == b"here"
        world.Barrier()


@pytest.mark.ranks(2)
def test_closing_fails_the_calls_under_way(world, served):
    _, address = served
    if world.rank == 1:
        client = open_endpoint()
        seen = []

        def wait():
            try:
                client.call(address, "test/Never").wait()
            except errors.CancelledError as error:
                seen.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: client._client._pending)
        client.close()
        thread.join(LIMIT_S)
        assert len(seen) == 1
        with pytest.raises(errors.CancelledError, match="is closed"):
            client.call(address, "test/Echo")


@pytest.mark.ranks(2, 3)
def test_numbers(world):
    size, here = world.size, world.rank
    with open_endpoint() as first, open_endpoint() as second:
        assert first.address.port % size == second.address.port % size == here
        assert first.address.port != second.address.port
        with pytest.raises(DistNetworkError, match="is in use already"):
            open_endpoint(number=first.address.port)
        with pytest.raises(DistNetworkError, match=f"belongs to rank {(here + 1) % size}, not"):
            open_endpoint(number=(here + 1) % size)
        with open_endpoint("mpi", here) as main:
            assert str(main.address) == f"mpi://{main.address.host}:{here}"
    world.Barrier()


@pytest.mark.ranks(2)
def test_a_number_that_is_used_again_gets_no_replies_meant_for_the_last(world):
    number = 3000 * world.size + 1  # of rank 1
    with open_endpoint() as endpoint:
        address = world.bcast(str(endpoint.address))
        if world.rank == 0:
            service, ended = Service(endpoint), []
            assert service.counter == 0
            endpoint.register("end", {"End": lambda request: ended.append(1)})
            endpoint.serve(lambda: bool(ended))
        else:
            for turn in range(10):
                with open_endpoint(number=number) as client:
                    late = client.call(address, "test/Later", b"%d" % turn)
                    ask(client, address, "Echo")
                with pytest.raises(errors.CancelledError):
                    late.wait(LIMIT_S)
                with open_endpoint(number=number) as client:
                    waiting = client.call(address, "test/Later", b"second %d" % turn)
                    ask(client, address, "Release", b"%d" % turn)
                    assert not waiting.is_completed()
                    ask(client, address, "Release", b"second %d" % turn)
                    got = waiting.result(LIMIT_S)
                    assert got == Reply(b"0", got.buffers)
            endpoint.call(address, "end/End").wait(LIMIT_S)


@pytest.mark.ranks(2)
def test_inproc_works_beside_mpi(world):
    with open_endpoint("inproc") as server, open_endpoint("grpc+local") as client:
        Service(server)
        server.serve_in_thread()
        assert ask(client, server.address, "Echo", b"here").body == b"here"
    world.Barrier()


def test_cases_as_between_nodes(tmp_path):
    """Run the cases as if between nodes: large buffers go by MPI, and no rank can be woken."""
    source = """
        from _cases.endpoints import CASES, Service
        from mpidist import open_endpoint
        from mpidist.mpi import node, world
        def refuse(nbytes):
            raise OSError("not here")
        node.SharedMemfd = refuse
        comm = world().comm
        with open_endpoint("mpi") as endpoint:
            address = comm.bcast(str(endpoint.address))
            assert world().peers.sections == {}
            Service(endpoint)
            if comm.rank == 0:
                endpoint.serve_in_thread()
            else:
                for case in CASES:
                    case(endpoint, address, case.__name__.encode())
                print("all", len(CASES))
            comm.Barrier()
    """
    tests = str(Path(__file__).parents[1])
    ended = run_ranks(tmp_path, 2, source, timeout_s=60, env={"PYTHONPATH": tests})
    assert ended.status == 0, ended.err
    assert f"all {len(CASES)}" in ended.out


def test_large_buffers_where_mpi_cannot_read_the_memory_of_others(tmp_path):
    """Keep a frame that MPI sends late ahead of the buffers that follow it."""
    source = """
        from _cases.endpoints import Service, case_long_bodies_ahead_of_large_buffers as case
        from mpidist import open_endpoint
        from mpidist.mpi import world
        comm = world().comm
        with open_endpoint("mpi") as endpoint:
            address = comm.bcast(str(endpoint.address))
            Service(endpoint)
            if comm.rank == 0:
                endpoint.serve_in_thread()
            else:
                case(endpoint, address, b"")
            comm.Barrier()
    """
    env = {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MPIR_CVAR_CH4_CMA_ENABLE": "0",
        "OMPI_MCA_smsc": "^cma,xpmem",
    }
    ended = run_ranks(tmp_path, 2, source, timeout_s=90, env=env)
    assert ended.status == 0, ended.err


def test_a_call_to_a_script_that_has_ended_fails_soon(tmp_path):
    source = """
        from mpidist import errors, open_endpoint
        from mpidist.mpi import world
        rank = world().rank
        with open_endpoint("mpi") as endpoint:
            addresses = world().comm.allgather(str(endpoint.address))
            if rank == 1:
                try:
                    endpoint.call(addresses[0], "test/Never").wait()
                except errors.UnavailableError as error:
                    print(error)
    """
    ended = run_ranks(tmp_path, 2, source, env={"MPIDIST_CALL_TIMEOUT_S": "25"})
    assert ended.status == 0, ended.err
    assert "no reply to test/Never from mpi://" in ended.out
    assert "the script there has ended" in ended.out


def test_a_rank_is_lost_after_its_last_messages(tmp_path):
    source = """
        import time
        from mpidist import open_endpoint
        from mpidist.mpi import world
        rank = world().rank
        endpoint = open_endpoint("mpi")
        addresses = world().comm.allgather(str(endpoint.address))
        if rank == 1:
            for _ in range(200):
                endpoint.notify(addresses[0], "test/Note", bytes(100))
        else:
            events = []
            endpoint.register("test", {"Note": lambda request: events.append("note")})
            endpoint.on_peer_lost(events.append)
            while not endpoint._transport._left:
                time.sleep(0.01)
            assert endpoint.serve(lambda: "rank 1" in events, time.monotonic() + 20)
            assert events == ["note"] * 200 + ["rank 1"], events.index("rank 1")
    """
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("nbytes", "limit"), [(0, 8), (8, 8), (100_000, 12)])
def test_a_call_enters_few_files_of_the_package(world, served, nbytes, limit):
    """Check that a call passes few files between ``Endpoint.call`` and the result."""
    endpoint, address = served
    if world.rank:
        buffers = [pattern(nbytes)] if nbytes else []
        ask(endpoint, address, "Echo", b"12345678", buffers)  # the first call has extra work
        entered = files_entered(lambda: ask(endpoint, address, "Echo", b"12345678", buffers))
        assert len(entered) <= limit, sorted(entered)
        world.send("asked", 0)
    else:
        world.recv(source=1)


def files_entered(function):
    """Return the package files that a function enters on this thread."""
    entered = set()
    package = str(Path(mpidist.__file__).parent)

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


@pytest.fixture
def by_mpi(world, monkeypatch):
    """Open an endpoint that calls itself over MPI, without shared buffers. Yield notices, too."""
    with Endpoint(mpi_transport()) as endpoint:
        monkeypatch.setattr(endpoint._transport, "_writers", [None] * world.size)
        notices = []
        endpoint.register("test", {"Note": lambda request: notices.append(request.body)})
        yield endpoint, notices


@pytest.mark.ranks(1)
def test_an_exception_while_messages_are_received_drops_none(by_mpi, monkeypatch):
    endpoint, notices = by_mpi
    inbox = endpoint._transport._inbox
    testall, calls = inbox._testall, []

    def interrupted(requests):
        calls.append(requests)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return len(calls) > 4 and testall(requests)  # several messages are in flight by then

    monkeypatch.setattr(inbox, "_testall", interrupted)
    sent = [b"first", b"second", b"third"]
    for body in sent:
        endpoint.notify(endpoint.address, "test/Note", body, [pattern(1 << 20)])
    with pytest.raises(KeyboardInterrupt):
        endpoint.serve(lambda: len(notices) == 3, time.monotonic() + LIMIT_S)
    assert endpoint.serve(lambda: len(notices) == 3, time.monotonic() + LIMIT_S / 3)
    assert notices == sent


@pytest.mark.ranks(1)
def test_an_exception_during_a_delivery_drops_no_other_message(by_mpi, monkeypatch):
    endpoint, notices = by_mpi
    transport = endpoint._transport
    deliver, failed = endpoint.deliver, []

    def fail_once(message):
        deliver(message)
        if not failed:
            failed.append(message)
            raise KeyboardInterrupt

    monkeypatch.setattr(endpoint, "deliver", fail_once)
    # One poll completes all of them, because the requests and notices of a rank keep their order.
    has_ended = transport._inbox._has_ended
    monkeypatch.setattr(
        transport._inbox,
        "_has_ended",
        lambda incoming: len(transport._inbox._incoming) == 3 and has_ended(incoming),
    )
    for body in (b"first", b"second", b"third"):
        endpoint.notify(endpoint.address, "test/Note", body, [pattern(1 << 20)])
    with pytest.raises(KeyboardInterrupt):
        endpoint.serve(lambda: len(notices) == 3, time.monotonic() + LIMIT_S)
    monkeypatch.setattr(transport._inbox, "_has_ended", has_ended)
    assert endpoint.serve(lambda: len(notices) == 3, time.monotonic() + LIMIT_S / 3)
    assert notices == [b"first", b"second", b"third"]


class FailingSends:
    """A communicator that fails at the second send."""

    def __init__(self, comm):
        self._comm = comm
        self._sends = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, *arguments):
        self._sends += 1
        if self._sends == 2:
            raise RuntimeError("no memory")
        return self._comm.Isend(*arguments)


@pytest.mark.ranks(1)
def test_a_send_that_fails_keeps_the_frame_that_mpi_still_reads(by_mpi, monkeypatch):
    endpoint, notices = by_mpi
    transport = endpoint._transport
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_comm", FailingSends(transport._comm))
        with pytest.raises(RuntimeError, match="no memory"):
            endpoint.notify(endpoint.address, "test/Note", b"x", [pattern(1 << 20)])
    assert len(transport._outgoing) == 1
    endpoint.notify(endpoint.address, "test/Note", b"next")
    assert endpoint.serve(lambda: bool(notices), time.monotonic() + LIMIT_S)
    assert notices == [b"next"]
