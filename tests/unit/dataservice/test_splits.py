from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataservice.splits import Splits


@given(
    st.integers(0, 3000), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False)
)
def test_every_index_of_every_pass_once(length, workers, passes, random):
    splits = Splits(length)
    at = dict.fromkeys(range(workers), 0)
    got = {number: Counter() for number in range(passes)}
    while at:
        worker = random.choice(list(at))
        part = splits.next((7, at[worker]), workers)
        got[at[worker]].update(part)
        if not part:
            at[worker] += 1
            if at[worker] == passes:
                del at[worker]
    assert all(counts == Counter(range(length)) for counts in got.values())


def test_a_late_worker_finds_old_passes_given_out():
    splits = Splits(3)
    for number in range(3):
        while splits.next((number,), 1):
            pass
    assert [len(splits.next((number,), 2)) for number in range(4)] == [0, 0, 0, 1]


def test_a_slow_worker_still_gets_parts_of_an_old_pass():
    splits = Splits(100)
    slow = splits.next((0,), 2)
    fast = splits.next((1,), 2)
    assert (slow.start, fast.start) == (0, 0)
    assert splits.next((0,), 2).start == slow.stop


@given(st.integers(1, 20_000), st.integers(1, 8))
def test_parts_shrink_to_one(length, workers):
    splits = Splits(length)
    sizes = []
    while part := splits.next((0,), workers):
        sizes.append(len(part))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert max(sizes) <= max(length / workers / 4, 1)
