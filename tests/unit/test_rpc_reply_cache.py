"""The reply cache: a repeated request is not executed again."""

from hypothesis import given
from hypothesis import strategies as st

from mpidist.rpc import reply_cache as module
from mpidist.rpc.message import REPLY, Message
from mpidist.rpc.reply_cache import ReplyCache


def reply(identity):
    return Message(REPLY, identity)


def test_life_of_a_request():
    cache = ReplyCache()
    assert cache.admit(7)
    assert not cache.admit(7)
    assert cache.get(7) is None  # under way
    answer = reply(7)
    cache.store(7, answer)
    assert not cache.admit(7)
    assert cache.get(7) is answer
    cache.ack([7])
    assert not cache.admit(7)
    assert cache.get(7) is None
    cache.store(7, answer)  # a handler that cache twice
    assert cache.get(7) is None


def test_what_was_never_asked_is_not_kept():
    cache = ReplyCache()
    cache.store(3, reply(3))
    cache.ack([3, 4])
    assert cache.get(3) is None
    assert cache.admit(3)


def test_old_ones_are_forgotten_and_stay_refused(monkeypatch):
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 10)
    cache = ReplyCache()
    for identity in range(1, 1001):
        assert cache.admit(identity)
        cache.ack([identity])
        assert len(cache._replies) <= 11
    assert not any(cache.admit(identity) for identity in range(1, 1001))
    assert cache.admit(1001)


def test_one_that_waits_does_not_keep_those_behind_it(monkeypatch):
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 10)
    cache = ReplyCache()
    for identity in range(1, 1001):
        assert cache.admit(identity)
        if identity != 5:
            cache.ack([identity])
    assert len(cache._replies) <= 11
    cache.store(5, reply(5))
    assert cache.get(5) is not None
    assert not any(cache.admit(identity) for identity in range(1, 1001))


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from("rsa")), max_size=80))
def test_nothing_is_done_twice(script):
    cache, done = ReplyCache(), []
    for identity, what in script:
        if what == "r" and cache.admit(identity):
            done.append(identity)
        elif what == "a" and identity in done:
            cache.store(identity, reply(identity))
        elif what == "s":
            cache.ack([identity])
    assert len(done) == len(set(done))
