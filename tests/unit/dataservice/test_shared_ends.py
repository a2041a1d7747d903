"""The end of an epoch that consumers share, of whom some die, stand still, or leave."""

import signal
import threading

import pytest
from _cases.data_cluster import DataCluster, Reader

from dataservice import Dataset, distribute
from mpidist.errors import NotFoundError

COUNT = 400


def make_readers(cluster, count):
    apply = distribute("distributed_epoch", cluster.target, job_name="job")
    dataset = Dataset.range(COUNT).map(int).apply(apply)
    return [Reader(cluster.add_process(f"consumer{i}"), dataset) for i in range(count)]


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
    others = readers[1].rest()  # what it has itself, at least: nobody waits for who is there
    assert others
    came = used + rest + others
    # What the killed one had used without a word may come again.
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


def test_the_elements_of_one_that_stands_still_come_to_the_others_and_it_uses_them_no_more(cluster):
    fast, slow = make_readers(cluster, 2)
    used = slow.take(2)
    slow.process.signal(signal.SIGSTOP)
    came = fast.rest()
    slow.process.signal(signal.SIGCONT)
    assert len(set(came)) == len(came)
    assert set(came) | set(used) == set(range(COUNT))
    with pytest.raises(NotFoundError, match="is not known"):
        slow.process.run(_take_one_when_told)


def _take_one_when_told(state):
    fetching = [each for each in threading.enumerate() if each.name == "dataservice-consumer"]
    for thread in fetching:
        thread.join(30)
    next(state["elements"])


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
