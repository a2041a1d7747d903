"""Trees of tuples, namedtuples, lists, dicts and dataclasses."""

from collections import OrderedDict, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from _cases.servers import Cluster
from hypothesis import given
from hypothesis import strategies as st

from strategy import IndexedSlices, PerReplica, optimizers
from strategy.replicas.nest import tree_leaves, tree_map, tree_zip, with_leaves
from strategy.replicas.reduce import own_value, regrouped


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True)
class Batch:
    x: Any
    y: Any = None

    def __post_init__(self):
        assert self.y is None or self.x is not None


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
    assert tree_map(str, MappingProxyType({"a": 1})) == {"a": "1"}
    assert tree_map(str, Pair(1, [2])) == Pair("1", ["2"])
    assert tree_map(str, Batch(1, {"y": 2})) == Batch("1", {"y": "2"})
    assert tree_map(lambda a, b: a + b, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {"a": 11, "b": 22}


@pytest.mark.parametrize("leaf", [
    IndexedSlices(np.ones(1), [0]), optimizers.SGD(1.0), Derived(1), Batch, "text", np.ones(3),
])  # fmt: skip
def test_leaves(leaf):
    assert tree_leaves(leaf)[0] is leaf
    assert tree_map(lambda one: one, [leaf])[0] is leaf


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
