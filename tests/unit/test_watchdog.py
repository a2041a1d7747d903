"""What the watchdog tells, on waits that a test makes."""

from types import SimpleNamespace

from mpidist.config import Config
from mpidist.mpi import watchdog
from mpidist.mpi.pending import PendingOps
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
        "third",
    ]
    assert not ended
