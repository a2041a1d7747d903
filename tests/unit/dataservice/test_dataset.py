"""Datasets against what NumPy and plain Python say."""

import itertools
import pickle
from collections import namedtuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset
from mpidist.errors import InvalidArgumentError, UnimplementedError

small = st.integers(0, 30)


def values(dataset):
    return [int(element) for element in dataset]


# Sources


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-4, 4).filter(bool))
def test_range(start, stop, step):
    dataset = Dataset.range(start, stop, step)
    assert values(dataset) == list(range(start, stop, step))
    assert len(dataset) == dataset.cardinality() == len(range(start, stop, step))


def test_range_gives_numpy_scalars():
    assert {type(element) for element in Dataset.range(3).as_numpy_iterator()} == {np.int64}


@pytest.mark.parametrize("arguments", [(), (1, 2, 3, 4), (1.5,)])
def test_range_takes_what_python_takes(arguments):
    with pytest.raises(TypeError):
        Dataset.range(*arguments)


def test_slices_of_nested_arrays():
    x, y = np.arange(12).reshape(4, 3), np.arange(4.0)
    elements = list(Dataset.from_tensor_slices({"x": x, "rest": (y, [7, 8, 9, 10])}))
    assert len(elements) == 4
    np.testing.assert_array_equal(elements[2]["x"], [6, 7, 8])
    assert elements[2]["rest"] == (2.0, 9)
    assert isinstance(elements[2]["rest"], tuple)


def test_slices_cannot_be_changed_in_place():
    rows = np.zeros((2, 3))
    element = next(iter(Dataset.from_tensor_slices(rows)))
    with pytest.raises(ValueError, match="read-only"):
        element += 1
    rows += 1  # the caller's own array stays its own


@pytest.mark.parametrize(
    ("tensors", "message"),
    [((np.zeros(3), np.zeros(4)), "same number"), (5, "scalar"), ({}, "at least one")],
)
def test_slices_of_wrong_arrays(tensors, message):
    with pytest.raises(ValueError, match=message):
        Dataset.from_tensor_slices(tensors)


# Transformations


@given(small, small, st.integers(1, 7), st.booleans())
def test_batch(count, width, size, drop):
    rows = np.arange(count * width).reshape(count, width)
    dataset = Dataset.from_tensor_slices({"rows": rows, "n": np.arange(count)})
    batches = list(dataset.batch(size, drop_remainder=drop))
    kept = count - count % size if drop else count
    starts = range(0, kept, size)
    assert len(batches) == len(starts) == len(dataset.batch(size, drop))
    for start, batch in zip(starts, batches, strict=True):
        np.testing.assert_array_equal(batch["rows"], rows[start : min(start + size, kept)])
        np.testing.assert_array_equal(batch["n"], np.arange(start, min(start + size, kept)))
        assert batch["rows"].dtype == rows.dtype
        assert batch["rows"].flags.writeable


def test_batch_of_strings_of_different_lengths():
    batch = next(iter(Dataset.from_tensor_slices(np.array(["a", "long"])).map(str).batch(2)))
    assert batch.tolist() == ["a", "long"]


@pytest.mark.parametrize("group", [Dataset.batch, Dataset.padded_batch])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "dtype", [">i4", ">f8", ">c8", ">M8[s]", ">U3", [("a", ">i4"), ("b", ">f4")], "<i4", "S3", "?"]
)
def test_batches_have_the_order_of_bytes_that_numpy_gives_them(group, mixed, dtype):
    text = np.dtype(dtype).kind in "SU"
    one = np.full(2, "abc", dtype) if text else np.zeros(2, dtype)
    other = one.astype(one.dtype.newbyteorder()) if mixed else one
    source = Dataset.from_source([one, other, one])
    for dataset in (source, source.unbatch()):
        elements = list(dataset)
        for batch in group(dataset, 2):
            expected = np.stack(elements[: len(batch)])
            assert (batch.dtype.str, batch.shape) == (expected.dtype.str, expected.shape)
            assert batch.dtype == expected.dtype
        assert group(dataset, 2).element_spec.dtype == expected.dtype
        assert dataset.element_spec.dtype == elements[0].dtype
    slices = Dataset.from_tensor_slices(one)
    assert slices.element_spec.dtype == next(iter(slices)).dtype


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda i: np.zeros(int(i) + 1), "different dtypes or shapes in"),
        (
            lambda i: np.float32(i) if i else np.int64(i),
            "different dtypes or shapes in",
        ),
        (lambda i: {"a": i} if i else {"b": i}, "different structure"),
        (lambda i: object(), "cannot batch object"),
    ],
)
def test_batch_of_what_does_not_stack(function, message):
    with pytest.raises(InvalidArgumentError, match=message):
        list(Dataset.range(2).map(function).batch(2))


@given(small, st.integers(-1, 40))
def test_take_and_skip(count, n):
    expected = list(range(count))
    take, skip = Dataset.range(count).take(n), Dataset.range(count).skip(n)
    assert values(take) == (expected if n == -1 else expected[:n])
    assert values(skip) == ([] if n == -1 else expected[n:])
    assert (len(take), len(skip)) == (len(values(take)), len(values(skip)))


@given(small, st.integers(1, 5), st.data())
def test_shard(count, shards, data):
    index = data.draw(st.integers(0, shards - 1))
    dataset = Dataset.range(count).shard(shards, index)
    assert values(dataset) == list(range(count))[index::shards]
    assert len(dataset) == len(values(dataset))


@given(small, st.integers(0, 4))
def test_repeat(count, times):
    dataset = Dataset.range(count).repeat(times)
    assert values(dataset) == list(range(count)) * times
    assert len(dataset) == count * times


@pytest.mark.parametrize("count", [None, -1])
def test_repeat_for_ever(count):
    dataset = Dataset.range(3).repeat(count)
    assert [int(x) for x in itertools.islice(dataset, 7)] == [0, 1, 2, 0, 1, 2, 0]
    assert dataset.cardinality() == -1
    with pytest.raises(TypeError, match="infinite"):
        len(dataset)


def test_repeating_nothing_for_ever_ends():
    assert values(Dataset.range(0).repeat()) == []


def test_map_unpacks_tuples_only():
    Pair = namedtuple("Pair", "a b")
    pairs = Dataset.range(3).map(lambda i: (i, 10 * i))
    assert values(pairs.map(lambda a, b: a + b)) == [0, 11, 22]
    named = Dataset.range(3).map(lambda i: Pair(i, 10 * i))
    assert values(named.map(lambda pair: pair.a + pair.b)) == [0, 11, 22]
    assert values(Dataset.range(3).map(lambda i: {"a": i}).map(lambda d: d["a"])) == [0, 1, 2]


def test_map_results_become_numpy():
    element = next(iter(Dataset.range(1).map(lambda i: (1, 2.0, [1, 2], "text", {"k": True}))))
    assert [type(leaf) for leaf in element[:4]] == [np.int64, np.float64, np.ndarray, np.str_]
    assert type(element[4]["k"]) is np.bool_


def test_map_raising_stop_iteration_is_no_end():
    def stop(i):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Dataset.range(3).map(stop))


def test_as_numpy_iterator_converts_or_refuses():
    class Foreign:
        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2])

    foreign = Dataset.range(1).map(lambda i: Foreign())
    assert isinstance(next(iter(foreign)), Foreign)
    np.testing.assert_array_equal(next(foreign.as_numpy_iterator()), [1, 2])
    with pytest.raises(TypeError, match="cannot be converted to NumPy"):
        next(Dataset.range(1).map(lambda i: object()).as_numpy_iterator())


def test_apply():
    assert values(Dataset.range(4).apply(lambda dataset: dataset.take(2))) == [0, 1]
    with pytest.raises(TypeError, match="not a Dataset"):
        Dataset.range(4).apply(list)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.batch(0),
        lambda d: d.shuffle(0),
        lambda d: d.shuffle(3, seed=-1),
        lambda d: d.repeat(-2),
        lambda d: d.prefetch(0),
        lambda d: d.shard(3, 3),
        lambda d: d.shard(0, 0),
        lambda d: d.take(-2),
        lambda d: d.skip(-2),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ValueError, match=r"-?\d"):
        make(Dataset.range(3))


def test_a_finished_iterator_stays_finished():
    for dataset in (
        Dataset.range(3),
        Dataset.range(3).batch(2),
        Dataset.range(3).shuffle(2),
        Dataset.range(3).repeat(2),
        Dataset.range(3).prefetch(1),
        Dataset.range(3).take(1),
        Dataset.range(3).skip(1),
        Dataset.range(3).shard(2, 1),
    ):
        with iter(dataset) as iterator:
            list(iterator)
            assert list(iterator) == []


# Descriptions


def test_passes_are_independent():
    dataset = Dataset.range(4)
    first, second = iter(dataset), iter(dataset)
    assert [next(first), next(second), next(first)] == [0, 0, 1]


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_datasets_can_be_pickled(dumps):
    dataset = Dataset.from_tensor_slices(np.arange(10)).batch(3).repeat(2)
    copy = pickle.loads(dumps(dataset))
    assert repr(copy) == repr(dataset)
    assert [list(b) for b in copy] == [list(b) for b in dataset]


def test_functions_travel():
    offset = 5
    copy = pickle.loads(cloudpickle.dumps(Dataset.range(3).map(lambda i: i + offset)))
    assert values(copy) == [5, 6, 7]


def test_the_description_as_text():
    dataset = Dataset.range(10).map(str).shuffle(5, seed=1).batch(2).repeat()
    assert repr(dataset) == (
        "<Dataset range(0, 10, 1).map(str).shuffle(5, 1, True).batch(2, False).repeat(None)>"
    )
    one = Dataset.from_tensor_slices((np.zeros((3, 2)), np.zeros(3, int))).shuffle(3)
    assert one.node.summary() == Dataset(one.node).node.summary()
    assert "float64[3, 2]" in repr(one)


def test_a_dataset_is_true_even_if_empty():
    assert Dataset.range(0)


# Which source indices can be given out


@given(st.integers(0, 40), st.data())
def test_selections_of_the_source(count, data):
    dataset = Dataset.range(count).map(lambda i: i)
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.sampled_from(["take", "skip", "shard"]))
        n = data.draw(st.integers(0, 9))
        if kind == "shard":
            dataset = dataset.shard(n + 1, data.draw(st.integers(0, n)))
        else:
            dataset = getattr(dataset, kind)(n)
    assert dataset.node.source_length() == len(values(dataset))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.shuffle(3).take(2),
        lambda d: d.filter(bool).batch(2).skip(1),
        lambda d: d.filter(bool).repeat().shard(2, 0),
    ],
)
def test_selections_of_what_is_not_the_source(make):
    with pytest.raises(UnimplementedError, match="cannot be split"):
        make(Dataset.range(9)).node.source_length()


def test_what_follows_keeps_the_source():
    dataset = Dataset.range(9).skip(2).map(str).shuffle(3).batch(2).repeat(3).prefetch(1)
    assert dataset.node.source_length() == 7


@pytest.mark.parametrize("make", [lambda d: d, lambda d: d.batch(2), lambda d: d.prefetch(2)])
def test_an_interrupted_element_is_made_again(make):
    interrupts = iter([True])

    def interrupted(i):
        if i == 3 and next(interrupts, False):
            raise KeyboardInterrupt
        return i

    dataset = make(Dataset.range(8).map(interrupted))
    found = []
    with iter(dataset) as elements:
        while len(found) < 8:
            try:
                found += np.ravel(next(elements)).tolist()
            except KeyboardInterrupt:
                again = iter(dataset)
                again.set_state(elements.get_state())
                assert [n for e in again for n in np.ravel(e).tolist()] == list(
                    range(len(found), 8)
                )
                if make(Dataset.range(1)).node.indexed_length() is None:
                    break
    assert found == list(range(8))


def test_closing_ends_a_filter_that_finds_nothing_more(no_thread_is_left_behind):
    elements = iter(Dataset.counter().filter(lambda i: i < 3).prefetch(1))
    assert [int(next(elements)) for _ in range(3)] == [0, 1, 2]
    elements.close()


def test_sizes_beyond_all_elements():
    (batch,) = Dataset.range(20).batch(10**12)
    assert batch.tolist() == list(range(20))
    assert len(list(Dataset.range(20).prefetch(10**9))) == 20
