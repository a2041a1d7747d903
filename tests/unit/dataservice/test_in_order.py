"""Transformations that depend on the order of elements, against plain Python."""

import itertools

import numpy as np
import pytest
from _cases.data_readers import goes_on_from, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError

numbers = st.lists(st.integers(0, 6), max_size=15)
place = st.integers(0, 16)


def of(values):
    """Return a dataset of integers."""
    return Dataset.from_tensor_slices(np.array(values, np.int64))


# take_while


@settings(deadline=None)
@given(numbers, st.integers(0, 7), place)
def test_take_while(values, limit, taken):
    dataset = of(values).take_while(lambda x: x < limit)
    expected = list(itertools.takewhile(lambda x: x < limit, values))
    assert goes_on_from(dataset, taken) == expected
    assert goes_on_from(dataset.repeat(2), taken) == expected * 2
    assert dataset.cardinality() == (-2 if values else 0)
    assert dataset.element_spec == of(values).element_spec


def test_take_while_of_tuples_and_what_never_ends():
    pairs = Dataset.zip(Dataset.range(9), Dataset.range(9)).repeat()
    assert plain(list(pairs.take_while(lambda a, b: a + b < 4))) == [(0, 0), (1, 1)]


def test_take_while_asks_for_nothing_behind_its_end():
    made = []
    dataset = Dataset.range(9).map(lambda x: made.append(int(x)) or x).take_while(lambda x: x < 2)
    with iter(dataset) as elements:
        assert plain(list(elements)) == [0, 1]
        assert list(elements) == []
    assert made == [0, 1, 2]


@pytest.mark.parametrize(
    ("said", "expected"),
    [(np.bool_(True), 3), (np.array(True), 3), (np.array(False), 0), (2, 3), (np.int32(0), 0)],
)
def test_answers_of_other_kinds(said, expected):
    assert len(list(Dataset.range(3).take_while(lambda x: said))) == expected


@pytest.mark.parametrize("said", [None, "yes", np.array([True]), 1.0, [], object()])
def test_answers_that_are_neither_yes_nor_no(said):
    with pytest.raises(InvalidArgumentError, match=r"take_while returned .* return a bool"):
        list(Dataset.range(3).take_while(lambda x: said))


def test_an_error_of_a_predicate_is_that_of_one_element():
    dataset = Dataset.range(6).take_while(lambda x: bool(6 // (x - 2)) and x < 4)
    with np.errstate(divide="raise"):
        assert plain(list(dataset.ignore_errors())) == [0, 1, 3]


# scan


@settings(deadline=None)
@given(numbers, place)
def test_scan(values, taken):
    dataset = of(values).scan((0, {"most": 0}), totals)
    expected = list(
        zip(itertools.accumulate(values), itertools.accumulate(values, max), strict=True)
    )
    assert goes_on_from(dataset, taken) == expected
    assert goes_on_from(dataset.repeat(2), taken) == expected * 2
    assert len(dataset) == len(values)


def totals(state, x):
    total, most = state[0] + x, max(state[1]["most"], int(x))
    return (total, {"most": most}), (total, most)


def test_scan_gets_tuples_as_they_are_and_says_what_its_elements_are_like():
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
    dataset = pairs.scan("", lambda text, pair: (f"{text}{pair[0]}", [pair[0], pair[1], 1.5]))
    assert dataset.element_spec == ArraySpec((3,), np.float64)
    assert plain(list(dataset)) == [[n, n, 1.5] for n in range(3)]
    endless = Dataset.range(3).repeat().scan(0, lambda count, x: (count + 1, count))
    assert plain(list(endless.take(5))) == [*range(5)]
    assert endless.cardinality() == -1


def test_a_state_is_changed_by_nobody():
    initial, kept = {"sum": np.zeros(2)}, np.zeros(2)

    def add(state, x):
        with pytest.raises(ValueError, match="read-only"):
            state["sum"] += x
        np.add(state["sum"], x, out=kept)
        state["more"] = 1
        return {"sum": kept}, kept

    dataset = Dataset.range(1, 4).scan(initial, add)
    initial["sum"] += 7
    initial["sum"] = None
    for _ in range(2):
        found = []
        for element in dataset:
            found.append(element.tolist())
            element += 100
        assert found == [[1, 1], [3, 3], [6, 6]]


@pytest.mark.parametrize("result", [3, (1, 2, 3), [1, 2], None, (1, None)])
def test_scan_needs_pairs(result):
    with pytest.raises(InvalidArgumentError, match=r"scan returned .* a state and an element"):
        list(Dataset.range(3).scan(0, lambda state, x: result))


def test_an_error_leaves_the_state_as_it_was():
    dataset = Dataset.range(6).scan(0, lambda total, x: (total + 6 // (x - 2) * 0 + x, total))
    with np.errstate(divide="raise"):
        assert plain(list(dataset.ignore_errors())) == [0, 0, 1, 4, 8]


# unique


@settings(deadline=None)
@given(numbers, place)
def test_unique(values, taken):
    expected = list(dict.fromkeys(values))
    assert goes_on_from(of(values).unique(), taken) == expected
    assert goes_on_from(of(values).repeat(2).unique(), taken) == expected
    assert goes_on_from(of(values).unique().repeat(2), taken) == expected * 2
    assert of(values).unique().cardinality() == (-2 if values else 0)
    assert of(values).unique().element_spec == of(values).element_spec


WORDS = np.array(["a", "abc"])
SIMILAR = [
    np.int64(1), np.float64(1), np.int32(1), np.bool_(True), "1", b"1", np.zeros(0),
    np.zeros((0, 1)), np.array([1]), np.array([1, 0]), np.array([[1, 0]]),
    np.array([1, 0], np.int32), (1, 0), (0, 1), (1, (0,)), ((1,), 0), {"a": 1, "b": 0},
    {"a": 0, "b": 1}, {"a": 1}, {"a": (1, {"b": 0})}, (), ("a", "bc"), ("ab", "c"),
    WORDS, WORDS[0], WORDS.astype("S3"), np.datetime64("2020-01-01"),
]  # fmt: skip


def test_what_differs_is_not_the_same():
    dataset = Dataset.from_source(SIMILAR)
    assert len(list(dataset.unique())) == len(SIMILAR)
    assert len(list(dataset.concatenate(dataset).unique())) == len(SIMILAR)


@pytest.mark.parametrize(
    "pair",
    [
        ({"x": 1, "y": "b"}, {"y": "b", "x": 1}),
        (WORDS, WORDS.astype("U9")),
        (np.array(["a"], "U1")[0], np.array(["a"], "U7")[0]),
        (np.arange(6)[::2], np.array([0, 2, 4])),
        (np.float64("nan"), np.float64("nan")),
        ([1, 2], np.array([1, 2])),
        (WORDS, WORDS.astype(object)),
        (np.array([b"a"], object), np.array([b"a"])),
    ],
)
def test_what_is_the_same(pair):
    assert len(list(Dataset.from_source(pair).unique())) == 1


def test_unique_is_for_what_has_a_value():
    with pytest.raises(InvalidArgumentError, match="unique needs elements of arrays, numbers and"):
        list(Dataset.from_source([object()]).unique())


# In a data service


@pytest.mark.parametrize("policy", ["distributed_epoch", "parallel_epochs"])
def test_behind_a_service(make_service, policy):
    apply = distribute(policy, make_service(1).target, deterministic=policy != "parallel_epochs")
    dataset = Dataset.range(9).apply(apply).take_while(lambda x: x < 5)
    assert plain(list(dataset)) == [*range(5)]


COPIED = {
    "take_while": lambda d: d.take_while(lambda x: x < 70),
    "scan": lambda d: d.scan(np.zeros(2), lambda total, x: (total + x, total.sum())),
    "unique": lambda d: d.map(lambda x: x // 2).repeat(2).unique(),
}


@pytest.mark.parametrize("name", COPIED)
def test_copies_of_workers_go_on_where_they_were(make_service, name):
    dataset = COPIED[name](Dataset.range(100))
    remote = dataset.apply(distribute("parallel_epochs", make_service(1).target))
    with iter(remote) as elements:
        found = [next(elements) for _ in range(30)]
        state = elements.get_state()
    with iter(dataset.apply(distribute("parallel_epochs", make_service(1).target))) as elements:
        elements.set_state(state)
        assert plain([*found, *elements]) == plain(list(dataset))


def test_records_of_other_fields_are_others():
    one = np.zeros((), [("a", "i4"), ("b", "f4")])
    other = np.zeros((), [("a", "f4"), ("b", "i4")])
    assert len(list(Dataset.from_generator(lambda: iter([one, other, one])).unique())) == 2
