"""The end of a shared epoch with consumers that die, stop responding, or leave."""

import signal
import threading
from pathlib import Path

import pytest
from _cases.data_cluster import DataCluster, Reader
from _cases.endpoints import wait_until

from dataservice import Dataset, distribute, service_status
from mpidist.errors import NotFoundError

COUNT = 400


def make_readers(cluster, readers, count=COUNT, **more):
    apply = distribute("distributed_epoch", cluster.target, job_name="job", **more)
    dataset = Dataset.range(count).map(int).apply(apply)
    return [Reader(cluster.add_process(f"consumer{i}"), dataset) for i in range(readers)]


@pytest.fixture
def cluster():
    with DataCluster(2, dispatcher={"client_timeout_ms": 300_000}) as made:
        yield made


def test_what_a_killed_consumer_had_not_used_comes_to_the_others(cluster):
    readers = make_readers(cluster, 3)
    used = readers[0].take(30) + readers[1].take(20)
    lost = readers[2].take(10)
    readers[2].process.end()
    rest = readers[0].rest()
    others = readers[1].rest()  # at least its held elements: readers[0] leaves them
    assert others
    came = used + rest + others
    # The unreported elements of the killed consumer may come again.
    assert len(set(came)) == len(came)
    assert set(came) >= set(range(COUNT)) - set(lost)
    assert set(came) | set(lost) == set(range(COUNT))


def test_nobody_waits_for_one_that_is_there_and_uses_nothing(cluster):
    fast, slow = make_readers(cluster, 2)
    first = slow.take(1)
    came = fast.rest()
    held = slow.rest()
    assert held
    assert sorted(first + came + held) == list(range(COUNT))


def test_what_one_that_leaves_had_not_used_comes_to_the_last_one(cluster):
    fast, slow = make_readers(cluster, 2)
    used = slow.take(1)
    begun = fast.take(COUNT - 50)
    slow.close()
    assert sorted(used + begun + fast.rest()) == list(range(COUNT))


def test_one_that_stands_still_is_given_up_and_uses_nothing_more_of_what_it_has(cluster, tmp_path):
    count = 100_000
    stopped, other = make_readers(cluster, 2, count=count)
    paths = [tmp_path / "stopped", tmp_path / "other"]
    stopped.process.begin(_write_down, paths[0])
    wait_until(lambda: paths[0].exists() and paths[0].stat().st_size > 10_000)
    stopped.process.signal(signal.SIGSTOP)
    wait_until(lambda: " T " in Path(f"/proc/{stopped.process.pid}/stat").read_text())
    used = len(paths[0].read_text().split())
    # Read only now, since a faster reader could take all elements.
    other.process.begin(_write_down, paths[1])
    other.process.result()
    stopped.process.signal(signal.SIGCONT)
    with pytest.raises(NotFoundError, match="is not known"):
        stopped.process.result()
    before, after = ([int(x) for x in path.read_text().split()] for path in paths)
    assert len(after) == len(set(after))
    # The stopped reader may have used one more element.
    assert set(before[used + 1 :]).isdisjoint(after)
    assert set(before) | set(after) == set(range(count))


def _write_down(state, path):
    with path.open("w", buffering=1) as lines:
        for element in state["elements"]:
            lines.write(f"{element}\n")


def test_a_dispatcher_that_is_started_again_gives_up_who_died_meanwhile(tmp_path):
    config = {"client_timeout_ms": 300_000}
    with DataCluster(2, work_dir=tmp_path, fault_tolerant=True, dispatcher=config) as cluster:
        fast, slow = make_readers(cluster, 2)
        used = slow.take(3) + fast.take(3)
        cluster.kill_dispatcher()
        slow.process.end()
        cluster.restart_dispatcher()
        came = fast.rest()
        assert len(set(came)) == len(came)
        assert set(came) | set(used) == set(range(COUNT))


def test_the_last_elements_are_in_hand_when_the_worker_is_lost():
    with DataCluster(1) as cluster:
        (reader,) = make_readers(cluster, 1, count=8, start_timeout_s=1.0)
        used = reader.take(6)
        in_hand(reader, 2)
        cluster.kill_worker(0)
        cluster.add_worker()
        lost(cluster, 0)
        reader.process.run(wait_for_a_look)
        assert used + reader.rest() == list(range(8))


@pytest.mark.parametrize("dies", [True, False])
def test_others_have_the_last_elements_when_the_worker_is_lost(dies):
    with DataCluster(1, dispatcher={"client_timeout_ms": 300_000}) as cluster:
        fast, slow = make_readers(cluster, 2, count=40)
        used = slow.take(1)
        in_hand(slow, 3)
        used += fast.take(36)
        cluster.kill_worker(0)
        cluster.add_worker()
        lost(cluster, 0)
        if dies:
            slow.process.end()
        used += fast.rest()
        if not dies:
            held = slow.rest()
            assert len(held) == 3
            used += held
        assert sorted(used) == list(range(40))


def in_hand(reader, count):
    """Wait until a reader holds ``count`` unused elements."""
    reader.process.run(_wait_until_in_hand, count)


def _wait_until_in_hand(state, count):
    buffer = state["elements"]._elements._fetcher.buffer
    wait_until(lambda: len(buffer._left) + buffer._count == count)


def lost(cluster, index):
    """Wait until the dispatcher has given up a worker."""
    address = f"tcp://localhost:{cluster.workers[index].last_port}"
    wait_until(lambda: all(w.address != address for w in service_status(cluster.target).workers))


def wait_for_a_look(state):
    """Wait longer than the timeout of a consumer without a worker."""
    threading.Event().wait(2.0)
