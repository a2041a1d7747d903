"""Test cases for every store, and a model store for comparison."""

from __future__ import annotations

import re
import threading
from collections import deque
from datetime import timedelta

import pytest
from hypothesis import strategies as st

from mpidist import DistStoreError, PrefixStore, QueueEmptyError

SHORT_S = 0.05
LIMIT_S = 30.0


def values(store):
    store.set("a", "one")
    assert store.get("a") == b"one"
    store.set("a", b"\x00\xff")
    assert store.get("a") == b"\x00\xff"
    store.set("a", bytearray(b"copied"))
    assert store.get("a") == b"copied"
    assert type(store.get("a")) is bytes


def odd_values_and_keys(store):
    long = "k" * 100_000
    keys = ["", "ключ/ü", "with\0nul", long, long + "'", "b%_*?#"]
    for number, key in enumerate(keys):
        store.set(key, str(number))
    assert store.multi_get(keys) == [b"%d" % number for number in range(len(keys))]
    assert set(keys) <= set(store.list_keys())
    store.set("empty", "")
    assert store.get("empty") == b""
    assert store.check(["empty"])
    store.set("text", "é")
    assert store.get("text") == "é".encode()
    store.set("large", bytes(range(256)) * 40_000)
    assert store.get("large") == bytes(range(256)) * 40_000


def sums(store):
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    for text, total in (("", 1), ("12a", 13), (" 7 ", 8), ("+7", 8), ("2.5", 3)):
        store.set("n", text)
        assert store.add("n", 1) == total
    store.set("n", str((1 << 63) - 1))
    for text, match in (("x1", "key .*n'.*not a number"), (str((1 << 63) - 1), "64 bits")):
        store.set("n", text)
        with pytest.raises(ValueError, match=match):
            store.add("n", 1)
        assert store.get("n") == text.encode()


def appended(store):
    store.append("a", "x")
    store.append("a", b"\xff")
    store.append("a", "")
    assert store.get("a") == b"x\xff"


def compared(store):
    assert store.compare_set("c", "some", "new") == b"some"
    assert not store.check(["c"])
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", b"first", b"second") == b"second"
    assert store.get("c") == b"second"
    store.set("c", "")
    assert store.compare_set("c", "", "again") == b"again"


def several(store):
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    with pytest.raises(ValueError, match="1 keys and 2 values"):
        store.multi_set(["c"], ["1", "2"])
    assert not store.check(["c"])
    sizes = [0, 1 << 20, 3, 0, 100_000]
    names = [str(number) for number in range(len(sizes))]
    store.multi_set(names, [b"x" * size for size in sizes])
    assert [len(value) for value in store.multi_get(names)] == sizes


def there_or_not(store):
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.check(["a", "b"])
    assert store.check(("a",))
    assert store.check([])
    assert not store.check(["a", "c"])
    assert sorted(store.list_keys()) == ["a", "b"]
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert store.list_keys() == ["b"]
    assert not store.check(["a"])


def counted(store):
    """Check the number of keys. A prefix store counts the keys of other users, too."""
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    store.set("a", "3")
    store.queue_push("q", "1")
    assert store.num_keys() == before + 2
    store.delete_key("a")
    assert store.num_keys() == before + 1


def queues(store):
    assert store.queue_len("q") == 0
    for value in ("1", b"2", ""):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert store.check(["q"])
    store.wait(["q"])
    assert "q" not in store.list_keys()
    assert store.delete_key("q") is False
    assert [store.queue_pop("q"), store.queue_pop("q", False), store.queue_pop("q")] == [
        b"1",
        b"2",
        b"",
    ]
    assert not store.check(["q"])
    with pytest.raises(QueueEmptyError, match=r"queue '.*q' is empty"):
        store.queue_pop("q", block=False)


def waits_that_time_out(store):
    store.set("there", "1")
    store.queue_push("q", "1")
    store.set_timeout(SHORT_S)
    assert store.timeout == timedelta(seconds=SHORT_S)
    with pytest.raises(DistStoreError, match=r"Store.*missing' within 0.05 s"):
        store.get("missing")
    for call in (lambda: store.get("q"), lambda: store.queue_pop("there")):
        with pytest.raises(DistStoreError, match=r"within 0\.05 s"):
            call()
    with pytest.raises(DistStoreError, match=r"there', .*missing' within 0.05 s"):
        store.multi_get(["there", "missing"])
    store.set_timeout(timedelta(seconds=LIMIT_S))
    with pytest.raises(DistStoreError, match=r"missing' within 0.02 s"):
        store.wait(["missing"], timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="within 0 s"):
        store.wait(["missing"], 0)
    store.wait(["there"], 0)
    store.set_timeout(0)
    assert store.add("n", 1) == 1
    assert store.get("there") == b"1"
    with pytest.raises(DistStoreError, match="within 0 s"):
        store.get("missing")
    assert store.get("n") == b"1"


def barriers(store):
    store.barrier("alone", 1)
    assert store.check(["alone/last_member"])
    store.barrier("alone", 1, timedelta(seconds=LIMIT_S))
    with pytest.raises(DistStoreError, match="two/last_member"):
        store.barrier("two", 2, SHORT_S)
    with pytest.raises(ValueError, match="at least one"):
        store.barrier("none", 0)


def wrong_arguments(store):
    for call in (
        lambda: store.set(1, "x"),
        lambda: store.set(b"k", "x"),
        lambda: store.set("k", 1),
        lambda: store.set("k", None),
        lambda: store.get(None),
        lambda: store.add("k", 1.5),
        lambda: store.add("k", "1"),
        lambda: store.check("k"),
        lambda: store.check([1]),
        lambda: store.wait("k"),
        lambda: store.multi_get("k"),
        lambda: store.multi_set(["k"], "v"),
        lambda: store.multi_set(["k"], [1]),
        lambda: store.append("k", 1),
        lambda: store.compare_set("k", 1, "x"),
        lambda: store.queue_push("k", 1),
        lambda: store.queue_pop(1),
        lambda: store.set_timeout(None),
    ):
        with pytest.raises(TypeError):
            call()
    assert not store.check(["k"])
    for call in (lambda: store.set_timeout(-1), lambda: store.wait(["k"], -1)):
        with pytest.raises(ValueError, match="negative"):
            call()
    with pytest.raises(ValueError, match="surrogates"):
        store.set("\ud800", "x")


def cloned(store):
    store.set("a", "1")
    other = store.clone()
    assert type(other) is type(store)
    other.set("b", "2")
    assert (store.get("b"), other.get("a")) == (b"2", b"1")
    before = store.timeout
    other.set_timeout(7)
    assert store.timeout == before
    while isinstance(other, PrefixStore):
        other = other.underlying_store
    if hasattr(other, "close"):
        other.close()
    assert store.get("b") == b"2"


def in_threads(*calls):
    """Run each call on its own thread. Return the results, or the errors."""
    results = [None] * len(calls)

    def run(place, call):
        try:
            results[place] = call()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return results


def threads_add(store):
    def add():
        return [store.add("n", 1) for _ in range(100)]

    totals = in_threads(*[add] * 8)
    assert sorted(total for part in totals for total in part) == list(range(1, 801))
    assert store.get("n") == b"800"


def threads_release_each_other(store):
    def first():
        store.set("ping", "1")
        return store.get("pong")

    def second():
        store.wait(["ping"])
        store.append("pong", store.get("ping") + b"2")

    def third():
        return store.multi_get(["ping", "pong"])

    assert in_threads(third, first, second) == [[b"1", b"12"], b"12", None]


def threads_share_a_queue(store):
    def take():
        return [store.queue_pop("q") for _ in range(25)]

    def give(start):
        for number in range(start, start + 50):
            store.queue_push("q", str(number))

    taken = in_threads(*[take] * 4, lambda: give(0), lambda: give(50))
    assert sorted(int(value) for part in taken[:4] for value in part) == list(range(100))
    assert store.queue_len("q") == 0


def threads_race(store):
    def run(number):
        return store.compare_set("winner", "", f"thread {number}") == b"thread %d" % number

    won = in_threads(*[lambda number=number: run(number) for number in range(8)])
    assert sum(won) == 1
    assert store.get("winner") == b"thread %d" % won.index(True)


def threads_meet(store):
    assert in_threads(*[lambda: store.barrier("all", 5)] * 5) == [None] * 5


CASES = [
    values,
    odd_values_and_keys,
    sums,
    appended,
    compared,
    several,
    there_or_not,
    queues,
    waits_that_time_out,
    barriers,
    wrong_arguments,
    cloned,
    threads_add,
    threads_release_each_other,
    threads_share_a_queue,
    threads_race,
    threads_meet,
]
NAMES = [case.__name__ for case in CASES]


class Model:
    """A model of a store: a dict, and queues that never wait."""

    def __init__(self):
        self.entries = {}
        self.queued = {}

    def set(self, key, value):
        self.entries[key] = value

    def get(self, key):
        return self.entries.get(key, DistStoreError)

    def add(self, key, amount):
        digits = re.match(rb"\s*[+-]?[0-9]+", self.entries.get(key, b"") or b"0")
        if digits is None:
            return ValueError
        self.entries[key] = str(int(digits[0]) + amount).encode()
        return int(self.entries[key])

    def append(self, key, value):
        self.entries[key] = self.entries.get(key, b"") + value

    def compare_set(self, key, expected, desired):
        if self.entries.get(key, b"") == expected:
            self.entries[key] = desired
        return self.entries.get(key, expected)

    def delete_key(self, key):
        return self.entries.pop(key, None) is not None

    def multi_set(self, keys, values):
        self.entries |= zip(keys, values, strict=True)

    def multi_get(self, keys):
        there = all(key in self.entries for key in keys)
        return [self.entries[key] for key in keys] if there else DistStoreError

    def check(self, keys):
        return all(key in self.entries or self.queued.get(key) for key in keys)

    def queue_push(self, key, value):
        self.queued.setdefault(key, deque()).append(value)

    def queue_pop(self, key, block):
        queue = self.queued.get(key)
        if queue:
            return queue.popleft()
        return DistStoreError if block else QueueEmptyError

    def queue_len(self, key):
        return len(self.queued.get(key, ()))

    def list_keys(self):
        return sorted(self.entries)


_keys = st.sampled_from(["", "a", "b", "a/b", "ü"])
_values = st.one_of(st.binary(max_size=4), st.integers(-99, 99).map(lambda n: b"%d" % n))
_pairs = st.lists(st.tuples(_keys, _values), max_size=3).map(lambda pairs: dict(pairs))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["set", "append", "queue_push"]), _keys, _values),
        st.tuples(st.sampled_from(["get", "delete_key", "queue_len"]), _keys),
        st.tuples(st.just("add"), _keys, st.integers(-1000, 1000)),
        st.tuples(st.just("compare_set"), _keys, _values, _values),
        st.tuples(st.sampled_from(["check", "multi_get"]), st.lists(_keys, max_size=3)),
        _pairs.map(lambda pairs: ("multi_set", list(pairs), list(pairs.values()))),
        st.tuples(st.just("queue_pop"), _keys, st.booleans()),
        st.just(("list_keys",)),
    ),
    max_size=30,
)


def outcome(store, name, *arguments):
    """Return the value of a call, or the class of its error."""
    try:
        value = getattr(store, name)(*arguments)
    except (QueueEmptyError, DistStoreError) as error:
        return type(error)
    except ValueError:
        return ValueError
    return sorted(value) if name == "list_keys" else value


def check_like_model(store, calls):
    """Check that an empty store and an empty model give the same results of calls."""
    store.set_timeout(0)
    model = Model()
    for call in calls:
        assert outcome(store, *call) == getattr(model, call[0])(*call[1:]), call
