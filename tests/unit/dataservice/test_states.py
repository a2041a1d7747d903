"""Passes that are put away and taken up again: the rest is what it would have been."""

import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from mpidist.errors import DataLossError, InvalidArgumentError, UnimplementedError

number = st.integers(1, 4)
seeds = st.integers(0, 3)

STEPS = st.one_of(
    st.builds(lambda n: lambda d: d.map(lambda x: x + n), number),
    st.builds(lambda n: lambda d: d.filter(lambda x: int(x) % (n + 1)), number),
    st.builds(lambda n, s: lambda d: d.shuffle(n, seed=s), number, seeds),
    st.builds(lambda n: lambda d: d.shuffle(n), number),
    st.builds(lambda n, s: lambda d: d.repeat(n).shuffle(3, s, False), st.integers(0, 2), seeds),
    st.builds(lambda n: lambda d: d.repeat(n), st.integers(0, 2)),
    st.builds(lambda n: lambda d: d.take(7 * n), number),
    st.builds(lambda n: lambda d: d.take_while(lambda x: int(x) < 5 * n), number),
    st.builds(lambda n: lambda d: d.scan(n, lambda last, x: (x, last + x)), number),
    st.builds(lambda n: lambda d: d.map(lambda x: x // n).unique(), number),
    st.builds(lambda n: lambda d: d.skip(n), st.integers(0, 3)),
    st.builds(lambda n: lambda d: d.shard(n, n - 1), number),
    st.builds(lambda n: lambda d: d.prefetch(n), number),
    st.builds(lambda n: lambda d: d.batch(n).unbatch(), number),
    st.builds(lambda n: lambda d: d.batch(3).rebatch(n).unbatch(), number),
    st.builds(
        lambda n, s: (
            lambda d: d.rejection_resample(lambda x: int(x) % 2, [n, 1], seed=s).map(lambda _, x: x)
        ),
        number,
        seeds,
    ),
    st.builds(lambda n: lambda d: d.enumerate(n).map(lambda i, x: i + x), number),
    st.builds(lambda n: lambda d: d.concatenate(Dataset.range(n).shuffle(2, 1)), number),
    st.builds(lambda n: lambda d: Dataset.zip(d, d.skip(n)).map(lambda a, b: a + b), number),
    st.builds(
        lambda n, b: (
            lambda d: d.interleave(lambda x: Dataset.range(int(x) % 5).shuffle(2, seed=1), n, b)
        ),
        number,
        number,
    ),
    st.builds(
        lambda n, s: lambda d: d.window(n, s).flat_map(lambda w: w.shuffle(2, 0)), number, number
    ),
    st.builds(lambda: lambda d: d.cache()),
    st.builds(
        lambda s: lambda d: Dataset.sample_from_datasets([d, Dataset.range(9)], seed=s), seeds
    ),
    st.builds(
        lambda n: (
            lambda d: Dataset.choose_from_datasets(
                [d, Dataset.range(50, 60)], Dataset.range(2).repeat(3 * n)
            )
        ),
        number,
    ),
    st.builds(
        lambda n: (
            lambda d: (
                d.map(lambda x: np.arange(int(x) % 6))
                .bucket_by_sequence_length(len, [2, 4], [n, 2, 3], padding_values=-1)
                .unbatch()
                .map(np.sum)
            )
        ),
        number,
    ),
    st.builds(
        lambda n, s: (
            lambda d: d.group_by_window(lambda x: int(x) % n, lambda key, g: g.shuffle(3, s), 4)
        ),
        number,
        seeds,
    ),
    st.builds(
        lambda n: lambda d: d.map(lambda x: np.arange(int(x) % 6)).padded_batch(n).map(np.sum),
        number,
    ),
)


@settings(deadline=None, max_examples=300)
@given(
    count=st.integers(0, 25),
    steps=st.lists(STEPS, max_size=4),
    place=st.integers(0, 40),
    epochs=st.integers(0, 2),
)
def test_the_rest_is_what_it_would_have_been(count, steps, place, epochs):
    dataset = Dataset.from_tensor_slices(np.arange(count))
    for step in steps:
        dataset = step(dataset)
    sent = cloudpickle.dumps(dataset)
    for _ in range(epochs):  # passes are numbered
        next(iter(dataset), None)
    elements = iter(dataset.take(200))
    for _ in range(place):
        next(elements, None)
    state = elements.get_state()
    rest = [int(element) for element in elements]
    assert isinstance(state, bytes)
    # In this process, and as in another one, where nothing is kept in memory.
    for again in (dataset, pickle.loads(sent)):
        later = iter(again.take(200))
        later.set_state(state)
        assert [int(element) for element in later] == rest
        assert next(later, "over") == "over"
        later.close()
    elements.close()


def test_the_state_is_small_and_costs_the_same_everywhere():
    dataset = Dataset.range(10**12).map(lambda i: i * 2).batch(8).repeat().prefetch(1)
    elements = iter(dataset)
    sizes = []
    for _ in range(3):
        for _ in range(50):
            next(elements)
        sizes.append(len(elements.get_state()))
    assert max(sizes) < 1000
    far = iter(dataset)
    far.set_state(elements.get_state())
    elements.close()
    far.close()


def test_a_state_from_the_middle_of_what_shuffle_holds():
    dataset = Dataset.range(100).shuffle(10, seed=1)
    elements = iter(dataset)
    first = [int(next(elements)) for _ in range(37)]
    later = iter(dataset)
    later.set_state(elements.get_state())
    assert sorted(first + [int(x) for x in later]) == list(range(100))


class Counter:
    """An iterator that can say where it is, in the words of others."""

    def __init__(self, names):
        self.at, self.read, self._names = 0, 0, names
        for name, function in zip(names, (lambda: {"at": self.at}, self._load), strict=True):
            setattr(self, name, function)

    def _load(self, state):
        self.at = state["at"]

    def __iter__(self):
        return self

    def __next__(self):
        self.at, self.read = self.at + 1, self.read + 1
        if self.at > 10:
            raise StopIteration
        return self.at


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
def test_iterators_that_say_where_they_are(names):
    made = []

    def factory():
        made.append(Counter(names))
        return made[-1]

    dataset = Dataset.from_generator(factory)
    elements = iter(dataset)
    for _ in range(4):
        next(elements)
    later = iter(dataset)
    later.set_state(elements.get_state())
    assert [int(x) for x in later] == [5, 6, 7, 8, 9, 10]
    assert made[-1].read == 7  # and not all again


def test_generators_are_read_again():
    dataset = Dataset.from_generator(lambda: iter(range(9))).batch(2)
    elements = iter(dataset)
    next(elements)
    later = iter(dataset)
    later.set_state(elements.get_state())
    assert [batch.tolist() for batch in later] == [[2, 3], [4, 5], [6, 7], [8]]


def test_files_go_on_at_their_place(tmp_path):
    for name, count in (("a", 3), ("b", 0), ("c", 4)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(count)))
    np.save(tmp_path / "d.npy", np.arange(5))
    text = Dataset.from_files(str(tmp_path / "*.txt"))
    for dataset in (text, Dataset.from_files(tmp_path / "d.npy")):
        all_of_them = [str(x) for x in dataset]
        for place in range(len(all_of_them) + 1):
            elements, later = iter(dataset), iter(dataset)
            for _ in range(place):
                next(elements)
            later.set_state(elements.get_state())
            assert [str(x) for x in later] == all_of_them[place:]
            elements.close()


def test_a_cache_in_a_file_goes_on_at_its_place(tmp_path):
    made = []
    path = str(tmp_path / "cache")
    dataset = Dataset.range(6).map(lambda i: made.append(1) or i).cache(path)
    assert len(list(dataset)) == 6
    elements, later = iter(dataset), iter(dataset)
    for _ in range(4):
        next(elements)
    later.set_state(elements.get_state())
    assert [int(x) for x in later] == [4, 5]
    assert len(made) == 6
    elements.close()


def test_wrong_states():
    dataset = Dataset.range(5).batch(2)
    elements = iter(dataset)
    state = elements.get_state()
    with pytest.raises(DataLossError, match="damaged"):
        elements.set_state(state[:-3])
    with pytest.raises(DataLossError, match="damaged"):
        elements.set_state(b"what")
    with pytest.raises(InvalidArgumentError, match=r"over range\(0, 5, 1\).batch\(2.* not over"):
        iter(Dataset.range(5).batch(3)).set_state(state)
    assert [batch.tolist() for batch in elements] == [[0, 1], [2, 3], [4]]


def test_consumers_that_share_elements_as_they_come_have_no_state(make_service):
    service = make_service(1)
    apply = distribute("parallel_epochs", service.target, job_name="job")
    elements = iter(Dataset.range(9).apply(apply))
    next(elements)
    with pytest.raises(UnimplementedError, match="deterministic=True"):
        elements.get_state()
    elements.close()


@pytest.mark.parametrize("path", [None, "kept"])
@pytest.mark.parametrize("place", range(13))
def test_a_cache_that_is_lost_is_filled_as_it_was(tmp_path, place, path):
    """By the pass that a state is from, or by the one whose elements were kept then."""
    below = Dataset.range(6).shuffle(6)
    dataset = (below.cache(str(tmp_path / path)) if path else below.cache()).repeat(3)
    sent = cloudpickle.dumps(dataset)
    elements = iter(dataset)
    begin = [int(next(elements)) for _ in range(place)]
    state = elements.get_state()
    rest = [int(element) for element in elements]
    every = begin + rest
    assert every == 3 * every[:6]
    if path:
        (tmp_path / path).unlink()
    later = iter(pickle.loads(sent))
    later.set_state(state)
    assert [int(element) for element in later] == rest


def lost_cache(file):
    """Return a pickled dataset with an empty cache over a file, and a state behind four of six."""
    file.write_text("0 1 2 3 4 5")
    dataset = Dataset.from_generator(lambda: map(int, file.read_text().split())).cache()
    sent = cloudpickle.dumps(dataset)
    assert len(list(dataset)) == 6
    with iter(dataset) as elements:
        for _ in range(4):
            next(elements)
        return sent, elements.get_state()


def test_a_lost_cache_over_a_shorter_source_ends(tmp_path):
    file = tmp_path / "numbers"
    sent, state = lost_cache(file)
    file.write_text("0 1")
    later = iter(pickle.loads(sent))
    later.set_state(state)
    assert list(later) == []


def test_a_lost_cache_over_a_broken_source_raises_its_error(tmp_path):
    file = tmp_path / "numbers"
    sent, state = lost_cache(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        iter(pickle.loads(sent)).set_state(state)
