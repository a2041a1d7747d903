"""The global order, against a list of all elements, and against simulated fetches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.payload import pack_elements
from dataservice.read.buffers import Frame, OrderedBuffer
from dataservice.read.order import Order, Plan
from mpidist.errors import FailedPreconditionError

lengths_of_parts = st.lists(st.integers(0, 12), min_size=1, max_size=6)
count = st.integers(1, 7)
seeds = st.integers(0, 1 << 30)


def whole(lengths):
    """Return all elements as pairs of part and index, in the global order."""
    rounds = range(max(lengths))
    return [(part, r) for r in rounds for part, n in enumerate(lengths) if r < n]


class Fetcher:
    """A consumer that fetches the elements of its plans in random pieces."""

    def __init__(self, lengths, order, rng):
        self.lengths, self.order, self.rng = lengths, order, rng
        self.fetched = [order.mark(part) for part in range(len(lengths))]
        self.here = [set() for _ in lengths]

    def fetch(self, part):
        plan = self.order.plan(part, self.fetched[part])
        stop = min(self.lengths[part], plan.start + self.rng.randint(1, 7))
        if plan.until >= 0:
            stop = min(stop, plan.until)
        wanted = range(plan.start, max(stop, plan.start))
        self.here[part] |= {i for i in wanted if plan.period and i % plan.period == plan.offset}
        self.fetched[part] = stop = max(stop, plan.start)
        length = self.lengths[part]
        if self.order.note(part, min(stop, length), stop >= length):
            # The elements behind this end are dropped: they now belong to other consumers.
            end = self.order.end(part)
            self.fetched = [min(stop, end) for stop in self.fetched]
            self.here = [{i for i in held if i < end} for held in self.here]

    def next(self):
        """Return the next element of this consumer, or None at the end."""
        while True:
            part = self.order.missing()
            if part is None:
                if self.order.over:
                    return None
                part = self.order.part
                if self.order.index in self.here[part]:
                    element = (part, self.order.index)
                    self.order.step()
                    return element
                assert self.fetched[part] <= self.order.index, "it was passed over"
            for each in (part, self.rng.randrange(len(self.lengths))):
                self.fetch(each)


def read(lengths, consumers, begin, rng, most=None):
    """Return up to ``most`` elements of each consumer, and the state after them."""
    given_out, states = [], []
    for index in range(consumers):
        fetcher = Fetcher(lengths, Order(len(lengths), consumers, index, begin), rng)
        got = []
        while most is None or len(got) < most:
            element = fetcher.next()
            if element is None:
                break
            got.append(element)
        given_out.append(got)
        states.append(fetcher.order.state())
    return given_out, states


@given(lengths_of_parts, count, seeds)
def test_consumers_get_the_whole_in_turn(lengths, consumers, seed):
    given_out, _ = read(lengths, consumers, None, random.Random(seed))
    assert given_out == [whole(lengths)[i::consumers] for i in range(consumers)]


@given(lengths_of_parts, count, count, seeds, st.data())
def test_any_consumers_state_takes_any_number_of_consumers_on(lengths, before, after, seed, data):
    everything, rng = whole(lengths), random.Random(seed)
    steps = data.draw(st.integers(0, len(everything) // before))
    _, states = read(lengths, before, None, rng, steps)
    assert {state.position for state in states} == {steps * before}
    begin = data.draw(st.sampled_from(states))
    given_out, states = read(lengths, after, begin, rng)
    rest = everything[steps * before :]
    assert given_out == [rest[i::after] for i in range(after)]
    assert all(state.position >= len(everything) - after for state in states)


@given(lengths_of_parts, count, seeds, st.lists(st.integers(0, 5), max_size=5))
def test_states_of_what_went_on_from_states(lengths, consumers, seed, legs):
    everything, rng = whole(lengths), random.Random(seed)
    begin, position = None, 0
    for steps in legs:
        steps = min(steps, (len(everything) - position) // consumers)
        given_out, states = read(lengths, consumers, begin, rng, steps)
        stop = position + steps * consumers
        assert given_out == [everything[position + i : stop : consumers] for i in range(consumers)]
        begin, position = states[-1], stop
        assert begin.position == position


@given(lengths_of_parts, count, st.data())
def test_nothing_behind_a_mark_is_wanted_again(lengths, consumers, data):
    index = data.draw(st.integers(0, consumers - 1))
    rng = random.Random(data.draw(seeds))
    order = Order(len(lengths), consumers, index, None)
    fetcher = Fetcher(lengths, order, rng)
    marks = [0] * len(lengths)
    while (element := fetcher.next()) is not None:
        now = [order.mark(part) for part in range(len(lengths))]
        assert all(old <= new for old, new in zip(marks, now, strict=True))
        assert now[element[0]] > element[1]
        marks = now


def test_a_plan_ends_where_a_part_does():
    order = Order(2, 2, 0, None)
    assert order.plan(0, 0) == Plan(0, 1, 0)
    assert order.plan(1, 0) == Plan(0, 0, 0)
    assert order.note(1, 3, end=True) is True
    assert order.note(1, 3, end=True) is False
    assert order.plan(0, 0) == Plan(0, 1, 0, 3)
    assert order.plan(0, 3) == Plan(3, 2, 1)
    assert order.plan(1, 3) == Plan(3, 0, 0)


# Coordinated reads: rounds of one element for each consumer, through the buffer.


def fill(buffer, rng):
    """Put planned elements of a random part into a buffer, as pairs of part and index."""
    part = rng.randrange(3)
    plan = buffer.plan(part)
    wanted = [i for i in range(plan.start, plan.start + 9) if i % plan.period == plan.offset]
    wanted = wanted[: rng.randint(1, len(wanted))]
    parcel = pack_elements([(part, i) for i in wanted])
    buffer.put(Frame(parcel, len(wanted), 1, part, wanted[0], plan.period))
    buffer.note_extent(part, wanted[-1] + 1, end=False)


def rounds(buffer, rng, number):
    """Return the next ``number`` elements of a buffer."""
    got = []
    while len(got) < number:
        while not buffer._is_here():
            fill(buffer, rng)
        got.append(buffer.next())
    return got


@given(count.filter(lambda n: n > 1), st.integers(0, 20), seeds)
def test_every_round_has_one_element_for_each_consumer_from_one_part(consumers, number, seed):
    rng = random.Random(seed)
    for slot in range(consumers):
        buffer = OrderedBuffer("a user", Order(3, 1, 0, None), consumers, slot)
        expected = [(r % 3, (r // 3) * consumers + slot) for r in range(number)]
        assert rounds(buffer, rng, number) == expected
        state = buffer.state()
        assert state.position == number
        starts = [(number // 3 + (part < number % 3)) * consumers for part in range(3)]
        assert [part.start for part in state.parts] == starts
        assert [buffer.watermark(part) for part in range(3)] == starts


def test_an_end_is_an_error_in_coordinated_reads():
    buffer = OrderedBuffer("a user", Order(3, 1, 0, None), 2, 0)
    with pytest.raises(FailedPreconditionError, match=r"part 1 .* after 5 elements.*repeat"):
        buffer.note_extent(1, 5, end=True)
