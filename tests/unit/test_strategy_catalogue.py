"""How a server makes room: what it answers to whom, and in which order."""

import contextlib
import mmap
import os
from types import SimpleNamespace

import pytest

from mpidist import LATER, ClusterSpec, Window, errors, host_memory
from strategy import ParameterServerStrategy, get_variable
from strategy.local import local_host
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.catalogue import Catalogue

MIB = 1 << 20


class Asked:
    """A request, and what came of it."""

    def __init__(self, message, log):
        self.body = message.SerializeToString()
        self.log = log
        self.answer = None

    def reply(self, body=b"", buffers=()):
        self.log.append(self)
        self.answer = pb.GrowReply.FromString(body)

    def fail(self, error):
        self.answer = error


class Host:
    """A ps that shares its node with two workers of three."""

    def __init__(self):
        self.windows = [Window.private(MIB)]
        self.endpoint = SimpleNamespace(progress=lambda: False)
        self.cluster_spec = ClusterSpec({"ps": ["a:0"], "worker": [f"a:{n}" for n in range(1, 4)]})
        self.log, self.warnings = [], []
        self.room = 1 << 40
        self.grows = True

    @property
    def memory(self):
        return self

    def own(self, segment=0):
        return self.windows[segment].local

    def mates(self, index, one_sided=False):
        if one_sided:
            return [("worker", 0), ("worker", 1), ("worker", 2)]
        return [("worker", 0), ("worker", 2), ("evaluator", 0)]

    def growth_bytes(self, index, needed, wanted):
        assert needed <= wanted
        return wanted if needed <= self.room else 0

    def grow(self, index, segment, nbytes, tasks, one_sided=False):
        self.log.append((segment, tasks))
        if not self.grows:
            raise errors.ResourceExhaustedError("none left")
        self.windows.append(Window.private(nbytes))

    def warn_unshared(self, reason):
        self.warnings.append(reason)

    def sync(self):
        pass


class Server:
    """A catalogue, and a connection of each worker; worker 0 has two."""

    def __init__(self):
        self.host = Host()
        self.catalogue = Catalogue(self.host, 0)
        for worker in (0, 1, 2, 0):
            self.catalogue.attach(Asked(pb.AttachRequest(worker=worker), []))

    def creation(self, worker, connection=None, **changes):
        fields = {"name": "v", "shape": [3 * MIB], "dtype": "float32", "ordinal": 1}
        at = worker if connection is None else connection
        return pb.CreateRequest(**(fields | changes), worker=worker, connection=at)

    def create(self, worker, connection=None, **changes):
        asked = Asked(self.creation(worker, connection, **changes), self.host.log)
        reply = self.catalogue.create(asked)
        return reply if reply is LATER else pb.CreateReply.FromString(reply.body)

    def promise(self, worker, connection=None, segment=1, **changes):
        create = self.creation(worker, connection, **changes)
        asked = Asked(pb.GrowRequest(segment=segment, create=create), self.host.log)
        reply = self.catalogue.grow(asked)
        if reply is not LATER:
            asked.answer = pb.GrowReply.FromString(reply.body)
        return asked

    def withdraw(self, worker):
        create = self.creation(worker)
        self.catalogue.withdraw(Asked(pb.GrowRequest(segment=1, create=create), []))


@pytest.fixture
def server():
    return Server()


def test_all_are_answered_before_the_server_enters(server):
    assert [server.create(worker).grow for worker in (0, 2, 1)] == [1, 1, 1]
    far, first, again = server.promise(1), server.promise(0), server.promise(0, connection=3)
    assert [asked.answer for asked in (far, first, again)] == [None] * 3
    last = server.promise(2)
    assert [asked.answer.enter for asked in (first, last, far, again)] == [True, True, False, False]
    assert first.answer.nbytes == last.answer.nbytes == server.host.windows[1].local.nbytes
    entered = (1, [("worker", 0), ("worker", 2)])
    assert server.host.log[:3] == [first, last, entered]
    assert set(server.host.log[3:]) == {far, again}
    made = server.create(2)
    assert (made.segment, made.private, made.must_initialize, made.grow) == (1, False, True, 0)
    assert server.create(0) is LATER  # for the first value
    assert server.host.warnings == []


def test_a_promise_that_comes_late(server):
    for worker in (0, 2):
        server.promise(worker)
    assert not server.promise(0, connection=3).answer.enter
    assert not server.promise(0, segment=2).answer.enter
    assert server.create(0).segment == 1


def test_other_variables_wait_for_no_more_than_the_first(server):
    other = server.promise(0, connection=3, name="w", ordinal=2)
    first, last = server.promise(0), server.promise(2)
    # One thread of worker 0 enters, whichever it is.
    assert [asked.answer.enter for asked in (other, first, last)] == [True, False, True]
    assert server.create(0, connection=3, name="w", ordinal=2).segment == 1
    third = {"name": "x", "ordinal": 3, "shape": [9 * MIB]}
    assert server.create(2, **third).grow == 2


def test_room_that_is_gone_by_the_time_that_all_have_promised(server):
    first = server.promise(0)
    server.host.room = 0
    last = server.promise(2)
    assert not first.answer.enter
    assert not last.answer.enter
    assert server.host.log == [first, last]
    assert server.create(0).private
    assert server.host.warnings


def test_room_that_is_gone_before_all_have_promised(server):
    """The second worker is given private memory at once: the first must not go on waiting."""
    assert server.create(0).grow == 1
    first = server.promise(0)
    server.host.room = 0
    assert server.create(2).private
    assert not first.answer.enter
    assert not server.promise(1).answer.enter


def test_a_collective_that_fails_on_all(server):
    server.host.grows = False
    for worker in (0, 2):
        assert server.promise(worker).answer is None or worker == 2
    assert server.create(0).private
    assert server.host.warnings[0] == "none left"
    assert server.create(2, name="w", ordinal=2).grow == 1  # there may be some again


def test_shared_memory_or_an_error(server):
    server.host.room = 0
    with pytest.raises(errors.ResourceExhaustedError, match="no room for"):
        server.create(0, only_shared=True)
    with pytest.raises(errors.ResourceExhaustedError, match=f"'v' of {12 * MIB} bytes: no room"):
        server.create(0, only_shared=True)
    assert server.create(2).private
    with pytest.raises(errors.ResourceExhaustedError, match="'v' of ps 0 does not lie in shared"):
        server.create(0, only_shared=True)


@pytest.mark.parametrize("room", [0, 1 << 60])
@pytest.mark.parametrize("elements", [1 << 45, 1 << 62])  # which no process can address
def test_more_memory_than_the_host_has(server, room, elements):
    server.host.room = room
    match = rf"ps 0 has no room for variable 'v' of {4 * elements} bytes: its host has \d+ MiB"
    with pytest.raises(errors.ResourceExhaustedError, match=match):
        server.create(0, shape=[elements])
    assert server.host.log == server.host.warnings == []


def test_what_there_was_no_room_for_may_come_divided(server):
    server.host.room = 0
    with pytest.raises(errors.ResourceExhaustedError, match="divide the variable"):
        server.create(0, shape=[1 << 45], part=pb.PartOf(variable="v", count=1))
    parts = [
        pb.PartOf(variable="v", shape=[8], axis=0, start=4 * n, stop=4 * n + 4, count=2)
        for n in range(2)
    ]
    server.create(0, name="v/part_0", shape=[4], part=parts[0])
    with pytest.raises(errors.InvalidArgumentError, match="must divide a variable alike"):
        server.create(2, shape=[8], part=pb.PartOf(variable="v", shape=[8], count=1))
    # What has been made keeps its division, though a further part finds no room.
    with pytest.raises(errors.ResourceExhaustedError):
        server.create(0, name="v/part_1", shape=[1 << 45], ordinal=2, part=parts[1])
    with pytest.raises(errors.InvalidArgumentError, match="must divide a variable alike"):
        server.create(2, shape=[8], part=pb.PartOf(variable="v", shape=[8], count=1))


def test_the_least_that_is_more_than_the_host_has(server, monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory", lambda: (12 * MIB, "host"))
    with pytest.raises(
        errors.ResourceExhaustedError, match="its host has 12 MiB of memory left: divide"
    ):
        server.create(0)
    versions = 8 * 12
    monkeypatch.setattr(host_memory, "free_memory", lambda: (12 * MIB + versions, "host"))
    assert server.create(0).grow


def test_more_memory_than_there_are_addresses(server, monkeypatch):
    """As under a limit to them: this variable takes more than there can be."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: (1 << 62, "host"))
    server.host.room = 0
    match = rf"ps 0 has no room for variable 'v' of {1 << 59} bytes: its process cannot have"
    with pytest.raises(errors.ResourceExhaustedError, match=match):
        server.create(0, shape=[1 << 57])
    assert server.host.warnings == []  # which would speak of slower variables
    assert server.create(0).private


def test_a_segment_of_the_server_alone_that_cannot_be(server, monkeypatch):
    monkeypatch.setattr(server.host, "mates", lambda index, one_sided=False: [])
    monkeypatch.setattr(server.host, "grow", lambda *arguments: mmap.mmap(-1, 1 << 59))
    alone = Catalogue(server.host, 0)
    alone.attach(Asked(pb.AttachRequest(worker=0), []))
    reply = alone.create(Asked(server.creation(0), []))
    assert pb.CreateReply.FromString(reply.body).private


@pytest.mark.parametrize("one_sided", [True, False])
def test_pages_of_a_segment_count_when_they_are_taken(server, monkeypatch, one_sided):
    """One for one-sided operations is zeroed when it is made; others are sparse."""
    monkeypatch.setattr(server.host, "mates", lambda index, one_sided=False: [])
    alone = Catalogue(server.host, 0)
    mode = pb.Mode(name="async", one_sided=one_sided)
    alone.attach(Asked(pb.AttachRequest(worker=0, mode=mode), []))
    assert alone.create(Asked(server.creation(0), [])) is not LATER
    monkeypatch.setattr(host_memory, "free_memory", lambda: (0, "host"))
    more = Asked(server.creation(0, name="w", shape=[MIB], ordinal=2), [])
    if one_sided:
        reply = pb.CreateReply.FromString(alone.create(more).body)
        assert (reply.segment, reply.private) == (1, False)
    else:
        with pytest.raises(errors.ResourceExhaustedError, match="its host has 0 MiB"):
            alone.create(more)


def test_a_variable_that_is_far_too_large_in_local_mode():
    host = local_host()
    with contextlib.closing(host.endpoint), ParameterServerStrategy(server=host).scope():
        match = rf"ps 0 has no room for variable 'h' of {1 << 47} bytes"
        with pytest.raises(errors.ResourceExhaustedError, match=match):
            get_variable("h", (1 << 45,))
        assert float(get_variable("v", (), initializer=2.0)) == 2.0


def test_a_collective_that_breaks(server, monkeypatch):
    """An error of one side alone is not taken for a lack of room."""
    monkeypatch.setattr(server.host, "grow", lambda *arguments: os.stat("/missing"))
    server.promise(0)
    with pytest.raises(FileNotFoundError):
        server.promise(2)


def test_taking_a_promise_back(server):
    first, again, other = server.promise(0), server.promise(0), server.promise(1)
    server.withdraw(0)
    for asked in (first, again):
        assert isinstance(asked.answer, errors.DeadlineExceededError)
        assert "worker 0 waits, and worker 2 did not create it in time" in str(asked.answer)
    assert other.answer is None
    late = server.promise(2)
    assert late.answer is None
    assert server.promise(0).answer.enter
    server.withdraw(2)
    assert late.answer.enter  # too late to take it back


def test_workers_that_differ(server):
    server.promise(0)
    with pytest.raises(errors.InvalidArgumentError, match="worker 2 creates variable 'v' as numb"):
        server.promise(2, ordinal=2)
    with pytest.raises(errors.InvalidArgumentError, match="worker 0 variable 'v' as number 1"):
        server.create(2, name="small", shape=[3])
    assert server.create(2, name="small", shape=[3], ordinal=2).must_initialize


def test_closing_answers_who_waits(server):
    asked = server.promise(0)
    server.catalogue.close()
    assert isinstance(asked.answer, errors.UnavailableError)
