from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataservice.dispatch.splits import Cursors, Granted
from dataservice.proto import dataservice_pb2 as pb

pass_numbers = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(
    st.integers(0, 3000),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_index_of_every_pass_once(length, workers, passes, restored, random):
    cursors = Cursors(length)
    at = dict.fromkeys(range(workers), 0)
    got = {number: Counter() for number in range(passes)}
    while at:
        worker = random.choice(list(at))
        part = cursors.next((7, at[worker]), workers)
        got[at[worker]].update(part)
        if not part:
            at[worker] += 1
            if at[worker] == passes:
                del at[worker]
        if restored:
            cursors = Cursors(length, cursors.state())
    assert all(counts == Counter(range(length)) for counts in got.values())


def test_a_late_worker_finds_old_passes_given_out():
    cursors = Cursors(3)
    for number in range(3):
        while cursors.next((number,), 1):
            pass
    assert [len(cursors.next((number,), 2)) for number in range(4)] == [0, 0, 0, 1]


def test_a_slow_worker_still_gets_parts_of_an_old_pass():
    cursors = Cursors(100)
    slow = cursors.next((0,), 2)
    fast = cursors.next((1,), 2)
    assert (slow.start, fast.start) == (0, 0)
    assert cursors.next((0,), 2).start == slow.stop


@given(st.integers(1, 20_000), st.integers(1, 8))
def test_parts_shrink_to_one(length, workers):
    cursors = Cursors(length)
    sizes = []
    while part := cursors.next((0,), workers):
        sizes.append(len(part))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert max(sizes) <= max(length / workers / 4, 1)


def test_the_state_of_cursors_tells_what_is_over_from_what_has_not_begun():
    assert Cursors(2).state() == []
    cursors = Cursors(2)
    while cursors.next((3,), 1):
        pass
    (state,) = cursors.state()
    assert (list(state.passes), state.over) == ([3], True)
    assert len(Cursors(2, [state]).next((3,), 1)) == 0
    assert len(Cursors(2, [state]).next((4,), 1)) == 1


@given(st.integers(1, 200), st.lists(pass_numbers, max_size=20), st.integers(0, 20))
def test_cursors_go_on_from_a_state_as_if_nothing_had_been(length, asked, when):
    cursors = Cursors(length)
    for passes in asked[:when]:
        cursors.next(passes, 2)
    again = Cursors(length, cursors.state())
    rest = asked[when:]
    assert [again.next(each, 2) for each in rest] == [cursors.next(each, 2) for each in rest]


splits = st.builds(lambda start, size: range(start, start + size), st.integers(0, 50), st.just(3))
grants = st.lists(st.tuples(pass_numbers, splits), max_size=20)


def granted_of(given_out):
    granted = Granted()
    for passes, split in given_out:
        granted.add(passes, split)
    return granted


@given(grants)
def test_a_number_stands_for_the_same_split_for_good(given_out):
    granted = granted_of(given_out)
    for passes in {passes for passes, _ in given_out}:
        expected = [split for each, split in given_out if each == passes]
        assert granted.count(passes) == len(expected)
        assert [granted.get(passes, i) for i in range(len(expected) + 1)] == [*expected, None]
        assert granted.get(passes, -1) is None


@given(grants)
def test_what_was_granted_is_the_same_after_it_has_been_a_message(given_out):
    granted = granted_of(given_out)
    state = [pb.Splits.FromString(each.SerializeToString()) for each in granted.state()]
    assert Granted.of(state) == granted


@given(grants, pass_numbers, st.integers(0, 8))
def test_what_comes_before_a_checkpoint_is_forgotten_and_keeps_its_numbers(
    given_out, passes, number
):
    granted = granted_of(given_out)
    number = min(number, granted.count(passes))
    after = granted.after(passes, number)
    for each in {passes, *(each for each, _ in given_out)}:
        count = granted.count(each)
        if each < passes:
            assert after.count(each) == 0
            continue
        first = number if each == passes else 0
        assert after.count(each) == count
        assert [after.get(each, i) for i in range(first)] == [None] * first
        kept = range(first, count)
        assert [after.get(each, i) for i in kept] == [granted.get(each, i) for i in kept]
    assert after.after(passes, number) == after
    assert Granted.of(after.state()) == after


def test_a_grant_goes_on_counting_after_its_beginning_was_forgotten():
    granted = granted_of([((0,), range(3)), ((0,), range(3, 6))]).after((0,), 2)
    assert granted.count((0,)) == 2
    granted.add((0,), range(6, 9))
    assert (granted.get((0,), 1), granted.get((0,), 2)) == (None, range(6, 9))
