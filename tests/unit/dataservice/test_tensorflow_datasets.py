"""Transformations against TensorFlow's, where it is installed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset, ShardingPolicy
from dataservice.auto_shard import auto_shard
from mpidist.errors import NotFoundError

tf = pytest.importorskip("tensorflow")

small = st.integers(0, 12)
number = st.integers(1, 4)
lengths = st.lists(st.integers(0, 7), max_size=12)


def same(ours, theirs):
    ours, theirs = list(ours), list(theirs.as_numpy_iterator())
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=40)
@given(lengths, number, number)
def test_interleave(counts, cycle, block):
    ours = Dataset.from_source(counts).interleave(
        lambda n: Dataset.range(int(n) * 10, int(n) * 11), cycle, block
    )
    theirs = tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64)).interleave(
        lambda n: tf.data.Dataset.range(n * 10, n * 11), cycle, block
    )
    same(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(small, number, number, st.integers(1, 3), st.booleans())
def test_window(count, size, shift, stride, drop):
    both = [
        library.range(count).window(size, shift, stride, drop)
        for library in (Dataset, tf.data.Dataset)
    ]
    ours, theirs = ([[int(x) for x in window] for window in windows] for windows in both)
    assert ours == theirs
    assert len(both[0]) == both[1].cardinality() == len(ours)


@settings(deadline=None, max_examples=40)
@given(lengths, number, st.booleans())
def test_padded_batch(counts, size, drop):
    ours = Dataset.from_source([np.arange(n) for n in counts])
    theirs = tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64)).map(tf.range)
    same(
        ours.padded_batch(size, drop_remainder=drop), theirs.padded_batch(size, drop_remainder=drop)
    )


@settings(deadline=None, max_examples=40)
@given(lengths, st.booleans(), st.booleans())
def test_buckets(counts, drop, to_boundary):
    counts = [min(n, 5) for n in counts] if to_boundary else counts
    ours = Dataset.from_source([np.arange(n) for n in counts]).bucket_by_sequence_length(
        len, [3, 6], [2, 3, 1], pad_to_bucket_boundary=to_boundary, drop_remainder=drop
    )
    theirs = (
        tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64))
        .map(tf.range)
        .bucket_by_sequence_length(
            lambda x: tf.size(x), [3, 6], [2, 3, 1], pad_to_bucket_boundary=to_boundary,
            drop_remainder=drop,
        )
    )  # fmt: skip
    same(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(small, small, st.lists(st.integers(0, 1), max_size=12), st.booleans())
def test_choices(first, second, order, stop):
    both = [
        library.choose_from_datasets(
            [library.range(first), library.range(50, 50 + second)],
            library.from_tensor_slices(np.array(order, np.int64)),
            stop_on_empty_dataset=stop,
        )
        for library in (Dataset, tf.data.Dataset)
    ]
    same(*both)


@settings(deadline=None, max_examples=40)
@given(small, number, st.booleans(), st.integers(0, 3))
def test_chains(count, size, drop, skip):
    ours, theirs = (
        library.range(count)
        .skip(skip)
        .shard(2, 1)
        .repeat(2)
        .concatenate(library.range(3))
        .batch(size, drop_remainder=drop)
        .unbatch()
        .enumerate(5)
        .map(lambda i, x: i * x)
        .filter(lambda x: x % 3 != 1)
        .take(9)
        for library in (Dataset, tf.data.Dataset)
    )
    same(ours, theirs)


@settings(deadline=None, max_examples=20)
@given(st.lists(small, min_size=2, max_size=3))
def test_zip(counts):
    ours, theirs = (
        library.zip(*(library.range(count) for count in counts)).flat_map(
            lambda *numbers, library=library: (
                library.from_tensors(numbers[0])
                if hasattr(library, "from_tensors")
                else library.from_source([numbers[0]])
            )
        )
        for library in (Dataset, tf.data.Dataset)
    )
    same(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(st.lists(small, max_size=30), number, number)
def test_group_by_window(values, keys, size):
    values = np.array(values, np.int64)
    ours, theirs = (
        library.from_tensor_slices(values).group_by_window(
            lambda x: x % keys - 1,
            lambda key, group: group.batch(3, drop_remainder=False).map(lambda rows: rows + key),
            window_size_func=lambda key: key + size + 1,
        )
        for library in (Dataset, tf.data.Dataset)
    )
    same(ours, theirs)


@pytest.mark.parametrize("initial", [None, [0.7, 0.2, 0.1]])
@pytest.mark.parametrize("target", [[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]])
def test_rejection_resample(initial, target):
    values = np.random.default_rng(0).choice(3, 10_000, p=[0.7, 0.2, 0.1])
    for library in (Dataset, tf.data.Dataset):
        dataset = library.from_tensor_slices(values).rejection_resample(
            lambda x: x, np.float64(target), initial and np.float64(initial), seed=1
        )
        found = np.array([(int(kind), int(x)) for kind, x in dataset])
        assert (found[:, 0] == found[:, 1]).all()
        np.testing.assert_allclose(
            np.bincount(found[:, 0], minlength=3) / len(found), target, 0, 0.05
        )


@pytest.mark.parametrize("library", [Dataset, tf.data.Dataset])
def test_endless_sources(library):
    assert [int(x) for x in library.counter(start=3, step=-2).take(4)] == [3, 1, -1, -3]
    for again, numbers in ((None, 1), (False, 1), (True, 2)):
        source = library.random(seed=4, rerandomize_each_iteration=again).take(9).batch(9)
        passes = [batch.tolist() for batch in source.repeat(2).as_numpy_iterator()]
        assert len({tuple(one) for one in passes}) == numbers
        assert all(0 <= n < 2**32 for one in passes for n in one)
    assert library.range(4, 5).get_single_element() == 4


def fail_at(*numbers):
    def ours(x):
        if int(x) in numbers:
            raise OSError(int(x))
        return x

    def theirs(x):
        fine = tf.reduce_all(tf.constant(numbers, tf.int64) != x)
        with tf.control_dependencies([tf.debugging.Assert(fine, [x])]):
            return tf.identity(x)

    return ours, theirs


SURVIVED = [
    lambda lib, d, f: d.map(f),
    lambda lib, d, f: d.map(f, num_parallel_calls=2),
    lambda lib, d, f: d.filter(lambda x: f(x) % 3 != 1),
    lambda lib, d, f: d.map(f).batch(2).unbatch(),
    lambda lib, d, f: d.map(f).batch(3, drop_remainder=True).unbatch(),
    lambda lib, d, f: d.map(f).batch(2).rebatch(3).unbatch(),
    lambda lib, d, f: d.prefetch(2),
    lambda lib, d, f: d.take(7),
    lambda lib, d, f: d.take_while(lambda x: f(x) < 7),
    lambda lib, d, f: d.scan(np.int64(0), lambda last, x: (f(x), last + x)),
    lambda lib, d, f: d.map(lambda x: f(x) // 3).unique(),
    lambda lib, d, f: d.repeat(2),
    lambda lib, d, f: d.concatenate(lib.range(4).map(f)),
    lambda lib, d, f: lib.zip(d, lib.range(99).map(f)).map(lambda a, b: a + b),
    # Where one ends and the other fails, TensorFlow raises before it ends: so none ends early.
    lambda lib, d, f: lib.zip(lib.range(99).map(f), d.concatenate(lib.range(20))).map(
        lambda a, b: a + b
    ),
    lambda lib, d, f: d.interleave(
        lambda x: lib.range(x % 5).map(f), cycle_length=2, block_length=2
    ),
    lambda lib, d, f: d.flat_map(lambda x: lib.range(f(x) % 3)),
    lambda lib, d, f: d.group_by_window(lambda x: f(x) % 3, lambda key, group: group.map(f), 2),
    lambda lib, d, f: d.enumerate().map(lambda i, x: i + x),
    lambda lib, d, f: d.ignore_errors(),
]


@settings(deadline=None, max_examples=40)
@given(
    small,
    st.lists(st.sampled_from(SURVIVED), min_size=1, max_size=3),
    st.lists(small, min_size=1, max_size=3),
)
def test_what_survives_ignore_errors(count, steps, bad):
    both = []
    for library, function in zip((Dataset, tf.data.Dataset), fail_at(*bad), strict=True):
        dataset = library.range(count)
        for step in steps:
            dataset = step(library, dataset, function)
        both.append(dataset.ignore_errors())
    # By default TensorFlow fuses a map with the batch right above it: then an error takes a whole
    # batch, and otherwise what had been read of it.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    same(both[0], both[1].with_options(options))


@settings(deadline=None, max_examples=20)
@given(lengths, number)
def test_what_survives_batches_of_different_shapes(counts, size):
    ours = Dataset.from_source(counts).map(lambda n: np.arange(int(n) // 4))
    theirs = tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64)).map(
        lambda n: tf.range(n // 4)
    )
    same(ours.batch(size).ignore_errors(), theirs.batch(size).ignore_errors())


def auto_sharded(dataset, policy, workers, index):
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return _AutoShardDataset(dataset.with_options(options), workers, index)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["FILE", "DATA", "FILE_OR_DATA", "HINT"])
def test_static_sharding(tmp_path, policy, workers):
    paths = [str(tmp_path / f"{number}.txt") for number in range(3)]
    for number, path in enumerate(paths):
        with open(path, "w") as file:
            file.writelines(f"{number}{line}\n" for line in range(number + 2))
    theirs_policy = getattr(
        tf.data.experimental.AutoShardPolicy, {"FILE_OR_DATA": "AUTO"}.get(policy, policy)
    )
    ours = Dataset.from_files(paths).map(lambda line: np.int64(line))
    theirs = tf.data.TextLineDataset(paths).map(lambda line: tf.strings.to_number(line, tf.int64))
    both = [
        (dataset.shard(-1, -1) if policy == "HINT" else dataset).repeat(2).batch(2).prefetch(1)
        for dataset in (ours, theirs)
    ]
    for index in range(workers):
        node = auto_shard(both[0].node, ShardingPolicy[policy], workers, index)
        same(Dataset(node), auto_sharded(both[1], theirs_policy, workers, index))


def test_what_cannot_be_sharded_by_files():
    ours, theirs = (
        library.range(9).concatenate(library.range(3)) for library in (Dataset, tf.data.Dataset)
    )
    with pytest.raises(NotFoundError):
        auto_shard(ours.node, ShardingPolicy.FILE, 2, 0)
    with pytest.raises(tf.errors.NotFoundError):
        auto_sharded(theirs, tf.data.experimental.AutoShardPolicy.FILE, 2, 0)
