"""Arguments as programs for tf.data give them."""

import numpy as np
import pytest

from dataservice import AUTOTUNE, Dataset, distribute
from dataservice.dataset.spec import ArraySpec
from mpidist.errors import InvalidArgumentError


class Shape:
    """A shape of another library."""

    def __init__(self, lengths):
        self._lengths = lengths

    def as_list(self):
        if self._lengths is None:
            raise ValueError("the number of dimensions is unknown")
        return self._lengths


@pytest.mark.parametrize(
    ("shapes", "width"),
    [(5, 5), (-1, 2), (np.int64(5), 5), (Shape([5]), 5), (Shape([None]), 2), (Shape(None), 2)],
)
def test_shapes_of_padded_batch(shapes, width):
    elements = [np.array([1]), np.array([2, 3])]
    (batch,) = Dataset.from_source(elements).padded_batch(2, padded_shapes=shapes)
    assert batch.tolist() == [[1, *[0] * (width - 1)], [2, 3, *[0] * (width - 2)]]
    pairs = Dataset.from_source([(one, {"n": one}) for one in elements])
    (batch,) = pairs.padded_batch(2, padded_shapes=(shapes, {"n": shapes}))
    assert batch[0].shape == batch[1]["n"].shape == (2, width)


def test_names_of_functions():
    dataset = Dataset.range(3).map(map_func=lambda i: i + 1, num_parallel_calls=2)
    assert list(dataset) == [1, 2, 3]
    assert list(dataset.apply(transformation_func=lambda it: it.take(1))) == [1]
    both = Dataset.zip(datasets=(dataset, {"a": dataset}))
    assert list(both)[2] == (3, {"a": 3})
    assert list(Dataset.zip(datasets=dataset)) == [1, 2, 3]


def test_map_keeps_the_order_unless_told_otherwise():
    calls = {"num_parallel_calls": 2}
    for deterministic, in_order in ((None, True), (True, True), (False, False)):
        mapped = Dataset.range(3).map(abs, deterministic=deterministic, **calls)
        assert (mapped.node.indexed_length() == 3) is in_order


def test_batch_and_interleave_take_what_they_do_without():
    batches = Dataset.range(4).batch(2, num_parallel_calls=AUTOTUNE, deterministic=False)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]

    def twice(i):
        return Dataset.from_tensors(i).repeat(2)

    expected = list(Dataset.range(40).interleave(twice))
    more = {"cycle_length": None, "block_length": None, "deterministic": False}
    assert list(Dataset.range(40).interleave(twice, **more)) == expected


class Kind:
    """A dtype of another library."""

    def __init__(self, dtype):
        self.as_numpy_dtype = dtype


class Signature:
    """The signature of an array of another library."""

    def __init__(self, lengths, dtype):
        self.shape = Shape(lengths)
        self.dtype = Kind(dtype)


def given(elements, signature):
    return Dataset.from_generator(lambda: iter(elements), output_signature=signature)


@pytest.mark.parametrize(
    ("element", "dtype", "expected"),
    [
        *((1, np.int32, np.int32(1)), (1.5, np.float32, np.float32(1.5)), (2, "f4", np.float32(2))),
        *((200, np.uint8, np.uint8(200)), (1, "?", np.True_), (True, "i8", np.int64(1))),
        *(
            (1.5, "c8", np.complex64(1.5)),
            ("a", "U", np.str_("a")),
            (b"a", object, np.bytes_(b"a")),
        ),
        *((b"a\0", object, b"a\0"), ("a\0", "U", "a\0")),
    ],
)
def test_a_signature_says_what_numbers_become(element, dtype, expected):
    dataset = given(
        [(element, {"n": element})], (ArraySpec((), dtype), {"n": Signature([], dtype)})
    )
    ((first, second),) = dataset
    for found in (first, second["n"]):
        assert (type(found), found) == (type(expected), expected)
    assert dataset.element_spec == (ArraySpec((), dtype), {"n": ArraySpec((), dtype)})


def test_a_signature_says_what_no_element_says():
    dataset = given([], Signature([None, 2], np.int32))
    assert dataset.element_spec == ArraySpec((None, 2), np.int32)
    assert dataset.batch(3, drop_remainder=True).element_spec == ArraySpec((3, None, 2), np.int32)
    (empty,) = given([[]], ArraySpec((None,), np.int32))
    assert (empty.dtype, empty.shape) == (np.int32, (0,))


@pytest.mark.parametrize(
    ("element", "signature"),
    [
        *((1.5, ArraySpec((), "i4")), (1 << 40, ArraySpec((), "i4")), (-1, ArraySpec((), "u1"))),
        *(([1, 2], ArraySpec((3,), "i8")), ([1], ArraySpec((), "i8")), (2, ArraySpec((), "?"))),
        *(("a", ArraySpec((), "S")), ("1", ArraySpec((), "i4")), ((1,), ArraySpec((), "i8"))),
        *(({"a": 1}, {"b": ArraySpec((), "i8")}), (1, (ArraySpec((), "i8"),))),
        (np.array([1, b"a"], object), ArraySpec((2,), "S")),
    ],
)
def test_elements_that_are_not_what_the_signature_says(element, signature):
    with pytest.raises(InvalidArgumentError, match="but its element_spec is"):
        list(given([element], signature))


def test_a_pass_with_a_signature_goes_on_from_a_state():
    dataset = given([1, 2, 3], ArraySpec((), np.int32))
    before = iter(dataset)
    assert next(before) == 1
    after = iter(dataset)
    after.set_state(before.get_state())
    assert list(after) == [2, 3]


def test_a_signature_through_a_service(make_service):
    dataset = given([1, 2, 3], ArraySpec((), np.int32)).batch(3)
    there = dataset.apply(distribute("distributed_epoch", make_service(1).target))
    assert there.element_spec == ArraySpec((None,), np.int32)
    (batch,) = there
    np.testing.assert_array_equal(batch, np.array([1, 2, 3], np.int32), strict=True)


def test_nothing_to_zip():
    for call in (lambda: Dataset.zip(), lambda: Dataset.zip(datasets=())):
        with pytest.raises(ValueError, match="at least one dataset"):
            call()
