"""Elements on a GPU ahead of their use."""

import collections
import itertools

import numpy as np
import pytest
from _cases.gpu_calls import device_bytes

from dataservice import Dataset, distribute
from mpidist import errors

Pair = collections.namedtuple("Pair", "image label")


def images(count=10, size=100):
    return Dataset.range(count).map(lambda n: np.full(size, n, "f4"))


def numbers(xp, elements):
    return [float(xp.asnumpy(element)[0]) for element in elements]


def test_elements_are_arrays_on_the_device_in_order(xp):
    elements = list(images().prefetch_to_device())
    assert all(isinstance(element, xp.ndarray) for element in elements)
    assert numbers(xp, elements) == list(range(10))


def test_the_stream_of_the_step_waits_for_the_copy(xp):
    with xp.cuda.Stream(non_blocking=True):
        total = xp.zeros(100, "f4")
        for element in images(30).prefetch_to_device("GPU:0", 3):
            total += element
        np.testing.assert_array_equal(xp.asnumpy(total), np.full(100, sum(range(30))))


def test_structures_keep_their_form_and_what_is_no_number_stays(xp):
    dataset = Dataset.range(3).map(
        lambda n: {"pair": Pair(np.full(2, n), n), "name": f"image {n}", "flag": n > 1}
    )
    for number, element in enumerate(dataset.prefetch_to_device()):
        assert isinstance(element["pair"], Pair)
        assert xp.asnumpy(element["pair"].image).tolist() == [number, number]
        assert element["pair"].label.shape == ()
        assert int(xp.asnumpy(element["pair"].label)) == number
        assert str(element["name"]) == f"image {number}"
        assert bool(xp.asnumpy(element["flag"])) == (number > 1)


def test_it_keeps_length_and_spec(xp):
    dataset = images().batch(4).prefetch_to_device()
    assert len(dataset) == 3
    assert dataset.element_spec == images().batch(4).element_spec


@pytest.mark.parametrize("taken", [0, 1, 4, 10])
def test_a_state_goes_on_with_the_next_element(xp, taken):
    def dataset():
        return images().shuffle(5, seed=3).prefetch_to_device(0, 3)

    first = iter(dataset())
    expected = numbers(xp, dataset())
    assert numbers(xp, itertools.islice(first, taken)) == expected[:taken]
    state = first.get_state()
    first.close()
    second = iter(dataset())
    second.set_state(state)
    assert numbers(xp, second) == expected[taken:]


def test_an_error_comes_in_its_turn_and_the_pass_goes_on(xp):
    def fail(n):
        if n == 2:
            raise ValueError("no 2")
        return np.full(3, n)

    elements = iter(Dataset.range(4).map(fail).prefetch_to_device())
    assert numbers(xp, itertools.islice(elements, 2)) == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        next(elements)
    assert numbers(xp, elements) == [3]


def test_memory_on_the_device_is_bounded(xp):
    pool = xp.get_default_memory_pool()
    before = pool.used_bytes()
    for element in images(200, 10_000).prefetch_to_device(0, 2):
        xp.asnumpy(element)
        assert pool.used_bytes() <= before + 8 * 48 * 1024


def test_a_pass_that_is_given_up_gives_its_memory_back(xp):
    before = device_bytes(xp)
    with iter(images(1000).prefetch_to_device()) as elements:
        next(elements)
    assert device_bytes(xp) == before


@pytest.mark.parametrize(
    ("device", "error"),
    [("CPU:0", ValueError), ("GPU:x", ValueError), (-1, ValueError), (None, TypeError)],
)
def test_what_is_no_gpu(device, error):
    with pytest.raises(error):
        images().prefetch_to_device(device)


def test_names_of_gpus(xp):
    for name in (
        "GPU:0",
        "gpu:0",
        "/device:GPU:0",
        "/job:worker/task:1/device:GPU:0",
        0,
        np.int64(0),
    ):
        assert numbers(xp, images(2).prefetch_to_device(name)) == [0, 1]


def test_a_gpu_that_there_is_not(xp):
    with pytest.raises(ValueError, match="there is no GPU 99 here, only"):
        list(images().prefetch_to_device(99))
    with pytest.raises(ValueError, match="buffer_size"):
        images().prefetch_to_device(0, 0)


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(errors.FailedPreconditionError, match="extras cuda13 and cuda12"):
        list(images().prefetch_to_device())


def test_sources_on_a_gpu(xp):
    rows = np.arange(6.0).reshape(3, 2)
    for dataset in (
        Dataset.from_tensor_slices({"x": xp.asarray(rows)}).map(lambda element: element["x"]),
        Dataset.from_generator(lambda: (xp.asarray(row) for row in rows)),
    ):
        np.testing.assert_array_equal(np.stack(list(dataset)), rows)


def test_threads_behind_it_are_refused(xp):
    on_gpu = images().prefetch_to_device()
    for threaded in (
        lambda: on_gpu.prefetch(2),
        lambda: on_gpu.repeat(2).prefetch(2),
        lambda: Dataset.zip(on_gpu, images()).prefetch(2),
        lambda: on_gpu.map(lambda x: x, num_parallel_calls=2),
    ):
        with pytest.raises(ValueError, match="call prefetch_to_device last"):
            threaded()
    assert len(list(on_gpu.map(lambda x: x + 1).repeat(2))) == 20


def test_batches_are_made_before(xp):
    with pytest.raises(errors.InvalidArgumentError, match="call prefetch_to_device last"):
        list(images().prefetch_to_device().batch(2))


def test_before_distribute_it_is_refused(xp):
    with pytest.raises(errors.UnimplementedError, match="GPU of the trainer"):
        images().prefetch_to_device().node.source_length()


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_what_a_service_delivers(make_service, xp, mode):
    service = make_service(2)
    dataset = images(40).batch(4).apply(distribute(mode, service.target)).prefetch_to_device()
    got = collections.Counter(
        float(one) for batch in dataset for one in xp.asnumpy(batch)[:, 0].tolist()
    )
    assert got == dict.fromkeys(range(40), 2 if mode == "parallel_epochs" else 1)


def test_a_state_of_what_a_service_delivers(make_service, xp):
    def dataset():
        service = make_service(2)
        apply = distribute("distributed_epoch", service.target, deterministic=True, num_shards=4)
        return images(40).apply(apply).prefetch_to_device()

    with iter(dataset()) as elements:
        first = numbers(xp, itertools.islice(elements, 13))
        state = elements.get_state()
        rest = numbers(xp, elements)
    assert sorted(first + rest) == list(range(40))
    with iter(dataset()) as elements:
        elements.set_state(state)
        assert numbers(xp, elements) == rest


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_a_worker_brings_nothing_to_the_gpu_of_the_trainer(make_service, xp, mode):
    service = make_service(1)
    with pytest.raises(errors.UnimplementedError, match="GPU of the trainer"):
        list(images().prefetch_to_device().apply(distribute(mode, service.target)))
