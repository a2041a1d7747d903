"""Copies of variables that are made while the variables change."""

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.checkpoints.core_sharing import CHUNK_BYTES
from strategy.checkpoints.parts import PartState
from strategy.server.snapshot import Snapshot

DTYPES = ("float32", "float64", "int64", "bool", "uint8")
ARRAYS = st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 5), (700,)]))


def snapshot_of(variables):
    state = PartState(variables, {"facts": "{}"})
    return Snapshot(state, np.full(state.nbytes, 255, np.uint8))


def copied(variables):
    return {
        name: {key: array.copy() for key, array in arrays.items()}
        for name, arrays in variables.items()
    }


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, arrays in expected.items():
        assert found[name].keys() == arrays.keys()
        for key, array in arrays.items():
            assert found[name][key].dtype == array.dtype
            np.testing.assert_array_equal(found[name][key], array)


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.dictionaries(st.sampled_from("xyz"), ARRAYS, min_size=1)
    ),
    st.lists(st.sampled_from("abcdef")),
)
@settings(deadline=None)
def test_the_values_are_those_at_the_start(facts, changed):
    variables = {
        name: {key: np.full(shape, 1, dtype) for key, (dtype, shape) in arrays.items()}
        for name, arrays in facts.items()
    }
    expected = copied(variables)
    snapshot = snapshot_of(variables)
    for name in changed:
        snapshot.copy(name)
        for array in variables.get(name, {}).values():
            array[...] = 0
    snapshot.finish()
    check_equal(snapshot.copies.variables, expected)
    assert snapshot.copies.metadata == {"facts": "{}"}


def test_changes_during_the_copy():
    rng = np.random.default_rng(0)
    size = 3 * CHUNK_BYTES // 8 + 1
    variables = {str(n): {"data": rng.random(size), "slot:m": rng.random(size)} for n in range(12)}
    expected = copied(variables)
    snapshot = snapshot_of(variables)
    thread = threading.Thread(target=snapshot.finish)
    thread.start()
    for name in reversed(variables):
        snapshot.copy(name)
        for array in variables[name].values():
            array.fill(-1)
    thread.join(60)
    check_equal(snapshot.copies.variables, expected)
