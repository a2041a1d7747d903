"""Datasets that feed replicas on GPUs: order, streams, errors, states, and threads."""

import collections
import contextlib
import gc
import itertools
import pickle
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.gpu_calls import device_bytes

from dataservice import Dataset
from mpidist import errors
from strategy import InputOptions, ParameterServerStrategy, get_replica_context
from strategy.replicas import input as feeding

Pair = collections.namedtuple("Pair", "image label")
LAYOUTS = {"one": (1, 1), "sharing": (1, 3), "two": (2, 2)}
ON_HOST = InputOptions(experimental_fetch_to_device=False)
AT_ONCE = InputOptions(experimental_per_replica_buffer_size=0)


def made(xp, layout):
    gpus, replicas = LAYOUTS[layout]
    if xp.cuda.runtime.getDeviceCount() < gpus:
        pytest.skip(f"there are not {gpus} GPUs")
    return ParameterServerStrategy(num_gpus_per_worker=gpus, num_replicas_per_worker=replicas)


@pytest.fixture(params=LAYOUTS)
def strategy(xp, request):
    with made(xp, request.param) as strategy:
        yield strategy


@pytest.fixture
def alone(xp):
    with made(xp, "one") as strategy:
        yield strategy


def batches(count=10, rows=6):
    return [np.full((rows, 2), number, "f4") + np.arange(rows)[:, None] for number in range(count)]


def numbers(xp, elements):
    """Return the first number of each element of the first replica."""
    return [int(xp.asnumpy(getattr(e, "values", (e,))[0]).flat[0]) for e in elements]


def threads():
    return [one for one in threading.enumerate() if one.name == "batches for GPUs"]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    if threads():
        gc.collect()
    wait_until(lambda: not threads())


DIVIDED = {
    "dataset": lambda strategy, data: strategy.experimental_distribute_dataset(data),
    "function": lambda strategy, data: strategy.distribute_datasets_from_function(lambda _: data),
    "at once": lambda strategy, data: strategy.experimental_distribute_dataset(data, AT_ONCE),
    "iterator": lambda strategy, data: strategy.experimental_distribute_dataset(iter(data)),
}
ONE_EACH = {
    "dataset": lambda strategy, data: strategy.make_dataset_iterator(data),
    "function": lambda strategy, data: strategy.make_input_fn_iterator(lambda _: data),
    "calls": lambda strategy, data: strategy.make_input_fn_iterator(lambda _: iter(data).__next__),
    "at once": lambda strategy, data: strategy.make_dataset_iterator(data, AT_ONCE),
}


@pytest.mark.parametrize("way", DIVIDED)
def test_each_replica_gets_its_part_on_its_gpu(xp, strategy, way):
    def step(part):
        assert isinstance(part, xp.ndarray)
        assert part.device.id == get_replica_context().gpu
        with xp.cuda.Device(part.device.id):
            return xp.asnumpy(part * 2)

    parts = [strategy.run(step, (e,)) for e in DIVIDED[way](strategy, batches())]
    for expected, given in zip(batches(), parts, strict=True):
        whole = np.concatenate(strategy.experimental_local_results(given))
        np.testing.assert_array_equal(whole, expected * 2)


@pytest.mark.parametrize("way", ONE_EACH)
def test_each_replica_gets_an_element_of_its_own(xp, strategy, way):
    count = strategy.num_replicas_in_sync
    found = []
    for element in ONE_EACH[way](strategy, batches(10)):
        parts = strategy.experimental_local_results(element)
        assert [part.device.id for part in parts] == list(strategy.gpus)
        found += [xp.asnumpy(part) for part in parts]
    np.testing.assert_array_equal(found, batches(10 // count * count))


def test_replicas_work_on_what_has_arrived(xp, strategy):
    """The program does not synchronize the streams between steps, and memory is reused."""
    replicas = strategy.num_replicas_in_sync
    totals = []
    for gpu in strategy.gpus:
        with xp.cuda.Device(gpu):
            totals.append(xp.zeros((2 * replicas // replicas, 500), "f4"))

    def step(part):
        total = totals[get_replica_context().replica_id_in_sync_group]
        total += part

    data = (np.full((2 * replicas, 500), number, "f4") for number in range(40))
    for element in strategy.experimental_distribute_dataset(data):
        strategy.run(step, (element,))
    for total, gpu in zip(totals, strategy.gpus, strict=True):
        with xp.cuda.Device(gpu):
            np.testing.assert_array_equal(xp.asnumpy(total), np.full((2, 500), sum(range(40))))


def test_memory_is_not_used_again_under_a_step_that_has_failed(xp):
    with made(xp, "sharing") as strategy:
        totals = [xp.zeros((2, 5003), "f4") for _ in range(3)]
        xp.cuda.Device(0).synchronize()

        def step(part):
            number = get_replica_context().replica_id_in_sync_group
            own = xp.cuda.Stream(non_blocking=True)
            own.wait_event(xp.cuda.get_current_stream().record())
            own.use()
            for _ in range(20):
                totals[number] += part
            if number == 0:
                raise ValueError("replica 0 fails")

        user = xp.cuda.Stream(non_blocking=True)
        data = (np.full((6, 5003), number, "f4") for number in range(30))
        with user:
            for element in strategy.experimental_distribute_dataset(data):
                with pytest.raises(ValueError, match="replica 0 fails") as raised:
                    strategy.run(step, (element,))
                raised.value.__traceback__ = None  # its frames reference the batch
                del element, raised
                user.synchronize()
        xp.cuda.Device(0).synchronize()
        expected = np.full((2, 5003), 20 * sum(range(30)))
        for total in totals:
            np.testing.assert_array_equal(xp.asnumpy(total), expected)


def test_structures_keep_their_form_and_what_is_no_number_stays(xp, strategy):
    replicas = strategy.num_replicas_in_sync
    rows = np.arange(2 * replicas)
    element = {
        "pair": Pair(rows * 1.5, [rows > 0, rows.astype("f2")]),
        "names": np.array([f"image {number}" for number in rows]),
        "objects": np.array([{"a": 1}] * len(rows), object),
        "small": rows.astype(ml_dtypes.float8_e5m2),
    }
    (found,) = strategy.experimental_distribute_dataset([element])

    def step(part):
        pair = part["pair"]
        assert type(pair) is Pair
        assert type(pair.label) is list
        assert all(isinstance(one, xp.ndarray) for one in (pair.image, *pair.label))
        assert all(type(part[name]) is np.ndarray for name in ("names", "objects", "small"))
        return [xp.asnumpy(pair.image), *map(xp.asnumpy, pair.label), part["names"], part["small"]]

    parts = [strategy.experimental_local_results(one) for one in strategy.run(step, (found,))]
    expected = [element["pair"].image, *element["pair"].label, element["names"], element["small"]]
    for given, whole in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(given), whole)


def test_numbers_become_arrays(xp, alone):
    elements = [3, 2.5, True, np.int16(4), "text", None, 2**70]
    found = list(alone.experimental_distribute_dataset(elements))
    assert all(isinstance(one, xp.ndarray) for one in found[:4])
    assert [xp.asnumpy(one).tolist() for one in found[:4]] == [3, 2.5, True, 4]
    assert found[3].dtype == np.int16
    assert found[4:] == elements[4:]


def test_arrays_of_other_packages(xp, alone):
    torch = pytest.importorskip("torch")
    (found,) = alone.experimental_distribute_dataset([torch.arange(3)])
    assert isinstance(found, xp.ndarray)
    assert xp.asnumpy(found).tolist() == [0, 1, 2]


def test_batches_that_do_not_divide_evenly(xp):
    with made(xp, "sharing") as strategy:
        data = [np.arange(7), np.arange(2)]
        found = [
            [xp.asnumpy(part).tolist() for part in element.values]
            for element in strategy.experimental_distribute_dataset(data)
        ]
        assert found == [[[0, 1, 2], [3, 4], [5, 6]], [[0], [1], []]]


def test_arrays_on_a_gpu_go_by_way_of_the_host(xp, strategy):
    def on_gpu():
        for number in range(5):
            with xp.cuda.Stream(non_blocking=True):
                array = xp.zeros((6, 2), "f4")
                for _ in range(number):
                    array += 1
                yield array

    data = strategy.experimental_distribute_dataset(on_gpu())
    assert numbers(xp, data) == [0, 1, 2, 3, 4]


def test_a_dataset_whose_elements_are_on_a_gpu_is_used_as_it_is(alone):
    dataset = Dataset.range(4).prefetch_to_device()
    assert dataset.on_device
    assert not Dataset.range(4).on_device
    assert alone.experimental_distribute_dataset(dataset) is dataset


def test_the_replica_has_its_device_for_what_it_takes(xp):
    with made(xp, "two") as strategy:
        strategy.gpus, strategy._replicas = (1,), 1  # like the second worker of a host
        for element in strategy.experimental_distribute_dataset(batches(3)):
            assert element.device.id == xp.cuda.Device().id == 1
    xp.cuda.Device(0).use()


def test_it_has_a_length_and_passes(xp, strategy):
    data = strategy.experimental_distribute_dataset(batches(7))
    assert len(data) == 7
    assert numbers(xp, data) == numbers(xp, data) == list(range(7))
    iterator = strategy.make_dataset_iterator(batches(7))
    first = numbers(xp, iterator)
    iterator.initialize()
    assert numbers(xp, iterator) == first
    assert first == list(range(0, 7, strategy.num_replicas_in_sync))[: len(first)]
    with pytest.raises(TypeError):
        len(strategy.experimental_distribute_dataset(batch for batch in batches(2)))


class Counted:
    """Batches of numbers, which note the requests beyond the wanted elements plus ``ahead``."""

    def __init__(self, count, ahead):
        self.asked = self.wanted = 0
        self.count, self.ahead, self.excess = count, ahead, []

    def __iter__(self):
        for number in range(self.count):
            self.asked += 1
            if self.asked > self.wanted + self.ahead:
                self.excess.append(number)
            yield np.full(6, number)

    def take(self, elements):
        self.wanted += 1
        return next(elements)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_are_made_ahead_up_to_a_bound(xp, strategy, ahead):
    data = Counted(20, ahead)
    options = InputOptions(experimental_per_replica_buffer_size=ahead)
    elements = iter(strategy.experimental_distribute_dataset(data, options))
    assert data.asked == 0
    assert not threads()
    for number in range(20):
        assert numbers(xp, [data.take(elements)]) == [number]
        wait_until(lambda: data.asked >= min(data.wanted + ahead, 20))
    assert data.excess == []


def test_two_are_made_ahead_if_nothing_is_said(strategy):
    data = Counted(9, 2)
    elements = iter(strategy.experimental_distribute_dataset(data))
    data.take(elements)
    wait_until(lambda: data.asked == 3)
    assert data.excess == []


def test_none_is_made_ahead_if_none_shall_be(strategy):
    data = Counted(9, 0)
    elements = iter(strategy.experimental_distribute_dataset(data, AT_ONCE))
    for _ in range(5):
        data.take(elements)
    assert not threads()
    assert data.excess == []


@pytest.mark.parametrize("options", [ON_HOST, types.SimpleNamespace(**vars(ON_HOST))])
def test_arrays_stay_on_the_host_if_they_shall(strategy, options):
    for elements in (
        strategy.experimental_distribute_dataset(batches(), options),
        strategy.distribute_datasets_from_function(lambda _: batches(), options),
        strategy.make_dataset_iterator(batches(), options),
        strategy.make_input_fn_iterator(lambda _: batches(), options=options),
    ):
        for part in strategy.experimental_local_results(next(iter(elements))):
            assert type(part) is np.ndarray


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (3, TypeError, "options must be InputOptions, not 3"),
        (InputOptions(experimental_replication_mode="per_replica"), ValueError, "'per_worker'"),
        (InputOptions(experimental_place_dataset_on_device=True), ValueError, "on the host"),
        (InputOptions(experimental_per_replica_buffer_size=-1), ValueError, "negative: -1"),
        (InputOptions(experimental_per_replica_buffer_size=1.5), TypeError, "whole number"),
    ],
)
def test_bad_options(xp, gpus, options, error, message):
    with (
        ParameterServerStrategy(num_gpus_per_worker=gpus) as strategy,
        pytest.raises(error, match=message),
    ):
        strategy.experimental_distribute_dataset(batches(), options)


def test_on_the_cpu_options_change_nothing():
    with ParameterServerStrategy(num_replicas_per_worker=2) as strategy:
        (element,) = strategy.experimental_distribute_dataset([np.arange(4)], InputOptions())
        assert [part.tolist() for part in element.values] == [[0, 1], [2, 3]]


def failing(at=2, count=5):
    def fail(number):
        if number == at:
            raise ValueError(f"no {at}")
        return np.full(6, number)

    return Dataset.range(count).map(fail)


@pytest.mark.parametrize("options", [None, AT_ONCE])
def test_an_error_comes_in_its_turn_and_the_pass_goes_on(xp, strategy, options):
    elements = iter(strategy.experimental_distribute_dataset(failing(), options))
    assert numbers(xp, itertools.islice(elements, 2)) == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        next(elements)
    assert numbers(xp, elements) == [3, 4]


def test_behind_an_error_the_dataset_is_asked_when_another_batch_is(xp, alone):
    asked = []

    class Failing:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(len(asked))
            if len(asked) in (2, 3):
                raise OSError(f"failure {len(asked)}")
            if len(asked) > 5:
                raise StopIteration
            return np.full(6, len(asked))

    elements = alone.experimental_distribute_dataset(Failing())
    assert numbers(xp, [next(elements)]) == [1]
    for number in (2, 3):
        with pytest.raises(OSError, match=f"failure {number}"):
            next(elements)
        assert len(asked) == number
    assert numbers(xp, elements) == [4, 5]
    assert list(elements) == []


def test_an_element_that_cannot_be_divided(xp):
    with made(xp, "sharing") as strategy:
        elements = iter(strategy.experimental_distribute_dataset([np.ones(6), 3, np.zeros(6)]))
        assert numbers(xp, [next(elements)]) == [1]
        with pytest.raises(ValueError, match="3 has none: batch the dataset first"):
            next(elements)
        assert numbers(xp, elements) == [0]


@pytest.mark.parametrize("options", [None, AT_ONCE])
@pytest.mark.parametrize("taken", [0, 1, 4, 10])
def test_a_state_goes_on_with_the_next_batch(xp, strategy, taken, options):
    def elements():
        dataset = Dataset.range(10).shuffle(5, seed=3).map(lambda n: np.full(6, n))
        return iter(strategy.experimental_distribute_dataset(dataset, options))

    expected, first = numbers(xp, elements()), elements()
    assert numbers(xp, itertools.islice(first, taken)) == expected[:taken]
    state = first.get_state()
    assert numbers(xp, first) == expected[taken:]
    second = elements()
    second.set_state(state)
    assert second.get_state() == state
    assert numbers(xp, second) == expected[taken:]


def test_a_state_is_of_what_has_been_used_where_more_lies_ready(xp, strategy):
    data = Dataset.range(10).map(lambda n: np.full(6, n))
    first = iter(strategy.experimental_distribute_dataset(data))
    next(first)
    wait_until(lambda: len(first._channel.waiting()) == 2)
    with made(xp, "sharing") as other:  # another number of replicas works, too
        second = iter(other.experimental_distribute_dataset(data))
        second.set_state(first.get_state())
        assert numbers(xp, second) == list(range(1, 10))


def test_a_state_of_an_iterator_whose_elements_are_one_for_each(xp, strategy):
    dataset = Dataset.range(12).map(lambda n: np.full(6, n))
    first = strategy.make_dataset_iterator(dataset)
    expected = numbers(xp, strategy.make_dataset_iterator(dataset))
    assert numbers(xp, [next(first)]) == expected[:1]
    second = strategy.make_dataset_iterator(dataset)
    second.set_state(first.get_state())
    assert numbers(xp, second) == expected[1:]


def test_a_state_on_the_cpu():
    with ParameterServerStrategy(num_replicas_per_worker=2) as strategy:
        first = strategy.make_dataset_iterator(Dataset.range(6))
        assert next(first).values == (0, 1)
        second = strategy.make_dataset_iterator(Dataset.range(6))
        second.set_state(first.get_state())
        assert next(second).values == (2, 3)
        for attempt in (lambda one: one.get_state(), lambda one: one.set_state(b"")):
            with pytest.raises(errors.UnimplementedError, match="list_iterator"):
                attempt(strategy.make_dataset_iterator([1, 2]))


def test_a_state_on_the_cpu_of_divided_batches(xp, alone):
    data = failing(1, 5)
    with ParameterServerStrategy(num_replicas_per_worker=2) as strategy:
        first = iter(strategy.experimental_distribute_dataset(data))
        assert [part.tolist() for part in next(first).values] == [[0, 0, 0], [0, 0, 0]]
        with pytest.raises(ValueError, match="no 1"):
            next(first)
        second = iter(alone.experimental_distribute_dataset(data))
        second.set_state(first.get_state())
        assert numbers(xp, first) == numbers(xp, second) == [2, 3, 4]


def test_a_state_without_the_error_that_lies_ready(xp, alone):
    asked = []

    def fail(number):
        asked.append(number)
        if number == 1:
            raise ValueError("no 1")
        return np.full(6, number)

    data = Dataset.range(4).map(fail)
    first = iter(alone.experimental_distribute_dataset(data))
    next(first)
    wait_until(lambda: 1 in asked)
    state = first.get_state()
    with pytest.raises(ValueError, match="no 1"):
        next(first)
    second = iter(alone.experimental_distribute_dataset(data))
    second.set_state(state)
    assert numbers(xp, first) == numbers(xp, second) == [2, 3]


def test_an_iterator_that_has_a_state_is_asked_only_for_what_is_used(xp, strategy):
    """The state of the caller's iterator counts only the elements that were used."""
    data = Dataset.range(10).map(lambda n: np.full(6, n))
    elements = iter(data)
    given = strategy.experimental_distribute_dataset(elements)
    assert numbers(xp, itertools.islice(given, 3)) == [0, 1, 2]
    again = iter(data)
    again.set_state(elements.get_state())
    assert [int(one[0]) for one in again] == list(range(3, 10))
    assert numbers(xp, given) == list(range(3, 10))


def test_states_that_there_are_not(alone):
    elements = iter(alone.experimental_distribute_dataset(batches()))
    with pytest.raises(errors.UnimplementedError, match="list_iterator cannot say where it is"):
        elements.get_state()
    with pytest.raises(errors.UnimplementedError, match="list_iterator cannot go on"):
        elements.set_state(b"")
    elements = iter(alone.experimental_distribute_dataset(Dataset.range(3)))
    for damaged in (b"", pickle.dumps(3), pickle.dumps((1, 2, 3))):
        with pytest.raises(errors.DataLossError):
            elements.set_state(damaged)
    next(elements)
    with pytest.raises(errors.FailedPreconditionError, match="before the first batch"):
        elements.set_state(pickle.dumps((feeding._FORMAT, [], None)))


ENDS = {
    "dropped": lambda elements: None,
    "closed": lambda elements: elements.close(),
    "left": lambda elements: elements.__exit__(None, None, None),
}


@pytest.mark.parametrize("end", ENDS)
def test_its_thread_ends_with_it_and_memory_comes_back(strategy, xp, end):
    gc.collect()
    before = [device_bytes(xp, gpu) for gpu in strategy.gpus]
    elements = iter(strategy.experimental_distribute_dataset(itertools.repeat(np.ones(600))))
    next(elements)
    (thread,) = threads()
    channel = elements._channel
    wait_until(lambda: len(channel.waiting()) == 2)
    assert [device_bytes(xp, gpu) for gpu in strategy.gpus] != before
    ENDS[end](elements)
    del elements
    thread.join(20)
    assert not thread.is_alive()
    assert [device_bytes(xp, gpu) for gpu in strategy.gpus] == before


class Closing:
    """An iterator that counts how often it is closed."""

    closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        return np.ones(3)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_a_closed_pass_is_at_its_end(alone, taken, own):
    """Closing a pass closes an iterator that the pass made, but not an iterator of the caller."""
    within = Closing()
    data = within if own else type("Data", (), {"__iter__": lambda _: within})()
    elements = iter(alone.experimental_distribute_dataset(data))
    for _ in range(taken):
        next(elements)
    elements.close()
    elements.close()
    assert list(elements) == []
    assert bool(within.closed) is not own


@pytest.mark.parametrize("options", [None, AT_ONCE])
def test_its_thread_ends_where_a_step_fails(strategy, options):
    def step(_):
        raise ValueError("a step fails")

    def train():
        data = itertools.repeat(np.ones(6))
        for element in strategy.experimental_distribute_dataset(data, options):
            strategy.run(step, (element,))

    with pytest.raises(ValueError, match="a step fails"):
        train()
    wait_until(lambda: not threads())


def test_its_thread_ends_where_an_error_is_kept(alone):
    kept = []
    elements = iter(alone.experimental_distribute_dataset(failing(0)))
    with contextlib.suppress(ValueError):
        try:
            next(elements)
        except ValueError as error:
            kept.append(error)
            error.__traceback__ = None
            raise
    kept[0].__traceback__ = None
    del elements
    wait_until(lambda: not threads())


def test_a_device_that_fails(xp, alone, monkeypatch):
    if xp.__name__ == "cupy":
        pytest.skip("copies cannot be made to fail there")

    def fail(*_):
        raise xp.CUDARuntimeError(1)

    elements = iter(alone.experimental_distribute_dataset(batches(3)))
    with monkeypatch.context() as patch:
        patch.setattr(xp.cuda.runtime, "memcpyAsync", fail)
        with pytest.raises(errors.DistBackendError, match="GPU 0"):
            next(elements)
    assert numbers(xp, elements) == [1, 2]


def test_without_a_thread_of_its_own_a_context_is_that_of_the_caller(alone):
    """For example, the dataset's functions run with the caller's NumPy error handling."""
    with np.errstate(divide="raise"):
        data = alone.experimental_distribute_dataset(np.ones(3) / n for n in (np.float64(0),))
        with pytest.raises(FloatingPointError):
            next(iter(data))
