"""``Dataset.rebatch`` against ``unbatch().batch()``."""

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, numbers, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError

lengths = st.lists(st.integers(0, 5), max_size=8)


def batches(counts):
    """Elements of some rows each, which are all numbered."""
    stops = np.cumsum(counts, dtype=np.int64)
    elements = [
        {"x": np.arange(stop - count, stop), "y": (np.full((count, 2), stop),)}
        for count, stop in zip(counts, stops, strict=True)
    ]
    return Dataset.from_source(elements)


@settings(deadline=None)
@given(lengths, st.integers(1, 7), st.booleans(), st.integers(0, 20))
def test_rebatch(counts, size, drop, taken):
    below = batches(counts)
    dataset = below.rebatch(size, drop)
    expected = plain(list(below.unbatch().batch(size, drop)))
    assert goes_on_from(dataset, taken) == expected
    assert goes_on_from(dataset.repeat(2), taken) == expected * 2
    assert dataset.cardinality() == (-2 if counts else 0)


def test_what_rebatch_says_of_itself():
    below = Dataset.from_tensor_slices({"x": np.zeros((6, 2), ">f4")}).batch(2)
    assert below.rebatch(3).element_spec == {"x": ArraySpec((None, 2), np.float32)}
    assert below.rebatch(3, drop_remainder=True).element_spec["x"].shape == (3, 2)
    assert below.repeat().rebatch(4).cardinality() == -1
    assert next(iter(below.rebatch(3)))["x"].dtype == np.dtype("f4")


def test_a_batch_is_a_copy():
    array = np.arange(6)
    for size in (2, 3, 6):
        for batch in Dataset.from_source([array[:3], array[3:]]).rebatch(size):
            batch += 10
    assert array.tolist() == [*range(6)]


def test_rows_of_text_and_of_another_order_of_bytes():
    text = Dataset.from_source([np.array(["a", "b"]), np.array(["long", "c"])])
    assert plain(list(text.rebatch(3))) == [["a", "b", "long"], ["c"]]
    swapped = Dataset.from_source([np.arange(2, dtype=">i4"), np.arange(2, dtype="<i4")])
    for batch in (*swapped.rebatch(4), *swapped.rebatch(1)):
        assert batch.dtype == np.dtype("i4")
        assert batch.dtype.isnative


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([np.int64(1)], "arrays with at least one dimension"),
        ([np.array(1)], "arrays with at least one dimension"),
        (["text"], "arrays with at least one dimension"),
        ([()], "the same number of rows"),
        ([(np.zeros(2), np.zeros(3))], r"the same number of rows in an element, not \[2, 3\]"),
        ([np.zeros(1), np.zeros((1, 2))], r"component 0: rows have float64\[\] and float64\[2\]"),
        ([np.zeros(1), np.zeros(1, int)], r"component 0: rows have float64\[\] and int64\[\]"),
        ([np.zeros(1), np.array(["a"])], "component 0"),
        ([np.zeros(1), {"a": np.zeros(1)}], "different structure"),
    ],
)
def test_what_cannot_be_batched(elements, message):
    with pytest.raises(InvalidArgumentError, match=message):
        list(Dataset.from_source(elements).rebatch(2))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"rebatch needs a whole number as batch_size, not 1.5"):
        Dataset.range(3).rebatch(1.5)
    with pytest.raises(ValueError, match="rebatch needs a batch_size of at least 1, not 0"):
        Dataset.range(3).rebatch(0)


@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_lost_by_an_error_is_what_batch_loses(bad, size):
    def fail(x):
        if int(x) == bad:
            raise ZeroDivisionError
        return np.arange(3 * x, 3 * x + 3)

    below = Dataset.range(5).map(fail)
    assert plain(list(below.rebatch(size).ignore_errors())) == plain(
        list(below.unbatch().batch(size).ignore_errors())
    )


# Of a service


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_cut_what_they_have(make_service, mode, workers):
    dataset = Dataset.range(50).batch(4).rebatch(3)
    remote = dataset.apply(distribute(mode, make_service(workers).target))
    copies = workers if mode == "parallel_epochs" else 1
    assert sorted(numbers(remote)) == sorted([*range(50)] * copies)


@pytest.mark.parametrize("method", ["batch", "padded_batch", "rebatch"])
def test_structured_dtypes_batch_if_numpy_promotes_them(method):
    def batched(*fields):
        return list(
            getattr(Dataset.from_source([np.zeros(1, field) for field in fields]), method)(2)
        )

    (batch,) = batched([("a", "i4")], [("a", "i8")])
    assert batch.dtype == [("a", "i8")]
    with pytest.raises(InvalidArgumentError, match=r"cannot batch .* in component 0"):
        batched([("a", "i4")], [("b", "i4")])
