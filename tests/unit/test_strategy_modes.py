"""Workers that wait for each other, as threads of this process."""

import logging
import signal
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import errors
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers, schedules
from strategy.client import sync_modes
from strategy.client.changes import Change
from strategy.gradients import describe_step
from strategy.partitioners import FixedShardsPartitioner
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.rounds import Decision

LIMIT_S = 60


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def together(works):
    """Call functions in threads of their own. Return their results, or raise the first error."""
    results, problems = [None] * len(works), []

    def call(number, work):
        try:
            results[number] = work()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if problems:
        raise problems[0]
    assert not [thread for thread in threads if thread.is_alive()], "a worker hangs"
    return results


def until(condition):
    """Wait for a condition that another thread fulfils."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def variables(strategy, sizes, dtype=np.float32):
    with strategy.scope():
        return [get_variable(f"v{n}", size, dtype, 1.0) for n, size in enumerate(sizes)]


def gradient(worker, step, value):
    """Return a gradient that depends on all arguments. Sums depend on the order of the workers."""
    random = np.random.default_rng((worker, step))
    noise = random.standard_normal(value.shape) * 10.0 ** random.integers(-3, 4)
    return (noise + np.asarray(value, np.float64)).astype(value.dtype)


def mean(gradients):
    wide = [g.astype(np.float32) if g.dtype.itemsize == 2 else g for g in gradients]
    total = wide[0]
    for one in wide[1:]:
        total = total + one
    return total / total.dtype.type(len(gradients))


SIZES = [3, 5000, 700_000]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("servers", [1, 2])
def test_steps_of_all_workers_are_those_of_one_process(make, servers, near, dtype):
    workers, steps = 3, 3
    cluster = make(servers=servers, workers=workers, near=near)

    def train(index):
        strategy = cluster.worker(index, mode="sync")
        made = variables(strategy, SIZES, dtype)
        optimizer = optimizers.Adam(0.01)
        for step in range(steps):
            grads = [gradient(index, step, v.read_value()) for v in made]
            applied = optimizer.apply_gradients(zip(grads, made, strict=True)).result()
            assert applied.versions == (step + 2,) * len(SIZES)
            assert applied.staleness == (0,) * len(SIZES)
            assert applied.contributed
        assert int(strategy.global_step) == steps
        return [v.read_value() for v in made]

    results = together([lambda index=index: train(index) for index in range(workers)])
    alone = make(near=near).worker(0)
    made = variables(alone, SIZES, dtype)
    optimizer = optimizers.Adam(0.01)
    for step in range(steps):
        values = [v.read_value() for v in made]
        grads = [mean([gradient(w, step, value) for w in range(workers)]) for value in values]
        if dtype is ml_dtypes.bfloat16:  # the mean stays in float32, but a push would round it
            return check_halves(results, values, step)
        optimizer.apply_gradients(zip(grads, made, strict=True)).wait()
    for result in results:
        for value, v in zip(result, made, strict=True):
            np.testing.assert_array_equal(value, v)
    return None


def check_halves(results, first, step):
    """Check that all workers have the same values, and that the values have changed."""
    assert step == 0
    for result in results:
        for value, start, same in zip(result, first, results[0], strict=True):
            assert np.isfinite(value.astype(np.float64)).all()
            assert (value != start).any()
            np.testing.assert_array_equal(value, same)


def test_halves_are_added_up_in_float32(make):
    cluster = make(workers=3)
    given = np.array([1.0, 2.0**-8, 2.0**-8], np.float32)  # in bfloat16 the sum would stay 1

    def train(index):
        (v,) = variables(cluster.worker(index, mode="sync"), [4], ml_dtypes.bfloat16)
        grad = np.full(4, given[index], ml_dtypes.bfloat16)
        optimizers.SGD(1.0).apply_gradients([(grad, v)]).wait()
        return v.read_value()

    expected = (1 - (np.float32(1) + 2.0**-7) / np.float32(3)).astype(ml_dtypes.bfloat16)
    for result in together([lambda index=index: train(index) for index in range(3)]):
        np.testing.assert_array_equal(result, np.full(4, expected))


def test_rows_of_all_workers(make):
    cluster = make(workers=2, servers=2)
    rows = [([0, 2, 0], [1.0, 2.0, 4.0]), ([2, 3], [8.0, 16.0])]

    def train(index):
        strategy = cluster.worker(
            index, mode="sync", variable_partitioner=FixedShardsPartitioner(2)
        )
        with strategy.scope():
            v = get_variable("v", (5, 1), np.float64, 0.0)
        ids, values = rows[index]
        grad = IndexedSlices(np.array(values)[:, None], ids)
        applied = optimizers.SGD(1.0).apply_gradients([(grad, v)]).result()
        assert applied.versions == ((2, 2),)
        return v.read_value()[:, 0]

    for result in together([lambda index=index: train(index) for index in range(2)]):
        np.testing.assert_array_equal(result, [-2.5, 0, -5, -8, 0])


def test_a_slow_worker_with_backup_workers(make):
    cluster = make(workers=3, servers=2)
    fast_are_done = threading.Event()
    steps = 5

    def strategy_of(index):
        strategy = cluster.worker(index, mode="sync", backup_workers=1)
        return strategy, variables(strategy, [4, 40_000])

    def apply(index, made):
        grads = [np.full(v.shape, 2.0**index, np.float32) for v in made]
        return optimizers.SGD(1.0).apply_gradients(zip(grads, made, strict=True)).result()

    def fast(index):
        strategy, made = strategy_of(index)
        for _ in range(steps):
            assert apply(index, made).contributed
        if index == 0:
            fast_are_done.set()
            assert apply(index, made).contributed  # with the slow worker
        strategy.finish()

    def slow():
        strategy, made = strategy_of(2)
        fast_are_done.wait(LIMIT_S)
        late = apply(2, made)
        assert (late.contributed, late.versions, late.staleness) == (False, (), ())
        np.testing.assert_array_equal(made[1], np.full(40_000, 1 - steps * 1.5))
        assert int(strategy.global_step) == steps
        applied = apply(2, made)
        assert applied.contributed
        assert applied.versions == (steps + 2, steps + 2)
        strategy.finish()
        return made[0].read_value()

    _, _, value = together([lambda: fast(0), lambda: fast(1), slow])
    np.testing.assert_array_equal(value, np.full(4, 1 - steps * 1.5 - 2.5))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_skips_a_step(make, servers):
    """Workers with finite gradients make the step. Without finite gradients, there is no step."""
    cluster = make(workers=3, servers=servers)
    given = [[1.0, np.nan, np.nan, 1.0], [2.0, np.inf, 2.0, 2.0], [4.0, np.nan, 4.0, np.nan]]

    def train(index):
        strategy = cluster.worker(index, mode="sync", nan="skip")
        made = variables(strategy, [2, 40_000], np.float64)
        contributed, values = [], []
        for number in given[index]:
            grads = [np.full(v.shape, number) for v in made]
            work = optimizers.SGD(1.0).apply_gradients(zip(grads, made, strict=True))
            contributed.append(work.result().contributed)
            values.append([v.read_value()[0] for v in made])
        assert int(strategy.global_step) == 3
        return contributed, values

    expected = np.cumsum([-7 / 3, 0, -6 / 2, -3 / 2]) + 1
    for index, (contributed, values) in enumerate(
        together([lambda index=index: train(index) for index in range(3)])
    ):
        assert contributed == np.isfinite(given[index]).tolist()
        np.testing.assert_allclose(values, np.stack([expected, expected], axis=1))


def test_a_worker_that_skips_on_a_leash(make):
    cluster = make(workers=2)

    def train(index):
        strategy = cluster.worker(index, mode="ssp", staleness=0, nan="skip")
        (v,) = variables(strategy, [2], np.float64)
        for step in range(4):
            grad = np.full(2, np.nan if (step + index) % 2 else 1.0)
            applied = optimizers.SGD(1.0).apply_gradients([(grad, v)]).result()
            assert applied.contributed == ((step + index) % 2 == 0)
        strategy.finish()
        return v

    for v in together([lambda index=index: train(index) for index in range(2)]):
        np.testing.assert_array_equal(v, [-3, -3])


def test_workers_that_leave_are_not_waited_for(make):
    cluster = make(workers=3)
    counts = [7, 2, 4]

    def train(index):
        strategy = cluster.worker(index, mode="sync")
        (v,) = variables(strategy, [2], np.float64)
        for _ in range(counts[index]):
            grad = np.full(2, index + 1.0)
            optimizers.SGD(1.0).apply_gradients([(grad, v)]).wait()
        strategy.finish()
        return strategy

    strategies = together([lambda index=index: train(index) for index in range(3)])
    v = strategies[1].creator.by_name["v0"]
    with pytest.raises(errors.FailedPreconditionError, match="worker 1 has finished its training"):
        optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)])
    strategies[1].finish()
    expected = 1 - (2 * 2 + 2 * 2 + 3 * 1)  # of all, of 0 and 2, of 0 alone
    np.testing.assert_array_equal(strategies[0].creator.by_name["v0"], [expected] * 2)
    assert int(strategies[1].global_step) == max(counts)


def test_nobody_gets_too_far_ahead(make):
    cluster = make(workers=2)
    bound, steps, pushed = 2, [0, 0], [0, 0]
    may_go = threading.Semaphore(0)

    def train(index):
        strategy = cluster.worker(index, mode="ssp", staleness=bound)
        (v,) = variables(strategy, [2], np.float64)
        for _ in range(8):
            if index == 1:
                may_go.acquire(timeout=LIMIT_S)
            assert steps[index] - min(pushed) <= bound
            pushed[index] += 1
            optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]).wait()
            steps[index] += 1
        strategy.finish()

    clocks = cluster.parameter_servers[0]._coordinator._clocks

    def let_go():
        for slowest in range(6):
            ahead = slowest + bound + 1
            until(lambda ahead=ahead: any(ahead in dict(c._waiting) for c in clocks.values()))
            assert steps[0] == slowest + bound
            assert [one.missing() for one in clocks.values()] == [[1]]
            may_go.release()
            until(lambda ahead=ahead: steps[0] == ahead)
        for _ in range(2):
            may_go.release()

    together([lambda: train(0), lambda: train(1), let_go])
    assert steps == [8, 8]


def test_what_is_seen_on_a_short_leash(make):
    """With a bound of 0, every worker sees all earlier pushes of the other workers."""
    cluster = make(workers=3)

    def train(index):
        strategy = cluster.worker(index, mode="ssp", staleness=0)
        (v,) = variables(strategy, [50_000], np.float64)
        for step in range(6):
            seen = 1 - v.read_value()[0]
            assert 3 * step <= seen <= 3 * (step + 1) - 1
            optimizers.SGD(1.0).apply_gradients([(np.ones(50_000), v)]).wait()
        strategy.finish()

    together([lambda index=index: train(index) for index in range(3)])


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "ssp", "staleness": 0}], ids=str)
def test_who_is_missing_is_said(make, options, monkeypatch, caplog):
    cluster = make(workers=3)
    monkeypatch.setattr(sync_modes, "settings", SimpleNamespace(stall_s=0.05))
    strategies = [cluster.worker(index, **options) for index in range(3)]
    made = [variables(strategy, [2], np.float64) for strategy in strategies]

    def step(index):
        optimizers.SGD(1.0).apply_gradients([(np.ones(2), made[index][0])]).wait()

    def late():
        until(lambda: len(caplog.records) >= 2)
        step(1)

    with caplog.at_level(logging.WARNING, "strategy.client.sync_modes"):
        together([lambda: step(0), late, lambda: step(2)])
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "worker 0 has waited" in text and "for worker 1" in text]
    assert len([text for text in said if text.startswith("worker 2")]) == 1


OTHERWISE = {
    "fewer": (
        lambda made: (optimizers.SGD(1.0), [(np.ones(3), made[0])]),
        r"worker 0 gives gradients of \['v0', 'v1'\] .*, and worker 1 of \['v0'\]",
    ),
    "rows": (
        lambda made: (
            optimizers.SGD(1.0),
            [(IndexedSlices(np.ones(1), [0]), made[0]), (np.ones(5000), made[1])],
        ),
        r"and worker 1 of \['rows of v0', 'v1'\]",
    ),
    "optimizer": (
        lambda made: (optimizers.SGD(1.0000001), [(np.ones(3), made[0]), (np.ones(5000), made[1])]),
        "learning rate 1.0, and worker 1 .*learning rate 1.0000001",
    ),
    "schedule": (
        lambda made: (
            optimizers.SGD(schedules.ExponentialDecay(1.0, 1, 0.5)),
            [(np.ones(3), made[0]), (np.ones(5000), made[1])],
        ),
        "and worker 1 .*learning rate schedule ExponentialDecay",
    ),
    "function": (
        lambda made: (
            optimizers.Function(lambda p, g, *_: np.add(p, 2 * g, out=p) and None),
            [(np.ones(3), made[0]), (np.ones(5000), made[1])],
        ),
        "and worker 1 .* for Function 'Function' with .*code",
    ),
    "order": (
        lambda made: (optimizers.SGD(1.0), [(np.ones(5000), made[1]), (np.ones(3), made[0])]),
        r"and worker 1 of \['v1', 'v0'\]",
    ),
}


@pytest.mark.parametrize(("second", "problem"), OTHERWISE.values(), ids=OTHERWISE)
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_that_push_otherwise(make, second, problem, servers):
    cluster = make(workers=2, servers=servers)

    def train(index):
        strategy = cluster.worker(index, mode="sync")
        made = variables(strategy, [3, 5000], np.float64)
        grads = [(np.ones(3), made[0]), (np.ones(5000), made[1])]
        optimizer, own = second(made) if index else (optimizers.SGD(1.0), grads)
        with pytest.raises(errors.InvalidArgumentError, match=problem):
            optimizer.apply_gradients(own).wait()
        for v in made:
            np.testing.assert_array_equal(v, np.ones(v.shape))
        optimizers.SGD(1.0).apply_gradients(grads).wait()
        return [v.read_value() for v in made]

    for result in together([lambda index=index: train(index) for index in range(2)]):
        assert [np.unique(value).tolist() for value in result] == [[0.0], [0.0]]


def test_a_worker_that_cannot_push_fails_the_step_for_all(make):
    cluster = make(workers=2, servers=2)

    def fail_once(strategy):
        own = strategy._connections[1]
        push = own.push

        def failing(*arguments):
            own.push = push
            raise MemoryError("no room for a copy")

        own.push = failing

    def run(index):
        strategy = cluster.worker(index, mode="sync")
        made = variables(strategy, [2, 700_000], np.float64)
        problems = []
        for step in range(3):
            if (index, step) == (0, 1):
                fail_once(strategy)
            pairs = [(np.full(v.shape, 10.0**step), v) for v in made]
            try:
                optimizers.SGD(1.0).apply_gradients(pairs).wait()
            except (MemoryError, errors.AbortedError) as error:
                problems.append((step, type(error)))
        return problems, [v.read_value()[0] for v in made]

    (first, one), (second, two) = together([lambda: run(0), lambda: run(1)])
    assert first == [(1, MemoryError)]
    assert second == [(1, errors.AbortedError)]
    assert one == two
    assert 1 - 101 in one


def test_what_follows_a_step_that_fails_is_applied(make):
    cluster = make(workers=2)
    both = [cluster.worker(index, mode="sync") for index in range(2)]
    made = [variables(strategy, [2], np.float64)[0] for strategy in both]
    grad = np.ones(2)

    def fail():
        connection = both[0]._connections[0]
        server = cluster.parameter_servers[0]._store

        def behind():  # the other worker has pushed, and then assigned
            return [len(one.unfinished) for one in server.connections.values()] == [0, 2]

        def failing(*_):
            until(behind)
            raise MemoryError("no room for a copy")

        connection.push = failing
        with pytest.raises(MemoryError):
            optimizers.SGD(1.0).apply_gradients([(grad, made[0])])

    def follow():
        work = optimizers.SGD(1.0).apply_gradients([(grad, made[1])])
        assert made[1].assign_add(5) == 2
        with pytest.raises(errors.AbortedError, match="worker 0, whose gradients"):
            work.wait()

    together([fail, follow])
    np.testing.assert_array_equal(made[1], [6, 6])


def test_assignments_count_at_once(make):
    strategy = make(workers=2).worker(0, mode="sync")
    (v,) = variables(strategy, [2], np.float64)
    assert v.assign_add(1) == 2
    np.testing.assert_array_equal(v, [2, 2])


def test_who_finishes_with_an_error_is_not_waited_for(make):
    cluster = make(workers=2)

    def fail(*_):
        raise RuntimeError("not today")

    def train(index):
        strategy = cluster.worker(index, mode="sync")
        (v,) = variables(strategy, [2], np.float64)
        work = optimizers.Function(fail).apply_gradients([(np.ones(2), v)])
        if index:
            until(work.is_completed)
            with pytest.raises(errors.InvalidArgumentError, match="not today"):
                strategy.finish()
            return
        with pytest.raises(errors.InvalidArgumentError, match="not today"):
            work.wait()
        assert optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]).result().contributed

    together([lambda: train(0), lambda: train(1)])


def test_an_interrupt_while_a_worker_waits(make):
    cluster = make(workers=2)
    strategies = [cluster.worker(index, mode="sync") for index in range(2)]
    made = [variables(strategy, [2], np.float64)[0] for strategy in strategies]

    def step(index):
        return optimizers.SGD(1.0).apply_gradients([(np.full(2, 2.0**index), made[index])])

    def interrupt():
        rounds = cluster.parameter_servers[0]._coordinator._rounds
        until(lambda: any(one._entered for one in list(rounds.values())))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # Python installs no SIGINT handler if SIGINT is ignored at start, as in a shell's background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            step(0)
    finally:
        signal.signal(signal.SIGINT, before)
    results = together([lambda: step(0).result(), lambda: step(1).result()])
    assert [applied.versions for applied in results] == [(2,), (2,)]
    np.testing.assert_array_equal(made[0], [-0.5, -0.5])


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "ssp", "staleness": 0}], ids=str)
def test_a_worker_that_leaves_the_cluster_is_not_waited_for(make, options, monkeypatch):
    monkeypatch.setattr(sync_modes, "LOOK_S", 0.01)
    cluster = make(workers=3)
    strategy = cluster.worker(0, **options)
    (v,) = variables(strategy, [2], np.float64)

    def go():
        time.sleep(0.05)
        cluster.gone |= {("worker", 1), ("worker", 2)}

    def steps():
        for _ in range(3):
            optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]).wait()

    together([go, steps])
    np.testing.assert_array_equal(v, [-2, -2])


def test_a_strategy_that_could_not_be_made_is_not_counted(make):
    cluster = make(workers=2, servers=2)

    def train(index):
        if index == 0:
            host = cluster.host(0)
            for wrong in ({"placement": "biggest"}, {"nan": "?"}, {"transport": "shared"}):
                cluster.near = False
                with pytest.raises((ValueError, errors.FailedPreconditionError)):
                    ParameterServerStrategy(server=host, mode="sync", **wrong)
            strategy = ParameterServerStrategy(server=host, mode="sync")
        else:
            strategy = cluster.worker(index, mode="sync")
        (v,) = variables(strategy, [2], np.float64)
        return optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]).result().versions

    assert together([lambda: train(0), lambda: train(1)]) == [(2,), (2,)]


def test_what_follows_a_step_is_applied_after_it(make):
    cluster = make(workers=2)

    def train(index):
        (v,) = variables(cluster.worker(index, mode="sync"), [700_000], np.float64)
        work = optimizers.SGD(1.0).apply_gradients([(np.full(700_000, index + 1.0), v)])
        if index == 0:
            v.assign(np.full(700_000, 5.0))
        work.wait()
        return v

    values = together([lambda index=index: train(index) for index in range(2)])
    np.testing.assert_array_equal(values[1], np.full(700_000, 5.0))


def test_workers_with_different_modes(make):
    cluster = make(workers=2)
    cluster.worker(0, mode="sync", backup_workers=1)
    for options, words in (
        ({}, "'async'"),
        ({"mode": "sync"}, "'sync' with backup_workers=0"),
        ({"mode": "ssp", "staleness": 3}, "'ssp' with staleness=3"),
    ):
        with pytest.raises(errors.InvalidArgumentError) as info:
            cluster.worker(1, **options)
        assert f"worker 1 has mode {words}, but worker 0 has 'sync' with" in info.value.message
        cluster = make(workers=2)
        cluster.worker(0, mode="sync", backup_workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "bulk"}, r"unknown mode 'bulk'.*'async', 'sync', 'ssp'"),
        ({"mode": "ssp"}, "needs staleness"),
        ({"staleness": 1}, "staleness is for mode 'ssp', not 'async'"),
        ({"mode": "ssp", "staleness": -1}, "from 0 to"),
        ({"mode": "ssp", "staleness": 1 << 40}, "from 0 to"),
        ({"backup_workers": 1}, "are for mode 'sync'"),
        ({"mode": "sync", "backup_workers": 2}, "must be from 0 to 1, .*, not 2"),
        ({"mode": "sync", "backup_workers": -1}, "must be from 0 to 1, .*, not -1"),
    ],
    ids=str,
)
def test_wrong_arguments(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(workers=2).worker(0, **options)


def test_who_leaves_when_it_has_just_been_counted_in_fails_the_step(make):
    cluster = make(workers=2)
    strategies = [cluster.worker(index, mode="sync") for index in range(2)]
    made = [variables(strategy, [2], np.float64)[0] for strategy in strategies]
    rounds = cluster.parameter_servers[0]._coordinator

    def step(index):
        return optimizers.SGD(1.0).apply_gradients([(np.ones(2), made[index])])

    own = strategies[0].sync_mode
    own._entering = own._start_entering(own_words(strategies[0], made[0]))
    until(lambda: any(one._entered for one in list(rounds._rounds.values())))
    (connection,) = strategies[0]._connections
    call = connection.call
    other = []

    def late(method, message):
        assert method == "Leave"
        other.append(threading.Thread(target=lambda: results.append(outcome()), daemon=True))
        other[0].start()
        until(lambda: all(one._step == 1 for one in rounds._rounds.values()))
        return call(method, message)

    results = []

    def outcome():
        try:
            return step(1).result(LIMIT_S)
        except errors.AbortedError as error:
            return error

    connection.call = late
    strategies[0].finish()
    other[0].join(LIMIT_S)
    assert [type(one) for one in results] == [errors.AbortedError]
    assert step(1).result(LIMIT_S).contributed


def own_words(strategy, variable):
    """Return the words that workers compare for a step of SGD."""
    return describe_step(optimizers.SGD(1.0), 1.0, [(None, variable)])


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "ssp", "staleness": 1}])
def test_a_worker_that_closes_before_another_begins_is_not_waited_for(make, options):
    cluster = make(workers=2)
    cluster.worker(0, **options).close()
    (v,) = variables(cluster.worker(1, **options), [2], np.float64)
    for _ in range(5):
        optimizers.SGD(1.0).apply_gradients([(np.ones(2), v)]).result(LIMIT_S)
    np.testing.assert_array_equal(v, np.full(2, -4.0))


def test_a_push_of_a_later_step_waits_for_its_own_members(make):
    """A member of step 5 arrives while step 4, which shares a member with it, is incomplete."""
    cluster = make(workers=3)
    workers = [cluster.worker(index, mode="sync", backup_workers=1) for index in range(3)]
    v, *others = (variable(strategy, "v", (), 0.0) for strategy in workers)

    def push(worker, step, members, value):
        change = Change((v, *others)[worker].remotes, pb.ADD, np.array(value))
        (connection,) = workers[worker]._connections
        return connection.push([change], Decision(step, members))

    works = [
        push(0, 4, (0, 2), 2.0),
        push(1, 5, (0, 1), 10.0),
        push(0, 5, (0, 1), 20.0),
        push(2, 4, (0, 2), 4.0),
    ]
    for work in works:
        work.wait(LIMIT_S)
    assert float(v) == (2 + 4) / 2 + (10 + 20) / 2
