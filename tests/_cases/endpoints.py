"""Test cases for endpoints over any transport, and a service for their calls."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from datetime import timedelta

import numpy as np
import pytest

from mpidist import LATER, Endpoint, Reply, errors

LIMIT_S = 30.0
# In bytes: zero, small, odd, around the threshold for separate messages, and large.
SIZES = (0, 1, 7, 4096, 16383, 16384, 16385, 100_003, (5 << 20) + 1)


def pattern(size, seed=0):
    """Return bytes that depend on the position and the seed."""
    return (np.arange(size, dtype=np.uint32) * 31 + seed).astype(np.uint8)


def as_bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Service:
    """A service. Its handlers run one at a time."""

    def __init__(self, endpoint):
        self.waiting = {}
        self._notes = {}
        self._kept = deque(maxlen=100)
        self._inside = threading.Lock()
        names = ("Echo", "Make", "Strided", "Fail", "Later", "Release", "Never", "Note", "Notes")
        names += ("Count", "Drop", "Bytes")
        endpoint.register("test", {name: getattr(self, name.lower()) for name in names})
        self.counter = 0

    def echo(self, request):
        return Reply(request.body, [np.array(buffer) for buffer in request.buffers])

    def make(self, request):
        return Reply(b"", [pattern(size, n) for n, size in enumerate(json.loads(request.body))])

    def strided(self, request):
        return Reply(b"", [np.zeros((4, 4))[:, 1]])

    def fail(self, request):
        name, text = json.loads(request.body)
        known = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
        raise known.get(name, getattr(errors, name, None))(text)

    def later(self, request):
        self.waiting.setdefault(request.body, []).append(request)
        return LATER

    def release(self, request):
        waiting = self.waiting.pop(request.body, [])
        threads = [
            threading.Thread(target=one.reply, args=(b"%d" % n, [pattern(70_000, n)]), daemon=True)
            for n, one in enumerate(waiting)
        ]
        for thread in threads:
            thread.start()
        return Reply(b"%d" % len(waiting))

    def never(self, request):
        self._kept.append(request)  # a dropped request would be answered
        return LATER

    def drop(self, request):
        return LATER

    def bytes(self, request):
        return request.body

    def note(self, request):
        key, _, text = request.body.partition(b":")
        sizes = [int(as_bytes(buffer).sum()) for buffer in request.buffers]
        self._notes.setdefault(key, []).append([text.decode(), sizes])

    def notes(self, request):
        return Reply(json.dumps(self._notes.get(request.body, [])).encode())

    def count(self, request):
        assert self._inside.acquire(blocking=False), "two handlers at once"
        self.counter = self.counter + 1
        self._inside.release()
        return Reply(b"%d" % self.counter)


def ask(client, address, method, body=b"", buffers=(), **options):
    return client.call(address, f"test/{method}", body, buffers, **options).result(LIMIT_S)


def case_round_trip(client, address, key):
    buffers = [pattern(size, n) for n, size in enumerate(SIZES)]
    reply = ask(client, address, "Echo", b"body", buffers)
    assert reply.body == b"body"
    assert len(reply.buffers) == len(buffers)
    for got, sent in zip(reply.buffers, buffers, strict=True):
        np.testing.assert_array_equal(as_bytes(got), sent)
    assert ask(client, address, "Echo") == Reply(b"", [])


def case_each_size_alone(client, address, key):
    for size in SIZES:
        sent = pattern(size, 3)
        (got,) = ask(client, address, "Echo", buffers=[sent]).buffers
        np.testing.assert_array_equal(as_bytes(got), sent)


def case_arrays_of_any_dtype(client, address, key):
    sent = [np.arange(24.0).reshape(2, 3, 4), np.array(7, np.int16), np.ones(9000, np.complex64)]
    reply = ask(client, address, "Echo", buffers=sent)
    for got, array in zip(reply.buffers, sent, strict=True):
        np.testing.assert_array_equal(as_bytes(got).view(array.dtype), array.reshape(-1))


def case_large_bodies(client, address, key):
    for size in (16_384, 32_600, 32_768, 40_000, 1 << 20, (3 << 20) + 1):
        body = pattern(size).tobytes()
        assert ask(client, address, "Echo", body).body == body
    buffers = [pattern(10, 1), pattern(1 << 20, 2)]
    reply = ask(client, address, "Echo", body, buffers)
    assert reply.body == body
    for got, sent in zip(reply.buffers, buffers, strict=True):
        np.testing.assert_array_equal(as_bytes(got), sent)


def case_long_bodies_ahead_of_large_buffers(client, address, key):
    buffer = pattern(9 << 20, 5)
    for body in (pattern(1000).tobytes(), pattern(30_000).tobytes()):
        for _ in range(4):
            reply = ask(client, address, "Echo", body, [buffer])
            assert reply.body == body
            np.testing.assert_array_equal(as_bytes(reply.buffers[0]), buffer)


def case_many_buffers(client, address, key):
    buffers = [pattern(n % 3, n) for n in range(6000)]
    reply = ask(client, address, "Echo", b"", buffers)
    assert [as_bytes(b).tobytes() for b in reply.buffers] == [b.tobytes() for b in buffers]


def case_what_is_long_keeps_its_place(client, address, key):
    key += b" long"
    sizes = [3, 50_000, 5, 100_000, 7, 200_000, 40_000, 1]
    for n, size in enumerate(sizes):
        text = f"{n}/" + size * "x"
        client.notify(address, "test/Note", key + b":" + text.encode(), [pattern(size, n)])
    notes = json.loads(ask(client, address, "Notes", key).body)
    assert [int(text.partition("/")[0]) for text, _ in notes] == list(range(len(sizes)))
    assert [len(text) - 2 for text, _ in notes] == sizes
    assert [sums for _, sums in notes] == [[int(pattern(s, n).sum())] for n, s in enumerate(sizes)]


def case_reply_into_given_arrays(client, address, key):
    for sizes in ((8, 24), (16, 1 << 20, 0, 3 << 20), (40_000,), (0,)):
        into = [np.zeros(size, np.uint8) for size in sizes]
        reply = ask(client, address, "Make", json.dumps(sizes).encode(), into=into)
        assert all(got is array for got, array in zip(reply.buffers, into, strict=True))
        for n, array in enumerate(into):
            np.testing.assert_array_equal(array, pattern(array.size, n))
    matrix = np.zeros((100, 1000), np.float32)
    ask(client, address, "Make", json.dumps([matrix.nbytes]).encode(), into=[matrix])
    np.testing.assert_array_equal(as_bytes(matrix), pattern(matrix.nbytes))


def case_reply_that_does_not_fit_the_given_arrays(client, address, key):
    for size in (100, 100_000):
        for into in ([np.zeros(size + 1, np.uint8)], [np.zeros(size, np.uint8)] * 2, []):
            reply = ask(client, address, "Make", json.dumps([size]).encode(), into=into)
            assert len(reply.buffers) == 1
            np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(size))
            assert not any(array.any() for array in into)


def case_errors_arrive_by_class(client, address, key):
    for cls in errors.OpError.__subclasses__():
        with pytest.raises(errors.OpError) as info:
            ask(client, address, "Fail", json.dumps([cls.__name__, "so it is"]).encode())
        assert type(info.value) is cls
        assert info.value.message == "so it is"
    for name in ("ValueError", "TypeError"):
        with pytest.raises(errors.InvalidArgumentError, match=rf"{name}: no .*test/Fail at "):
            ask(client, address, "Fail", json.dumps([name, "no"]).encode())
    with pytest.raises(errors.UnknownError, match=r"KeyError: 'no' \(in test/Fail at "):
        ask(client, address, "Fail", json.dumps(["KeyError", "no"]).encode())


def case_unknown_methods(client, address, key):
    for method in ("test/Nothing", "nobody/Echo", "test", "Echo", ""):
        work = client.call(address, method)
        with pytest.raises(errors.UnimplementedError, match=r"does not serve .*services: .*test"):
            work.wait(LIMIT_S)
    with pytest.raises(NotImplementedError):
        client.call(address, "test/Nothing").wait(LIMIT_S)


def case_replies_that_come_later(client, address, key):
    count = 5
    works = [client.call(address, "test/Later", key) for _ in range(count)]
    ask(client, address, "Echo")  # all handlers have run, since requests keep their order
    assert not any(work.is_completed() for work in works)
    assert ask(client, address, "Release", key).body == b"%d" % count
    for n, work in enumerate(works):
        reply = work.result(LIMIT_S)
        assert reply.body == b"%d" % n
        np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(70_000, n))


def case_deadline_of_a_call_that_is_never_answered(client, address, key):
    work = client.call(address, "test/Never", timeout=0.05)
    with pytest.raises(
        errors.DeadlineExceededError, match=r"no reply to test/Never from .* 0.05 s"
    ):
        work.wait()
    assert work.is_completed()
    patient = client.call(address, "test/Never", timeout=LIMIT_S)
    with pytest.raises(errors.DeadlineExceededError, match="it stays pending"):
        patient.wait(0.02)
    assert not patient.is_completed()
    assert ask(client, address, "Echo", b"still there").body == b"still there"


def case_reply_after_its_deadline_is_dropped(client, address, key):
    late = client.call(address, "test/Later", key, timeout=0.02)
    with pytest.raises(errors.DeadlineExceededError):
        late.wait()
    assert ask(client, address, "Release", key).body == b"1"
    assert ask(client, address, "Echo", b"next", [pattern(70_000)]).body == b"next"
    with pytest.raises(errors.DeadlineExceededError):
        late.wait()


def case_notices_keep_their_order(client, address, key):
    for number in range(20):
        client.notify(address, "test/Note", b"%s:%d" % (key, number), [pattern(number * 3000)])
    client.notify(address, "test/Fail", b'["ValueError", "logged, not answered"]')
    client.notify(address, "nobody/Nothing")
    got = json.loads(ask(client, address, "Notes", key).body)
    assert got == [[str(n), [int(pattern(n * 3000).sum())]] for n in range(20)]


def case_calls_keep_their_order(client, address, key):
    """Check the order of calls, also beyond the flow-control credit."""
    key += b" order"
    large = pattern(3 << 20)
    works = [
        client.call(address, "test/Note", b"%s:%d" % (key, n), [large[: len(large) >> n % 3]])
        for n in range(50)
    ]
    for work in works:
        work.wait(LIMIT_S)
    notes = json.loads(ask(client, address, "Notes", key).body)
    assert [int(text) for text, _ in notes] == list(range(50))


def case_many_threads_of_one_endpoint(client, address, key):
    failures, counts = [], []

    def work(seed):
        try:
            for turn in range(30):
                size = (seed * 7919 + turn * 3571) % 40_000
                into = [np.empty(size, np.uint8)] if turn % 2 else None
                body = b"%d/%d" % (seed, turn)
                reply = ask(client, address, "Echo", body, [pattern(size, seed)], into=into)
                assert reply.body == body
                np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(size, seed))
                counts.append(int(ask(client, address, "Count").body))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert failures == []
    assert len(set(counts)) == len(counts) == 6 * 30


def case_many_calls_under_way(client, address, key):
    sizes = [(n * 6007) % 50_000 for n in range(80)]
    works = [
        client.call(address, "test/Echo", b"%d" % n, [pattern(size, n)])
        for n, size in enumerate(sizes)
    ]
    for n in reversed(range(len(works))):
        reply = works[n].result(LIMIT_S)
        assert reply.body == b"%d" % n
        np.testing.assert_array_equal(as_bytes(reply.buffers[0]), pattern(sizes[n], n))


def case_work_that_a_callback_completes(client, address, key):
    whole, got = client.work("both"), []

    def one_ended(work):
        got.append(work.result().body)
        if len(got) == 2:
            whole.complete(sorted(got))

    for body in (b"a", b"b"):
        client.call(address, "test/Echo", body).add_done_callback(one_ended)
    assert whole.result(LIMIT_S) == [b"a", b"b"]


def case_what_is_no_body(client, address, key):
    for body in ("text", 5, None, [1]):
        with pytest.raises(TypeError, match="must be str and bytes, not str and "):
            client.call(address, "test/Echo", body)
    with pytest.raises(TypeError, match="must be str and bytes, not bytes and bytes"):
        client.call(address, b"test/Echo")


def case_a_reply_that_cannot_be_sent(client, address, key):
    with pytest.raises(errors.InvalidArgumentError, match=r"must be C-contiguous.*test/Strided"):
        ask(client, address, "Strided")
    assert ask(client, address, "Echo", b"x").body == b"x"


def case_buffers_that_are_not_contiguous(client, address, key):
    with pytest.raises(ValueError, match="C-contiguous"):
        client.call(address, "test/Echo", b"", [np.zeros((4, 4))[:, 1]])
    # int() accepts U+0663 (Arabic 3), and str.isdigit() also accepts U+00B2 (superscript 2).
    for wrong in ("nowhere", "mpi://vm:\u0663", "vm:\u00b2", "vm:-1"):
        with pytest.raises(ValueError, match="is not an address"):
            client.call(wrong, "test/Echo")


def case_drain(client, address, key):
    """Check that drain answers earlier requests and refuses later requests."""
    with Endpoint(client._transport) as server:
        service = Service(server)
        server.serve_in_thread()
        there = str(server.address)
        later = [client.call(there, "test/Later", key) for _ in range(3)]
        assert ask(client, there, "Echo", b"x").body == b"x"  # the earlier handlers have run
        assert not server.drain(0.02)
        with pytest.raises(errors.UnavailableError, match="is about to close"):
            ask(client, there, "Echo")
        drained = []
        thread = threading.Thread(target=lambda: drained.append(server.drain(LIMIT_S)), daemon=True)
        thread.start()
        for request in service.waiting.pop(key):
            request.reply(b"done")
        assert [work.result(LIMIT_S).body for work in later] == [b"done"] * 3
        thread.join(LIMIT_S)
        assert drained == [True]


def case_requests_that_are_dropped_unanswered(client, address, key):
    with Endpoint(client._transport) as server:
        Service(server)
        server.serve_in_thread()
        for size in (10, 100_000):
            with pytest.raises(
                errors.UnavailableError, match="has discarded the request without a reply"
            ):
                ask(client, str(server.address), "Drop", b"x", [pattern(size)])
        assert server.drain(LIMIT_S)


def case_requests_that_wait_when_the_endpoint_is_closed(client, address, key):
    with Endpoint(client._transport) as server:
        service = Service(server)
        server.serve_in_thread()
        works = [client.call(str(server.address), "test/Later", key) for _ in range(2)]
        ask(client, str(server.address), "Echo")
    for work in works:
        with pytest.raises(errors.UnavailableError, match="closed"):
            work.wait(LIMIT_S)
    for request in service.waiting[key]:
        request.reply(b"too late")


def case_an_endpoint_that_its_handler_closes(client, address, key):
    server = Endpoint(client._transport)
    Service(server)
    server.register("stop", {"Stop": lambda request: server.close()})
    server.serve_in_thread()
    there = str(server.address)
    assert client.call(there, "stop/Stop").result(LIMIT_S).body == b""
    gone = (errors.UnavailableError, errors.DistNetworkError, errors.DeadlineExceededError)
    with pytest.raises(gone):  # over tcp, another process may soon listen there
        ask(client, there, "Echo", timeout=1.0)
    for use in (lambda: server.register("x", {}), server.serve_in_thread):
        with pytest.raises(errors.CancelledError, match="is closed"):
            use()
    server.close()


def case_what_a_handler_must_not_return(client, address, key):
    with pytest.raises(errors.UnknownError, match="returned bytes, not a Reply, None or LATER"):
        ask(client, address, "Bytes", b"x")


def case_what_cannot_be_sent_or_received_into(client, address, key):
    objects = np.array([{}], object)
    frozen = np.zeros(3, np.uint8)
    frozen.flags.writeable = False
    for buffers, into, error in (
        ([objects], None, "holds Python objects"),
        ([np.ones(3)], [objects], "holds Python objects"),
        ([[1.0]], None, "must be a NumPy array, not list"),
        (np.ones((2, 2)), None, "put it in brackets"),
    ):
        with pytest.raises(TypeError, match=error):
            ask(client, address, "Echo", b"", buffers, into=into)
    with pytest.raises(ValueError, match="read-only"):
        ask(client, address, "Echo", b"", [np.ones(3, np.uint8)], into=[frozen])
    with pytest.raises(TypeError, match="a peer must be an address or its text, not None"):
        ask(client, None, "Echo")
    got = ask(client, address, "Echo", b"x", timeout=timedelta(seconds=LIMIT_S))
    assert got.body == b"x"


def case_an_array_that_becomes_read_only(client, address, key):
    """Check that the caller gets the error and the endpoint stays usable."""
    array = np.zeros(100, np.uint8)
    work = client.call(address, "test/Later", key, into=[array])
    array.flags.writeable = False
    for size in (70_000, 100):
        into = np.zeros(size, np.uint8)
        work = client.call(address, "test/Later", key + b"%d" % size, into=[into])
        into.flags.writeable = False
        ask(client, address, "Release", key + b"%d" % size)
        if size == 70_000:
            with pytest.raises(ValueError, match="read-only"):
                work.wait(LIMIT_S)
        else:  # the reply does not fit, so the array is not used
            assert work.result(LIMIT_S).buffers[0].nbytes == 70_000
    ask(client, address, "Release", key)


def case_addresses_of_other_protocols(client, address, key):
    own = client._transport.protocol
    for protocol in {"inproc", "mpi", "tcp"} - {own}:
        with pytest.raises(errors.DistNetworkError, match=f"open an endpoint over {protocol}"):
            ask(client, f"{protocol}://localhost:1", "Echo")


def case_drain_waits_for_own_calls(client, address, key):
    with Endpoint(client._transport) as another:
        work = another.call(address, "test/Later", key)
        ask(another, address, "Echo")
        assert not another.drain(0.02)
        ask(client, address, "Release", key)
        assert another.drain(LIMIT_S)
        assert work.result().body == b"0"


def case_futures(client, address, key):
    future = client.call(address, "test/Echo", b"x").get_future()
    assert future.result(LIMIT_S).body == b"x"
    failing = client.call(address, "test/Fail", b'["NotFoundError", "gone"]').get_future()
    assert isinstance(failing.exception(LIMIT_S), errors.NotFoundError)


def wait_until(condition):
    """Wait until another thread has made a condition true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]
NAMES = [case.__name__.removeprefix("case_") for case in CASES]
