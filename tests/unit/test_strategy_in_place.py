"""Changes that a worker makes itself in its server's memory: the server gives it the turn."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.servers import Cluster, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mpidist import errors
from strategy import IndexedSlices, optimizers
from strategy.connection import in_place
from strategy.connection.change import Change, push_all
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared import staging
from strategy.shared.shard import BLOCK_BYTES, SharedShard

BLOCK = BLOCK_BYTES // 8
SIZE = 3 * BLOCK + 5  # float64: more than a ring holds
LIMIT_S = 30
MANY = 1000


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(staging, "TURN_S", 0.001)


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def turns(monkeypatch):
    """What turns have been given: whether each was granted."""
    given, turn = [], staging.Ring.turn

    def counted(ring):
        given.append(turn(ring))
        return given[-1]

    monkeypatch.setattr(staging.Ring, "turn", counted)
    return given


@pytest.fixture
def held(monkeypatch):
    """Holds a change of ``held.name`` in the middle."""

    class Held:
        reached, go_on, fail = threading.Event(), threading.Event(), None

        def hold(self, shard, update):
            change(shard, self.stopping(update))

        def stopping(self, update):
            blocks = iter(range(99))

            def stop(part):
                if next(blocks) == 2:
                    self.reached.set()
                    assert self.go_on.wait(LIMIT_S)
                    if self.fail is not None:
                        raise self.fail
                update(part)

            return stop

    change, hold = SharedShard.change, Held()

    def changing(shard, update):
        if hold.armed:
            hold.armed = False
            hold.hold(shard, update)
        else:
            change(shard, update)

    hold.armed = False
    monkeypatch.setattr(SharedShard, "change", changing)
    monkeypatch.setattr(in_place, "can_compile", lambda: False)  # compiled code has no middle
    return hold


def some_workers(make, names=("large", "small", "extra"), workers=2):
    cluster = make(workers=workers)
    strategies = [cluster.worker(index) for index in range(workers)]
    sizes = {"small": 4}
    made = [[variable(s, name, sizes.get(name, SIZE)) for name in names] for s in strategies]
    return cluster, strategies, made


def gradient(scale):
    return scale * np.arange(1.0, SIZE + 1)


def push(pairs, rate=1.0):
    return optimizers.SGD(rate).apply_gradients(pairs).result(LIMIT_S)


def versions_of(cluster, name):
    shard = cluster.parameter_servers[0]._catalogue.by_name[name].shard
    return shard, set(shard.versions)


DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["assign", "assign_add", "assign_sub"])
def test_as_the_server_would_make_it(make, turns, dtype, rule):
    cluster = make()
    cluster.worker(0)
    far = Cluster.worker(make(near=False), 0)
    size = 3 * BLOCK_BYTES // np.dtype(dtype).itemsize + 7
    random = np.random.default_rng(3)
    start = random.integers(0, 50, size).astype(dtype)
    values = [random.integers(0, 50, size).astype(dtype), (start + start)[::-1]]
    made = [variable(s, "v", size, start, dtype) for s in (cluster.worker(1), far)]
    before = len(turns)
    for value in values:
        assert len({getattr(v, rule)(value) for v in made}) == 1
    assert turns[before:] == [True] * len(values)
    one, other = (v.read_value() for v in made)
    assert one.tobytes() == other.tobytes()
    assert one.tobytes() != start.tobytes()
    shard, versions = versions_of(cluster, "v")
    assert versions == {2 * shard.version}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("gradients", ["same", "strided", "other", "read-only"])
@pytest.mark.parametrize("compiled", [False, True])
def test_descent_to_the_bit(make, turns, monkeypatch, dtype, gradients, compiled):
    if compiled:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(in_place, "can_compile", lambda: False)
    size = 4 * BLOCK_BYTES // np.dtype(dtype).itemsize - 3
    random = np.random.default_rng(4)
    start = random.standard_normal(size).astype(dtype)
    grad = random.standard_normal(2 * size).astype(dtype)
    grad = grad[::2] if gradients == "strided" else grad[:size]
    if gradients == "other":
        grad = grad.astype(np.float64 if dtype is np.float32 else np.float32)
    grad.flags.writeable = gradients != "read-only"
    near, far = make().worker(0), make(near=False).worker(0)
    made = [variable(s, "v", size, start, dtype) for s in (near, far)]
    before = len(turns)
    applied = [push([(grad, v)], 0.03) for v in made for _ in range(2)]
    assert turns[before:] == ([True] * 2 if gradients != "other" else [])
    assert [one.versions for one in applied] == [(2,), (3,), (2,), (3,)]
    one, other = (v.read_value() for v in made)
    assert one.tobytes() == other.tobytes()
    expected = start.astype(np.float64) - 2 * 0.03 * grad.astype(np.float64)
    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("halves", "count"),
    [([6], 0), ([7], 1), ([2, 2, 2], 0), ([2, 2, 2, 2], 4), ([1] * 9, 0), ([1, 8, 1, 2], 2)],
)
def test_what_fits_the_ring_the_server_makes(make, turns, halves, count):
    """Sizes in halves of a block; the ring has 3 blocks."""
    strategy = make().worker(0)
    made = [variable(strategy, f"v{n}", half * BLOCK // 2) for n, half in enumerate(halves)]
    before = len(turns)
    pairs = [(np.full(v.shape, n + 1.0), v) for n, v in enumerate(made)]
    for step in (1, 2):
        assert push(pairs).versions == (step + 1,) * len(made)
    assert turns[before:] == [True] * 2 * count
    for n, v in enumerate(made):
        np.testing.assert_array_equal(v, np.full(v.shape, -2.0 * (n + 1)))


def test_what_keeps_something_beside_the_values_the_server_makes(make, turns):
    strategy = make().worker(0)
    v, half = variable(strategy, "v", SIZE), variable(strategy, "half", 4 * SIZE, dtype=np.float16)
    before = len(turns)
    optimizers.Adam(0.1).apply_gradients([(np.ones(SIZE), v)]).wait()
    optimizers.SGD(0.5).apply_gradients([(np.ones(4 * SIZE, np.float16), half)]).wait()
    assert turns[before:] == []
    np.testing.assert_array_equal(half, np.full(4 * SIZE, -0.5))
    half.assign_add(np.ones(4 * SIZE, np.float16))  # the copy in float32 is worth nothing now
    assert turns[before:] == [True]
    optimizers.SGD(0.5).apply_gradients([(np.ones(4 * SIZE, np.float16), half)]).wait()
    np.testing.assert_array_equal(half, np.zeros(4 * SIZE))


def test_several_in_one_push(make, turns):
    _, _, ((a, small, b), (a_too, _, b_too)) = some_workers(make)
    before = len(turns)
    pairs = [(gradient(1.0), a), (np.ones(4), small), (gradient(2.0), b)]
    one, two = push(pairs), push(pairs)
    assert turns[before:] == [True] * 4
    assert (one.versions, two.versions) == ((2, 2, 2), (3, 3, 3))
    np.testing.assert_array_equal(a_too, -2 * gradient(1.0))
    np.testing.assert_array_equal(b_too, -2 * gradient(2.0))
    np.testing.assert_array_equal(small, np.full(4, -2.0))
    applied = push([(gradient(1.0), b_too), (np.ones(4), small), (gradient(1.0), a)][:1])
    assert (applied.versions, applied.staleness) == ((4,), (0,))


def test_rows_of_the_variable_that_is_changed(make):
    """One push has both: the turn is not given before the rows are done."""
    _, _, (mine, _) = some_workers(make, names=("large",))
    remote = mine[0].remotes[0]
    rows = Change(remote, pb.ADD, np.ones(1), ids=np.zeros(1, np.int64))
    whole = Change(remote, pb.ADD, np.ones(SIZE))
    for changes in ([rows, whole], [whole, rows], [whole, whole]):
        push_all(changes).result(LIMIT_S)
    expected = np.full(SIZE, 4.0)
    expected[0] += 2
    np.testing.assert_array_equal(mine[0], expected)


def test_only_who_wants_the_same_variable_waits(make, pool, held):
    cluster, _, made = some_workers(make)
    (large, small, extra), (large_too, small_too, _) = made
    before = large.read_value()[0]
    held.armed = True
    late = pool.submit(push, [(gradient(1.0), large_too), (np.ones(4), small_too)])
    assert held.reached.wait(LIMIT_S)
    (pushes,) = [server._pushes for server in cluster.parameter_servers]
    for _ in range(3):
        push([(gradient(2.0), extra), (np.ones(4), small)])
    np.testing.assert_array_equal(extra, -3 * gradient(2.0))
    np.testing.assert_array_equal(small, np.full(4, -4.0))  # the rest of the push is done
    remote = large.remotes[0]
    assert remote.shared.try_read(np.empty(SIZE)) is None
    copy = np.empty(SIZE)
    waiting = [
        pool.submit(remote.connection.pulls.start(remote, copy).result),
        pool.submit(push, [(gradient(4.0), large)]),
    ]
    assert pushes._half_way
    assert not any(one.done() for one in (*waiting, late))
    held.go_on.set()
    assert late.result(LIMIT_S).versions == (2, 2)
    for one in waiting:
        one.result(LIMIT_S)
    assert copy[0] - before in (-1, -5)  # never in the middle of one
    np.testing.assert_array_equal(copy, gradient(copy[0]))
    np.testing.assert_array_equal(large, -gradient(5.0))
    shard, versions = versions_of(cluster, "large")
    assert versions == {2 * shard.version}
    wait_until(lambda: not pushes._half_way)


def test_who_waits_for_one_variable_holds_no_other(make, pool, held):
    _, _, made = some_workers(make, workers=3)
    (large, small, extra), (_, small_too, extra_too), (large_too, _, _) = made
    held.armed = True
    late = pool.submit(push, [(gradient(1.0), large_too)])
    assert held.reached.wait(LIMIT_S)
    both = pool.submit(push, [(gradient(2.0), large), (np.ones(4), small), (gradient(2.0), extra)])
    push([(gradient(4.0), extra_too), (np.ones(4), small_too)])
    assert not both.done()
    held.go_on.set()
    assert late.result(LIMIT_S).versions == (2,)
    assert both.result(LIMIT_S).versions[0] == 3
    np.testing.assert_array_equal(large, -gradient(3.0))
    np.testing.assert_array_equal(extra, -gradient(6.0))
    np.testing.assert_array_equal(small, [-2.0] * 4)


@pytest.mark.parametrize("reason", [KeyboardInterrupt, errors.AbortedError])
def test_a_worker_that_does_not_end_its_turn(make, pool, held, reason):
    cluster, _, made = some_workers(make)
    (large, small, _), (large_too, small_too, extra) = made
    held.armed, held.fail, left = True, reason(), reason is errors.AbortedError
    pairs = [(gradient(1.0), large_too), (np.ones(4), small_too), (gradient(1.0), extra)]

    def late():
        with pytest.raises(reason):
            push(pairs)

    working = pool.submit(late)
    assert held.reached.wait(LIMIT_S)
    waiting = pool.submit(push, [(gradient(2.0), large)])
    if left:
        cluster.gone.add(("worker", 1))
    else:
        held.go_on.set()
    waiting.result(LIMIT_S)
    shard, versions = versions_of(cluster, "large")
    assert versions == {2 * shard.version}
    expected = -gradient(2.0)
    expected[: 2 * BLOCK] -= gradient(1.0)[: 2 * BLOCK]  # what had been done
    np.testing.assert_array_equal(large, expected)
    assert large.remotes[0].shared.try_read(np.empty(SIZE)) is not None
    wait_until(lambda: not cluster.parameter_servers[0]._pushes._half_way)
    held.go_on.set()
    working.result(LIMIT_S)
    cluster.gone.clear()
    if not left:
        with pytest.raises(errors.FailedPreconditionError, match="interrupted half-way"):
            push(pairs)
        np.testing.assert_array_equal(small, [-1.0] * 4)
        np.testing.assert_array_equal(made[0][2], np.zeros(SIZE))
        large.assign(gradient(3.0))
        np.testing.assert_array_equal(large, gradient(3.0))


def test_a_turn_that_is_refused(make, turns):
    strategy = make().worker(0)
    v = variable(strategy, "flags", 8 * SIZE, dtype=np.bool_)
    small = variable(strategy, "small", 4)
    before = len(turns)
    ones = np.ones(8 * SIZE, np.bool_)
    changes = [
        Change(v.remotes[0], pb.SUB, ones),
        Change(small.remotes[0], pb.ADD, np.ones(4)),
        Change(v.remotes[0], pb.ADD, ones),
    ]
    with pytest.raises(errors.InvalidArgumentError, match="cannot subtract from variable 'flags'"):
        push_all(changes[:2]).result(LIMIT_S)
    with pytest.raises(errors.InvalidArgumentError, match="cannot subtract from variable 'flags'"):
        push_all(changes).result(LIMIT_S)
    assert turns[before:] == [False, False, True]
    assert v.read_value().all()
    np.testing.assert_array_equal(small, [2.0] * 4)
    assert v.assign(~ones) == 3


def test_another_change_that_fails_is_told(make, turns):
    """The turn is given before the rest is done; the answer is not."""
    strategy = make().worker(0)
    v, small = variable(strategy, "v", SIZE), variable(strategy, "flag", 4, dtype=np.bool_)
    changes = [
        Change(v.remotes[0], pb.ADD, np.ones(SIZE)),
        Change(small.remotes[0], pb.SUB, np.ones(4, np.bool_)),
    ]
    before = len(turns)
    with pytest.raises(errors.InvalidArgumentError, match="cannot subtract from variable 'flag'"):
        push_all(changes).result(LIMIT_S)
    assert turns[before:] == [True]
    np.testing.assert_array_equal(v, np.ones(SIZE))


def test_a_save_has_all_of_a_turn_that_had_begun(make, pool, held, tmp_path):
    _, strategies, made = some_workers(make)
    held.armed = True
    late = pool.submit(push, [(gradient(1.0), made[1][0])])
    assert held.reached.wait(LIMIT_S)
    saving = pool.submit(strategies[0].save, str(tmp_path))
    assert not saving.done()
    held.go_on.set()
    late.result(LIMIT_S)
    found = load_file(f"{saving.result(LIMIT_S)}/ps-0-of-1.safetensors")
    np.testing.assert_array_equal(found["large:data"], -gradient(1.0))


def test_a_push_that_is_repeated_during_the_turn(make, pool, held):
    """It is answered, and not made again."""
    _, strategies, made = some_workers(make)
    connection = strategies[1]._connections[0]
    sent, start = [], connection.start

    def watched(method, message, *arguments, **options):
        sent.append((method, message, *arguments))
        return start(method, message, *arguments, **options)

    connection.start = watched
    held.armed = True
    late = pool.submit(push, [(gradient(1.0), made[1][0])])
    assert held.reached.wait(LIMIT_S)
    (again,) = [start(*one) for one in sent if one[0] == "Push"]
    held.go_on.set()
    assert late.result(LIMIT_S).versions == (2,)
    assert list(pb.PushReply.FromString(again.result(LIMIT_S).body).versions)[-1] == 2
    (after,) = [start(*one) for one in sent if one[0] == "Push"]
    assert list(pb.PushReply.FromString(after.result(LIMIT_S).body).versions)[-1] == 2
    np.testing.assert_array_equal(made[0][0], -gradient(1.0))


@settings(deadline=None, max_examples=10)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["large", "extra", "small", "rows", "both"])),
        min_size=1,
        max_size=12,
    )
)
def test_any_pushes_of_two_workers_add_up(steps):
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        _, _, made = some_workers(lambda **options: Cluster(stack, **options))

        def run(worker):
            large, small, extra = made[worker]
            one = (np.ones(SIZE), large)
            pairs = {
                "large": [one],
                "extra": [(np.ones(SIZE), extra)],
                "small": [(np.ones(4), small)],
                "rows": [(IndexedSlices(np.ones(1), [7]), extra), one],
                "both": [one, (np.ones(SIZE), extra), (np.ones(4), small)],
            }
            for who, what in steps:
                if who == worker:
                    push(pairs[what])

        for one in [pool.submit(run, worker) for worker in range(2)]:
            one.result(2 * LIMIT_S)
        count = {what: [kind for _, kind in steps].count(what) for what in ("large", "extra")}
        count |= {w: [kind for _, kind in steps].count(w) for w in ("small", "rows", "both")}
        large, small, extra = made[0]
        total = count["large"] + count["rows"] + count["both"]
        np.testing.assert_array_equal(large, np.full(SIZE, -float(total)))
        np.testing.assert_array_equal(small, np.full(4, -float(count["small"] + count["both"])))
        expected = np.full(SIZE, -float(count["extra"] + count["both"]))
        expected[7] -= count["rows"]
        np.testing.assert_array_equal(extra, expected)


def test_readers_and_restores_have_their_turn(make, pool, tmp_path):
    """Pushes that follow each other without pause leave the variable to who came before them.

    How many end before this thread goes on says how busy the machine is; in vain it would wait for
    as many as there are.
    """
    _, strategies, made = some_workers(make, names=("large",), workers=3)
    connection = made[0][0].remotes[0].connection
    path, stop, counts = strategies[0].save(str(tmp_path)), threading.Event(), [0, 0, 0]

    def keep_pushing(worker):
        while not stop.is_set():
            made[worker][0].assign_add(np.ones(SIZE))
            counts[worker] += 1

    pushing = [pool.submit(keep_pushing, worker) for worker in (1, 2)]
    try:
        for _ in range(20):
            before = sum(counts)
            copy = np.empty(SIZE)
            connection.pulls.start(made[0][0].remotes[0], copy).result(LIMIT_S)
            assert (copy == copy[0]).all()
            assert sum(counts) - before < MANY
            before = sum(counts)
            strategies[0].restore(path)
            assert sum(counts) - before < MANY
    finally:
        stop.set()
        for one in pushing:
            one.result(LIMIT_S)
    assert min(counts[1:]) > 0


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("size", [SIZE, 2 * BLOCK])
def test_arithmetic_of_the_user_changes_nothing(make, near, size):
    """What NumPy is told to raise must not end a push in the middle."""
    v = variable(make(near=near).worker(0), "v", size)
    v.assign(np.full(size, 1e308))
    with np.errstate(all="raise"):
        v.assign_add(np.full(size, 1e308))
    assert np.isinf(v.read_value()).all()
    v.assign(np.ones(size))
    np.testing.assert_array_equal(v, np.ones(size))


def test_finish_waits_for_the_turn_of_another_thread(make, pool, held):
    _, strategies, made = some_workers(make)
    held.armed = True
    late = pool.submit(made[1][0].assign_add, np.ones(SIZE))
    assert held.reached.wait(LIMIT_S)
    finishing = pool.submit(strategies[1].finish)
    with pytest.raises(TimeoutError):
        finishing.result(0.2)
    held.go_on.set()
    finishing.result(LIMIT_S)
    assert late.done()
    np.testing.assert_array_equal(made[0][0], np.ones(SIZE))


def test_a_worker_that_leaves_after_its_turn(monkeypatch):
    """It has ended its turn before it left, whatever the server looks at first."""
    memory = np.zeros(staging.ring_bytes(1), np.uint8)
    worker = staging.Ring(memory, 0, 1, lambda: None, lambda: None)

    def leaves():
        if worker.turn():
            worker.end_turn()
        return True

    server = staging.Ring(memory, 0, 1, lambda: None, lambda: None, "its worker", leaves)
    assert list(server.lend(granted=True)) == []
    server.lend(granted=True)
    monkeypatch.setattr(server, "_lost", lambda: True)
    with pytest.raises(staging.RingBrokenError, match="its worker has left"):
        list(server.lend(granted=True))


def test_what_is_half_way_when_the_server_ends_is_left_alone(make, pool, held):
    """Its memory may be gone by the time that the garbage is collected."""
    cluster, _, made = some_workers(make)
    held.armed = True
    late = pool.submit(push, [(gradient(1.0), made[1][0])])
    assert held.reached.wait(LIMIT_S)
    (server,) = cluster.parameter_servers
    wait_until(lambda: server._pushes._half_way)
    shard = server._catalogue.by_name["large"].shard
    before = shard.versions.copy()
    for work in server._pushes._half_way:
        work.close()
    np.testing.assert_array_equal(shard.versions, before)
    server._pushes._half_way.clear()
    held.go_on.set()
    late.result(LIMIT_S)
