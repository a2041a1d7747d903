"""Trees of tuples, namedtuples, lists, dicts and dataclasses."""

import os
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from _cases.servers import Cluster
from hypothesis import given
from hypothesis import strategies as st

from strategy import IndexedSlices, PerReplica, get_replica_context, optimizers, schedules
from strategy.replicas.nest import tree_leaves, tree_map, tree_zip, with_leaves
from strategy.replicas.reduce import own_value, regrouped


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True)
class Batch:
    x: Any
    y: Any = None


@dataclass
class Checked:
    x: Any

    def __post_init__(self):
        assert isinstance(self.x, int)


@dataclass
class Scaled:
    x: Any
    scale: InitVar[int]


@dataclass(init=False)
class Written:
    x: Any

    def __init__(self, value):
        self.x = value


class Sized(tuple):
    def __new__(cls, values):
        return super().__new__(cls, map(int, values))


class Unset(NamedTuple("Unset", [("x", Any)])):
    def __new__(cls):
        return super().__new__(cls, 0)


@dataclass
class Derived:
    x: Any
    size: int = field(init=False, default=0)


TREES = st.recursive(
    st.integers() | st.none() | st.text(max_size=2),
    lambda child: (
        st.lists(child, max_size=3)
        | st.tuples(child, child)
        | st.builds(Pair, child, child)
        | st.builds(Batch, st.integers(), child)
        | st.dictionaries(st.text(max_size=2), child, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_leaves_and_form(tree):
    leaves = tree_leaves(tree)
    assert with_leaves(tree, leaves) == tree
    seen = []
    assert tree_map(lambda leaf: (seen.append(leaf), leaf)[1], tree) == tree
    assert seen == leaves
    numbered = with_leaves(tree, [f"leaf {number}" for number in range(len(leaves))])
    assert tree_leaves(numbered) == [f"leaf {number}" for number in range(len(leaves))]
    if leaves != [tree]:
        assert type(numbered) is type(tree)


@given(TREES, st.integers(2, 3))
def test_values_of_replicas_are_combined_and_taken_apart(tree, count):
    each = [with_leaves(tree, [np.array(n) for _ in tree_leaves(tree)]) for n in range(count)]
    together = regrouped(each)
    assert len(tree_leaves(together)) == len(tree_leaves(tree))
    for leaf in tree_leaves(together):
        assert isinstance(leaf, PerReplica)
    for number in range(count):
        assert tree_leaves(own_value(together, number)) == tree_leaves(each[number])


def test_types_are_kept():
    counts = defaultdict(list, a=1)
    doubled = tree_map(lambda leaf: 2 * leaf, counts)
    assert doubled == {"a": 2}
    assert doubled["new"] == []
    assert "new" not in counts
    assert type(tree_map(str, OrderedDict(a=1))) is OrderedDict
    assert tree_map(str, Pair(1, [2])) == Pair("1", ["2"])
    assert type(tree_map(str, Unset())) is Unset
    assert tree_map(str, Batch(1, {"y": 2})) == Batch("1", {"y": "2"})
    assert tree_map(lambda a, b: a + b, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": 11, "b": 22}


ODD = [
    IndexedSlices(np.ones(1), [0]), optimizers.SGD(1.0), schedules.ExponentialDecay(0.1, 10, 0.5),
    Derived(1), Checked(1), Scaled(1, 2), Written(1), Batch, "text", np.ones(3), Sized([1, 2]),
    Counter("aab"), MappingProxyType({"a": 1}), sys.version_info, os.environ,
]  # fmt: skip


@pytest.mark.parametrize("leaf", ODD)
def test_leaves(leaf):
    assert tree_leaves(leaf)[0] is leaf
    assert tree_map(lambda one: one, [leaf])[0] is leaf


@pytest.fixture(params=[1, 2])
def strategy(request):
    with ExitStack() as stack:
        yield Cluster(stack).worker(0, num_replicas_per_worker=request.param)


@pytest.mark.parametrize("leaf", ODD)
def test_leaves_as_arguments_and_results_of_steps(strategy, leaf):
    result = strategy.run(lambda value: (value is leaf, value), (leaf,))
    for is_same, value in zip(*map(strategy.experimental_local_results, result), strict=True):
        assert is_same
        assert value is leaf


def test_a_step_may_change_its_containers(strategy):
    batch = {"x": 1, "y": [2]}
    result = strategy.run(lambda own: (own.pop("x"), own["y"].append(3), len(own["y"])), (batch,))
    assert batch == {"x": 1, "y": [2]}
    for size in strategy.experimental_local_results(result[2]):
        assert size == 2


def test_each_replica_gets_its_own_containers(strategy):
    def step():
        context = get_replica_context()
        sums = context.all_reduce("sum", {"loss": [1.0]})
        context.merge_call(lambda _: None)
        sums["loss"].append(0)
        context.merge_call(lambda _: None)
        return len(sums["loss"])

    assert set(strategy.experimental_local_results(strategy.run(step))) == {2}


def test_batches_of_other_mappings_are_divided(strategy):
    batch = UserDict(x=np.arange(4))
    (element,) = strategy.experimental_distribute_dataset([batch])
    parts = strategy.experimental_local_results(element["x"])
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(4))


def test_an_unchanged_dataclass_is_not_made_again():
    batch = Batch(np.ones(2), [1])
    assert tree_map(lambda leaf: leaf, batch) is batch


@pytest.mark.parametrize("other", [[1], [1, 2, 3], (1, 2), {"a": 1}, 5])
def test_different_forms(other):
    with pytest.raises(ValueError, match="nested differently: a list"):
        tree_map(lambda a, b: a, [1, 2], other)
    assert tree_zip(list, [[1, 2], other]) == [[1, 2], other]


def test_a_step_with_dataclasses():
    """Batches are divided, each replica gets its part, and results are reduced leaf by leaf."""
    with ExitStack() as stack:
        strategy = Cluster(stack).worker(0, num_replicas_per_worker=2)
        data = [Batch(np.arange(4.0), Pair(np.ones((4, 1)), np.arange(4)))]
        (batch,) = strategy.experimental_distribute_dataset(data)

        def step(batch):
            assert type(batch) is Batch
            return Batch(batch.x.sum(), Pair(batch.y.one.sum(), batch.y.two.max()))

        result = strategy.run(step, (batch,))
        total = strategy.reduce("sum", result)
    assert total == Batch(6.0, Pair(4.0, 4))


@pytest.mark.parametrize("values", [
    (True, True), (np.uint8(200), np.uint8(200)), (np.int8(100), np.int8(-3)), (2, 3),
    (np.array([True, False]), np.array([True, True])), (np.int32(2**31 - 1),) * 2,
    (np.int64(2**62), np.int64(-5)),
])  # fmt: skip
def test_integers_and_bools_are_reduced_as_in_numpy(strategy, values):
    own = values[: strategy.num_replicas_in_sync]
    per_replica = strategy.run(lambda value: value, (regrouped(own),))
    for op, function in (("sum", np.sum), ("mean", np.mean)):
        reduced = strategy.reduce(op, per_replica)
        expected = function(np.stack(own), axis=0)
        np.testing.assert_array_equal(reduced, expected)
        assert reduced.dtype == expected.dtype


def test_an_axis_that_a_value_lacks(strategy):
    with pytest.raises(ValueError, match=r"a value of shape \(\) has no axis 0"):
        strategy.reduce("mean", strategy.run(lambda: 1.0), axis=0)
