"""The part of a dataset that each worker evaluates under the static policies."""

import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice import SHARD_HINT, Dataset, DispatcherConfig, ShardingPolicy
from dataservice.auto_shard import auto_shard
from dataservice.dataset.base import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Context
from dataservice.dataset.indexed import Map
from dataservice.dispatch.scheduler import worker_index
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy


def parts(dataset, policy, workers):
    """Return the elements of each worker. All workers use the same context, as in a service."""
    result = []
    for index in range(workers):
        part = auto_shard(dataset.node, policy, workers, index)
        with part.iterate(Context(seed=(5,))) as elements:
            result.append([np.asarray(element).tolist() for element in elements])
    return result


def flat(lists):
    return [element for one in lists for element in one]


@pytest.fixture
def folder(tmp_path):
    """Provide ``folder(3)``, which returns the paths of three files of two lines each."""

    def write(count, name=""):
        paths = [tmp_path / f"{name}{number}.txt" for number in range(count)]
        for number, path in enumerate(paths):
            path.write_text(f"{name}{number}a\n{name}{number}b\n")
        return [str(path) for path in paths]

    return write


@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
def test_other_policies_leave_it_as_it_is(policy):
    node = Dataset.range(9).map(abs).node
    assert auto_shard(node, policy, 3, 1) is node


@pytest.mark.parametrize("policy", [OFF, DATA])
@pytest.mark.parametrize(("workers", "index"), [(0, 0), (2, 2), (2, -1)])
def test_an_index_out_of_range(policy, workers, index):
    with pytest.raises(ValueError, match="index"):
        auto_shard(Dataset.range(9).node, policy, workers, index)


STEPS = st.sampled_from(
    [
        lambda d: d.map(lambda x: x * 2),
        lambda d: d.map(lambda x: x + 1, num_parallel_calls=2),
        lambda d: d.prefetch(2),
        lambda d: d.filter(lambda x: x % 3 != 1),
        lambda d: d.take_while(lambda x: x < 15),
        lambda d: d.scan(0, lambda last, x: (x, last + x)),
        lambda d: d.unique(),
        lambda d: d.group_by_window(lambda x: x % 2, lambda key, group: group.take(2), 3),
        lambda d: d.shuffle(3),
        lambda d: d.repeat(2),
        lambda d: d.skip(1).take(9),
        lambda d: d.batch(2).unbatch(),
        lambda d: d.batch(3).rebatch(2).unbatch(),
        lambda d: d.concatenate(Dataset.range(50, 55).shuffle(2)),
        lambda d: Dataset.zip(d, d.skip(1)).map(lambda a, b: a + b),
        lambda d: Dataset.sample_from_datasets([d, Dataset.range(60, 70)]),
        lambda d: d.flat_map(lambda x: Dataset.range(int(x) % 3)),
    ]
)


@given(st.integers(0, 20), st.lists(STEPS, max_size=4), st.integers(1, 6))
def test_every_nth_element_of_any_dataset(count, steps, workers):
    dataset = Dataset.range(count)
    for step in steps:
        dataset = step(dataset)
    (whole,) = parts(dataset, DATA, 1)
    assert parts(dataset, DATA, workers) == [whole[i::workers] for i in range(workers)]
    assert parts(dataset, FILE_OR_DATA, workers) == parts(dataset, DATA, workers)


# A cache keeps the order of its first pass. With a shuffle below the cache, this order differs
# between the workers and a reader of the whole dataset.
@given(st.integers(0, 20), st.integers(1, 6))
def test_every_nth_element_of_a_cached_dataset(count, workers):
    dataset = Dataset.range(count).map(lambda x: x * 2).cache().repeat(2).skip(3)
    whole = [2 * x for x in range(count)] * 2
    assert parts(dataset, DATA, workers) == [whole[3:][i::workers] for i in range(workers)]


def test_functions_are_called_for_the_elements_of_a_worker_only():
    called = []
    dataset = Dataset.range(10).map(lambda x: called.append(int(x)) or x).map(abs).prefetch(1)
    assert list(auto_shard(dataset.node, DATA, 4, 1).iterate(Context(seed=(0,)))) == [1, 5, 9]
    assert called == [1, 5, 9]


def test_a_map_that_keeps_no_order_gives_every_element_once():
    dataset = Dataset.range(50).map(lambda x: x, num_parallel_calls=4, deterministic=False)
    assert sorted(flat(parts(dataset, DATA, 3))) == list(range(50))


@pytest.mark.parametrize("policy", [FILE, FILE_OR_DATA])
def test_every_nth_file(folder, policy):
    files = Dataset.from_files(folder(5))
    assert parts(files, policy, 2) == [
        ["0a", "0b", "2a", "2b", "4a", "4b"],
        ["1a", "1b", "3a", "3b"],
    ]
    dataset = files.map(lambda line: line).filter(lambda line: line != "1a").repeat(2)
    assert parts(dataset, policy, 5)[1:3] == [["1b"] * 2, ["2a", "2b"] * 2]


def test_files_below_several_nodes(folder):
    dataset = Dataset.from_files(folder(3)).concatenate(Dataset.from_files(folder(2, "x")))
    assert parts(dataset, FILE, 2) == [
        ["0a", "0b", "2a", "2b", "x0a", "x0b"],
        ["1a", "1b", "x1a", "x1b"],
    ]


def test_what_cannot_be_divided_by_files(folder):
    lines = Dataset.from_files(folder(3))
    few = r"from_files\(3 .*has 3 files, not enough for 4 workers.*DATA"
    with pytest.raises(InvalidArgumentError, match=few):
        auto_shard(lines.node, FILE, 4, 0)
    assert parts(lines, FILE_OR_DATA, 4) == parts(lines, DATA, 4)
    for dataset in (
        Dataset.range(3),
        lines.concatenate(Dataset.from_source(["x", "y", "z"])),
        Dataset.choose_from_datasets([lines, lines], Dataset.range(2)),
        Dataset.range(3).flat_map(lambda _: lines),
    ):
        with pytest.raises(NotFoundError, match="unshardable"):
            auto_shard(dataset.node, FILE, 2, 0)
        assert parts(dataset, FILE_OR_DATA, 2) == parts(dataset, DATA, 2)


def test_nothing_is_rewritten_below_what_others_evaluate(folder):
    class Remote(Map):
        def input_fields(self):
            return {}

    lines = Dataset.from_files(folder(3))
    with pytest.raises(NotFoundError, match="unshardable"):
        auto_shard(Remote(lines.node, str), FILE, 2, 0)
    hinted = Remote(lines.shard(SHARD_HINT, SHARD_HINT).node, str)
    with pytest.raises(NotFoundError, match="SHARD_HINT"):
        auto_shard(hinted, HINT, 2, 0)


def test_hints():
    hinted = Dataset.range(10).shard(SHARD_HINT, SHARD_HINT).map(lambda x: x * 2)
    assert parts(hinted, HINT, 3) == [[0, 6, 12, 18], [2, 8, 14], [4, 10, 16]]
    two = hinted.concatenate(Dataset.range(3)).concatenate(hinted.take(2))
    assert parts(two, HINT, 2)[1] == [2, 6, 10, 14, 18, 0, 1, 2, 2, 6]
    for dataset in (Dataset.range(9), Dataset.range(9).shard(3, 1)):
        with pytest.raises(NotFoundError, match=r"shard\(SHARD_HINT, SHARD_HINT\)"):
            auto_shard(dataset.node, HINT, 2, 0)


@pytest.mark.parametrize(("num_shards", "index"), [(SHARD_HINT, 0), (4, SHARD_HINT)])
def test_a_hint_in_one_place(num_shards, index):
    with pytest.raises(InvalidArgumentError, match="for both"):
        Dataset.range(9).shard(num_shards, index)


@pytest.mark.parametrize("policy", [OFF, DYNAMIC, DATA, FILE_OR_DATA])
def test_a_hint_under_another_policy(policy):
    dataset = Dataset.range(9).shard(SHARD_HINT, SHARD_HINT)
    with pytest.raises(FailedPreconditionError, match=r"range.*HINT"):
        parts(dataset, policy, 2)


def test_a_hint_here():
    dataset = Dataset.range(9).shard(SHARD_HINT, SHARD_HINT)
    for evaluate in (list, lambda d: d.node.source_length()):
        with pytest.raises(FailedPreconditionError, match="data service"):
            evaluate(dataset)
    assert dataset.element_spec.dtype == np.int64
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    assert dataset.repeat().cardinality() == INFINITE_CARDINALITY
    assert Dataset.range(0).shard(SHARD_HINT, SHARD_HINT).cardinality() == 0
    assert dataset.node == pickle.loads(cloudpickle.dumps(dataset.node))


def test_what_does_not_change_stays_the_same_object():
    cached = Dataset.range(6).cache()
    hinted = Dataset.zip(cached, Dataset.range(6).shard(SHARD_HINT, SHARD_HINT))
    zipped = auto_shard(hinted.node, HINT, 2, 1)
    assert zipped.parents[0] is cached.node
    assert zipped.parents[1].index == 1


# Workers


@pytest.mark.parametrize(
    ("address", "addresses", "index"),
    [
        ("a:1", ["b:1", "a:1"], 1),
        ("tcp://a:1", ["b:1", "a:1"], 1),
        ("a:1", ["tcp://b:1", "tcp://a:1"], 1),
        ("mpi://a:1", ["tcp://a:1", "mpi://a:1"], 1),
        ("a:7", ["b", "a"], 1),
        ("tcp://a:7", ["b:%port%", "a:%port%"], 1),
        ("a:7", ["a:%port%", "a:7"], 1),
        ("a:7", ["a:6", "a", "a:%port%"], 1),
        ("A.example:7", ["b", "a.EXAMPLE:7"], 1),
        ("[::1]:7", ["[::2]", "[::1]"], 1),
    ],
)
def test_the_index_of_a_worker(address, addresses, index):
    assert worker_index(address, addresses) == index


@pytest.mark.parametrize(
    ("address", "addresses"),
    [
        ("a:1", []),
        ("a:1", ["b:1", "a:2"]),
        ("tcp://a:1", ["mpi://a:1"]),
        ("a:1", ["a:1x", "aa", "a.b"]),
    ],
)
def test_a_worker_that_is_not_configured(address, addresses):
    with pytest.raises(InvalidArgumentError, match=r"a:1 is not in .*\["):
        worker_index(address, addresses)


def test_an_address_that_is_none():
    with pytest.raises(InvalidArgumentError, match="not the address"):
        worker_index("", ["a"])


def test_workers_of_a_host_take_its_places_in_turn():
    addresses = list(DispatcherConfig(worker_addresses=["h:%port%", "h:2", "h"]).worker_addresses)
    for address, index in (("h:1", 0), ("h:2", 1), ("h:3", 2), ("h:1", 0)):
        assert worker_index(address, addresses) == index
        addresses[index] = address
    with pytest.raises(InvalidArgumentError, match=r"h:4 is not in .*h:1.*taken all entries"):
        worker_index("h:4", addresses)
