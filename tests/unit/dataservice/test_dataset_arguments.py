"""Wrong arguments of dataset methods: the messages, at the call itself."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset
from dataservice.dataset.arguments import whole

D = Dataset.range(6)
PAIRS = Dataset.zip(D, D)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: D.batch(2.0), "batch needs a whole number as batch_size, not 2.0"),
        (lambda: D.batch(True), "batch needs a whole number as batch_size, not True"),
        (lambda: D.batch(None), "batch needs a whole number as batch_size, not None"),
        (lambda: D.padded_batch("2"), "padded_batch needs a whole number as batch_size, not '2'"),
        (lambda: D.padded_batch(2, 2.5), "padded_shapes must be a shape .*, not 2.5"),
        (lambda: D.padded_batch(2, True), "padded_shapes must be a shape .*, not True"),
        (
            lambda: PAIRS.padded_batch(2, ([2], "x")),
            r"padded_shapes must be .*, not \(\[2\], 'x'\)",
        ),
        (lambda: D.padded_batch(2, [2.5]), r"padded_shapes must be .*, not \[2.5\]"),
        (lambda: D.take("1"), "take needs a whole number as count, not '1'"),
        (lambda: D.skip(1.5), "skip needs a whole number as count, not 1.5"),
        (lambda: D.repeat("x"), "repeat needs a whole number as count, not 'x'"),
        (lambda: D.shuffle("x"), "shuffle needs a whole number as buffer_size, not 'x'"),
        (lambda: D.shuffle(3, seed=1.0), "shuffle needs a whole number as seed, not 1.0"),
        (lambda: D.shard(2.0, 1), "shard needs a whole number as num_shards, not 2.0"),
        (lambda: D.shard(2, None), "shard needs a whole number as index, not None"),
        (lambda: D.prefetch([]), r"prefetch needs a whole number as buffer_size, not \[\]"),
        (lambda: D.prefetch_to_device(0, 2.0), "needs a whole number as buffer_size, not 2.0"),
        (lambda: D.enumerate("a"), "enumerate needs a whole number as start, not 'a'"),
        (
            lambda: D.ignore_errors(limit=1.5),
            "ignore_errors needs a whole number as limit, not 1.5",
        ),
        (lambda: D.window(2.0), "window needs a whole number as size, not 2.0"),
        (lambda: D.window(2, "1"), "window needs a whole number as shift, not '1'"),
        (lambda: D.window(2, 1, None), "window needs a whole number as stride, not None"),
        (lambda: D.map(3), "map needs a function as function, not 3"),
        (lambda: D.map(abs, "2"), "map needs a whole number as num_parallel_calls, not '2'"),
        (lambda: D.map(), "map needs a function as function, not None"),
        (lambda: D.map(map_func=3), "map needs a function as function, not 3"),
        (lambda: D.map(abs, map_func=abs), "only one of function and map_func"),
        (lambda: D.apply(transformation_func=3), "a function as transformation, not 3"),
        (lambda: D.apply(abs, transformation_func=abs), "only one of transformation and"),
        (lambda: D.batch(2, num_parallel_calls=1.5), "as num_parallel_calls, not 1.5"),
        (lambda: Dataset.zip(D, datasets=D), "only one of args and datasets"),
        (lambda: Dataset.from_generator(range, (2,), 3), "an ArraySpec for each array, not 3"),
        (lambda: Dataset.from_generator(range, (2,), np.int64), "an ArraySpec for each array"),
        (lambda: D.filter(None), "filter needs a function as predicate, not None"),
        (lambda: D.take_while(3), "take_while needs a function as predicate, not 3"),
        (lambda: D.scan(0, 3), "scan needs a function as scan_func, not 3"),
        (lambda: D.flat_map(D), "flat_map needs a function as map_func, not <Dataset"),
        (lambda: D.interleave(3), "interleave needs a function as map_func, not 3"),
        (lambda: D.interleave(lambda x: D, 2.0), "a whole number as cycle_length, not 2.0"),
        (lambda: D.interleave(lambda x: D, 2, "1"), "a whole number as block_length, not '1'"),
        (lambda: D.concatenate([1]), r"concatenate needs a Dataset as dataset, not \[1\]"),
        (lambda: D.cache(3), "cache needs a path as filename, not 3"),
        (lambda: D.apply(3), "apply needs a function as transformation, not 3"),
        (lambda: D.save(3), "save needs a path as path, not 3"),
        (lambda: D.save("unused", 2.0), "save needs a whole number as num_shards, not 2.0"),
        (lambda: D.bucket_by_sequence_length(1, [1], [1, 1]), "as element_length_func, not 1"),
        (lambda: D.bucket_by_sequence_length(int, 1, [1]), "numbers as bucket_boundaries, not 1"),
        (lambda: D.bucket_by_sequence_length(int, [1], [1, 1.5]), "bucket_batch_sizes, not 1.5"),
        (lambda: Dataset.range("x"), "integer"),
        (lambda: Dataset.counter(1.5), "counter needs a whole number as start, not 1.5"),
        (lambda: Dataset.counter(0, "1"), "counter needs a whole number as step, not '1'"),
        (lambda: Dataset.random(1.5), "random needs a whole number as seed, not 1.5"),
        (lambda: Dataset.load(3), "load needs a path as path, not 3"),
        (lambda: Dataset.from_files(3), "from_files needs a path as files, not 3"),
        (lambda: Dataset.from_files([3]), "from_files needs a path as files, not 3"),
        (lambda: Dataset.from_source(3), "from_source needs .*, and int has neither: 3"),
        (lambda: Dataset.from_generator(3), "from_generator needs a function as generator, not 3"),
        (lambda: Dataset.from_generator(range, 3), "a tuple of arguments as args, not 3"),
        (lambda: Dataset.zip(3), "datasets are needed, not 3"),
        (lambda: Dataset.sample_from_datasets(D), "a list of datasets is needed, not <Dataset"),
        (lambda: Dataset.sample_from_datasets(3), "a list of datasets is needed, not 3"),
        (lambda: Dataset.sample_from_datasets([D], seed="x"), "a whole number as seed, not 'x'"),
        (lambda: Dataset.sample_from_datasets([D], ["x"]), r"numbers as weights, not \['x'\]"),
        (lambda: Dataset.sample_from_datasets([D], D.repeat()), "numbers as weights, not <Dataset"),
        (lambda: Dataset.choose_from_datasets([D], [0]), r"a Dataset as choice_dataset, not \[0\]"),
    ],
)
def test_what_is_of_the_wrong_type_is_refused_where_it_is_given(make, told):
    with pytest.raises(TypeError, match=told):
        make()


@given(st.integers(-(2**31), 2**31 - 1), st.sampled_from([int, np.int32, np.int64, np.array]))
def test_whole_numbers_become_pythons(number, kind):
    found = whole("take", "count", kind(number))
    assert found == number
    assert type(found) is int


@given(st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.integers()))
def test_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match="take needs a whole number as count, not"):
        whole("take", "count", value)


def test_numbers_and_paths_of_other_types(tmp_path):
    def described(number, path):
        return (
            D.shuffle(number(6), seed=number(1))
            .map(abs, number(2))
            .take(number(5))
            .skip(number(1))
            .repeat(number(2))
            .window(number(2), number(2), number(1))
            .flat_map(lambda window: window)
            .padded_batch(number(3), [])
            .map(lambda x: np.ones(3))
            .padded_batch(number(1), (number(4),))
            .prefetch(number(1))
            .cache(path)
        )

    ours, numpys = described(int, f"{tmp_path}/kept"), described(np.int64, tmp_path / "kept")
    assert repr(ours) == repr(numpys).replace("np.int64(4)", "4")
    assert [x.shape for x in numpys] == [(1, 4)] * 3


def test_weights_may_be_an_array():
    dataset = Dataset.sample_from_datasets([D, D], np.array([0.0, 1.0]))
    assert len(dataset) == 6
    for weights in ([1.0], [math.inf, 1.0], []):
        with pytest.raises(ValueError, match="weights"):
            Dataset.sample_from_datasets([D, D], weights)
