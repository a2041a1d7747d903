"""Large variables that are pulled by message: in pieces, whole, without copies on the server."""

import threading
import time
import tracemalloc
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import Reply, Work, errors
from strategy import optimizers
from strategy.connection import pulls
from strategy.proto import parameter_server_pb2 as pb
from strategy.server import reads

SIZE = 1000


@pytest.fixture
def make(monkeypatch):
    """Clusters where more than 100 bytes are large, and go in pieces of 64."""
    monkeypatch.setattr(pulls, "LARGE_BYTES", 100)
    monkeypatch.setattr(pulls, "_PIECE_BYTES", 64)
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, near=False, **options)


@pytest.mark.parametrize("size", [12, 13, 16, 17, 1000, 1003])
@pytest.mark.parametrize("dtype", ["f8", "f4", "u1", "f2"])
def test_values_and_versions(make, size, dtype):
    strategy = make().worker(0)
    values = (np.arange(size) % 100).astype(dtype)
    weight = variable(strategy, "v", size, values, dtype)
    np.testing.assert_array_equal(weight.read_value(), values)
    version = weight.assign(values[::-1])
    np.testing.assert_array_equal(weight.read_value(), values[::-1])
    assert weight.version == version


def test_scalars_and_empty_variables(make):
    strategy = make().worker(0)
    assert variable(strategy, "s", (), 3.0).read_value() == 3
    assert variable(strategy, "e", (0, 5), "zeros").read_value().shape == (0, 5)


def test_variables_in_parts(make):
    strategy = make(servers=2).worker(0, variable_partitioner=lambda shape, dtype: (3, 1))
    weight = variable(strategy, "v", (99, 7), np.arange(693.0).reshape(99, 7))
    np.testing.assert_array_equal(weight.read_value(), np.arange(693).reshape(99, 7))


def test_no_pull_is_torn_by_pushes(make):
    cluster = make(workers=3)
    weights = [variable(cluster.worker(n), "v", SIZE, "zeros") for n in range(3)]
    ended, torn = threading.Event(), []

    def push(weight):
        sgd, minus_one = optimizers.SGD(1.0), np.full(SIZE, -1.0)
        while not ended.is_set():
            sgd.apply_gradients([(minus_one, weight)]).wait()

    def pull(weight):
        for _ in range(30):
            value = weight.read_value()
            if value.min() != value.max() or value[0] != weight.version - 1:
                torn.append((value.min(), value.max(), weight.version))

    pushers = [threading.Thread(target=push, args=(one,)) for one in weights[:2]]
    pullers = [threading.Thread(target=pull, args=(weights[2],)) for _ in range(2)]
    for thread in (*pushers, *pullers):
        thread.start()
    for thread in pullers:
        thread.join(60)
    ended.set()
    for thread in pushers:
        thread.join(60)
    assert torn == []
    assert weights[2].read_value()[0] > 0


def test_a_reader_that_stands_still_holds_up_nobody_for_long(make, monkeypatch):
    monkeypatch.setattr(reads, "_PATIENCE_S", 0.2)
    cluster = make()
    one, two = (variable(cluster.worker(n), "v", SIZE, "zeros") for n in range(2))
    (remote,) = one.remotes
    first = np.empty(8)
    begin = pb.ReadRequest(
        variable=remote.number, connection=remote.connection.number, reading=99, stop=8
    )
    started = time.monotonic()  # the server's patience begins with its answer
    remote.connection.start("Read", begin, into=(first,)).result()
    two.assign_add(1)
    assert 0.1 < time.monotonic() - started < 10
    np.testing.assert_array_equal(two.read_value(), np.ones(SIZE))
    begin.start, begin.stop = 8, 16
    with pytest.raises(errors.AbortedError, match="begin again"):
        remote.connection.start("Read", begin, into=(first,)).result()


def test_a_slow_reader_gets_the_rest_of_its_values_while_a_writer_goes_on(make, monkeypatch):
    monkeypatch.setattr(reads, "_PATIENCE_S", 0.2)
    cluster = make()
    one, two = (variable(cluster.worker(n), "v", SIZE, np.arange(1000.0)) for n in range(2))
    (remote,) = one.remotes
    values, written = np.empty(SIZE), threading.Event()

    def write():
        two.assign_add(1)
        written.set()

    writer = threading.Thread(target=write)
    asked = pb.ReadRequest(variable=remote.number, connection=remote.connection.number, reading=99)
    for asked.start in range(SIZE):
        asked.stop = asked.start + 1
        piece = values[asked.start : asked.stop]
        remote.connection.start("Read", asked, into=(piece,)).result()
        if asked.start == 0:
            writer.start()
        elif asked.start == SIZE - 2:
            # The reader has been fast, or the writer has not waited for it.
            assert written.wait(30)
        else:
            written.wait(0.02)
    writer.join(30)
    np.testing.assert_array_equal(values, np.arange(1000))
    np.testing.assert_array_equal(one.read_value(), np.arange(1000) + 1)


def test_a_reader_that_is_slow_begins_again_and_gets_the_whole_in_the_end(make, monkeypatch):
    monkeypatch.setattr(reads, "_PATIENCE_S", 0.0)
    weight = variable(make().worker(0), "v", SIZE, np.arange(1000.0))
    np.testing.assert_array_equal(weight.read_value(), np.arange(1000))


@pytest.mark.parametrize("kind", [errors.AbortedError, errors.ResourceExhaustedError])
def test_nothing_is_written_any_more_when_a_reader_begins_again_or_fails(make, kind):
    asked = []

    class Connection:
        number = 1

        def start(self, method, message, buffers=(), into=()):
            assert all(work.is_completed() for reading, work in asked if reading < message.reading)
            error = kind("a piece") if (message.reading, message.start) == (1, 0) else None
            reply = Reply(pb.ReadReply(version=message.reading).SerializeToString())
            work = Work(method, lambda work, deadline: work.complete(reply, error))
            asked.append((message.reading, work))
            return work

    begin, remote = pulls.Pulls(Connection()).in_pieces, SimpleNamespace(number=0)
    if kind is errors.AbortedError:
        assert begin(remote, np.empty(SIZE)) == 2
        assert {reading for reading, _ in asked} == {1, 2}
    else:
        with pytest.raises(kind, match="a piece"):
            begin(remote, np.empty(SIZE))
        assert all(work.is_completed() for _, work in asked)


def test_readers_follow_each_other(make):
    cluster = make(workers=4)
    weights = [variable(cluster.worker(n), "v", SIZE, np.arange(1000.0)) for n in range(4)]
    wrong = []

    def pull(weight):
        values = [weight.read_value() for _ in range(20)]
        wrong.extend(value for value in values if not np.array_equal(value, np.arange(1000)))

    threads = [threading.Thread(target=pull, args=(one,)) for one in weights for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_checkpoint_waits_for_readers(make, tmp_path):
    cluster = make()
    weight = variable(cluster.worker(0), "v", SIZE, np.arange(1000.0))
    other = cluster.worker(1)
    copy = variable(other, "v", SIZE, "zeros")
    ended, wrong = threading.Event(), []

    def pull():
        while not ended.is_set():
            if not np.array_equal(copy.read_value(), np.arange(1000)):
                wrong.append(1)

    thread = threading.Thread(target=pull)
    thread.start()
    for _ in range(3):
        path = weight.strategy.save(str(tmp_path))
    ended.set()
    thread.join(60)
    assert wrong == []
    weight.assign(np.zeros(SIZE))
    weight.strategy.restore(path)
    np.testing.assert_array_equal(weight.read_value(), np.arange(1000))


def test_the_server_holds_a_few_pieces_only():
    size = 96 << 20
    with ExitStack() as stack:
        cluster = Cluster(stack, near=False)
        weight = variable(cluster.worker(0), "v", size // 4, "zeros", np.float32)
        out = np.empty(size // 4, np.float32)
        tracemalloc.start()
        try:
            weight.read_value(out)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 40 << 20


@pytest.mark.parametrize("writer", ["push", "save"])
def test_writers_wait_for_slow_readers_once(monkeypatch, writer, tmp_path):
    """Six readers are in line; none asks for its next piece before the writer has come through."""
    with ExitStack() as stack:
        cluster = Cluster(stack, near=False)
        one, two = (variable(cluster.worker(n), "v", SIZE, np.arange(1000.0)) for n in range(2))
        (remote,) = one.remotes
        pieces, asked = [np.empty(SIZE) for _ in range(6)], []
        for reading, piece in enumerate(pieces):
            message = pb.ReadRequest(
                variable=remote.number, connection=remote.connection.number, reading=reading + 100
            )
            message.start, message.stop = 0, 1
            asked.append((message, remote.connection.start("Read", message, into=(piece[:1],))))
        begin = time.monotonic()
        if writer == "push":
            optimizers.SGD(1.0).apply_gradients([(np.ones(SIZE), two)]).wait()
        else:
            two.strategy.save(str(tmp_path))
            two.assign_sub(1)
        waited = time.monotonic() - begin
        assert waited < 2 * len(pieces) - 2  # two seconds for each of them
        for number, ((message, first), piece) in enumerate(zip(asked, pieces, strict=True)):
            first.wait()
            message.start, message.stop = 1, SIZE
            rest = remote.connection.start("Read", message, into=(piece[1:],))
            if number:
                rest.wait()
                np.testing.assert_array_equal(piece, np.arange(1000))
            else:  # it has not asked for two seconds
                with pytest.raises(errors.AbortedError, match="begin again"):
                    rest.wait()
        np.testing.assert_array_equal(one.read_value(), np.arange(1000) - 1)
