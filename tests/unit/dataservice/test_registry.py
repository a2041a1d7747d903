from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataservice.config import ShardingPolicy
from dataservice.records import Removal, TaskState, Timeouts
from dataservice.registry import Registry
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC
TIMEOUTS = Timeouts(worker_s=10, client_s=20, iteration_s=30)


def make(workers=0, length=10):
    registry = Registry(TIMEOUTS)
    dataset = registry.register_dataset(b"digest", "range(10)", length)
    ids = [registry.register_worker(f"inproc://localhost:{n}", 0) for n in range(1, workers + 1)]
    return registry, dataset, ids


def join(registry, dataset, policy=OFF, name=None, repetition=0, now=0):
    return registry.join_iteration(dataset, policy, name, repetition, seed=1, now=now)


def tasks_of(registry, client, now=0):
    return list(registry.heartbeat_client(client, now).tasks.values())


def take_all(registry, task):
    registry.start_task(task.id)
    taken = []
    while part := registry.next_split(task.id, (0,)):
        taken += part
    return taken


def test_datasets_are_known_by_their_digest():
    registry = Registry(TIMEOUTS)
    assert registry.dataset_id(b"a") == 0
    first = registry.register_dataset(b"a", "a", 3)
    assert registry.dataset_id(b"a") == registry.register_dataset(b"a", "a", 3) == first != 0
    assert registry.register_dataset(b"b", "b", 3) != first


def test_every_worker_has_a_task():
    registry, dataset, _ = make(workers=3)
    tasks = tasks_of(registry, join(registry, dataset))
    assert [t.worker.address for t in tasks] == [w.address for w in registry.workers]
    assert [t.number for t in tasks] == [0, 1, 2]


def test_a_worker_that_comes_later_has_one_too():
    registry, dataset, _ = make(workers=1)
    client = join(registry, dataset)
    registry.register_worker("inproc://localhost:9", 1)
    assert [t.worker.address[-1] for t in tasks_of(registry, client)] == ["1", "9"]


def test_a_worker_that_comes_while_nobody_reads_has_one_for_the_next_reader():
    registry, dataset, (old,) = make(workers=1)
    registry.release_client(join(registry, dataset, name="job"), 0)
    registry.unregister_worker(old)
    registry.register_worker("inproc://localhost:9", 1)
    for _ in range(2):
        client = join(registry, dataset, name="job")
        assert [t.worker.address[-1] for t in tasks_of(registry, client)] == ["9"]


def test_a_lost_task_cannot_be_started():
    registry, dataset, (old,) = make(workers=1)
    (task,) = tasks_of(registry, join(registry, dataset))
    registry.start_task(task.id)
    registry.unregister_worker(old)
    with pytest.raises(NotFoundError, match=r"is lost: its worker inproc://localhost:1 is gone"):
        registry.start_task(task.id)


def test_but_not_in_an_iteration_that_has_finished():
    registry, dataset, _ = make(workers=1)
    client = join(registry, dataset)
    registry.finish_task(tasks_of(registry, client)[0].id)
    registry.register_worker("inproc://localhost:9", 1)
    assert len(tasks_of(registry, client)) == 1


def test_anonymous_jobs_are_independent():
    registry, dataset, _ = make(workers=1)
    first, second = (join(registry, dataset, DYNAMIC) for _ in range(2))
    for client in (first, second):
        assert take_all(registry, tasks_of(registry, client)[0]) == list(range(10))


def test_a_name_is_shared():
    registry, dataset, _ = make(workers=2)
    first, second = (join(registry, dataset, DYNAMIC, "job") for _ in range(2))
    assert first != second
    assert registry.heartbeat_client(first, 0) is registry.heartbeat_client(second, 0)
    one, two = tasks_of(registry, first)
    assert take_all(registry, one) + take_all(registry, two) == list(range(10))


def test_a_repetition_is_a_new_iteration():
    registry, dataset, _ = make(workers=1)
    clients = [join(registry, dataset, DYNAMIC, "job", repetition) for repetition in range(2)]
    for client in clients:
        assert take_all(registry, tasks_of(registry, client)[0]) == list(range(10))


def test_who_comes_late_to_a_named_iteration_finds_it_finished():
    registry, dataset, _ = make(workers=1)
    client = join(registry, dataset, DYNAMIC, "job")
    (task,) = tasks_of(registry, client)
    registry.finish_task(task.id)
    assert registry.release_client(client, 1) == [Removal(task.id, task.worker.address)]
    late = registry.heartbeat_client(join(registry, dataset, DYNAMIC, "job"), 2)
    assert (late.finished, late.tasks) == (True, {})
    assert not registry.heartbeat_client(join(registry, dataset, DYNAMIC, "job", 1), 2).finished


def test_the_last_word_of_a_task_may_come_after_the_last_client_has_left():
    registry, dataset, _ = make(workers=1)
    client = join(registry, dataset, DYNAMIC, "job")
    (task,) = tasks_of(registry, client)
    assert registry.release_client(client, 1) == []
    assert registry.finish_task(task.id) == [Removal(task.id, task.worker.address)]
    assert registry.finish_task(task.id) == []


def test_an_iteration_without_workers_has_not_finished():
    registry, dataset, _ = make()
    assert not registry.heartbeat_client(join(registry, dataset), 0).finished


def test_a_name_with_other_parameters():
    registry, dataset, _ = make()
    other = registry.register_dataset(b"other", "range(11)", 11)
    same = registry.register_dataset(b"pickled elsewhere", "range(10)", 10)
    join(registry, dataset, DYNAMIC, "job")
    join(registry, same, DYNAMIC, "job")
    with pytest.raises(InvalidArgumentError, match=r"existing DYNAMIC over range\(10\), new OFF"):
        join(registry, dataset, OFF, "job")
    with pytest.raises(InvalidArgumentError, match=r"new DYNAMIC over range\(11\)"):
        join(registry, other, DYNAMIC, "job", repetition=1)


def test_what_cannot_be_split_or_is_not_known():
    registry, _, _ = make()
    whole = registry.register_dataset(b"w", "generator", -1)
    join(registry, whole, OFF)
    with pytest.raises(FailedPreconditionError, match="generator cannot be split"):
        join(registry, whole, DYNAMIC)
    with pytest.raises(NotFoundError):
        join(registry, 999)


def test_leaving_a_job_of_ones_own_forgets_it():
    registry, dataset, workers = make(workers=2)
    client = join(registry, dataset)
    tasks = tasks_of(registry, client)
    removals = registry.release_client(client, 1)
    assert {removal.task_id for removal in removals} == {task.id for task in tasks}
    with pytest.raises(NotFoundError):
        registry.heartbeat_client(client, 2)
    with pytest.raises(NotFoundError):
        registry.start_task(tasks[0].id)
    assert registry.heartbeat_worker(workers[0], [tasks[0].id], 2) == [tasks[0].id]
    assert registry.release_client(client, 3) == []


def test_a_named_iteration_outlives_its_consumers_for_a_while():
    registry, dataset, (worker,) = make(workers=1)
    client = join(registry, dataset, DYNAMIC, "job")
    (task,) = tasks_of(registry, client)
    registry.start_task(task.id)
    assert registry.release_client(client, now=1) == []
    registry.heartbeat_worker(worker, [task.id], now=30)
    assert registry.expire(now=31) == []
    back = join(registry, dataset, DYNAMIC, "job", now=31)
    assert tasks_of(registry, back, now=31) == [task]
    registry.release_client(back, now=32)
    registry.heartbeat_worker(worker, [task.id], now=63)
    assert registry.expire(now=63) == [Removal(task.id, task.worker.address)]


def test_silent_clients_are_gone():
    registry, dataset, (worker,) = make(workers=1)
    client = join(registry, dataset, now=0)
    registry.heartbeat_client(client, now=15)
    registry.heartbeat_worker(worker, [], now=35)
    assert registry.expire(now=35) == []
    assert len(registry.expire(now=36)) == 1
    with pytest.raises(NotFoundError, match="silent"):
        registry.heartbeat_client(client, now=36)


def test_a_silent_worker_is_lost_with_what_it_had_begun():
    registry, dataset, workers = make(workers=3)
    client = join(registry, dataset)
    begun, done, untouched = tasks_of(registry, client)
    for task in (begun, done):
        registry.start_task(task.id)
    registry.finish_task(done.id)
    registry.expire(now=11)
    assert registry.workers == []
    assert tasks_of(registry, client) == [begun, done]
    assert [t.state for t in (begun, done)] == [TaskState.LOST, TaskState.FINISHED]
    assert not registry.heartbeat_client(client, 11).finished
    assert untouched.id not in registry.heartbeat_client(client, 11).tasks
    with pytest.raises(NotFoundError, match="register again"):
        registry.heartbeat_worker(workers[0], [], 12)


def test_a_restarted_worker_replaces_the_old_one():
    registry, dataset, _ = make(workers=1)
    client = join(registry, dataset)
    (task,) = tasks_of(registry, client)
    registry.start_task(task.id)
    registry.register_worker("inproc://localhost:1", 1)
    assert [w.address for w in registry.workers] == ["inproc://localhost:1"]
    old, new = tasks_of(registry, client)
    assert (old.state, new.state) == (TaskState.LOST, TaskState.ASSIGNED)


class Epochs(RuleBasedStateMachine):
    """Workers and consumers come and act in any order; no element is lost or doubled."""

    LENGTH = 23

    def __init__(self):
        super().__init__()
        self.registry, self.dataset, _ = make(length=self.LENGTH)
        self.workers = 0
        self.clients = {}  # id -> (name or id, policy, repetition)
        self.given = {}  # the same key -> indices given out
        self.tasks = {}  # task id -> key

    @rule()
    def add_worker(self):
        self.workers += 1
        self.registry.register_worker(f"inproc://localhost:{self.workers}", 0)

    @rule(name=st.sampled_from([None, "x", "y"]), repetition=st.integers(0, 2))
    def add_consumer(self, name, repetition):
        client = join(self.registry, self.dataset, DYNAMIC, name, repetition)
        key = (name or client, repetition)
        self.clients[client] = key
        self.given.setdefault(key, Counter())

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def work(self, data):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        running = [
            task for task in tasks_of(self.registry, client) if task.state is not TaskState.FINISHED
        ]
        if not running:
            return
        task = data.draw(st.sampled_from(running))
        self.registry.start_task(task.id)
        part = self.registry.next_split(task.id, (0,))
        self.given[self.clients[client]].update(part)
        if not part:
            self.registry.finish_task(task.id)

    @invariant()
    def nothing_twice(self):
        for counts in self.given.values():
            assert all(count == 1 for count in counts.values())

    @invariant()
    def nothing_lost(self):
        for client, key in self.clients.items():
            if self.registry.heartbeat_client(client, 0).finished:
                assert self.given[key] == Counter(range(self.LENGTH))


TestEpochs = Epochs.TestCase
