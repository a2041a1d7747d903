"""Large variables that are pulled by message: in pieces, whole, without copies on the server."""

import threading
import tracemalloc
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import Reply, Work, errors
from strategy import optimizers
from strategy.client import pull as client_pull
from strategy.proto import parameter_server_pb2 as pb

SIZE = 1000


@pytest.fixture
def make(monkeypatch):
    """Clusters where more than 100 bytes are large, and go in pieces of 64."""
    monkeypatch.setattr(client_pull, "LARGE_BYTES", 100)
    monkeypatch.setattr(client_pull, "_PIECE_BYTES", 64)
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
    cluster = make(workers=4)
    weights = [variable(cluster.worker(n), "v", SIZE, "zeros") for n in range(4)]
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
    pullers = [threading.Thread(target=pull, args=(one,)) for one in weights[2:]]
    for thread in (*pushers, *pullers):
        thread.start()
    for thread in pullers:
        thread.join(60)
    ended.set()
    for thread in pushers:
        thread.join(60)
    assert torn == []
    assert weights[2].read_value()[0] > 0


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


def test_a_reader_that_stands_still_holds_up_nobody(make):
    """The pieces have two versions, so the reader starts again."""
    cluster = make()
    strategy = cluster.worker(0)
    weight, other = variable(strategy, "v", SIZE, np.arange(1000.0)), cluster.worker(1)
    changed = variable(other, "v", SIZE)
    (connection,) = strategy._connections
    start, pieces = connection.start, []

    def slowly(method, message, *arguments, **options):
        pieces.append((message.start, message.stop))
        if len(pieces) == 3:
            changed.assign_add(1)
        return start(method, message, *arguments, **options)

    connection.start = slowly
    np.testing.assert_array_equal(weight.read_value(), np.arange(1000) + 1)
    assert weight.version == 2
    assert pieces.count((0, 8)) == 2


def test_the_server_copies_what_changes_all_the_time(make):
    cluster = make()
    strategy = cluster.worker(0)
    weight, other = variable(strategy, "v", SIZE), cluster.worker(1)
    changed = variable(other, "v", SIZE)
    (connection,) = strategy._connections
    start, asked = connection.start, []

    def beside_pushes(method, message, *arguments, **options):
        asked.append(message.stop)
        changed.assign_add(1)
        return start(method, message, *arguments, **options)

    connection.start = beside_pushes
    value = weight.read_value()
    assert asked[-1] == 0  # the whole variable
    np.testing.assert_array_equal(value, np.full(SIZE, len(asked)))
    assert weight.version == len(asked) + 1


@pytest.mark.parametrize("failing", [0, 2])
def test_nothing_is_written_any_more_when_a_reader_begins_again_or_fails(make, failing):
    asked = []

    class Connection:
        task = "ps 0"

        def start(self, method, message, buffers=(), into=()):
            assert all(work.is_completed() for work in asked[: len(asked) // 125 * 125])
            error = errors.ResourceExhaustedError("a piece") if len(asked) == failing else None
            reply = Reply(pb.ReadReply(version=1).SerializeToString())
            work = Work(method, lambda work, deadline: work.complete(reply, error))
            asked.append(work)
            return work

    one = SimpleNamespace(number=0, connection=Connection())
    with pytest.raises(errors.ResourceExhaustedError, match="a piece"):
        client_pull.read_in_pieces(one, np.empty(SIZE))
    assert all(work.is_completed() for work in asked)
