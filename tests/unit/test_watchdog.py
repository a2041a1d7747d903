"""Reports of the watchdog about waits that a test makes."""

import math
from types import SimpleNamespace

import pytest

from mpidist.config import Config
from mpidist.mpi import watchdog
from mpidist.mpi.pending import PendingOps, WatchedCall
from mpidist.mpi.records import Identity


def wait_of(name):
    return SimpleNamespace(
        sequence=1, peer=-1, group_number=0, members=(0, 1), describe=lambda: name
    )


def test_each_long_wait_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "config", Config(stall_s=1.0))
    ended = []
    pending = PendingOps()
    control = SimpleNamespace(size=2, rank=0)
    dog = watchdog.Watchdog(control, pending, Identity(0, 1, "h"), lambda *why: ended.append(why))
    operations = pending.current
    operations[1], operations[2] = wait_of("first"), wait_of("second")
    for now in range(100, 110):
        dog._check(pending.observe(float(now)), float(now))
    operations[1] = wait_of("third")
    for now in range(110, 120):
        dog._check(pending.observe(float(now)), float(now))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" has waited")[0].split(": ")[1] for text in told] == [
        "first",
        "second",
        "second",  # after ten times as long
        "third",
    ]
    assert not ended


@pytest.mark.parametrize(
    ("limit", "stall", "ended_after"),
    [(1800.0, 60.0, 1801), (1.0, 60.0, 61), (100.0, 1.0, 101), (math.inf, 1.0, None)],
)
def test_making_a_group_ends_after_its_limit(monkeypatch, limit, stall, ended_after):
    monkeypatch.setattr(watchdog, "config", Config(stall_s=stall))
    ended = []
    pending = PendingOps()
    control = SimpleNamespace(size=2, rank=0)
    dog = watchdog.Watchdog(
        control, pending, Identity(0, 1, "h"), lambda reason, _: ended.append(reason)
    )
    pending.current[1] = WatchedCall("making group 'pair'", tuple(range(10)), limit)
    for now in range(2000):
        dog._check(pending.observe(float(now)), float(now))
        if ended:
            break
    assert bool(ended) == (ended_after is not None)
    if ended:
        assert now == ended_after
        assert ended[0].startswith(
            "making group 'pair' of the ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more has waited for "
            f"{now} s, and the time limit of the group is {limit:g} s: "
        )


@pytest.mark.parametrize(
    ("behind", "number", "ended_after"),
    [
        ("all_reduce(SUM, float64[1])", 7, 60),
        ("broadcast(root 0, 8 bytes)", 7, 300),  # its data may be in transfer
        ("all_reduce(SUM, float64[1])", 8, None),  # the same collective
    ],
)
def test_ranks_in_different_collectives_end_the_job(monkeypatch, behind, number, ended_after):
    monkeypatch.setattr(watchdog, "config", Config(stall_s=60.0))
    ended = []
    control = SimpleNamespace(size=2, rank=0)
    dog = watchdog.Watchdog(
        control, PendingOps(), Identity(0, 2, "h"), lambda reason, _: ended.append(reason)
    )
    own = SimpleNamespace(
        sequence=8, group_number=3, members=(0, 1), call=lambda: "all_reduce(SUM, float64[1])"
    )
    for second in range(400):
        dog._note_blocked(1, (3, number), behind, float(second))
        if second >= 60:  # this rank has waited for as long
            dog._check_positions(own, float(second))
        if ended:
            break
    if ended_after is None:
        assert not ended
    else:
        assert ended_after - 5 <= second <= ended_after
        assert f"rank 1 in {behind}, its number 7" in ended[0]


def test_a_rank_that_does_not_wait_keeps_the_job_alive(monkeypatch):
    monkeypatch.setattr(watchdog, "config", Config(stall_s=60.0))
    ended = []
    dog = watchdog.Watchdog(
        SimpleNamespace(size=3, rank=0),
        PendingOps(),
        Identity(0, 3, "h"),
        lambda *_: ended.append(1),
    )
    own = SimpleNamespace(sequence=8, group_number=3, members=(0, 1, 2), call=lambda: "barrier()")
    for second in range(1000):
        dog._note_blocked(1, (3, 7), "barrier()", float(second))
        dog._check_positions(own, float(second))
    assert not ended
