"""The methods and arguments of ``tf.data.Dataset`` beside those of :class:`Dataset`."""

import inspect
import re

import numpy as np
import pytest

from dataservice import Dataset

# TensorFlow 2.21: the public methods, without self, by inspect.signature.
TENSORFLOW = """
apply(transformation_func)
as_numpy_iterator()
batch(batch_size, drop_remainder=False, num_parallel_calls=None, deterministic=None, name=None)
bucket_by_sequence_length(element_length_func, bucket_boundaries, bucket_batch_sizes,
    padded_shapes=None, padding_values=None, pad_to_bucket_boundary=False, no_padding=False,
    drop_remainder=False, name=None)
cache(filename='', name=None)
cardinality()
choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset=True)
concatenate(dataset, name=None)
counter(start=0, step=1, dtype=np.int64, name=None)
enumerate(start=0, name=None)
filter(predicate, name=None)
fingerprint()
flat_map(map_func, name=None)
from_generator(generator, output_types=None, output_shapes=None, args=None, output_signature=None,
    name=None)
from_tensor_slices(tensors, name=None)
from_tensors(tensors, name=None)
get_single_element(name=None)
group_by_window(key_func, reduce_func, window_size=None, window_size_func=None, name=None)
ignore_errors(log_warning=False, name=None)
interleave(map_func, cycle_length=None, block_length=None, num_parallel_calls=None,
    deterministic=None, name=None)
list_files(file_pattern, shuffle=None, seed=None, name=None)
load(path, element_spec=None, compression=None, reader_func=None, wait=False)
map(map_func, num_parallel_calls=None, deterministic=None, synchronous=None,
    use_unbounded_threadpool=False, name=None)
options()
padded_batch(batch_size, padded_shapes=None, padding_values=None, drop_remainder=False, name=None)
prefetch(buffer_size, name=None)
ragged_batch(batch_size, drop_remainder=False, row_splits_dtype=np.int64, name=None)
random(seed=None, rerandomize_each_iteration=None, name=None)
range(*args, output_type=np.int64, name=None)
rebatch(batch_size, drop_remainder=False, name=None)
reduce(initial_state, reduce_func, name=None)
rejection_resample(class_func, target_dist, initial_dist=None, seed=None, name=None)
repeat(count=None, name=None)
sample_from_datasets(datasets, weights=None, seed=None, stop_on_empty_dataset=False,
    rerandomize_each_iteration=None)
save(path, compression=None, shard_func=None, checkpoint_args=None)
scan(initial_state, scan_func, name=None)
shard(num_shards, index, name=None)
shuffle(buffer_size, seed=None, reshuffle_each_iteration=True, name=None)
skip(count, name=None)
snapshot(path, compression='AUTO', reader_func=None, shard_func=None, name=None)
sparse_batch(batch_size, row_shape, name=None)
take(count, name=None)
take_while(predicate, name=None)
unbatch(name=None)
unique(name=None)
window(size, shift=None, stride=1, drop_remainder=False, name=None)
with_options(options, name=None)
zip(*args, datasets=None, name=None)
"""

LEFT_OUT = {
    "ragged_batch": "NumPy has no ragged tensors: use padded_batch",
    "sparse_batch": "NumPy has no sparse tensors",
    "snapshot": "cache(filename) keeps elements between runs, and save and load make snapshots",
    ("from_generator", "output_types"): "deprecated in TensorFlow: use output_signature",
    ("from_generator", "output_shapes"): "deprecated in TensorFlow: use output_signature",
    ("load", "compression"): "a snapshot names its compression",
    ("map", "synchronous"): "map is synchronous unless num_parallel_calls is given",
    ("map", "use_unbounded_threadpool"): "each map has num_parallel_calls threads of its own",
    ("save", "compression"): "GZIP is TensorFlow's: distributed_save compresses by other codecs",
}
"""The methods and arguments of TensorFlow's that are missing on purpose, each with its reason."""

BY_KEYWORD = {
    ("apply", "transformation_func"): "another name of the first argument",
    ("from_generator", "args"): "the second argument, since the deprecated ones are missing",
    ("from_generator", "output_signature"): "the third argument, likewise",
    ("from_generator", "name"): "the fourth argument, likewise",
    ("load", "element_spec"): "wait is the second argument",
    ("load", "reader_func"): "wait is the second argument",
    ("load", "wait"): "the second argument",
    ("map", "map_func"): "another name of the first argument",
    ("map", "name"): "processes is the fourth argument",
    ("save", "shard_func"): "num_shards is the second argument",
    ("save", "checkpoint_args"): "num_shards is the second argument",
}
"""The arguments at another place than TensorFlow's, which programs must give by name."""

OTHER_DEFAULTS = {
    ("apply", "transformation_func"): None,  # one of two names
    ("from_generator", "args"): (),
    ("map", "map_func"): None,  # one of two names
}


def signature(arguments):
    return inspect.signature(eval(f"lambda {arguments}: None", {"np": np}))


METHODS = {
    name: signature(arguments)
    for name, arguments in re.findall(r"(\w+)\((.*)\)", re.sub(r"\n +", " ", TENSORFLOW))
}


def parameters(method):
    found = dict(inspect.signature(getattr(Dataset, method)).parameters)
    found.pop("self", None)
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_has_tensorflows_arguments(method):
    if method in LEFT_OUT:
        assert not hasattr(Dataset, method)
        return
    theirs, ours = METHODS[method].parameters, parameters(method)
    for place, (name, parameter) in enumerate(theirs.items()):
        key = (method, name)
        if key in LEFT_OUT:
            assert name not in ours, key
            continue
        assert name in ours, key
        assert ours[name].default == OTHER_DEFAULTS.get(key, parameter.default), key
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and key not in BY_KEYWORD:
            assert (list(ours).index(name), ours[name].kind) == (place, parameter.kind), key


def test_arguments_of_our_own_come_last_or_by_name():
    """A positional argument of a program for tf.data means the same here, or is an error."""
    for method, theirs in METHODS.items():
        if method in LEFT_OUT or any(key[0] == method for key in BY_KEYWORD):
            continue
        for name, parameter in parameters(method).items():
            assert name in theirs.parameters or parameter.kind is parameter.KEYWORD_ONLY, method


def test_the_lists_name_tensorflows_arguments():
    keys = {key for key in (*LEFT_OUT, *BY_KEYWORD, *OTHER_DEFAULTS) if isinstance(key, tuple)}
    assert all(name in METHODS[method].parameters for method, name in keys)
    assert {key for key in LEFT_OUT if isinstance(key, str)} <= METHODS.keys()
    assert hasattr(Dataset, "element_spec")


def test_static_methods():
    static = "choose_from_datasets counter from_generator from_tensor_slices from_tensors"
    for name in (*static.split(), "list_files", "load", "random", "range", "zip"):
        assert isinstance(inspect.getattr_static(Dataset, name), staticmethod), name
