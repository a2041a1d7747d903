"""Several strategies on one Server."""

import threading

import numpy as np
import pytest

import mpidist
from strategy import ParameterServerStrategy, get_variable, optimizers
from strategy.creation import VariableCreator

SIZES = (10, 2048, 300_000)  # in a message, the smallest staged size, several blocks
TRANSPORTS = ("auto", "p2p")


@pytest.fixture(autouse=True)
def server():
    with mpidist.Server({"ps": ["localhost:0"], "worker": ["localhost:0"]}, "worker", 0) as server:
        yield server


def make(transport, own):
    """Return a strategy, its variables shared by all strategies, and its own variables."""
    strategy = ParameterServerStrategy(transport=transport, name=own)
    with strategy.scope():
        names = [f"{owner}/{size}" for owner in ("all", own) for size in SIZES]
        sizes = SIZES * 2
        made = [get_variable(n, s, "f8", 0.0) for n, s in zip(names, sizes, strict=True)]
    return strategy, made[: len(SIZES)], made[len(SIZES) :]


@pytest.mark.parametrize("first", TRANSPORTS)
@pytest.mark.parametrize("second", TRANSPORTS)
def test_their_pushes_do_not_meet(first, second):
    strategies = [make(first, "first"), make(second, "second")]
    sgd = optimizers.SGD(1.0)
    works = []
    for step in range(1, 6):
        for factor, (_, shared, own) in enumerate(strategies, 1):
            pairs = [(np.full(v.shape, -1.0 * step * factor), v) for v in shared + own]
            works.append(sgd.apply_gradients(pairs))
    for work in works:
        work.wait(30)
    for factor, (strategy, shared, own) in enumerate(strategies, 1):
        for v in shared:
            np.testing.assert_array_equal(v, np.full(v.shape, 15.0 * 3))
            assert v.version == 11
        for v in own:
            np.testing.assert_array_equal(v, np.full(v.shape, 15.0 * factor))
            assert v.version == 6
        assert int(strategy.global_step) == 10


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_on_threads_of_their_own(transport):
    strategies = [make(transport, name) for name in "abc"]
    rounds = 20

    def train(shared, own):
        for _ in range(rounds):
            optimizers.SGD(1.0).apply_gradients([(np.full(v.shape, -1.0), v) for v in shared + own])
            for v in own:
                v.read_value()

    threads = [threading.Thread(target=train, args=parts[1:]) for parts in strategies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for _, shared, own in strategies:
        for v in own:
            np.testing.assert_array_equal(v, np.full(v.shape, rounds))
        for v in shared:
            np.testing.assert_array_equal(v, np.full(v.shape, rounds * len(strategies)))


def test_one_made_after_another_has_pushed():
    _, (v, *_), _ = make("auto", "first")
    for _ in range(3):
        v.assign_add(1)
    _, (w, *_), _ = make("auto", "second")
    assert w.assign_add(np.ones(SIZES[0])) == 5
    np.testing.assert_array_equal(w, np.full(SIZES[0], 4.0))
    assert v.assign_add(1) == 6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closed_strategies_leave_the_others_alone(transport):
    """Strategies are opened and closed while another strategy trains."""
    strategy, shared, own = make(transport, "own")
    sgd = optimizers.SGD(1.0)
    for count in range(1, 31):
        with ParameterServerStrategy(transport=transport, name="other") as other, other.scope():
            v = [get_variable(f"all/{size}", size, "f8", 0.0) for size in SIZES][-1]
            sgd.apply_gradients([(np.full(v.shape, -1.0), v)])
        sgd.apply_gradients([(np.full(v.shape, -1.0), v) for v in (*shared, *own)]).wait(30)
        np.testing.assert_array_equal(shared[-1], np.full(SIZES[-1], 2.0 * count))
    for v in (*shared[:-1], *own):
        np.testing.assert_array_equal(v, np.full(v.shape, 30.0))
    strategy.close()


def test_strategies_close_while_another_saves(tmp_path):
    """A save neither waits for the pushes of closed strategies nor loses them."""
    strategy, shared, _ = make("auto", "own")
    stop, problems = threading.Event(), []

    def come_and_go(name):
        try:
            while not stop.is_set():
                with ParameterServerStrategy(name=name) as other, other.scope():
                    v = get_variable("all/10", SIZES[0], "f8", 0.0)
                    optimizers.SGD(1.0).apply_gradients([(np.full(v.shape, -1.0), v)])
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for _ in range(10):
        path = strategy.save(str(tmp_path))
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not problems
    before = int(strategy.global_step)
    strategy.restore(path)
    assert int(strategy.global_step) <= before
    np.testing.assert_array_equal(shared[0], np.full(SIZES[0], float(strategy.global_step)))


@pytest.mark.parametrize("between", [False, True])
def test_a_strategy_continues_after_a_closed_one(between):
    """Variables keep their values, and the next strategy continues with them."""
    size = SIZES[-1]
    strategy = ParameterServerStrategy()
    for count in range(1, 4):
        with ParameterServerStrategy(name="other") as other, other.scope():
            v = get_variable("v", size, "f8", 0.0)
            for _ in range(3):
                optimizers.SGD(1.0).apply_gradients([(np.full(size, -1.0), v)]).wait(30)
            np.testing.assert_array_equal(v, np.full(size, 3.0 * count))
        if between:
            with strategy.scope():
                get_variable(f"small {count}", 4, "f8", 1.0)
    strategy.close()


@pytest.mark.parametrize("closed", ["creator", "waiting"])
def test_a_strategy_that_closes_before_the_first_value_is_there(closed):
    """The other strategy continues: as the new creator, or without the closed one."""
    strategies = [ParameterServerStrategy(name=name) for name in "ab"]
    started, go_on = threading.Event(), threading.Event()

    def slow(shape, dtype):
        started.set()
        assert go_on.wait(60)
        if closed == "creator":
            raise KeyboardInterrupt
        return np.zeros(shape, dtype)

    def create(number, initializer, results):
        try:
            with strategies[number].scope():
                results.append(get_variable("v", 3, "f8", initializer))
        except BaseException as error:
            results.append(error)

    first, second = [], []
    threads = [threading.Thread(target=create, args=(0, slow, first))]
    threads[0].start()
    assert started.wait(60)
    threads.append(threading.Thread(target=create, args=(1, 1.0, second)))
    threads[1].start()
    if closed == "waiting":
        strategies[1].close()
        threads[1].join(60)
        assert isinstance(second[0], mpidist.errors.FailedPreconditionError)
        go_on.set()
        threads[0].join(60)
        np.testing.assert_array_equal(first[0], np.zeros(3))
    else:
        strategies[0].close()
        threads[1].join(60)
        np.testing.assert_array_equal(second[0], np.ones(3))
        go_on.set()
        threads[0].join(60)
        assert isinstance(first[0], BaseException)


def test_a_strategy_that_could_not_be_created_leaves_nothing(server, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(VariableCreator, "create", broken)
        with pytest.raises(RuntimeError, match="not today"):
            ParameterServerStrategy(mode="sync")
    assert not server._drains
    with ParameterServerStrategy(mode="sync") as strategy, strategy.scope():
        v = get_variable("v", 3, "f8", 0.0)
        optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]).wait(30)
        assert len(server._drains) == 1
    assert not server._drains


def test_a_strategy_may_be_configured_for_its_own_cluster(server):
    strategy = ParameterServerStrategy()
    strategy.configure(cluster_spec=server.cluster_spec, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="task_id is 1"):
        strategy.configure(cluster_spec=server.cluster_spec, task_id=1)


def test_threads_that_create_one_variable():
    strategy, started, go_on = ParameterServerStrategy(), threading.Event(), threading.Event()
    made = []

    def slow(shape, dtype):
        started.set()
        assert go_on.wait(60)
        return np.ones(shape, dtype)

    def create():
        with strategy.scope():
            made.append(get_variable("v", 3, "f8", slow))

    thread = threading.Thread(target=create)
    thread.start()
    assert started.wait(60)
    with strategy.scope(), pytest.raises(ValueError, match="'v' exists already"):
        get_variable("v", 3, "f8", 2.0)
    go_on.set()
    thread.join(60)
    assert made[0].version == 1
