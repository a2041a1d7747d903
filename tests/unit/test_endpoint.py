"""Endpoints over inproc."""

import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from _cases.endpoints import CASES, LIMIT_S, NAMES, Service, wait_until
from _cases.second_answers import HANDLERS, answer_of, check_answer, check_log, serve

from mpidist import LATER, DistNetworkError, Endpoint, Reply, errors, open_endpoint
from mpidist.config import config
from mpidist.rpc import endpoint as endpoint_module


@pytest.fixture
def pair():
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        Service(server)
        server.serve_in_thread()
        yield server, client


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_case(pair, case):
    server, client = pair
    case(client, server.address, b"key")
    case(client, str(server.address), b"other key")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_endpoint_that_calls_itself(case):
    with open_endpoint("inproc") as endpoint:
        Service(endpoint)
        endpoint.serve_in_thread()
        case(endpoint, endpoint.address, b"key")


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_second_answer_is_logged(caplog, handler):
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        serve(server, handler)
        check_answer(handler, answer_of(client, server.address))
        check_log(caplog, handler, str(client.address))


@pytest.mark.parametrize("seconds", [1, 5])
def test_second_answers_that_come_later(pair, caplog, seconds):
    """From another thread than the handler's, and after the caller has had its answer."""
    server, client = pair
    kept = []
    server.register("later", {"Keep": lambda request: kept.append(request) or LATER})
    work = client.call(server.address, "later/Keep")
    wait_until(lambda: kept)
    kept[0].reply(b"first")
    for _ in range(seconds):
        kept[0].fail(errors.DataLossError("the disk is broken"))
    assert work.result(LIMIT_S).body == b"first"
    told = [record for record in caplog.records if "second reply to later/Keep" in record.message]
    assert len(told) == seconds
    assert all("the disk is broken" in str(record.exc_info[1]) for record in told)


def test_threads_that_answer_at_once(pair, caplog):
    server, client = pair
    kept, begin = [], threading.Barrier(8)
    server.register("later", {"Keep": lambda request: kept.append(request) or LATER})
    work = client.call(server.address, "later/Keep")
    wait_until(lambda: kept)

    def answer(number):
        begin.wait(LIMIT_S)
        kept[0].reply(b"%d" % number)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert work.result(LIMIT_S).body in [b"%d" % number for number in range(8)]
    assert sum("second reply" in record.message for record in caplog.records) == 7


def test_an_error_after_the_endpoint_has_closed(caplog):
    """The caller was told that there will be no result; only a late error is news."""
    kept = []
    with open_endpoint("inproc") as client:
        with open_endpoint("inproc") as server:
            server.register("later", {"Keep": lambda request: kept.append(request) or LATER})
            server.serve_in_thread()
            work = client.call(server.address, "later/Keep")
            wait_until(lambda: kept)
        with pytest.raises(errors.UnavailableError, match="was closed"):
            work.result(LIMIT_S)
        kept[0].reply(b"late")
        kept[0].fail(errors.CancelledError("the task was given up"))
        assert caplog.records == []
        kept[0].fail(errors.DataLossError("the disk is broken"))
    assert "the disk is broken" in caplog.text


def test_a_reply_that_cannot_be_sent_is_not_the_first_answer(pair, caplog):
    server, client = pair

    def answer(request):
        with pytest.raises(ValueError, match="C-contiguous"):
            request.reply(b"", [np.zeros((4, 4))[:, 1]])
        return Reply(b"second try")

    server.register("try", {"Again": answer})
    assert client.call(server.address, "try/Again").result(LIMIT_S).body == b"second try"
    assert caplog.records == []


class NoText(RuntimeError):
    def __str__(self):
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("no file d\udc80t"), r"OSError: no file d\\udc80t \(in bad/Fail at "),
        (ValueError("d\udc80t"), r"ValueError: d\\udc80t \(in bad/Fail at "),
        (errors.NotFoundError("d\udc80t"), r"^d\\udc80t$"),
        (NoText(), r"NoText: <its __str__ fails> \(in bad/Fail at "),
    ],
    ids=["surrogate", "value", "OpError", "no text"],
)
def test_an_error_whose_text_cannot_be_sent(pair, error, text, monkeypatch):
    server, client = pair
    # Reports of pytest-xdist cannot hold such texts.
    monkeypatch.setattr(logging.getLogger("mpidist.rpc.endpoint"), "disabled", True)

    def fail(request):
        raise error

    server.register("bad", {"Fail": fail})
    with pytest.raises(errors.OpError, match=text):
        client.call(server.address, "bad/Fail", timeout=LIMIT_S / 3).result()
    assert client.call(server.address, "test/Echo", b"on").result(LIMIT_S).body == b"on"


def test_numbers():
    with open_endpoint("inproc") as first, open_endpoint("inproc") as second:
        assert first.address != second.address
        assert str(first.address) == f"inproc://localhost:{first.address.port}"
        with pytest.raises(DistNetworkError, match="is in use already"):
            open_endpoint("inproc", first.address.port)
    with open_endpoint("inproc", 4711) as again:
        assert again.address.port == 4711
    with open_endpoint("inproc", 4711):
        pass


def test_nobody_at_the_address(pair):
    server, client = pair
    server.close()
    with pytest.raises(DistNetworkError, match="nothing serves inproc://localhost"):
        client.call(server.address, "test/Echo")


def test_closed_endpoint(pair):
    server, client = pair
    pending = client.call(server.address, "test/Never")
    client.close()
    client.close()
    with pytest.raises(errors.CancelledError, match="was closed"):
        pending.wait(LIMIT_S)
    for call in (client.call, client.notify):
        with pytest.raises(errors.CancelledError, match="is closed"):
            call(server.address, "test/Echo")


def test_requests_that_wait_when_the_server_closes():
    server, client = open_endpoint("inproc"), open_endpoint("inproc")
    Service(server)
    work = client.call(server.address, "test/Echo")  # nobody serves yet
    server.close()
    with pytest.raises(errors.UnavailableError, match="was closed"):
        work.wait(LIMIT_S)
    with pytest.raises(ConnectionError):
        work.wait(LIMIT_S)
    client.close()


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_a_request_that_was_dropped_before_the_server_closes(protocol):
    with open_endpoint(protocol) as client, open_endpoint(protocol) as server:
        kept = []
        server.register("test", {"Keep": lambda request: kept.append(request) or LATER})
        work = client.call(server.address, "test/Keep")
        server.serve(lambda: bool(kept))
        kept.clear()  # no thread serves meanwhile
        server.close()
        with pytest.raises(
            errors.UnavailableError, match=r"has discarded the request without a reply|was closed"
        ):
            work.wait(LIMIT_S / 3)


def test_a_request_that_is_deferred_while_the_server_closes():
    with open_endpoint("inproc") as client, open_endpoint("inproc") as server:
        kept, free = [], threading.Event()

        def keep(request):
            kept.append(request)
            free.wait(LIMIT_S)
            return LATER

        server.register("test", {"Keep": keep})
        thread = threading.Thread(target=server.serve, args=(lambda: False,))
        thread.start()
        work = client.call(server.address, "test/Keep")
        wait_until(lambda: kept)
        server.close()
        free.set()
        with pytest.raises(errors.UnavailableError, match="was closed"):
            work.wait(LIMIT_S / 3)
        thread.join(LIMIT_S)


def test_serving_ends_while_another_thread_serves_when_the_endpoint_closes():
    entered, free = threading.Event(), threading.Event()
    ended = []
    with open_endpoint("inproc") as client:
        server = open_endpoint("inproc")

        def stick(request):
            entered.set()
            free.wait(LIMIT_S)

        server.register("test", {"Stick": stick})
        threads = [
            threading.Thread(target=lambda: ended.append(server.serve(lambda: False)))
            for _ in range(2)
        ]
        threads[0].start()
        client.call(server.address, "test/Stick")
        assert entered.wait(LIMIT_S)
        threads[1].start()
        server.close()
        threads[1].join(LIMIT_S / 3)
        assert ended == [False]
        free.set()
        threads[0].join(LIMIT_S)


def test_a_call_that_begins_while_its_endpoint_closes(pair, monkeypatch):
    server, client = pair
    resolve = client._transport.resolve

    def close_first(address):
        client.close()
        return resolve(address)

    monkeypatch.setattr(client._transport, "resolve", close_first)
    work = client.call(server.address, "test/Never")
    with pytest.raises(errors.CancelledError, match="was closed"):
        work.wait(LIMIT_S / 3)


def test_serve_looks_at_its_condition_while_requests_keep_coming():
    """A handler that sends the next request before it ends leaves the inbox never empty."""
    with open_endpoint("inproc") as endpoint:
        count = []

        def again(request):
            count.append(1)
            if len(count) < 1000:
                endpoint.notify(endpoint.address, "test/Again")

        endpoint.register("test", {"Again": again})
        endpoint.notify(endpoint.address, "test/Again")
        assert endpoint.serve(lambda: len(count) >= 10)
        assert len(count) == 10


def test_a_waiting_thread_is_woken_when_its_endpoint_closes(pair):
    server, client = pair
    seen = []

    def wait():
        try:
            client.call(server.address, "test/Never").wait()
        except errors.CancelledError as error:
            seen.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: client._client._pending)
    client.close()
    thread.join(LIMIT_S)
    assert len(seen) == 1


def test_serve_ends_when_told():
    with open_endpoint("inproc") as server, open_endpoint("inproc") as client:
        done = []
        server.register("once", {"End": lambda request: done.append(1)})
        work = client.call(server.address, "once/End")
        assert server.serve(lambda: bool(done)) is True
        assert work.result(LIMIT_S) == Reply()
        assert server.serve(lambda: False, deadline=0.0) is False


def test_serve_ends_when_the_endpoint_closes():
    server = open_endpoint("inproc")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(server.serve(lambda: False)))
    thread.start()
    server.close()
    thread.join(LIMIT_S)
    assert ended == [False]


def test_services_come_and_go(pair):
    server, client = pair
    with pytest.raises(ValueError, match="service 'test' exists already"):
        server.register("test", {})
    server.register("other", {"Ask": lambda request: Reply(b"answer")})
    assert client.call(server.address, "other/Ask").result(LIMIT_S).body == b"answer"
    server.unregister("other")
    with pytest.raises(errors.UnimplementedError):
        client.call(server.address, "other/Ask").wait(LIMIT_S)


def test_later_failures_and_second_answers(pair):
    server, client = pair
    kept = []
    server.register("kept", {"Ask": lambda request: kept.append(request) or _later()})
    work = client.call(server.address, "kept/Ask", b"body", [np.ones(3)])
    wait_until(lambda: kept)
    assert kept[0].method == "kept/Ask"
    assert kept[0].body == b"body"
    kept[0].fail(errors.OutOfRangeError("no more"))
    with pytest.raises(IndexError, match="no more"):
        work.wait(LIMIT_S)
    kept[0].reply(b"too late")
    with pytest.raises(errors.OutOfRangeError):
        work.wait(LIMIT_S)


def _later():
    from mpidist import LATER

    return LATER


def test_handlers_run_one_at_a_time_on_one_thread(pair):
    server, client = pair
    seen = []
    server.register("who", {"Am": lambda request: seen.append(threading.current_thread().name)})
    for _ in range(5):
        client.call(server.address, "who/Am").wait(LIMIT_S)
    assert set(seen) == {f"mpidist-endpoint-{server.address.port}"}


def test_unknown_protocols():
    with pytest.raises(ValueError, match="unknown protocol 'udp'; the known ones are 'mpi', 'tcp'"):
        open_endpoint("udp")
    with open_endpoint() as default, open_endpoint("grpc") as alias:
        assert isinstance(default, Endpoint)
        assert (default.address.protocol, alias.address.protocol) == ("inproc", "tcp")


@pytest.mark.parametrize("peer", ["grpc://localhost:5", "localhost:5", "tcp://localhost:5"])
def test_a_protocol_that_is_not_known_reaches_nobody(peer):
    with pytest.raises(ValueError, match="unknown protocol 'foo'"):
        open_endpoint("foo", peer=peer)


@pytest.mark.parametrize(
    ("protocol", "peer", "transport"),
    [
        (None, "localhost:{here}", "inproc"),
        ("grpc", "127.0.0.1:{here}", "inproc"),
        (None, "grpc+verbs://localhost:{here}", "inproc"),
        (None, "elsewhere:{here}", "tcp"),
        (None, "localhost:{there}", "tcp"),
        ("grpc", "localhost:{there}", "tcp"),
        (None, "grpc://localhost:{there}", "tcp"),
        (None, "tcp://localhost:{here}", "tcp"),
        ("tcp", "localhost:{here}", "tcp"),
        ("inproc", "localhost:{there}", "inproc"),
        ("grpc+local", "localhost:{there}", "inproc"),
    ],
)
def test_what_reaches_a_peer(protocol, peer, transport):
    with open_endpoint("inproc") as served:
        here = served.address.port
        address = peer.format(here=here, there=here + 1000)
        with open_endpoint(protocol, peer=address) as endpoint:
            assert endpoint.address.protocol == transport


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_a_call_that_nobody_waits_for_ends_at_its_deadline(protocol):
    with open_endpoint(protocol) as server, open_endpoint(protocol) as client:
        held = []
        server.register("never", {"Answers": lambda request: held.append(request) or LATER})
        server.serve_in_thread()
        ended = []
        work = client.call(server.address, "never/Answers", timeout=0.2)
        work.add_done_callback(ended.append)
        deadline = time.monotonic() + LIMIT_S
        while not work.is_completed():
            client.progress()
            assert time.monotonic() < deadline
        assert ended == [work]
        with pytest.raises(errors.DeadlineExceededError, match="no reply to never/Answers"):
            work.result()
        client.call(server.address, "never/Answers", timeout=0.2)
        assert client.drain(LIMIT_S)  # it ends, and so does the wait for it


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_a_work_of_several_calls_ends_at_their_deadlines(protocol):
    with open_endpoint(protocol) as server, open_endpoint(protocol) as client:
        held = []
        server.register("never", {"Answers": lambda request: held.append(request) or LATER})
        server.serve_in_thread()
        whole = client.work("both")
        calls = [client.call(server.address, "never/Answers", timeout=0.2) for _ in range(2)]

        def ended(call):
            if all(call.is_completed() for call in calls):
                whole.complete(error=call.error)

        for call in calls:
            call.add_done_callback(ended)
        with pytest.raises(errors.DeadlineExceededError, match="no reply to never/Answers"):
            whole.wait(LIMIT_S / 3)


@pytest.mark.parametrize("kind", ["call", "notify"])
@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_close_does_not_wait_for_a_handler_that_is_stuck(protocol, kind, monkeypatch, caplog):
    monkeypatch.setattr(endpoint_module, "config", replace(config, stall_s=0.2))
    entered, free = threading.Event(), threading.Event()

    def stick(request):
        entered.set()
        free.wait(LIMIT_S)
        return Reply(b"late")

    with open_endpoint(protocol) as client:
        server = open_endpoint(protocol)
        server.register("test", {"Stick": stick})
        address = server.address
        server.serve_in_thread()
        work = getattr(client, kind)(address, "test/Stick")
        assert entered.wait(LIMIT_S)
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < LIMIT_S / 2
        assert "the handler of test/Stick has not returned for 0.2 s" in caplog.text
        if kind == "call":
            with pytest.raises(errors.UnavailableError, match="was closed"):
                work.wait(LIMIT_S)
        free.set()
        server._thread.join(LIMIT_S)
        assert len(caplog.records) == 1
