"""Replicas on GPUs: their devices, and the transfers of values and gradients."""

import threading

import numpy as np
import pytest
from _cases.gpu_calls import counted_calls, lent_bytes
from _cases.held import held

from mpidist import ClusterSpec, errors
from mpidist.gpu import copy_stream
from strategy import (
    Bags,
    IndexedSlices,
    ParameterServerStrategy,
    get_replica_context,
    get_variable,
    optimizers,
    read_values,
    to_host_ahead,
)
from strategy.replicas.gpu import chosen_gpus


def made(xp, gpus, **options):
    if xp.cuda.runtime.getDeviceCount() < gpus:
        pytest.skip(f"there are not {gpus} GPUs")
    return ParameterServerStrategy(num_gpus_per_worker=gpus, **options)


def test_each_replica_has_a_device(xp):
    def step():
        context = get_replica_context()
        return context.gpu, xp.cuda.Device().id, context.devices

    with made(xp, 2) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.extended.worker_devices == ("/device:GPU:0", "/device:GPU:1")
        numbers, current, devices = strategy.run(step)
        assert numbers.values == current.values == (0, 1)
        assert devices[0].values == strategy.extended.worker_devices
    assert xp.cuda.Device().id == 0  # this thread has no replica


def test_one_replica_has_the_device_of_its_worker(xp):
    with made(xp, 2) as strategy:
        strategy.gpus, strategy._replicas = (1,), 1  # like the second worker of a host
        assert strategy.run(lambda: xp.cuda.Device().id) == 1
        assert xp.cuda.Device().id == 1
    xp.cuda.Device(0).use()


def test_several_replicas_share_a_device(xp):
    with made(xp, 1, num_replicas_per_worker=3) as strategy:
        assert strategy.gpus == (0, 0, 0)
        assert strategy.run(lambda: xp.cuda.Device().id).values == (0, 0, 0)


def test_on_the_cpu_there_is_none(xp):
    with ParameterServerStrategy(num_replicas_per_worker=2) as strategy:
        assert strategy.gpus == ()
        assert strategy.run(lambda: get_replica_context().gpu) is None
        assert strategy.extended.worker_devices == ("/device:CPU:0", "/device:CPU:1")


@pytest.mark.parametrize("gpus", [1, 2])
def test_values_are_on_the_gpu_of_the_replica(xp, gpus):
    with made(xp, gpus) as strategy, strategy.scope():
        weight = get_variable("w", (3, 4), initializer=np.arange(12.0).reshape(3, 4), dtype="f4")

        def step():
            value, rows = weight.read_value(), weight.gather([2, 0])
            assert isinstance(value, xp.ndarray)
            assert isinstance(weight.numpy(), np.ndarray)
            assert isinstance(np.asarray(weight), np.ndarray)
            assert isinstance(weight[1], xp.ndarray)
            return value.device.id, xp.asnumpy(value), xp.asnumpy(rows)

        parts = [strategy.experimental_local_results(part) for part in strategy.run(step)]
        assert parts[0] == tuple(range(gpus))
        for value, rows in zip(*parts[1:], strict=True):
            np.testing.assert_array_equal(value, np.arange(12).reshape(3, 4))
            np.testing.assert_array_equal(rows, np.arange(12).reshape(3, 4)[[2, 0]])
        assert isinstance(weight.read_value(), np.ndarray)


def test_variables_take_part_in_arithmetic_on_the_gpu(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (4, 2), initializer=np.arange(8.0).reshape(4, 2), dtype="f4")

        def step():
            ones = xp.asarray(np.ones((3, 4), "f4"))
            results = [ones @ weight, weight + 1, 2 * weight, xp.asarray(np.ones(2, "f4")) + weight]
            assert all(isinstance(one, xp.ndarray) for one in results)
            return [xp.asnumpy(one) for one in results]

        value = np.arange(8.0).reshape(4, 2)
        expected = [np.ones((3, 4)) @ value, value + 1, 2 * value, value + 1]
        for got, wanted in zip(strategy.run(step), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_small_pull_copies_once_waits_for_nothing_and_allocates_nothing(xp):
    if xp.__name__ == "cupy":
        pytest.skip("calls are counted with the stand-in")
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (1,), initializer="ones", dtype="f8")

        def step():
            for _ in range(3):  # the first pulls fill the pools
                weight.read_value()
                xp.cuda.Device(0).synchronize()
            with counted_calls(xp) as counts:
                value = weight.read_value()
            assert xp.asnumpy(value) == [1]
            return counts

        # The second event is recorded when the array of an earlier pull is freed.
        wanted = {"to host": 0, "to device": 1, "waits": 0, "allocations": 0}
        counts = strategy.run(step)
        assert counts.pop("events") <= 2
        assert counts == wanted


def test_a_value_arrives_behind_what_the_stream_has_to_do(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="ones", dtype="f4")
        with xp.cuda.Stream(non_blocking=True):
            out = xp.zeros(1000, "f4")
            for _ in range(5):
                out += 5
                assert weight.read_value(out) is out
                out += 1
            np.testing.assert_array_equal(xp.asnumpy(out), np.full(1000, 2))


def test_rows_by_numbers_that_are_on_the_gpu(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (5, 2), initializer=np.arange(10.0).reshape(5, 2), dtype="f4")
        ids = xp.asarray(np.array([4, 1, 1]))
        np.testing.assert_array_equal(weight.gather(ids), np.arange(10).reshape(5, 2)[[4, 1, 1]])
        weight.scatter_add(ids, xp.asarray(np.ones((3, 2), "f4")))
        expected = np.arange(10.0).reshape(5, 2)
        np.add.at(expected, [4, 1, 1], 1)
        np.testing.assert_array_equal(weight.numpy(), expected)
        weight.assign(xp.asarray(np.zeros((5, 2), "f4")))
        np.testing.assert_array_equal(weight.numpy(), np.zeros((5, 2)))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_gradients_on_gpus_are_those_on_the_cpu(xp, gpus, dtype):
    rng = np.random.default_rng(3)
    grads = [rng.normal(size=(50, 7)).astype(dtype) for _ in range(gpus)]

    def trained(place, **options):
        with ParameterServerStrategy(**options) as strategy, strategy.scope():
            weight = get_variable("w", (50, 7), initializer="ones", dtype=dtype)
            optimizer = optimizers.Adam(0.1)

            def step():
                number = get_replica_context().replica_id_in_sync_group
                optimizer.apply_gradients([(place(grads[number]), weight)]).wait()

            for _ in range(3):
                strategy.run(step)
            return weight.numpy()

    if xp.cuda.runtime.getDeviceCount() < gpus:
        pytest.skip("there are not as many GPUs")
    on_cpu = trained(np.asarray, num_replicas_per_worker=gpus)
    on_gpu = trained(xp.asarray, num_gpus_per_worker=gpus)
    np.testing.assert_array_equal(on_gpu, on_cpu)


@pytest.mark.parametrize("gpus", [1, 2])
def test_gradients_of_replicas_come_to_the_host_as_one(xp, gpus, monkeypatch):
    downloads = []
    copy_async = xp.cuda.runtime.memcpyAsync

    def noted(target, source, nbytes, kind, stream):
        downloads.extend([nbytes] * (kind == xp.cuda.runtime.memcpyDeviceToHost))
        copy_async(target, source, nbytes, kind, stream)

    with made(xp, gpus, num_replicas_per_worker=3) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="zeros", dtype="f4")

        def step():
            number = get_replica_context().replica_id_in_sync_group
            grad = xp.asarray(np.full(1000, number + 1, "f4"))
            optimizers.SGD(1.0).apply_gradients([(grad, weight)]).wait()

        with monkeypatch.context() as patch:
            if xp.__name__ != "cupy":
                patch.setattr(xp.cuda.runtime, "memcpyAsync", noted)
            strategy.run(step)
        np.testing.assert_array_equal(weight.numpy(), np.full(1000, -2))
        assert xp.__name__ == "cupy" or downloads == [4000]


class OfAnotherPackage:
    """An array with a stream known only to the computing thread, like torch's. Logs readers."""

    def __init__(self, array):
        self._facts = array.__cuda_array_interface__
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.looked = set()

    @property
    def __cuda_array_interface__(self):
        self.looked.add(threading.get_ident())
        return self._facts


def test_arrays_of_other_packages_are_read_by_the_thread_that_has_computed_them(xp):
    with made(xp, 1, num_replicas_per_worker=2) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="zeros", dtype="f4")

        def step():
            number = get_replica_context().replica_id_in_sync_group
            grad = OfAnotherPackage(xp.asarray(np.full(1000, number, "f4")))
            total = get_replica_context().all_reduce("sum", grad)
            optimizers.SGD(1.0).apply_gradients([(grad, weight)]).wait()
            assert grad.looked == {threading.get_ident()}
            return float(xp.asnumpy(total)[0])

        assert strategy.run(step).values == (1, 1)
        np.testing.assert_array_equal(weight.numpy(), np.full(1000, -0.5))


ODD = {
    "strided": lambda xp, number: xp.asarray(np.full(2000, number, "f4"))[::2],
    "integers": lambda xp, number: xp.asarray(np.full(1000, number, "i4")),
    "of two dtypes": lambda xp, number: xp.asarray(np.full(1000, number, ("f4", "f8")[number])),
    "one on the host": lambda xp, number: (xp.asarray, np.asarray)[number](np.full(1000, number)),
    "halves": lambda xp, number: xp.asarray(np.full(1000, number, "f2")),
    "complex": lambda xp, number: xp.asarray(np.full(1000, number, "c8")),
    "one element": lambda xp, number: xp.asarray(np.full((), number, "f4")),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_is_reduced_on_a_gpu_is_as_on_the_host(xp, kind, op):
    with made(xp, 2) as strategy:

        def step(place):
            number = get_replica_context().replica_id_in_sync_group
            with xp.cuda.Stream(non_blocking=True):
                value = ODD[kind](xp, number)
            return xp.asnumpy(value) if place == "host" else value

        there, here = (
            strategy.reduce(op, strategy.run(step, (place,))) for place in ("gpu", "host")
        )
        np.testing.assert_array_equal(there, here)
        assert np.asarray(there).dtype == np.asarray(here).dtype


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_gradient_is_taken_behind_the_stream_that_computes_it(xp, gpus):
    with made(xp, gpus) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="zeros", dtype="f4")
        optimizer = optimizers.SGD(1.0)

        def step():
            with xp.cuda.Stream(non_blocking=True):
                grad = xp.zeros(1000, "f4")
                for _ in range(20):
                    grad += 1
                work = optimizer.apply_gradients([(grad, weight)])
                grad += 1000  # the array may be reused at once
                work.wait()

        strategy.run(step)
        np.testing.assert_array_equal(weight.numpy(), np.full(1000, -20))


def test_values_of_several_replicas_are_assigned_behind_their_streams(xp):
    with made(xp, 2) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="zeros", dtype="f4", aggregation="mean")

        def step():
            with xp.cuda.Stream(non_blocking=True):
                value = xp.zeros(1000, "f4")
                for _ in range(20):
                    value += 1
                weight.assign(value)
                weight.assign_add(value)

        strategy.run(step)
        np.testing.assert_array_equal(weight.numpy(), np.full(1000, 40))


PULLS = {
    "read_value": lambda variable: variable.read_value(),
    "read_values": lambda variable: read_values([variable, variable])[1],
    "gather": lambda variable: variable.gather(np.arange(1000)),
}


@pytest.mark.parametrize("pull", PULLS)
def test_pulls_pass_by_what_the_stream_has_to_do(xp, pull):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="ones", dtype="f4")

        def step():
            with xp.cuda.Stream(non_blocking=True) as stream:
                # These pulls allocate the memory.
                values = [PULLS[pull](weight) for _ in range(3)]
                stream.synchronize()
                del values
                weight.assign_add(1)
                with held(stream):
                    value = PULLS[pull](weight)
                    copy_stream(0, "up").synchronize()
                value += 1
                return xp.asnumpy(value)

        np.testing.assert_array_equal(strategy.run(step), np.full(1000, 3))


def test_gradients_leave_ahead_of_what_is_queued_before_the_push(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (1000,), initializer="zeros", dtype="f4")
        table = get_variable("t", (4, 2), initializer="zeros", dtype="f4")
        optimizer = optimizers.SGD(1.0)

        def step():
            with xp.cuda.Stream(non_blocking=True) as stream:
                grad, rows = xp.zeros(1000, "f4"), xp.zeros((2, 2), "f4")
                for _ in range(20):
                    grad += 1
                    rows += 1
                slices = IndexedSlices(rows, xp.asarray(np.array([1, 3])))
                ahead = to_host_ahead([(grad, weight), (slices, table)])
                del grad, rows, slices
                with held(stream):
                    optimizer.apply_gradients(ahead).wait()

        strategy.run(step)
        np.testing.assert_array_equal(weight.numpy(), np.full(1000, -20))
        np.testing.assert_array_equal(table.numpy()[:, 0], [0, -20, 0, -20])


@pytest.mark.parametrize("gpus", [1, 2])
def test_steps_whose_gradients_leave_while_the_next_is_computed(xp, gpus):
    """Each step uses values without the push of the step before."""
    count, at_first = 6, np.linspace(-1, 1, 50)
    with made(xp, gpus) as strategy, strategy.scope():
        weight = get_variable("w", (50,), initializer=at_first, dtype="f8")
        optimizer = optimizers.SGD(0.25)

        def steps():
            number = get_replica_context().replica_id_in_sync_group
            with xp.cuda.Stream(non_blocking=True):
                (value,), leaving = read_values([weight]), None
                for _ in range(count):
                    grad = value * value + number
                    if leaving is not None:
                        optimizer.apply_gradients([(leaving, weight)])
                    leaving = to_host_ahead(grad)
                    (value,) = read_values([weight])
                optimizer.apply_gradients([(leaving, weight)]).wait()

        strategy.run(steps)
        known, pushes = at_first, []
        for _ in range(count):
            pushes.append(0.25 * np.mean([known * known + n for n in range(gpus)], axis=0))
            known = at_first - sum(pushes[:-1])
        np.testing.assert_allclose(weight.numpy(), at_first - sum(pushes), rtol=1e-12)


def test_what_does_not_lie_on_a_gpu_stays_as_it_is():
    given = {"host": np.ones(3), "none": None, "number": 2.0}
    found = to_host_ahead(given)
    assert all(found[name] is value for name, value in given.items())


def test_gradients_that_left_and_do_not_fit(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (3,), initializer="zeros", dtype="f4")
        for grad, error, message in (
            (xp.zeros(4, "f4"), ValueError, "has shape"),
            (xp.zeros((), "f4"), ValueError, "is a number"),
            (xp.zeros(3, "D"), TypeError, "complex128"),
            (xp.asarray(np.array([1, np.inf, 2], "f4")), errors.InvalidArgumentError, "'w'"),
        ):
            for given in (grad, to_host_ahead(grad)):
                with pytest.raises(error, match=message):
                    optimizers.SGD(1.0).apply_gradients([(given, weight)])
        np.testing.assert_array_equal(weight.numpy(), np.zeros(3))


def test_what_left_is_a_value_like_any_other(xp):
    with made(xp, 2) as strategy, strategy.scope():
        weight = get_variable("w", (3,), initializer="zeros", dtype="f4", aggregation="mean")

        def step():
            context = get_replica_context()
            value = to_host_ahead(xp.full(3, context.replica_id_in_sync_group + 1.0, "f4"))
            weight.assign(value)
            return context.all_reduce("sum", value), value

        total, values = strategy.run(step)
        np.testing.assert_array_equal(weight.numpy(), np.full(3, 1.5))
        np.testing.assert_array_equal(strategy.reduce("mean", values), np.full(3, 1.5))
        for one in total.values:
            np.testing.assert_array_equal(one, np.full(3, 3))


@pytest.mark.parametrize("gpus", [1, 2])
def test_rows_as_gradients(xp, gpus):
    with made(xp, gpus) as strategy, strategy.scope():
        weight = get_variable("w", (4, 2), initializer="zeros", dtype="f4")

        def step():
            rows = IndexedSlices(xp.asarray(np.ones((2, 2), "f4")), xp.asarray(np.array([1, 3])))
            optimizers.SGD(1.0).apply_gradients([(rows, weight)]).wait()

        strategy.run(step)
        np.testing.assert_array_equal(weight.numpy()[:, 0], [0, -1, 0, -1])


def test_bags(xp):
    with made(xp, 1) as strategy, strategy.scope():
        table = get_variable("t", (4, 2), initializer=np.arange(8.0).reshape(4, 2), dtype="f4")

        def step():
            ids, offsets = (xp.asarray(np.array(numbers)) for numbers in ([0, 3, 1], [0, 2]))
            bags = Bags(ids, combiner="sum", offsets=offsets)
            combined = bags.lookup(table)
            slices = bags.gradient(xp.asarray(np.ones((2, 2), "f4")))
            optimizers.SGD(1.0).apply_gradients([(slices, table)]).wait()
            assert isinstance(combined, xp.ndarray)
            lists = [xp.asarray(np.array([0, 3])), xp.asarray(np.array([1]))]
            weights = [xp.asarray(np.ones(2)), xp.asarray(np.ones(1))]
            again = Bags(lists, weights, combiner="sum").lookup(table)
            return xp.asnumpy(combined), again.shape

        combined, shape = strategy.run(step)
        np.testing.assert_array_equal(combined, [[6, 8], [2, 3]])
        assert shape == (2, 2)
        np.testing.assert_array_equal(table.numpy()[:, 0], [-1, 1, 4, 5])


def test_values_of_all_replicas_come_back_to_each(xp):
    with made(xp, 2) as strategy:

        def step():
            context = get_replica_context()
            number = context.replica_id_in_sync_group
            with xp.cuda.Stream(non_blocking=True):
                own = xp.zeros(3, "f4")
                own += number + 1
                total = context.all_reduce("sum", {"gpu": own, "cpu": np.ones(2)})
                joined = context.all_gather(own, 0)
                assert isinstance(total["gpu"], xp.ndarray)
                assert isinstance(total["cpu"], np.ndarray)
                assert total["gpu"].device.id == joined.device.id == number
                return xp.asnumpy(total["gpu"]), xp.asnumpy(joined)

        totals, joined = strategy.run(step)
        for total in totals.values:
            np.testing.assert_array_equal(total, np.full(3, 3))
        for one in joined.values:
            np.testing.assert_array_equal(one, [1, 1, 1, 2, 2, 2])


def test_each_replica_may_name_its_values_in_another_order(xp):
    with made(xp, 2) as strategy:

        def step():
            context = get_replica_context()
            values = {"gpu": xp.ones(2, "f4"), "cpu": np.ones(2, "f4")}
            if context.replica_id_in_sync_group:
                values = dict(reversed(values.items()))
            total = context.all_reduce("sum", values)
            return isinstance(total["gpu"], xp.ndarray), isinstance(total["cpu"], np.ndarray)

        for one in strategy.run(step):
            assert one.values == (True, True)


def test_arrays_on_a_gpu_come_back_there_without_replicas_there(xp):
    with ParameterServerStrategy(num_replicas_per_worker=2) as strategy:
        total = strategy.run(lambda: get_replica_context().all_reduce("sum", xp.ones(3, "f4")))
        for one in total.values:
            assert isinstance(one, xp.ndarray)
            np.testing.assert_array_equal(xp.asnumpy(one), np.full(3, 2))


def test_what_replicas_hand_on_is_behind_their_streams(xp):
    with made(xp, 2) as strategy:

        def queued():
            value = xp.zeros(1000, "f4")
            for _ in range(20):
                value += 1
            return value

        def merge():
            with xp.cuda.Stream(non_blocking=True):
                total = get_replica_context().merge_call(
                    lambda strategy, x: strategy.reduce("sum", x), (queued(),)
                )
            return float(total.max()), float(total.min())

        assert strategy.run(merge)[0].values == (40, 40)

        def leave():
            xp.cuda.Stream(non_blocking=True).use()
            return queued()

        result = strategy.run(leave)
        np.testing.assert_array_equal(strategy.reduce("sum", result), np.full(1000, 40))


@pytest.mark.parametrize("gpus", [1, 2])
def test_replicas_begin_behind_the_stream_of_the_caller(xp, gpus):
    with made(xp, gpus, num_replicas_per_worker=2) as strategy:

        def step(value):
            return float(xp.asnumpy(value).min())

        def queued():
            value = xp.zeros(1000, "f4")
            for _ in range(20):
                value += 1
            return value

        before = xp.cuda.get_current_stream()
        xp.cuda.Stream(non_blocking=True).use()
        try:
            assert strategy.run(step, (queued(),)).values == (20, 20)
        finally:
            before.use()


def test_what_is_made_in_a_merge_call_is_behind_its_stream(xp):
    with made(xp, 1, num_replicas_per_worker=2) as strategy:
        merging, read = [], threading.Event()

        def queued(_, values):
            merging.append(threading.get_ident())
            xp.cuda.Stream(non_blocking=True).use()
            value = xp.zeros(1000, "f4")
            for _ in range(20):
                value += 1
            return value

        def step():
            with xp.cuda.Stream(non_blocking=True):
                value = get_replica_context().merge_call(queued, (0,))
                if merging == [threading.get_ident()]:
                    assert read.wait(20)  # the other replica reads first
                least = float(xp.asnumpy(value).min())
                read.set()
                return least

        assert strategy.run(step).values == (20.0, 20.0)


def test_results_that_are_kept_keep_no_pinned_memory(xp):
    with made(xp, 1) as strategy:
        before = lent_bytes()
        kept = [strategy.reduce("mean", strategy.run(lambda: xp.ones(100))) for _ in range(50)]
        assert len(kept) == 50
        assert lent_bytes() == before


def test_sums_are_numbers(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (3,), initializer="zeros", dtype="f4")
        one = xp.ones(5, "f4").sum()
        weight.assign_add(one)
        weight.scatter_add([0], one)
        np.testing.assert_array_equal(weight.numpy(), [10, 5, 5])


def test_results_are_reduced_on_the_host(xp):
    with made(xp, 2) as strategy:

        def step():
            return xp.asarray(np.full(3, get_replica_context().replica_id_in_sync_group, "f4"))

        mean = strategy.reduce("mean", strategy.run(step))
        assert type(mean) is np.ndarray
        np.testing.assert_array_equal(mean, np.full(3, 0.5))


def test_gradients_that_are_not_finite(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (3,), initializer="zeros", dtype="f4")
        grad = xp.asarray(np.array([1, np.nan, 2], "f4"))
        with pytest.raises(errors.InvalidArgumentError, match="'w'"):
            optimizers.SGD(1.0).apply_gradients([(grad, weight)])
        np.testing.assert_array_equal(weight.numpy(), np.zeros(3))


def test_initial_values_from_a_gpu(xp):
    values = np.arange(6.0).reshape(2, 3)
    with made(xp, 1) as strategy, strategy.scope():
        given = get_variable("given", initializer=xp.asarray(values))
        called = get_variable("called", (2, 3), initializer=lambda *_: xp.asarray(values))
        np.testing.assert_array_equal(given.numpy(), values)
        np.testing.assert_array_equal(called.numpy(), values)


def test_what_does_not_fit(xp):
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (3,), dtype="f4")
        with pytest.raises(ValueError, match=r"out must be .* float32\[3\]"):
            weight.read_value(xp.zeros(4, "f4"))
        with pytest.raises(ValueError, match=r"float64\[3\]"):
            weight.read_value(xp.zeros(3, "f8"))
        with pytest.raises(ValueError, match="shape"):
            optimizers.SGD(1.0).apply_gradients([(xp.zeros(4, "f4"), weight)])
        strategy.run(lambda: weight.read_value())


def test_a_dtype_that_cupy_does_not_have(xp):
    if xp.__name__ == "cupy":
        pytest.skip("it may have it")
    with made(xp, 1) as strategy, strategy.scope():
        weight = get_variable("w", (3,), dtype="bfloat16")
        with pytest.raises(TypeError, match="variable 'w' of bfloat16 cannot lie on a GPU"):
            strategy.run(weight.read_value)
        assert strategy.run(weight.numpy).dtype == weight.dtype


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_gpus_per_worker": 99}, ValueError, "sees .* GPUs, and num_gpus_per_worker is 99"),
        ({"num_gpus_per_worker": -1}, ValueError, "negative"),
        ({"num_gpus_per_worker": 1.5}, TypeError, "num_gpus_per_worker"),
        ({"num_gpus_per_worker": 2, "num_replicas_per_worker": 1}, ValueError, "leaves GPUs idle"),
    ],
)
def test_bad_arguments(xp, options, error, message):
    with pytest.raises(error, match=message):
        ParameterServerStrategy(**options)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(errors.FailedPreconditionError, match="extras cuda13 and cuda12"):
        ParameterServerStrategy(num_gpus_per_worker=1)


def test_workers_of_a_host_take_its_gpus_in_turn(xp):
    if xp.cuda.runtime.getDeviceCount() != 2:
        pytest.skip("it is about two GPUs")
    spec = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:1", "a:3", "a:4", "b:2"]})
    workers = [("worker", number) for number in range(5)]
    one_each = [chosen_gpus(1, 1, spec, workers, me) for me in workers]
    assert one_each == [(0,), (0,), (1,), (0,), (1,)]
    assert [chosen_gpus(2, 2, spec, workers, me) for me in workers] == [(0, 1)] * 5
    assert chosen_gpus(2, 4, spec, workers, workers[0]) == (0, 1, 0, 1)
