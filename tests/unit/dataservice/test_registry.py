"""Datasets, jobs, iterations and their ends; what becomes of lost workers is tested beside."""

from collections import Counter

import pytest
from _cases.data_registry import (
    TIMEOUTS,
    Play,
    address_of,
    departures,
    forgotten,
    places,
    ranges,
    terms_of,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataservice.dispatch.registry import Registry
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)


def test_datasets_are_known_by_their_digest():
    play = Play()
    request = pb.RegisterDatasetRequest(digest=b"a", summary="a", source_length=3)
    assert play.registry.datasets.find(request) is None
    first = play.registry.datasets.register(request)
    assert play.registry.datasets.find(request) is play.registry.datasets.register(request) is first
    assert play.add_dataset("b").id not in (0, first.id)
    assert play.registry.datasets.get(first.id) is first
    with pytest.raises(NotFoundError, match="dataset 999"):
        play.registry.datasets.get(999)


def test_datasets_are_known_by_their_name_too():
    play = Play()
    named = play.add_dataset("squares", name="mine", spec=b"int")
    assert (
        play.add_dataset("squares", digest=b"pickled elsewhere", name="mine", spec=b"int") is named
    )
    assert play.registry.datasets.named("mine") is named
    assert play.registry.datasets.named(str(play.dataset.id)) is play.dataset
    with pytest.raises(InvalidArgumentError, match=r"'mine'.*another structure"):
        play.add_dataset("cubes", name="mine", spec=b"float")
    with pytest.raises(NotFoundError, match="'yours'"):
        play.registry.datasets.named("yours")


def test_the_registry_keeps_no_pickle():
    dataset = Play().add_dataset("big", pickle=b"very large")
    assert dataset.request.pickle == b""


def test_every_worker_has_a_task():
    play = Play(workers=3)
    assert places(play.beat(play.join())) == [(0, 1), (1, 2), (2, 3)]


def test_a_worker_that_comes_later_has_one_too_and_consumers_hear_of_it():
    play = Play(workers=1)
    client = play.join()
    version = play.beat(client).version
    play.add_worker(9)
    told = play.beat(client)
    assert places(told) == [(0, 1), (1, 9)]
    assert told.version > version


def test_nothing_new_is_the_same_version():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    version = play.beat(client).version
    play.registry.next_split(task, 0)
    assert play.beat(client, used=ranges(p0=[0, 1])).version == version


def test_a_worker_that_comes_while_nobody_reads_has_a_task_for_the_next_reader():
    play = Play(workers=1)
    play.leave(play.join_shared())
    play.lose(play.workers[0])
    play.add_worker(9)
    for _ in range(2):
        assert places(play.beat(play.join_shared())) == [(0, 9)]


def test_who_comes_when_the_iteration_has_finished_gets_no_task():
    play = Play(workers=1)
    client = play.join()
    (task,) = play.start(client)
    play.registry.finish_task(task, 3)
    assert not play.beat(client, used=ranges(p0=[0, 2])).finished
    assert play.beat(client, used=ranges(p0=[0, 3])).finished
    play.add_worker(9)
    told = play.beat(client)
    assert (told.finished, places(told)) == (True, [])


def test_jobs_of_ones_own_are_independent():
    play = Play(workers=1)
    for client in [play.join() for _ in range(2)]:
        (task,) = play.start(client)
        assert play.take_all(task) == list(range(10))


def test_a_name_is_shared():
    play = Play(workers=2)
    first, second = (play.join_shared() for _ in range(2))
    assert first.id != second.id
    one, two = play.start(first)
    assert play.start(second) == [one, two]
    assert play.take_all(one) + play.take_all(two) == list(range(10))


def test_a_repetition_is_a_new_iteration():
    play = Play(workers=1)
    for client in [play.join_shared(repetition=repetition) for repetition in range(2)]:
        (task,) = play.start(client)
        assert play.take_all(task) == list(range(10))


def test_a_position_has_the_same_split_and_comes_in_its_turn():
    play = Play(workers=2)
    one, two = play.start(play.join())
    first = play.registry.next_split(one, 0)
    assert play.registry.next_split(one, 0) == first
    assert play.registry.next_split(two, 0).start == first.stop
    with pytest.raises(
        FailedPreconditionError,
        match=rf"source index {len(first) + 1} .*: {len(first)} have been given",
    ):
        play.registry.next_split(one, len(first) + 1)


def test_who_comes_late_to_a_named_iteration_finds_it_finished():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    play.registry.finish_task(task, 2)
    outcome = play.leave(client, now=1, used=ranges(p0=[0, 2]))
    assert forgotten(outcome) == [(task, address_of(1))]
    late = play.beat(play.join_shared())
    assert (late.finished, places(late)) == (True, [])
    assert not play.beat(play.join_shared(repetition=1)).finished


def test_the_last_word_of_a_task_may_come_after_the_last_client_has_left():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    assert forgotten(play.leave(client, 1, used=ranges(p0=[0, 2]))) == []
    for expected in ([(task, address_of(1))], []):
        play.registry.finish_task(task, 2)
        assert forgotten(play.registry.take_outcome()) == expected


def test_an_iteration_without_workers_has_not_finished():
    play = Play()
    assert not play.beat(play.join()).finished


def test_a_name_with_other_parameters():
    play = Play()
    other = play.add_dataset("range(11)", 11)
    same = play.add_dataset("range", digest=b"pickled elsewhere")
    play.join_shared()
    play.join_shared(dataset=same)
    with pytest.raises(InvalidArgumentError, match="existing DYNAMIC over range, new OFF"):
        play.join_shared(pb.OFF)
    with pytest.raises(InvalidArgumentError, match=r"new DYNAMIC over range\(11\)"):
        play.join_shared(dataset=other, repetition=1)
    with pytest.raises(InvalidArgumentError, match="new DYNAMIC, delivery AT_MOST_ONCE over"):
        play.join_shared(delivery=pb.AT_MOST_ONCE)
    with pytest.raises(
        InvalidArgumentError, match="consumption DETERMINISTIC, num_shards 2, num_consumers 1"
    ):
        play.join_ordered()


def test_what_cannot_be_split_or_is_not_known():
    play = Play()
    whole = play.add_dataset("generator", -1)
    play.join(terms_of(pb.OFF), dataset=whole)
    with pytest.raises(FailedPreconditionError, match="generator cannot be split"):
        play.join(dataset=whole)
    with pytest.raises(NotFoundError):
        play.registry.join(pb.IterationRequest(dataset_id=999), 1, 0.0)


def test_two_consumers_of_one_index():
    play = Play()
    client = play.join_ordered(1, 2)
    with pytest.raises(AlreadyExistsError, match=r"consumer 1 of the job 'job'.*trainer/1-a"):
        play.join_ordered(1, 2)
    play.join_ordered(0, 2)
    play.leave(client)
    play.join_ordered(1, 2)


def test_leaving_a_job_of_ones_own_forgets_it():
    play = Play(workers=2)
    client = play.join()
    tasks = play.start(client)
    play.registry.take_outcome()
    outcome = play.leave(client, 1)
    assert {task for task, _ in forgotten(outcome)} == set(tasks)
    assert set(outcome.changed.values()) == {None}
    with pytest.raises(NotFoundError, match="not known: it has left"):
        play.beat(client)
    with pytest.raises(NotFoundError, match=f"unknown task {tasks[0]}"):
        play.registry.start_task(tasks[0])
    assert play.heartbeat(play.workers[0], 2, [tasks[0]]) == [tasks[0]]
    assert forgotten(play.leave(client, 3)) == []
    assert play.registry.jobs.by_id == play.registry.jobs.iterations == play.registry.clients == {}


def test_a_worker_that_has_not_begun_a_task_is_not_told_to_forget_it():
    play = Play(workers=1)
    assert forgotten(play.leave(play.join())) == []


def test_a_named_iteration_outlives_its_consumers_for_a_while():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    outcome = play.leave(client, now=1, used=ranges(p0=[0, 2]))
    assert forgotten(outcome) == []
    (departure,) = departures(outcome)
    assert (departure.client_id, departure.task_id) == (client.id, task)
    assert departure.used == [0, 2]
    play.heartbeat(play.workers[0], 30, [task])
    play.registry.expire(now=31)
    back = play.join_shared(now=31)
    assert [each.task_id for each in play.beat(back, 31).tasks] == [task]
    play.leave(back, now=32)
    play.heartbeat(play.workers[0], 63, [task])
    play.registry.expire(now=63)
    assert forgotten(play.registry.take_outcome()) == [(task, address_of(1))]
    assert play.registry.jobs.iterations == {}


def test_silent_clients_are_gone():
    play = Play(workers=1)
    client = play.join()
    play.start(client)
    play.beat(client, now=15)
    play.heartbeat(play.workers[0], 35)
    play.registry.expire(now=35)
    assert forgotten(play.registry.take_outcome()) == []
    play.registry.expire(now=36)
    assert len(forgotten(play.registry.take_outcome())) == 1
    with pytest.raises(NotFoundError, match="silent for 20 s"):
        play.beat(client, 36)


class Epochs(RuleBasedStateMachine):
    """Workers and consumers come and act in any order; no element is lost or doubled."""

    LENGTH = 23

    def __init__(self):
        super().__init__()
        self.play = Play(length=self.LENGTH, registry=Registry(TIMEOUTS))
        self.clients = {}  # client -> (name or id, repetition)
        self.given = {}  # the same key -> indices given out
        self.positions = Counter()  # of a task

    @rule()
    def add_worker(self):
        self.play.add_worker(len(self.play.registry.workers) + 1)

    @rule(name=st.sampled_from(["", "x", "y"]), repetition=st.integers(0, 2))
    def add_consumer(self, name, repetition):
        client = self.play.join_shared(name=name, repetition=repetition)
        self.clients[client] = key = (name or client.id, repetition)
        self.given.setdefault(key, Counter())

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def work(self, data):
        client = data.draw(st.sampled_from(sorted(self.clients, key=lambda client: client.id)))
        tasks = self.play.beat(client).tasks
        if not tasks:
            return
        task = data.draw(st.sampled_from(list(tasks)))
        self.play.registry.start_task(task.task_id)
        split = self.play.registry.next_split(task.task_id, self.positions[task.task_id])
        if split and split.start < self.LENGTH:
            self.given[self.clients[client]].update(split)
            self.positions[task.task_id] += len(split)
        else:
            used = pb.Ranges(part=task.part, bounds=[0, self.LENGTH])
            self.play.beat(client, used=[used])
            self.play.registry.finish_task(task.task_id, self.LENGTH)

    @invariant()
    def nothing_twice(self):
        for counts in self.given.values():
            assert all(count == 1 for count in counts.values())

    @invariant()
    def nothing_lost(self):
        for client, key in self.clients.items():
            if self.play.beat(client).finished:
                assert self.given[key] == Counter(range(self.LENGTH))


TestEpochs = Epochs.TestCase
