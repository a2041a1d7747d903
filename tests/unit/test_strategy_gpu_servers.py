"""Variables on GPUs of parameter servers, compared with variables on the host."""

import gc
import threading
from contextlib import ExitStack, contextmanager

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import errors
from mpidist.errors import InvalidArgumentError
from mpidist.gpu import persistent
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers
from strategy.partitioners import FixedShardsPartitioner
from strategy.protocol.layout import BLOCK_BYTES
from strategy.server import memory

GPU = ["/job:ps/task:0/device:GPU:0"]
HALVES = ["float16", ml_dtypes.bfloat16]
DTYPES = [*HALVES, "float32", "float64"]
BLOCK = BLOCK_BYTES // 4
LIMIT_S = 60

OPTIMIZERS = [
    optimizers.SGD(0.3),
    optimizers.SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    optimizers.Adagrad(0.1),
    optimizers.RMSprop(0.01, rho=0.8, momentum=0.5, centered=True),
    optimizers.Adam(0.01),
    optimizers.AdamW(lambda step: 0.1 / (step + 1)),
    optimizers.Ftrl(lambda step: 0.1 * step, l1=0.1, l2=0.2),
]
CASES = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)


def momentum(param, grad, slots, learning_rate, step):
    slots["velocity"] *= 0.5
    slots["velocity"] += grad
    param -= slots["velocity"] * learning_rate


@contextmanager
def served(devices, **options):
    """Yield a function that makes a cluster's workers. Close the cluster's servers at the end."""
    with ExitStack() as stack:
        cluster = Cluster(stack, **options)
        stack.callback(lambda: [one.close() for one in cluster.parameter_servers])
        yield lambda index=0, **more: cluster.worker(index, parameter_devices=devices, **more)


def on_both(train, **options):
    """Return the results of ``train`` with variables on the host and with variables on a GPU."""
    results = []
    for devices in (None, GPU):
        with served(devices, **options) as worker:
            results.append(train(worker))
    return results


def assert_equal(results):
    there, here = ([np.asarray(one, np.float64) for one in side] for side in results)
    for one, other in zip(there, here, strict=True):
        np.testing.assert_array_equal(one, other)


def gradient(seed, shape, dtype):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("near", "size"),
    [(True, 5), (True, 2 * BLOCK + 3), (False, 2 * BLOCK + 3)],
    ids=["shared, small", "shared", "p2p"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS, optimizers.Lamb(0.1, weight_decay=0.1), optimizers.Adafactor(0.1)],
    ids=lambda one: type(one).__name__,
)
def test_steps_are_those_of_the_host(xp, optimizer, dtype, size, near):
    def train(worker):
        strategy = worker()
        v = variable(strategy, "v", size, 0.5, dtype)
        for step in range(4):
            optimizer.apply_gradients([(gradient(step, size, dtype), v)]).wait()
        return [v.numpy(), v.read_value(consistent=False)]

    assert_equal(on_both(train, workers=1, near=near))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_of_rows_and_columns_are_those_of_the_host(xp, tmp_path, dtype):
    def train(worker):
        strategy, adafactor = worker(), optimizers.Adafactor(0.1)
        v = variable(strategy, "v", (70, 9), 0.5, dtype)
        for step in range(4):
            if step == 2:
                path = strategy.save(str(tmp_path / str(len(list(tmp_path.iterdir())))))
                v.assign(np.zeros(v.shape, dtype))
                strategy.restore(path)
            adafactor.apply_gradients([(gradient(step, (70, 9), dtype), v)]).wait()
        return [v.numpy()]

    assert_equal(on_both(train, workers=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [40, 1500])
@CASES
def test_rows_are_those_of_the_host(xp, optimizer, dtype, rows):
    def train(worker):
        v = variable(worker(), "v", (rows, 300), 0.5, dtype)
        for step in range(3):
            ids = np.random.default_rng(step).integers(0, rows, rows)  # many ids are repeated
            slices = IndexedSlices(gradient(step, (rows, 300), dtype), ids)
            optimizer.apply_gradients([(slices, v)]).wait()
            optimizer.apply_gradients([(gradient(step, (rows, 300), dtype), v)]).wait()
        return [v.numpy(), v.gather([3, 3, 0])]

    assert_equal(on_both(train, workers=1))


def together(works):
    """Call functions in threads of their own, and return their results."""
    results, problems = [None] * len(works), []

    def call(number, work):
        try:
            results[number] = work()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a worker hangs"
    if problems:
        raise problems[0]
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["whole", "rows"])
@pytest.mark.parametrize("optimizer", [optimizers.SGD(0.3), optimizers.Adam(0.01)], ids=str)
def test_synchronous_steps_are_those_of_the_host(xp, optimizer, dtype, kind):
    shape = (900, 301)

    def train(worker):
        def work(index):
            strategy = worker(index, mode="sync")
            v = variable(strategy, "v", shape, 0.5, dtype)
            for step in range(3):
                grad = gradient((index, step), shape, dtype)
                if kind == "rows":
                    ids = np.random.default_rng((step, index)).integers(0, 900, 900)
                    grad = IndexedSlices(grad, ids)
                optimizer.apply_gradients([(grad, v)]).wait()
            return v.numpy()

        return together([lambda index=index: work(index) for index in range(3)])

    assert_equal(on_both(train, workers=3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [6, BLOCK + 2])
def test_changes_that_take_only_the_values(xp, dtype, size):
    def train(worker):
        v = variable(worker(), "v", (size // 2, 2), 0.5, dtype)
        adam, seen = optimizers.Adam(0.1), []

        def look():  # a step shows the values on the GPU
            adam.apply_gradients([(gradient(len(seen), v.shape, dtype), v)]).wait()
            seen.append(v.numpy())

        look()
        for change in (v.assign, v.assign_add, v.assign_sub):
            change(gradient(7, v.shape, dtype))
            look()
        for name in ("update", "add", "sub", "mul", "div", "min", "max"):
            getattr(v, f"scatter_{name}")([2, 0, 2], gradient(9, (3, 2), dtype))
            look()
        return seen

    assert_equal(on_both(train, workers=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_is_called_with_arrays_of_cupy(xp, dtype, workers):
    package, shape = xp, (1200, 301)

    def rule(param, grad, slots, learning_rate, step):
        if isinstance(param, np.ndarray):
            return momentum(param, grad, slots, learning_rate, step)
        assert all(isinstance(one, package.ndarray) for one in (param, grad, *slots.values()))
        assert param.dtype == grad.dtype == (np.float32 if dtype in HALVES else dtype)
        return momentum(param, grad, slots, learning_rate, step)

    def train(worker):
        def work(index):
            v = variable(worker(index, mode="sync"), "v", shape, 0.5, dtype)
            function = optimizers.Function(rule, ["velocity"], 0.1)
            for step in range(2):
                grad = gradient((index, step), shape, dtype)
                function.apply_gradients([(grad, v)]).wait()
                rows = np.arange(0, 1200, 1 + index)
                slices = IndexedSlices(gradient(step, (len(rows), 301), dtype), rows)
                function.apply_gradients([(slices, v)]).wait()
            return v.numpy()

        return together([lambda index=index: work(index) for index in range(workers)])

    assert_equal(on_both(train, workers=workers))


def test_a_function_that_fails_leaves_a_server_that_goes_on(xp):
    def fail(param, grad, slots, learning_rate, step):
        raise ValueError("no")

    with served(GPU, workers=1) as worker:
        v = variable(worker(), "v", 3 * BLOCK, 1.0, "f4")
        with pytest.raises(InvalidArgumentError, match="no"):
            optimizers.Function(fail).apply_gradients([(v.numpy(), v)]).wait()
        optimizers.SGD(0.5).apply_gradients([(v.numpy(), v)]).wait()
        np.testing.assert_array_equal(v.numpy(), np.full(3 * BLOCK, 0.5))


def test_rows_without_room_on_the_gpu_stay_as_they_are(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("it would have to fill the GPU")
    rows = IndexedSlices(np.ones((20_000, 64), "f4"), np.arange(20_000))
    with served(GPU, workers=1) as worker:
        v = variable(worker(), "v", (20_000, 64), 1.0, "f4")
        momentum = optimizers.SGD(0.5, momentum=0.5)
        first = IndexedSlices(np.zeros((1, 64), "f4"), np.zeros(1, int))
        momentum.apply_gradients([(first, v)]).wait()  # creates the slots
        with monkeypatch.context() as patch:
            patch.setattr(xp, "longest", [1 << 20])
            message = r"rows of variable 'v'.* GPU 0 has not enough memory"
            with pytest.raises(errors.ResourceExhaustedError, match=message):
                momentum.apply_gradients([(rows, v)]).wait()
        np.testing.assert_array_equal(v.numpy(), np.ones((20_000, 64)))
        momentum.apply_gradients([(rows, v)]).wait()
        np.testing.assert_array_equal(v.numpy(), np.full((20_000, 64), 0.5))


def test_rows_that_the_gpu_has_no_room_for_come_there_with_the_next_step(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("it would have to fill the GPU")
    with served(GPU, workers=1) as worker:
        v = variable(worker(), "v", (20_000, 64), 1.0, "f4")
        momentum, nothing = optimizers.SGD(0.5, momentum=0.5), np.zeros((20_000, 64), "f4")
        momentum.apply_gradients([(nothing, v)]).wait()
        with monkeypatch.context() as patch:
            patch.setattr(xp, "longest", [1 << 20])
            v.scatter_add(np.arange(20_000), 1.0)
        momentum.apply_gradients([(nothing, v)]).wait()
        np.testing.assert_array_equal(v.numpy(), np.full((20_000, 64), 2))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [4, BLOCK + 4])
def test_what_a_function_has_changed_before_it_fails_is_seen(xp, size, dtype):
    def fail_at_first(param, grad, slots, learning_rate, step):
        param -= grad
        if step == 1:
            raise ValueError("no")

    def train(worker):
        v, optimizer = variable(worker(), "v", size, 1.0, dtype), optimizers.Function(fail_at_first)
        with pytest.raises(InvalidArgumentError, match="no"):
            optimizer.apply_gradients([(v.numpy(), v)]).wait()
        values = [v.numpy()[:4]]
        for _ in range(4):
            optimizer.apply_gradients([(np.zeros(size, dtype), v)]).wait()
            values.append(v.numpy()[:4])
        return values

    assert_equal(on_both(train, workers=1))


def test_what_fails_while_slots_come_down_is_told(xp, tmp_path):
    if xp.__name__ == "cupy":
        pytest.skip("devices cannot be made to fail there")
    with served(GPU, workers=1) as worker:
        strategy = worker()
        v = variable(strategy, "v", 8, 1.0, "f4")
        optimizers.Adam(0.1).apply_gradients([(v.numpy(), v)]).wait()
        xp.failure.append(700)
        try:
            with pytest.raises(errors.InternalError, match=r"GPU 0"):
                strategy.save(str(tmp_path / "saved"))
        finally:
            xp.failure.clear()


@pytest.mark.parametrize("compression", ["fp16", "bf16", ("topk", 0.1)], ids=str)
def test_compressed_gradients(xp, compression):
    def train(worker):
        strategy = worker(compression=compression)
        v = variable(strategy, "v", 2 * BLOCK + 3, 0.5, "f4")
        adam = optimizers.Adam(0.1, global_clipnorm=1.0)
        for step in range(3):
            adam.apply_gradients([(gradient(step, v.shape, "f4"), v)]).wait()
        return [v.numpy()]

    assert_equal(on_both(train, workers=1))


def test_several_variables_of_a_push(xp):
    def train(worker):
        strategy = worker()
        made = [variable(strategy, f"v{n}", n + 1, 0.5, dtype) for n, dtype in enumerate(DTYPES)]
        adam = optimizers.Adam(0.1)
        for step in range(3):
            grads = [gradient((step, v.shape[0]), v.shape, v.dtype) for v in made]
            adam.apply_gradients(list(zip(grads, made, strict=True))).wait()
        return [v.numpy() for v in made]

    assert_equal(on_both(train, workers=1))


def test_parts_on_several_servers(xp):
    devices = [*GPU, "/job:ps/task:1"]
    results = []
    for named in (None, devices):
        with served(named, servers=2, workers=1) as worker:
            strategy = worker(variable_partitioner=FixedShardsPartitioner(2))
            v = variable(strategy, "v", (9, 5), 0.5, "f4")
            for step in range(3):
                grad = gradient(step, v.shape, "f4")
                optimizers.Adam(0.1).apply_gradients([(grad, v)]).wait()
                rows = IndexedSlices(gradient(step, (3, 5), "f4"), np.array([0, 8, 0]))
                optimizers.Adam(0.1).apply_gradients([(rows, v)]).wait()
            results.append([v.numpy()])
            if named:
                assert set(v.device) == {GPU[0], "/job:ps/task:1/device:CPU:0"}
    assert_equal(results)


def test_memory_that_cannot_be_pinned_where_it_lies(xp, monkeypatch, caplog):
    def refuse(*_):
        raise xp.cuda.runtime.CUDARuntimeError(304)

    def train(worker):
        v = variable(worker(), "v", 4 * BLOCK + 3, 0.5, "f4")
        for step in range(3):
            optimizers.Adam(0.1).apply_gradients([(gradient(step, v.shape, "f4"), v)]).wait()
            v.assign_add(1.0)
        return [v.numpy()]

    pinned = on_both(train, workers=1)
    monkeypatch.setattr(persistent, "_warned", [])
    runtime = xp.cuda.runtime
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "hostRegister", refuse)
        assert_equal([*on_both(train, workers=1)])
    assert caplog.text.count("cannot be pinned in place") == 1
    assert_equal(pinned)


def test_readers_see_whole_versions_while_pushes_run(xp):
    size, changes = 3 * BLOCK + 5, 15
    with served(GPU, workers=2) as worker:
        v, mine = (variable(worker(index), "v", size, "zeros", "f4") for index in range(2))
        seen, problems, over = [], [], threading.Event()

        def read():
            out = np.empty(size, "f4")
            while not over.is_set():
                mine.read_value(out)
                if out.min() != out.max():
                    problems.append((out.min(), out.max()))
                seen.append(out[0])

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ones = np.ones(size, "f4")
        sgd = optimizers.SGD(1.0, momentum=1e-30)  # computed on the GPU
        for _ in range(changes):
            sgd.apply_gradients([(-ones, v)]).wait()
        over.set()
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        assert not problems
        assert seen == sorted(seen)
        np.testing.assert_array_equal(v.numpy(), np.full(size, changes))


def test_a_large_step_of_plain_sgd_is_made_by_the_server(xp):
    """Shared memory has only a copy of GPU variables, so the worker cannot make the step in it."""

    def train(worker):
        v = variable(worker(), "v", 6 * BLOCK, 0.5, "f4")
        for step in range(2):
            optimizers.SGD(0.5).apply_gradients([(gradient(step, v.shape, "f4"), v)]).wait()
            optimizers.Adam(0.1).apply_gradients([(gradient(step, v.shape, "f4"), v)]).wait()
            v.assign_add(gradient(step, v.shape, "f4"))
        return [v.numpy()]

    assert_equal(on_both(train, workers=1))


@pytest.mark.parametrize("ways", [(GPU, None), (None, GPU), (GPU, GPU)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_goes_on_from_a_checkpoint_wherever_it_was(xp, tmp_path, ways, dtype):
    size = BLOCK + 3

    def train(v, steps):
        for step in steps:
            optimizers.Adam(0.1).apply_gradients([(gradient(step, size, dtype), v)]).wait()
            optimizers.Adagrad(0.1).apply_gradients([(gradient(step, size, dtype), v)]).wait()
        return v.numpy()

    with served(ways[0], workers=1) as worker:
        strategy = worker()
        v = variable(strategy, "v", size, 0.5, dtype)
        train(v, range(3))
        path, saved = strategy.save(str(tmp_path)), v.numpy()
        goal = train(v, range(3, 6))
        optimizers.Ftrl(0.1).apply_gradients([(gradient(0, size, dtype), v)]).wait()
        strategy.restore(path)
        again = [v.numpy(), train(v, range(3, 6))]
    with served(ways[1], workers=1) as worker:
        strategy = worker()
        v = variable(strategy, "v", size, 7.0, dtype)
        train(v, range(1))
        strategy.restore(path)
        other = [v.numpy(), train(v, range(3, 6))]
    assert_equal([again, [saved, goal]])
    assert_equal([other, [saved, goal]])


def test_where_variables_live(xp):
    with served(GPU, workers=1) as worker:
        strategy = worker()
        floats, integers = (variable(strategy, d, 3, "zeros", d) for d in ("f4", "i8"))
        assert strategy.extended.parameter_devices == tuple(GPU)
        assert floats.device == GPU[0]
        assert integers.device == strategy.global_step.device == "/job:ps/task:0/device:CPU:0"
    with ParameterServerStrategy(parameter_devices=["/device:GPU:0"]) as strategy:
        assert strategy.extended.parameter_devices == ("/device:GPU:0",)
        with strategy.scope():
            v = get_variable("v", initializer=np.ones(3, "f4"))
        assert v.device == "/device:GPU:0"
        optimizers.Adam(1.0).apply_gradients([(np.ones(3, "f4"), v)]).wait()
        np.testing.assert_allclose(v.numpy(), np.zeros(3), atol=1e-5)
    with ParameterServerStrategy(parameter_devices=GPU) as strategy:
        assert strategy.extended.parameter_devices == ("/device:CPU:0",)  # not in a ps task
    with ParameterServerStrategy() as strategy, strategy.scope():
        assert get_variable("v", initializer=1.0).device == "/device:CPU:0"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["/job:ps/task:0/device:GPU:x"], "are not among"),
        (["/job:ps/task:0/device:CPU:1"], "are not among"),
        (["/device:GPU:0"], "are not among"),
        (["/job:ps/task:0", *GPU], "two devices of ps 0"),
    ],
)
def test_names_that_are_none(xp, devices, message):
    with served(devices, workers=1) as worker, pytest.raises(ValueError, match=message):
        worker()


def test_local_names_that_contradict(xp):
    with pytest.raises(ValueError, match="two devices of this process"):
        ParameterServerStrategy(parameter_devices=["/device:GPU:0", "/device:CPU:0"])


def test_a_gpu_that_a_server_does_not_have(xp):
    count = xp.cuda.runtime.getDeviceCount()
    name = f"/job:ps/task:0/device:GPU:{count}"
    message = f"ps 0 sees {count} GPUs, .* names its GPU {count}"
    with served([name], workers=1) as worker, pytest.raises(InvalidArgumentError, match=message):
        worker()


def test_a_server_without_cupy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    refused = pytest.raises(errors.FailedPreconditionError, match=r"ps 0 cannot have .* CuPy")
    with served(GPU, workers=1) as worker, refused:
        worker()


def test_workers_that_want_different_devices(xp):
    with ExitStack() as stack:
        cluster = Cluster(stack)
        cluster.worker(0, parameter_devices=GPU)
        with pytest.raises(InvalidArgumentError, match=r"worker 1 .* the host.* 0 on GPU 0"):
            cluster.worker(1)
        variable(cluster.worker(0), "v", 3, dtype="f4")
        third = cluster.worker(0, parameter_devices=GPU)
        message = r"'v' on GPU 0 of ps 0.* 0 created it on the host"
        with pytest.raises(InvalidArgumentError, match=message):
            variable(third, "v", 3, dtype="f4")


def test_a_variable_that_the_gpu_has_no_room_for(xp):
    with served(GPU, workers=1) as worker:
        strategy = worker()
        with pytest.raises(errors.ResourceExhaustedError, match=r"'v'.*GPU 0 has not enough"):
            variable(strategy, "v", 1 << 40, dtype="f4")
        assert variable(strategy, "v", 3, dtype="f4").numpy().tolist() == [0, 0, 0]


def test_slots_that_the_gpu_has_no_room_for(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("it would have to fill the GPU")
    with served(GPU, workers=1) as worker:
        v = variable(worker(), "v", 2 * BLOCK, 1.0, "f4")
        grad, adam = np.ones(2 * BLOCK, "f4"), optimizers.Adam(0.1)
        used = sum(xp.in_use.values())
        monkeypatch.setattr(xp, "limit", [used + v.numpy().nbytes])
        message = r"GPU 0 has not enough memory for .* slot 'Adam/v' beside variable 'v'"
        with pytest.raises(errors.ResourceExhaustedError, match=message):
            adam.apply_gradients([(grad, v)]).wait()
        np.testing.assert_array_equal(v.numpy(), np.ones(2 * BLOCK))
        monkeypatch.setattr(xp, "limit", [used + 3 * v.numpy().nbytes])
        optimizers.SGD(0.5).apply_gradients([(grad, v)]).wait()
        monkeypatch.undo()
        adam.apply_gradients([(grad, v)]).wait()
        np.testing.assert_allclose(v.numpy(), np.full(2 * BLOCK, 0.4), atol=1e-6)


def test_a_gpu_that_is_lost(xp, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("a true one would be lost for the other tests, too")
    with served(GPU, workers=1) as worker:
        strategy = worker()
        v = variable(strategy, "v", 2 * BLOCK, 1.0, "f4")
        counter = variable(strategy, "n", (), dtype="i8")
        grad = np.ones(2 * BLOCK, "f4")
        optimizers.Adam(0.1).apply_gradients([(grad, v)]).wait()
        with monkeypatch.context() as patch:
            patch.setattr(xp, "failure", [700])
            with pytest.raises(errors.InternalError, match=r"ps 0: .*variable 'v'.* GPU 0"):
                optimizers.Adam(0.1).apply_gradients([(grad, v)]).wait()
            counter.assign_add(1)
            assert int(counter) == 1
            assert v.numpy().shape == (2 * BLOCK,)  # the latest downloaded values can still be read


def test_all_memory_is_given_back(xp):
    if xp.__name__ == "cupy":
        pytest.skip("only the stand-in counts it")
    gc.collect()
    before = sum(xp.in_use.values())
    with served(GPU, workers=1) as worker:
        v = variable(worker(), "v", 2 * BLOCK, 1.0, "f4")
        optimizers.Adam(0.1).apply_gradients([(v.numpy(), v)]).wait()
        assert sum(xp.in_use.values()) >= before + 3 * v.numpy().nbytes
        assert xp.registered
    assert sum(xp.in_use.values()) == before
    assert not xp.registered
    with ParameterServerStrategy(parameter_devices=["/device:GPU:0"]) as strategy:
        v = variable(strategy, "v", 2 * BLOCK, 1.0, "f4")
        assert xp.registered
    assert sum(xp.in_use.values()) == before
    assert not xp.registered


def test_copies_in_further_segments(xp, monkeypatch):
    monkeypatch.setattr(memory, "_MIN_SEGMENT_BYTES", 5 << 20)

    def train(worker):
        strategy = worker()
        made = [variable(strategy, f"v{n}", BLOCK + n, 0.5, "f4") for n in range(3)]
        for step in range(2):
            grads = [gradient((step, n), v.shape, "f4") for n, v in enumerate(made)]
            optimizers.Adam(0.1).apply_gradients(list(zip(grads, made, strict=True))).wait()
        return [v.numpy() for v in made]

    assert_equal(on_both(train, workers=1))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3)], ids=str)
def test_shapes_of_little(xp, shape):
    def train(worker):
        v = variable(worker(), "v", shape, 0.5, "f2")
        for step in range(2):
            optimizers.Adam(0.1).apply_gradients([(gradient(step, shape, "f2"), v)]).wait()
        v.assign_add(np.ones(shape, "f2"))
        if shape:
            ids = np.arange(shape[0])
            rows = IndexedSlices(np.ones(shape, "f2"), ids)
            optimizers.Adam(0.1).apply_gradients([(rows, v)]).wait()
            v.scatter_add(ids, 1.0)
        return [v.numpy()]

    assert_equal(on_both(train, workers=1))


@pytest.mark.parametrize("nan", ["skip", "pass"])
def test_gradients_that_are_not_finite(xp, nan):
    def train(worker):
        strategy = worker(nan=nan)
        v, bad = variable(strategy, "v", 6, 0.5, "f4"), np.full(6, np.nan, "f4")
        bad[:3] = 1
        for grad in (np.ones(6, "f4"), bad, np.ones(6, "f4")):
            optimizers.Adam(0.1).apply_gradients([(grad, v)]).wait()
        return [v.numpy()]

    assert_equal(on_both(train, workers=1))


def test_bounded_staleness(xp):
    def train(worker):
        strategy = worker(mode="ssp", staleness=1)
        v = variable(strategy, "v", 2 * BLOCK, 0.5, "f4")
        for step in range(3):
            optimizers.Adam(0.1).apply_gradients([(gradient(step, v.shape, "f4"), v)]).wait()
        return [v.numpy(), int(strategy.global_step)]

    assert_equal(on_both(train, workers=1))
