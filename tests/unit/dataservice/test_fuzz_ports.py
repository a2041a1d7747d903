"""Foreign clients at the ports of a service: every process lives, memory stays, epochs complete."""

import random
import socket
from collections import Counter
from contextlib import ExitStack

import pytest
from _cases.data_cluster import DataCluster, Reader
from _cases.endpoints import wait_until
from _cases.strangers import LENGTHS, blurt, conversation, converse, damaged, frame, opening

from dataservice import Dataset, WorkerConfig, WorkerServer, distribute
from dataservice.proto import dataservice_pb2 as pb
from mpidist import Address, Endpoint, open_endpoint
from mpidist.errors import InvalidArgumentError, OpError, UnavailableError
from mpidist.rpc.tcp import TcpTransport

ELEMENTS = 3000
ROUNDS = 10
ROOM = 32 << 20
LIMIT_S = 30.0
HELD_S = 0.2
REFUSALS = {
    "CancelledError",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "NotFoundError",
    "UnavailableError",  # a held request for a task that is given up
    "UnimplementedError",
}


@pytest.fixture
def make_cluster():
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(DataCluster(*args, **more))


class Scene:
    """A service of two workers, and a consumer in the middle of an epoch."""

    def __init__(self, cluster, env=None):
        self.cluster = cluster
        dataset = Dataset.range(ELEMENTS).map(lambda i: 3 * i)
        apply = distribute("distributed_epoch", cluster.target, max_outstanding_requests=16)
        self.reader = Reader(cluster.add_process("consumer", env), dataset.apply(apply))
        self.elements = self.reader.take(100)
        self.processes = [cluster.dispatcher, *cluster.workers, self.reader.process]
        self.ports = [port for process in self.processes for port in process.ports()]
        assert len(self.ports) >= 3  # a consumer need not listen

    def methods(self):
        """Return the methods of all servers."""
        servers = self.processes[:3]
        return sorted({m for server in servers for m in server.run(methods_of)})

    def read_during(self, attack):
        """Attack in rounds and read in between, then check the service."""
        memory = []
        for number in range(ROUNDS):
            attack(number)
            self.elements += self.reader.take(ELEMENTS // ROUNDS // 2)
            memory.append([process.resident() for process in self.processes])
        self.check(memory[1], memory[-1])

    def check(self, before, after):
        """Check memory and processes, and complete this epoch and another epoch."""
        assert [now - then < ROOM for now, then in zip(after, before, strict=True)] == [True] * 4
        self.elements += self.reader.rest()
        assert sorted(self.elements) == [3 * i for i in range(ELEMENTS)]
        assert [process.ended for process in self.processes] == [None] * 4
        another = Dataset.range(50).apply(distribute("parallel_epochs", self.cluster.target))
        assert sorted(self.reader.process.run(lambda _, d: list(d), another)) == sorted(
            2 * list(range(50))
        )


def methods_of(server):
    return list(server._endpoint._handlers)


@pytest.fixture
def scene(make_cluster):
    return Scene(make_cluster(2))


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.long)])
def test_bytes_that_are_almost_a_conversation(scene, count):
    rng = random.Random(count)
    methods = scene.methods()

    def attack(number):
        for _ in range(count):
            port, abort = rng.choice(scene.ports), rng.random() < 0.8
            identity, said = rng.randbytes(20), conversation(rng, methods)
            what = rng.randrange(3)
            if what == 0:
                blurt(port, damaged(rng, opening(identity) + said), abort=abort)
            else:
                said = damaged(rng, said) if what == 1 else said
                converse(port, identity, said, abort=abort)

    scene.read_during(attack)


def test_lengths_that_nobody_has(scene):
    rng = random.Random(4)

    def attack(number):
        for port in scene.ports:
            for length in LENGTHS:
                said = frame(b"x", more=number % 2 > 0) + frame(b"x" * 1000, length=length)
                converse(port, rng.randbytes(20), said, abort=True)

    scene.read_during(attack)


def test_connections_that_are_left_half_open(scene):
    rng = random.Random(5)
    with ExitStack() as stack:

        def attack(number):
            for port in scene.ports:
                said = opening(rng.randbytes(20)) + conversation(rng)
                for kept in (0, 1, 10, 11, 63, 64, 65, 90, 125, 200):
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    one.sendall(said[:kept])

        scene.read_during(attack)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_connections(scene, count):
    """Check that later connections reuse the resources of closed connections."""
    handles = [process.descriptors() for process in scene.processes]
    memory = []
    for _ in range(3):
        with ExitStack() as stack:
            for port in scene.ports:
                for _ in range(count):
                    one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    one.sendall(opening(b"")[:20])
            scene.elements += scene.reader.take(200)
        memory.append([process.resident() for process in scene.processes])
    scene.check(memory[0], memory[-1])
    for process, before in zip(scene.processes, handles, strict=True):
        wait_until(lambda process=process, before=before: process.descriptors() < before + 20)


def varint(number):
    """Encode a number as a protobuf varint. Negative numbers take 64 bits."""
    rest, said = number % (1 << 64), b""
    while rest > 127:
        said += bytes([rest & 127 | 128])
        rest >>= 7
    return said + bytes([rest])


def message_of(rng):
    """Return a body with random fields of the service's messages. No id in the body exists."""
    body = b""
    for _ in range(rng.randrange(1, 7)):
        field = rng.randrange(1, 14) << 3
        if rng.random() < 0.6:
            number = rng.choice([0, 1, -1, 77, 1 << 31, -(1 << 63), rng.randrange(1 << 62)])
            body += varint(field) + varint(number)
        else:
            data = rng.choice([b"", b"nobody", b"x" * 5000, rng.randbytes(32), varint(77) * 3])
            body += varint(field | 2) + varint(len(data)) + data
    return body


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_requests_that_make_no_sense(scene, count):
    """Refuse or ignore well-formed requests with random content."""
    rng = random.Random(count)
    methods = [*scene.methods(), "dispatcher/Nothing", "nothing", "", "data_worker/"]
    methods.remove("dispatcher/RegisterWorker")  # the dispatcher would accept such a worker
    answers = Counter()

    def attack(number):
        works = []
        for _ in range(count):
            body = message_of(rng)
            body = rng.choice([b"", rng.randbytes(rng.randrange(60)), body, body, body])
            address = f"localhost:{rng.choice(scene.ports)}"
            method = rng.choice(methods)
            if rng.random() < 0.2:
                stranger.notify(address, method, body)
            else:
                # The dispatcher holds some requests for events that never come.
                works.append(stranger.call(address, method, body, timeout=HELD_S))
        for work in works:
            try:
                work.wait(LIMIT_S)
                answers["good"] += 1
            except OpError as error:
                answers[type(error).__name__] += 1

    with open_endpoint("tcp") as stranger:
        scene.read_during(attack)
    assert set(answers) <= REFUSALS | {"good"}
    assert answers["InvalidArgumentError"] > answers.total() / 20


@pytest.mark.parametrize("address", ["", "nobody", "localhost:x", "http://localhost:1"])
def test_a_worker_whose_address_is_none_is_refused(scene, address):
    body = pb.RegisterWorkerRequest(address=address).SerializeToString()
    with open_endpoint("tcp") as stranger:
        dispatcher = scene.cluster.target.split("://")[1]
        work = stranger.call(dispatcher, "dispatcher/RegisterWorker", body)
        with pytest.raises(InvalidArgumentError, match="address"):
            work.wait(LIMIT_S)
    scene.read_during(lambda number: None)


# Secrets


@pytest.fixture
def secret_scene(make_cluster):
    return Scene(make_cluster(2, secret="a secret"))


@pytest.mark.parametrize("secret", [None, "another"])
def test_who_does_not_know_the_secret_gets_nowhere(secret_scene, secret):
    rng = random.Random(3)
    methods, ports = secret_scene.methods(), secret_scene.ports
    transport = TcpTransport(secret)

    def attack(number):
        for port in ports:
            blurt(port, damaged(rng, opening(b"x" * 20) + conversation(rng, methods)))

    with Endpoint(transport) as stranger:
        addresses = [Address("tcp", "127.0.0.1", port) for port in ports]
        works = [stranger.call(address, "dispatcher/GetTask") for address in addresses]
        secret_scene.read_during(attack)
        for work in works:
            with pytest.raises(UnavailableError, match="the secrets"):
                work.wait(LIMIT_S)
    transport.close()


@pytest.mark.parametrize("secret", ["", "another"])
def test_a_consumer_and_a_worker_with_another_secret(make_cluster, secret):
    cluster = make_cluster(1, secret="a secret")
    environment = {"MPIDIST_SECRET": secret}
    apply = distribute("parallel_epochs", cluster.target, start_timeout_s=1)
    dataset = Dataset.range(10).apply(apply)
    stranger = Reader(cluster.add_process("stranger", environment), dataset)
    with pytest.raises(UnavailableError, match="no dispatcher answers"):
        stranger.rest()
    config = WorkerConfig(cluster.target, protocol="tcp", dispatcher_timeout_ms=1000)
    with pytest.raises(UnavailableError, match="no dispatcher answers"):
        stranger.process.run(lambda _: WorkerServer(config))
    patient = Dataset.range(10).apply(distribute("parallel_epochs", cluster.target))
    known = Reader(cluster.add_process("consumer"), patient)
    assert known.rest() == list(range(10))
