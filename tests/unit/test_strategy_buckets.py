"""Small variables in buckets: joint changes equal single changes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster, variable
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import errors
from strategy import optimizers, schedules
from strategy.client.changes import Change
from strategy.client.connection import push_all
from strategy.proto import parameter_server_pb2 as pb
from strategy.server import rules, shard, variable_store
from strategy.server.shard import Neighbors

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(0.1),
    "adamw": lambda: optimizers.AdamW(schedules.ExponentialDecay(0.1, 2, 0.5)),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1=0.01),
    "function": lambda: optimizers.Function(subtract),
}


def subtract(param, grad, slots, learning_rate, step):
    param -= grad


DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SIZES = st.sampled_from([0, 1, 2, 3, 7, 1000, 5000])
PUSHES = st.lists(
    st.tuples(st.sampled_from(sorted(OPTIMIZERS)), st.sets(st.integers(0, 6), min_size=1)),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


@pytest.fixture
def calls(monkeypatch):
    """Return the list of the numbers of variables that each bucket update has changed."""
    made, change = [], Neighbors.change

    def counted(neighbors, *arguments):
        made.append(neighbors.count)
        change(neighbors, *arguments)

    monkeypatch.setattr(Neighbors, "change", counted)
    return made


def contents(cluster):
    """Return all values, slots, steps and versions of a cluster's only server."""
    shards = [served.shard for served in cluster.parameter_servers[0]._store.variables]
    return [
        (
            shard.name,
            shard.flat.tobytes(),
            sorted((name, slot.tobytes()) for name, slot in shard.slots.items()),
            {name: step for name, step in shard.steps.items() if not name.startswith(":")},
            shard.versions.tolist(),
        )
        for shard in shards
    ]


def train(pushes, kinds, mode, transport):
    """Return a server's contents after random pushes by two workers, and the push results."""
    with ExitStack() as stack:
        cluster = Cluster(stack, workers=2, near=transport == "auto")
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def attend(index):
            strategy = cluster.worker(index, mode=mode, transport=transport)
            many = {kind: make() for kind, make in OPTIMIZERS.items()}
            return many, [
                variable(strategy, f"v{i}", size, "ones", dtype)
                for i, (size, dtype) in enumerate(kinds)
            ]

        def push(index, step, kind, chosen):
            many, made = workers[index]
            random = np.random.default_rng((step, index))
            gradients = [random.standard_normal(v.shape).astype(v.dtype) for v in made]
            pairs = [
                pair for i, pair in enumerate(zip(gradients, made, strict=True)) if i in chosen
            ]
            return many[kind].apply_gradients(pairs).result(30) if pairs else None

        workers = [attend(index) for index in range(2)]
        told = []
        for step, (kind, chosen) in enumerate(pushes):
            under_way = []
            for index in range(2):
                under_way.append(pool.submit(push, index, step, kind, chosen))
                if mode == "async":
                    under_way[-1].result(30)
            told += [one.result(30) for one in under_way]
        return contents(cluster), told


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("compiled", [False, True])
@given(
    pushes=PUSHES,
    kinds=st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=1, max_size=7),
    transport=st.sampled_from(["auto", "p2p"]),
)
@settings(max_examples=15, deadline=None)
def test_as_one_by_one(mode, compiled, pushes, kinds, transport):
    if compiled:
        pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(rules, "can_compile", lambda: False)
        together = train(pushes, kinds, mode, transport)
        patch.setattr(variable_store, "is_small", lambda layout: False)
        assert together == train(pushes, kinds, mode, transport)


@pytest.mark.parametrize(("count", "size", "expected"), [
    (5, 3, [5]), (1, 3, [1]), (20, 4000, [16, 4]), (3, 4096, []), (3, 4095, [3]),
])  # fmt: skip
def test_what_is_changed_together(make, calls, count, size, expected):
    strategy = make().worker(0)
    made = [variable(strategy, f"v{i}", size, "zeros", np.float32) for i in range(count)]
    calls.clear()
    applied = optimizers.SGD(1.0).apply_gradients([(np.ones(size, "f4"), v) for v in made]).result()
    assert calls == expected
    assert applied.versions == (2,) * count
    assert applied.staleness == (0,) * count
    for v in made:
        np.testing.assert_array_equal(v, -np.ones(size))


def test_what_is_not_alike_is_changed_in_order(make, calls):
    """Repeated variables, other dtypes, rows and another rule in between end a joint update."""
    strategy = make().worker(0)
    a, b = (variable(strategy, name, 4, "ones", np.float64) for name in "ab")
    c = variable(strategy, "c", 4, "ones", np.float32)
    calls.clear()

    def change(v, rule, value):
        return Change(v.remotes, rule, np.full(4, value, v.dtype))

    row = Change(a.remotes, pb.ADD, np.array([100.0]), ids=np.array([2]))
    changes = [
        change(a, pb.ADD, 1), change(b, pb.ADD, 2), change(a, pb.ADD, 4), change(c, pb.ADD, 8),
        row, change(a, pb.MUL, 2), change(b, pb.MUL, 3),
    ]  # fmt: skip
    pairs = list(zip(*push_all(changes).result(30), strict=True))
    assert calls == [2, 1, 1, 2]
    assert pairs == [(2, 0), (2, 0), (3, 1), (2, 0), (4, 2), (5, 3), (3, 1)]
    np.testing.assert_array_equal(a, [12, 12, 212, 12])
    np.testing.assert_array_equal(b, np.full(4, 9))
    np.testing.assert_array_equal(c, np.full(4, 9))


def test_one_that_fails_keeps_no_other_from_being_changed(make, monkeypatch):
    strategy = make().worker(0)
    made = [variable(strategy, f"v{i}", 3, "zeros", np.float64) for i in range(4)]
    check_room = shard.check_room
    asked = []

    def no_room(nbytes):
        asked.append(nbytes)
        if len(asked) in (3, 4):  # for the third variable: with others, and alone
            raise errors.ResourceExhaustedError("none left")
        check_room(nbytes)

    monkeypatch.setattr(shard, "check_room", no_room)
    adagrad = optimizers.Adagrad(1.0, initial_accumulator_value=0.0)
    with pytest.raises(errors.ResourceExhaustedError, match="beside variable 'v2'"):
        adagrad.apply_gradients([(np.ones(3), v) for v in made]).result(30)
    changed = [bool((v.numpy() != 0).all()) for v in made]
    assert changed == [True, True, False, True]
    assert int(strategy.global_step) == 1


def test_who_reads_meanwhile_sees_whole_values(make):
    """Each read returns the value of one version, and never a mixture of two versions."""
    cluster = make()
    writer, reader = cluster.worker(0), cluster.worker(1)
    names = [f"v{i}" for i in range(20)]
    written = [variable(writer, name, 500, "zeros") for name in names]
    read = [variable(reader, name, 500, "zeros") for name in names]
    sgd, done = optimizers.SGD(1.0), threading.Event()

    def push():
        for _ in range(200):
            sgd.apply_gradients([(-np.ones(500), v) for v in written]).wait()
        done.set()

    thread = threading.Thread(target=push)
    thread.start()
    torn = []
    while not done.is_set():
        for v in read:
            value = v.numpy()
            torn += [value] if (value != v.version - 1).any() else []
    thread.join(30)
    assert not torn
    np.testing.assert_array_equal(read[-1], np.full(500, 200))


def exit_at(step, rate=1.0):
    def schedule(number):
        if number == step:
            raise SystemExit(3)
        return rate

    return schedule


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("large", [40_000, 600_000])
def test_a_schedule_that_exits_keeps_other_changes(make, mode, large):
    """The case includes an exit before the server knows which variables can share a bucket."""
    cluster = make()
    strategies = [cluster.worker(index, mode=mode) for index in range(2)]
    sizes = {"a": 3, "b": large, "c": large}
    made = [[variable(s, name, n) for name, n in sizes.items()] for s in strategies]
    exiting = [optimizers.SGD(exit_at(0), name="exits") for _ in strategies]
    plain = [optimizers.SGD(1.0) for _ in strategies]

    def push(many, index, value):
        pairs = [(np.full(v.shape, value), v) for v in made[index]]
        return many[index].apply_gradients(pairs).result(30)

    with ThreadPoolExecutor(2) as pool:
        workers = range(2) if mode == "sync" else range(1)
        for work in [pool.submit(push, exiting, index, 7.0) for index in workers]:
            with pytest.raises(errors.Error, match="SystemExit"):
                work.result(60)
        for work in [pool.submit(push, plain, index, 1.0) for index in workers]:
            work.result(60)
    for v in made[0]:
        np.testing.assert_array_equal(v, np.full(v.shape, -1.0))
    assert int(strategies[0].global_step) == 2


def test_the_schedule_of_a_function_is_asked_once_a_variable(make, tmp_path):
    strategy, path = make().worker(0), tmp_path / "asked"

    def schedule(step, path=str(path)):
        with open(path, "a") as file:
            file.write(f"{step} ")
        return 1.0

    made = [variable(strategy, f"v{i}", 2) for i in range(3)]
    function = optimizers.Function(subtract, learning_rate=schedule)
    function.apply_gradients([(np.ones(2), v) for v in made]).wait()
    assert path.read_text() == "0 0 0 "


@pytest.mark.parametrize("size", [4, 700_000])
def test_a_function_that_exits_leaves_the_variable_readable(make, size):
    strategy = make().worker(0)
    v = variable(strategy, "v", size)

    def update(param, grad, slots, learning_rate, step):
        if step == 1:
            raise SystemExit(3)
        param -= grad

    function = optimizers.Function(update)
    with pytest.raises(errors.Error, match="SystemExit"):
        function.apply_gradients([(np.ones(size), v)]).result(30)
    assert not (v.remotes[0].shared.versions & 1).any()
    assert v.remotes[0].shared.try_read(np.empty(size)) is not None
    function.apply_gradients([(np.ones(size), v)]).result(30)
    np.testing.assert_array_equal(v, np.full(size, -1.0))
