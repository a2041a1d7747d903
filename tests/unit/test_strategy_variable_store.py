"""How a server allocates variables, and what it answers."""

import contextlib

import pytest

from mpidist import LATER, errors, host_memory
from mpidist.ps_memory import PsMemory
from strategy import ParameterServerStrategy, get_variable
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.memory import Memory
from strategy.server.parameter_server import Directory, LocalHost
from strategy.server.variable_store import VariableStore

MIB = 1 << 20


class Asked:
    """A request, and the answer to it."""

    def __init__(self, message):
        self.body = message.SerializeToString()
        self.answer = None

    def reply(self, body=b"", buffers=()):
        self.answer = pb.CreateReply.FromString(body)

    def fail(self, error):
        self.answer = error


class Server:
    """A store with a connection of each of three workers."""

    def __init__(self):
        self.memory = PsMemory()
        self.store = VariableStore(self, 0)
        for worker in range(3):
            self.store.attach(pb.AttachRequest(worker=worker, strategy="s"))

    def ask(self, worker, **changes):
        fields = {"name": "v", "shape": [3 * MIB], "dtype": "float32"}
        asked = Asked(pb.CreateRequest(**(fields | changes), worker=worker, connection=worker))
        reply = self.store.create(asked)
        if reply is not LATER:
            asked.reply(reply.body)
        return asked

    def create(self, worker, **changes):
        return self.ask(worker, **changes).answer


@pytest.fixture
def server():
    return Server()


def test_other_workers_wait_for_the_initial_value(server):
    first, second, third = (server.ask(worker) for worker in range(3))
    assert first.answer.must_initialize
    assert second.answer is third.answer is None
    server.store.abandon(Asked(pb.ReadRequest(variable=0)))
    assert second.answer.must_initialize  # the next one is to push it
    server.store.detach(1)
    assert third.answer.must_initialize


@pytest.mark.parametrize("elements", [1 << 45, 1 << 57])
def test_more_memory_than_the_host_has(server, elements):
    match = rf"ps 0 has no room for variable 'v' of {4 * elements} bytes: the host has \d+ MiB"
    with pytest.raises(errors.ResourceExhaustedError, match=match):
        server.create(0, shape=[elements])
    assert server.create(0).must_initialize  # smaller


def test_memory_that_is_just_enough(server, monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory", lambda: (12 * MIB, "host"))
    with pytest.raises(
        errors.ResourceExhaustedError, match="the host has 12 MiB of memory left: divide"
    ):
        server.create(0)
    versions = 8 * 12
    monkeypatch.setattr(host_memory, "free_memory", lambda: (12 * MIB + versions, "host"))
    assert server.create(0).must_initialize


def test_more_memory_than_the_process_can_address(server, monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory", lambda: (1 << 62, "host"))
    match = rf"ps 0 has no room for variable 'v' of {1 << 59} bytes: its process cannot have"
    with pytest.raises(errors.ResourceExhaustedError, match=match):
        server.create(0, shape=[1 << 57])
    assert server.create(0).must_initialize


def test_segments_grow_by_the_memory_that_there_is():
    source = PsMemory()
    allocated, allocate = [], source.allocate
    source.allocate = lambda nbytes: allocated.append(nbytes) or allocate(nbytes)
    memory = Memory(source)
    places = [memory.carve(64, 6 * MIB) for _ in range(9)]
    assert allocated == [16 * MIB, 16 * MIB, 32 * MIB]
    spans = [(place.segment.reference, *place.offsets) for place in places]
    assert len(set(spans)) == 9
    memory.carve(200 * MIB)
    assert allocated[-1] >= 200 * MIB


def test_the_memory_is_exhausted_beside_a_full_segment(monkeypatch):
    memory = Memory(PsMemory())
    memory.carve(15 * MIB)
    monkeypatch.setattr(host_memory, "free_memory", lambda: (MIB, "host"))
    with pytest.raises(errors.ResourceExhaustedError, match="the host has 1 MiB"):
        memory.carve(2 * MIB)
    assert memory.carve(MIB // 2).offsets == (15 * MIB,)


def test_a_variable_that_is_far_too_large_in_local_mode():
    host = LocalHost()
    with contextlib.closing(host.endpoint), ParameterServerStrategy(server=host).scope():
        match = rf"ps 0 has no room for variable 'h' of {1 << 47} bytes"
        with pytest.raises(errors.ResourceExhaustedError, match=match):
            get_variable("h", (1 << 45,))
        assert float(get_variable("v", (), initializer=2.0)) == 2.0
        assert get_variable("h", (4,), initializer="ones").numpy().tolist() == [1.0] * 4


def test_the_first_definition_counts_until_nobody_uses_it():
    directory = Directory()

    def define(connection, server, dtype="float32"):
        part = pb.PartOf(start=0, stop=8, server=server)
        asked = pb.Definition(
            name="v", shape=[8], dtype=dtype, parts=[part], worker=connection, connection=connection
        )
        return asked, pb.Definition.FromString(directory.define(Asked(asked)).body)

    first, known = define(0, 1)
    assert known == first
    directory.undefine(Asked(first))
    second, known = define(1, 0)
    assert known == second
    _, known = define(0, 1)
    assert known == second
    directory.undefine(Asked(second))  # strategy 0 uses it now
    assert define(0, 1)[1] == second
    with pytest.raises(errors.InvalidArgumentError, match=r"float64\[8\], but worker 1 created it"):
        define(2, 0, "float64")


def test_names_of_strategies(server):
    attach = server.store.attach
    with pytest.raises(errors.AlreadyExistsError, match="worker 0 has an open strategy named 's'"):
        attach(pb.AttachRequest(worker=0, strategy="s"))
    assert attach(pb.AttachRequest(worker=0, strategy="t")) == 3
    with pytest.raises(errors.InvalidArgumentError, match="worker 3 has mode 'sync' with backup"):
        attach(pb.AttachRequest(worker=3, strategy="s", mode=pb.Mode(name="sync")))
