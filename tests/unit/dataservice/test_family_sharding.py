"""Dynamic sharding ('distributed_epoch') of pipelines of every shape."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataservice import Dataset, ShardingPolicy, distribute
from mpidist.errors import UnimplementedError

DYNAMIC = "distributed_epoch"
R = Dataset.range
WORDS = ["a", "bb", "ccc", "dd", "e", "ff", "ggg", "h", "i", "jjj", "kk"]

# Datasets that workers can divide. Every element comes exactly once and equals the local element.
EXACT = {
    "range": R(30),
    "range with a step": R(90, 0, -7),
    "tensor slices": Dataset.from_tensor_slices(np.arange(40).reshape(20, 2)),
    "slices of a structure": Dataset.from_tensor_slices({"x": np.arange(9), "y": (np.ones(9),)}),
    "text": Dataset.from_tensor_slices(WORDS),
    "a list": Dataset.from_source([{"n": i} for i in range(13)]),
    "a generator": Dataset.from_generator(range, (17,)),
    "a generator, repeated": Dataset.from_generator(range, (5,)).repeat(3),
    "a generator, then numbers": Dataset.from_generator(range, (5,)).concatenate(R(7)),
    "generators, repeated": R(9)
    .filter(lambda i: i % 2)
    .concatenate(Dataset.from_generator(range, (5,)))
    .repeat(2),
    "an iterable": Dataset.from_source({3, 1, 4}),
    "map": R(25).map(lambda i: i * i),
    "parallel map": R(25).map(lambda i: i * i, 3),
    "parallel map, in no order": R(25).map(lambda i: i * i, 3, deterministic=False),
    "filter": R(31).filter(lambda i: i % 3 == 0),
    "filter that takes all": R(31).filter(lambda i: False),
    "ignored errors": R(10).map(lambda i: 12 // (i % 4)).ignore_errors(),
    "flat_map": R(7).flat_map(lambda i: Dataset.range(i)),
    "interleave": R(7).interleave(lambda i: Dataset.range(i), cycle_length=3),
    "interleave of repeats": R(5).interleave(lambda i: Dataset.range(2).repeat(2), 2, 2),
    "interleave of zips": R(5).interleave(
        lambda i: Dataset.zip(Dataset.range(3), Dataset.range(9))
    ),
    "flat_map of shuffles": R(5).flat_map(lambda i: Dataset.range(i).shuffle(3)),
    "unbatch": Dataset.from_tensor_slices(np.arange(12).reshape(4, 3)).unbatch(),
    "repeat": R(11).repeat(3),
    "repeat of repeat": R(5).repeat(2).repeat(3),
    "repeat of fewer than workers": R(1).repeat(10),
    "repeat nothing": R(11).repeat(0),
    "shuffle": R(33).shuffle(8),
    "shuffle with a seed": R(33).shuffle(8, seed=1),
    "shuffle and repeat": R(9).shuffle(9).repeat(4),
    "repeat and shuffle": R(9).repeat(4).shuffle(9),
    "batch of one": R(9).batch(1),
    "prefetch": R(20).prefetch(4),
    "take": R(20).take(2),
    "take more than there is": R(3).take(9),
    "take all": R(20).filter(lambda i: i % 2).take(-1),
    "skip": R(20).skip(2),
    "skip all": R(20).skip(20),
    "shard": R(20).shard(3, 1),
    "take, skip and shard": R(50).skip(4).take(30).shard(4, 3).skip(1),
    "take and repeat": R(20).take(2).repeat(3),
    "map, then take": R(20).map(lambda i: -i).take(5),
    "empty": R(0),
    "one element": R(1),
    "zip": Dataset.zip(R(12), R(100, 112)),
    "zip of unequal ones": Dataset.zip(R(12), R(5)),
    "zip of a structure": Dataset.zip({"x": R(6), "y": (R(6), R(9))}),
    "zip of parts": Dataset.zip(R(12).skip(5), R(12).take(6)),
    "zip, shuffle, repeat": Dataset.zip(R(6), R(6)).shuffle(3).repeat(2),
    "zip with itself": Dataset.zip(*[R(8).map(lambda i: i + 1)] * 2),
    "concatenate": R(7).concatenate(R(50, 60)),
    "concatenate with nothing": R(0).concatenate(R(5)).concatenate(R(0)),
    "concatenate of shapes": R(7).filter(lambda i: i % 2).concatenate(R(4).shuffle(4)),
    "concatenate and repeat": R(3).concatenate(R(5)).repeat(3),
    "concatenate and take": R(7).concatenate(R(50, 60)).skip(3).take(9),
    "enumerate": Dataset.from_tensor_slices(WORDS).enumerate(),
    "enumerate and repeat": Dataset.from_tensor_slices(WORDS).enumerate(3).repeat(2),
    "cache": R(15).map(lambda i: i * i).cache(),
    "cache, repeat and shuffle": R(15).cache().repeat(3).shuffle(9),
    "cache a parallel map, take and repeat": R(15).map(lambda i: -i, 3).cache().take(9).repeat(2),
    "windows": R(23).window(4, 2).map(lambda w: np.array([*w, -1])),
    "windows in pieces": R(23).window(5, 1, 2, True).flat_map(lambda w: w.batch(5)),
    "windows, cached": R(23).window(3).map(lambda w: sum(w)).cache().repeat(2),
    "enumerate and filter": R(10).enumerate().filter(lambda i, x: i % 2),
    "batch": R(20).batch(3),
    "batch, whole ones only": R(20).batch(3, drop_remainder=True),
    "batch and repeat": R(20).batch(3).repeat(2),
    "repeat and batch": R(7).repeat(3).batch(4),
    "repeat and batch, whole ones only": R(25).repeat(2).batch(4, drop_remainder=True),
    "batches of batches": R(20).batch(2).batch(3),
    "padded batch": R(9).map(lambda i: np.full(int(i), i)).padded_batch(4, padding_values=-1),
    "shard after batch": R(19).batch(2).shard(2, 0),
    "take after batch": R(19).batch(2).skip(1).take(5),
    "windows after batch": R(19).batch(2).window(3).map(lambda w: np.array([b[0] for b in w])),
    "cache after batch": R(19).batch(2).cache().repeat(2),
    "enumerate after batch": R(19).batch(2).enumerate(),
    "zip of batches": Dataset.zip(R(19).batch(2), R(19)),
    "shuffle of all": R(33).shuffle(33),
    "shuffle of all, unbatched": R(33).shuffle(40, seed=1).batch(4).unbatch(),
    "take after repeat": R(9).repeat().take(30),
    "skip and shard after repeat": R(9).repeat(3).skip(5).shard(2, 1),
    "enumerate after repeat": R(9).repeat(2).enumerate(),
    "windows after repeat": R(9).repeat(2).window(4).map(lambda w: np.array([*w, -1])),
    "zip with what never ends": Dataset.zip(R(9), R(2).repeat()),
    "concatenate what is repeated": R(9).concatenate(R(9).repeat(2)),
    "a mixture of repeats": Dataset.sample_from_datasets([R(9), R(4).repeat(2)], seed=1),
    "the first of an endless source": Dataset.counter(3, 2).take(40),
    "a mixture": Dataset.sample_from_datasets([R(9), R(50, 60)], [0.7, 0.3], seed=1),
    "a mixture, shuffled": Dataset.sample_from_datasets([R(9), R(50, 60)]).shuffle(4).repeat(2),
}

# Datasets with groups that end where the part of a worker ends.
GROUPED = {
    "filter and batch": R(20).filter(lambda i: i % 5).batch(3),
    "shuffle of all, padded batch": R(9)
    .map(lambda i: np.full(int(i), i))
    .shuffle(9)
    .padded_batch(4, padding_values=-1),
    "buckets": R(1, 10)
    .map(lambda i: np.full(int(i), i))
    .bucket_by_sequence_length(len, [4], [2, 3], padding_values=-1),
    "groups": R(30).group_by_window(lambda i: i % 3, lambda key, group: group.batch(2), 4),
    "rebatch": R(20).batch(4).rebatch(3),
    "shuffled batches": R(20).shuffle(9).batch(3).prefetch(2),
    "batches of all, shuffled": R(20).shuffle(20).batch(3).prefetch(2),
    "batches of a mixture": Dataset.sample_from_datasets([R(20), R(9)], [1, 2]).batch(3),
    "batch in an interleave": R(6).interleave(lambda i: Dataset.range(i).batch(2)),
}

REFUSED = {
    "take after shuffle": R(9).shuffle(8).take(3),
    "take_while": R(9).take_while(lambda i: i < 5),
    "scan": R(9).scan(0, lambda total, i: (total + i, total)),
    "unique": R(9).map(lambda i: i % 4).unique(),
    "skip after filter": R(9).filter(lambda i: i % 2).skip(1),
    "shard after batch": R(9).filter(bool).batch(2).shard(2, 0),
    "enumerate after shuffle": R(9).shuffle(8).enumerate(),
    "enumerate after filter": R(9).filter(lambda i: i % 2).enumerate(),
    "zip of what is shuffled": Dataset.zip(R(9).shuffle(8), R(9)),
    "zip of what is filtered": Dataset.zip(R(9), R(9).filter(lambda i: i % 2)),
    "zip with a generator": Dataset.zip(R(9), Dataset.from_generator(range, (9,))),
    "window after filter": R(9).filter(lambda i: i % 2).window(2),
    "cache after shuffle": R(9).shuffle(9).cache(),
    "cache after filter": R(9).filter(bool).batch(2).cache(),
    "cache in a file": R(9).cache("never written"),
    "sample_from_datasets": Dataset.sample_from_datasets([R(9), R(9).filter(bool)]),
    "sample that stops": Dataset.sample_from_datasets([R(9)] * 2, stop_on_empty_dataset=True),
    "choose_from_datasets": Dataset.choose_from_datasets([R(9), R(9)], R(2)),
}


def in_steady_order(node):
    return node.indexed_length() is not None and node.same_every_epoch


def plain(element):
    """Return an element as JSON-compatible values."""
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    if isinstance(element, tuple):
        return [plain(value) for value in element]
    return np.asarray(element).tolist()


def counts(elements):
    return Counter(json.dumps(plain(element)) for element in elements)


def numbers(elements):
    """Count the numbers in arrays of any shape, without the (negative) padding."""
    return Counter(int(n) for element in elements for n in np.ravel(element) if n >= 0)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_every_element_comes_once(make_service, name, workers):
    service = make_service(workers)
    remote = EXACT[name].apply(distribute(DYNAMIC, service.target))
    assert counts(remote) == counts(EXACT[name])
    if remote.cardinality() >= 0:
        assert len(remote) == len(list(remote))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_hold_every_element_once(make_service, name, workers):
    service = make_service(workers)
    remote = GROUPED[name].apply(distribute(DYNAMIC, service.target))
    assert numbers(remote) == numbers(GROUPED[name])


@pytest.mark.parametrize("name", [name for name in EXACT if in_steady_order(EXACT[name].node)])
def test_a_fixed_order_is_that_of_one_process(make_service, name):
    local = [json.dumps(plain(element)) for element in EXACT[name]]
    apply = distribute(DYNAMIC, make_service(3).target, deterministic=True, num_shards=5)
    assert [json.dumps(plain(element)) for element in EXACT[name].apply(apply)] == local


@pytest.mark.parametrize("name", ["filter", "flat_map", "shuffle", "a generator", "repeat"])
def test_a_fixed_order_does_not_depend_on_the_workers(make_service, name):
    dataset = EXACT["shuffle with a seed" if name == "shuffle" else name]

    def run(workers):
        service = make_service(workers)
        apply = distribute(DYNAMIC, service.target, deterministic=True, num_shards=5)
        return [json.dumps(plain(element)) for element in dataset.apply(apply)]

    one, three = run(1), run(3)
    assert one == three
    assert Counter(one) == counts(dataset)


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("name", ["a generator", "filter", "filter that takes all", "flat_map"])
def test_parts_without_elements_end_too(make_service, name, consumers):
    service = make_service(2)

    def read(index):
        sharing = {"job_name": "j", "consumer_index": index, "num_consumers": consumers}
        apply = distribute(DYNAMIC, service.target, deterministic=True, num_shards=7, **sharing)
        return list(EXACT[name].apply(apply))

    with ThreadPoolExecutor(consumers) as pool:
        found = list(pool.map(read, range(consumers)))
    assert counts(element for one in found for element in one) == counts(EXACT[name])
    sizes = [len(one) for one in found]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("taken", range(0, 18, 4))
def test_a_state_of_a_fixed_order_with_parts_without_elements(make_service, taken):
    apply = distribute(DYNAMIC, make_service(2).target, deterministic=True, num_shards=4)
    remote = EXACT["a generator"].apply(apply)
    with iter(remote) as before:
        found = [next(before) for _ in range(taken)]
        state = before.get_state()
    with iter(remote) as after:
        after.set_state(state)
        found += list(after)
    assert found == list(range(17))


@pytest.mark.parametrize("mode", [DYNAMIC, ShardingPolicy.DYNAMIC])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dealt_out_is_refused_at_once(name, mode):
    apply = distribute(mode, "localhost:1")
    with pytest.raises(UnimplementedError, match="cannot be split between workers"):
        REFUSED[name].apply(apply)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_goes_after_distribute_or_as_copies(make_service, name):
    if any(word in name for word in ("never ends", "window", "file", "stops")):
        return
    service = make_service(1)
    copy = REFUSED[name].apply(distribute("parallel_epochs", service.target))
    if "shuffle" in name or "sample" in name:
        assert len(list(copy)) == len(list(REFUSED[name]))
    else:
        assert counts(copy) == counts(REFUSED[name])


@pytest.mark.parametrize("form", ["text", "npy"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_files(make_service, tmp_path, form, shuffled):
    for number in range(5):
        rows = np.arange(number) + 100 * number
        path = tmp_path / f"part-{number}.{'txt' if form == 'text' else 'npy'}"
        if form == "text":
            path.write_text("".join(f"{row}\n" for row in rows))
        else:
            np.save(path, rows)
    dataset = Dataset.from_files(str(tmp_path / "part-*"), form)
    dataset = dataset.shuffle(5) if shuffled else dataset
    remote = dataset.apply(distribute(DYNAMIC, make_service(2).target))
    assert counts(remote) == counts(dataset)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("elements", [1, 2, 10])
def test_repetition_for_ever_with_few_elements(make_service, where, elements):
    service = make_service(5)
    apply = distribute(DYNAMIC, service.target)
    dataset = R(elements)
    dataset = dataset.repeat().apply(apply) if where == "before" else dataset.apply(apply).repeat()
    with iter(dataset) as endless:
        assert {int(next(endless)) for _ in range(20 * elements)} == set(range(elements))
        for worker in service.workers[1:]:
            worker.stop()
        assert {int(next(endless)) for _ in range(20 * elements)} == set(range(elements))


HALF = {}


class Waits:
    """A function that holds back the second half of the elements until an event is set."""

    def __init__(self, elements):
        self._elements = elements

    def __call__(self, i, x):
        assert i < self._elements or HALF[self._elements].wait(30)
        return i, x


@pytest.mark.parametrize("elements", [10, 200])
def test_workers_that_stop_lose_nothing_and_double_nothing(make_service, elements):
    service = make_service(3)
    HALF[elements] = threading.Event()
    dataset = R(elements).concatenate(R(elements)).enumerate().map(Waits(elements)).repeat(2)
    with iter(dataset.apply(distribute(DYNAMIC, service.target))) as remote:
        found = [next(remote)]
        service.workers[0].stop()
        HALF[elements].set()
        found += list(remote)
    assert counts(found) == counts(R(elements).concatenate(R(elements)).enumerate().repeat(2))


@pytest.mark.parametrize("name", ["range", "zip", "concatenate", "enumerate", "a generator"])
def test_a_state_goes_on_where_it_was(make_service, name):
    service = make_service(2)
    remote = EXACT[name].apply(distribute(DYNAMIC, service.target))
    with iter(remote) as before:
        found = [next(before) for _ in range(4)]
        state = before.get_state()
    with iter(remote) as after:
        after.set_state(state)
        found += list(after)
    assert counts(found) == counts(EXACT[name])
