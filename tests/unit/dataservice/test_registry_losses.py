"""Reassignment of the parts of lost workers, and of parts to new workers."""

from collections import Counter

import pytest
from _cases.data_registry import (
    Play,
    address_of,
    departures,
    forgotten,
    places,
    ranges,
    terms_of,
    waiting,
)

from dataservice.dispatch.records import AWAY_S
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import AlreadyExistsError, NotFoundError


def split(play, task, position):
    return play.registry.next_split(task, position)


# One consumer, or consumers with explicit requests: another worker continues at once.


@pytest.mark.parametrize("delivery", [pb.EXACTLY_ONCE, pb.AT_LEAST_ONCE])
def test_another_worker_gets_the_part_with_its_splits_and_its_checkpoint(delivery):
    play = Play(workers=2, length=1000)
    client = play.join(terms_of(delivery=delivery))
    one, two = play.start(client)
    given = [split(play, one, 0)]
    second = len(given[0])
    given.append(split(play, one, second))
    third = second + len(given[1])
    given.append(split(play, one, third))
    fourth = third + len(given[2])
    play.progress(play.workers[0], one, 300, position=second)
    play.lose(play.workers[0])
    told = play.beat(client)
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)
    again = play.registry.start_task(told.tasks[0].task_id)
    assert again.id not in (one, two)
    checkpoint = again.part.checkpoint
    assert (checkpoint.index, checkpoint.position) == (300, second)
    assert [split(play, again.id, position) for position in (second, third)] == given[1:]
    assert split(play, again.id, fourth).start == given[2].stop
    for call in (lambda: play.registry.start_task(one), lambda: split(play, one, fourth)):
        with pytest.raises(NotFoundError, match=f"unknown task {one}.*another worker"):
            call()


def test_a_checkpoint_never_goes_back():
    play = Play(workers=1)
    (task,) = play.start(play.join())
    play.progress(play.workers[0], task, 30)
    play.progress(play.workers[0], task, 20)
    assert play.registry.scheduler.get(task).part.checkpoint.index == 30


def test_without_another_worker_the_part_waits_for_one():
    play = Play(workers=1)
    client = play.join()
    play.start(client)
    play.lose(play.workers[0])
    assert waiting(play.beat(client)) == ([], [], 1)
    play.add_worker(9)
    assert waiting(play.beat(client)) == ([(0, 9)], [], 0)


def test_ordered_parts_go_to_whoever_has_the_fewest():
    play = Play(workers=3)
    clients = [play.join_ordered(index, 2, shards=6) for index in range(2)]
    play.start(clients[0])
    play.lose(play.workers[1])
    expected = [(0, 1), (1, 1), (2, 3), (3, 1), (4, 3), (5, 3)]
    assert [places(play.beat(client)) for client in clients] == [expected] * 2


def test_a_new_worker_relieves_those_that_have_most():
    play = Play(workers=2)
    client = play.join_ordered(shards=7)
    old = dict(zip(range(7), play.start(client), strict=True))
    play.registry.take_outcome()
    play.add_worker(3)
    told = play.beat(client)
    moved = [part for part, port in places(told) if port == 3]
    assert sorted(Counter(port for _, port in places(told)).values()) == [2, 2, 3]
    assert len(moved) == 2
    removals = forgotten(play.registry.take_outcome())
    assert {task for task, _ in removals} == {old[part] for part in moved}
    stayed = {task.part: task.task_id for task in told.tasks if task.part not in moved}
    assert stayed.items() <= old.items()


def test_a_new_worker_is_given_none_of_few_parts():
    play = Play(workers=2)
    client = play.join_ordered(shards=2)
    play.add_worker(3)
    assert places(play.beat(client)) == [(0, 1), (1, 2)]


def test_a_finished_part_is_not_evaluated_again():
    play = Play(workers=2)
    client = play.join()
    one, two = play.start(client)
    play.registry.finish_task(one, 4)
    play.beat(client, used=ranges(p0=[0, 4]))
    play.lose(play.workers[0])
    assert waiting(play.beat(client)) == ([(1, 2)], [], 0)
    play.registry.finish_task(two, 0)
    assert play.beat(client).finished


def test_of_several_consumers_the_slowest_decides_what_is_used():
    play = Play(workers=1)
    slow, fast = (play.join_ordered(index, 2, shards=1) for index in range(2))
    (task,) = play.start(slow)
    play.registry.finish_task(task, 6)
    play.beat(fast, used=ranges(p0=[0, 6]))
    part = play.registry.scheduler.get(task).part
    assert part.used.bounds == []
    play.beat(slow, used=ranges(p0=[0, 4]))
    assert part.used.bounds == [0, 4]
    assert play.beat(slow, used=ranges(p0=[0, 6])).finished


# Shared epochs: all consumers first report the elements that they hold.


def test_the_part_of_a_lost_worker_waits_until_all_consumers_have_settled():
    play = Play(workers=2)
    clients = [play.join_shared() for _ in range(2)]
    one, _ = play.start(clients[0])
    play.lose(play.workers[0])
    late = play.join_shared()
    assert waiting(play.beat(clients[0])) == ([(1, 2)], [one], 1)
    assert waiting(play.beat(late)) == ([(1, 2)], [], 1)
    with pytest.raises(NotFoundError, match=f"task {one} is lost: its worker {address_of(1)}"):
        play.registry.start_task(one)
    report = {"used": ranges(p0=[0, 3]), "held": ranges(p0=[3, 5]), "settled": [one]}
    assert waiting(play.beat(clients[0], **report)) == ([(1, 2)], [], 1)
    told = play.beat(clients[1], held=ranges(p0=[7, 8]), settled=[one])
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)
    part = play.registry.start_task(told.tasks[0].task_id).part
    assert part.used.bounds == [0, 3]
    held = {client.id: part.held[client.id].bounds for client in clients}
    assert held == {clients[0].id: [3, 5], clients[1].id: [7, 8]}


def test_settling_twice_changes_nothing():
    play = Play(workers=1)
    clients = [play.join_shared() for _ in range(2)]
    (task,) = play.start(clients[0])
    play.lose(play.workers[0])
    for _ in range(2):
        told = play.beat(clients[0], held=ranges(p0=[1, 2]), settled=[task])
    assert waiting(told) == ([], [], 1)
    play.beat(clients[1], settled=[task])
    assert waiting(play.beat(clients[1], settled=[task, 999])) == ([], [], 1)
    (part,) = clients[0].iteration.parts.values()
    assert part.held[clients[0].id].bounds == [1, 2]


def test_who_leaves_needs_not_settle_and_gives_back_what_it_held():
    play = Play(workers=2)
    clients = [play.join_shared() for _ in range(2)]
    one, _ = play.start(clients[0])
    play.lose(play.workers[0])
    play.beat(clients[0], held=ranges(p0=[0, 2]), settled=[one])
    play.leave(clients[1])
    told = play.beat(clients[0])
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)
    task = play.registry.start_task(told.tasks[0].task_id)
    play.join_shared()
    outcome = play.leave(clients[0], used=ranges(p0=[0, 1]))
    assert task.part.held == {}
    gone = {each.task_id: each for each in departures(outcome)}
    assert gone[task.id].client_id == clients[0].id
    assert gone[task.id].used == [0, 1]


def test_if_the_last_consumer_leaves_before_it_settles_the_next_one_finds_the_part():
    play = Play(workers=2)
    client = play.join_shared()
    play.start(client)
    play.lose(play.workers[0])
    play.leave(client, used=ranges(p0=[0, 1]))
    told = play.beat(play.join_shared())
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)


def test_a_part_that_is_given_out_needs_no_worker_until_a_consumer_leaves():
    play = Play(workers=2)
    clients = [play.join_shared() for _ in range(2)]
    one, two = play.start(clients[0])
    play.registry.finish_task(one, 5)
    play.lose(play.workers[0])
    play.beat(clients[0], used=ranges(p0=[0, 2]), held=ranges(p0=[2, 4]), settled=[one])
    told = play.beat(clients[1], held=ranges(p0=[4, 5]), settled=[one])
    assert waiting(told) == ([(1, 2)], [], 0)
    assert not told.finished
    play.leave(clients[0], used=ranges(p0=[2, 3]))
    told = play.beat(clients[1])
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)
    part = play.registry.start_task(told.tasks[0].task_id).part
    assert (part.used.bounds, list(part.held)) == ([0, 3], [clients[1].id])
    play.registry.finish_task(two, 0)
    assert play.beat(clients[1], used=ranges(p0=[3, 5])).finished


def test_a_part_that_is_given_out_ends_when_all_is_used():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    play.registry.finish_task(task, 2)
    play.lose(play.workers[0])
    assert not play.beat(client, held=ranges(p0=[0, 2]), settled=[task]).finished
    assert play.beat(client, used=ranges(p0=[0, 2])).finished


def test_a_task_that_had_not_begun_is_given_to_another_worker_at_once():
    play = Play(workers=2)
    client = play.join_shared()
    play.lose(play.workers[0])
    assert waiting(play.beat(client)) == ([(0, 2), (1, 2)], [], 0)


def test_at_least_once_waits_for_nobody():
    play = Play(workers=2)
    client = play.join_shared(delivery=pb.AT_LEAST_ONCE)
    play.start(client)
    play.beat(client, used=ranges(p0=[0, 3]))
    play.lose(play.workers[0])
    told = play.beat(client)
    assert waiting(told) == ([(0, 2), (1, 2)], [], 0)
    assert play.registry.start_task(told.tasks[0].task_id).part.used.bounds == [0, 3]


@pytest.mark.parametrize("consumption", [pb.EXCLUSIVE, pb.FIRST_COME, pb.DETERMINISTIC])
def test_at_most_once_gives_the_part_up(consumption):
    play = Play(workers=2)
    terms = terms_of(consumption=consumption, delivery=pb.AT_MOST_ONCE)
    if consumption == pb.DETERMINISTIC:
        terms.num_shards, terms.num_consumers = 2, 1
    client = play.join(terms, "job")
    _, two = play.start(client)
    play.lose(play.workers[0])
    told = play.beat(client)
    assert (*waiting(told), told.dropped) == ([(1, 2)], [], 0, 1)
    play.registry.finish_task(two, 0)
    assert play.beat(client).finished


def test_at_most_once_begins_elsewhere_what_had_not_begun():
    play = Play(workers=2)
    client = play.join_shared(delivery=pb.AT_MOST_ONCE)
    play.lose(play.workers[0])
    told = play.beat(client)
    assert (*waiting(told), told.dropped) == ([(0, 2), (1, 2)], [], 0, 0)


def test_who_leaves_is_waited_for_by_no_dispatcher_of_the_journal():
    play = Play(workers=1)
    first, second = play.join_shared(), play.join_shared()
    (task,) = play.start(first)
    play.registry.unregister_worker(play.workers[0].id)
    assert play.registry.scheduler.tasks[task].pending_acks == {first.id, second.id}
    play.registry.take_outcome()
    changed = play.leave(second).changed
    part = play.registry.scheduler.tasks[task].part
    assert changed["part", part.id] is part
    assert part.task.pending_acks == {first.id}


# The end of a shared epoch


def at_end(play, client, now, **report):
    told = play.beat(client, now=now, at_end=True, **report)
    return client.dismiss_if_done() or told.finished


def test_who_is_at_its_end_goes_when_another_one_has_been_heard_of_since():
    play = Play(workers=1)
    one, two, three = (play.join_shared() for _ in range(3))
    play.start(one)
    assert not at_end(play, one, 1.0)
    play.registry.hear_all(1.5)  # without new reports
    assert not one.dismiss_if_done()
    assert [play.beat(each, now=2.0).beat_soon for each in (two, three)] == [False, False]
    assert one.dismiss_if_done()
    # A dismissed consumer is no longer responsible for the rest of the epoch.
    assert not at_end(play, two, 3.0)
    play.beat(three, now=4.0)
    assert two.dismiss_if_done()
    assert not at_end(play, three, 5.0)


def test_nobody_goes_while_a_part_waits_for_a_worker():
    play = Play(workers=1)
    one, two = play.join_shared(), play.join_shared()
    (task,) = play.start(one)
    play.registry.finish_task(task, 20)
    assert not at_end(play, one, 1.0, used=ranges(p0=[0, 10]))
    play.beat(two, now=2.0)
    play.lose(play.workers[0])
    assert not one.dismiss_if_done()
    assert play.beat(one, now=3.0, settled=[task]).waiting
    play.beat(two, now=4.0, settled=[task], held=ranges(p0=[10, 20]))
    # Now the other consumer has all remaining elements, and the part needs no worker.
    assert play.beat(one, now=5.0).given_out == 1
    assert not at_end(play, one, 6.0)
    play.beat(two, now=7.0)
    assert one.dismiss_if_done()


def test_one_that_was_told_to_go_and_goes_on_sees_to_the_rest_again():
    play = Play(workers=1)
    one, two = play.join_shared(), play.join_shared()
    play.start(one)
    play.beat(one, now=1.0, at_end=True)
    play.beat(two, now=1.0)
    assert one.dismiss_if_done()
    play.beat(one, now=2.0)  # there was something new
    assert not at_end(play, two, 3.0)
    play.beat(one, now=3.0)
    assert two.dismiss_if_done()


def test_who_cannot_read_the_last_parts_waits_until_those_are_used_who_can():
    play = Play()
    play.add_worker(1, process="here/1-a", tags=("COLOCATED",))
    here = play.join_shared(process="here/2-b", delivery=pb.AT_MOST_ONCE)
    there = play.join_shared(process="there/3-c", delivery=pb.AT_MOST_ONCE)
    here.peer = "2"
    play.start(here)
    assert play.beat(there).elsewhere == 1
    assert not at_end(play, there, 1.0)
    play.beat(here, now=2.0)
    assert not there.dismiss_if_done()
    # But the consumer does not wait for a dead one.
    play.registry.lose_clients("2")
    assert not at_end(play, there, 2.0 + AWAY_S)
    play.registry.expire(3.0 + AWAY_S)
    assert here.id not in play.registry.clients


def test_the_last_one_goes_when_all_is_used():
    play = Play(workers=1)
    one, two = play.join_shared(), play.join_shared()
    (task,) = play.start(one)
    play.registry.finish_task(task, 4)
    assert not at_end(play, one, 1.0, used=ranges(p0=[0, 2]))
    play.leave(two)
    assert not at_end(play, one, 2.0)
    assert at_end(play, one, 3.0, used=ranges(p0=[2, 4]))


def test_what_only_the_worker_was_told_counts_as_used():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    play.registry.finish_task(task, 4)
    assert not play.beat(client).finished
    play.registry.finish_task(task, 4, used_up=True)
    assert play.beat(client).finished


@pytest.mark.parametrize("delivery", [pb.EXACTLY_ONCE, pb.AT_LEAST_ONCE])
def test_one_whose_process_is_gone_is_given_up_when_another_one_waits(delivery):
    play = Play(workers=1)
    one, two = (play.join_shared(delivery=delivery) for _ in range(2))
    two.peer = "2"
    play.start(one)
    play.registry.lose_clients("2")
    play.registry.expire(AWAY_S + 1)
    assert two.id in play.registry.clients  # no consumer waits for it
    version = play.beat(one, now=AWAY_S + 1, at_end=True).version
    play.registry.expire(AWAY_S + 2)
    assert two.id not in play.registry.clients
    (departure,) = departures(play.registry.take_outcome())
    assert departure.client_id == two.id
    assert play.beat(one, now=AWAY_S + 2).version > version


def test_one_that_comes_back_is_not_given_up():
    play = Play(workers=1)
    one, two = play.join_shared(), play.join_shared()
    two.peer = "2"
    play.registry.lose_clients("2")
    play.beat(two, now=AWAY_S)
    play.beat(one, now=2 * AWAY_S, at_end=True)
    play.registry.expire(2 * AWAY_S + 1)
    assert two.id in play.registry.clients


def test_one_whose_process_is_gone_is_given_up_for_who_settles():
    play = Play(workers=2)
    one, two = play.join_shared(), play.join_shared()
    two.peer = "2"
    (task, _) = play.start(one)
    play.lose(play.workers[0])
    play.beat(one, now=AWAY_S, settled=[task])
    play.registry.lose_clients("2")
    play.registry.expire(AWAY_S + 1)
    assert two.id not in play.registry.clients
    assert not waiting(play.beat(one, now=AWAY_S + 1))[2]


def test_what_a_worker_keeps_for_one_that_is_gone_is_given_back():
    play = Play(workers=1)
    client = play.join_shared()
    (task,) = play.start(client)
    holders = [pb.Holders(task_id=task, client_ids=[client.id, 77]), pb.Holders(task_id=99)]
    request = pb.WorkerRequest(worker_id=play.workers[0].id, task_ids=[task], holders=holders)
    play.registry.heartbeat_worker(request, 1.0)
    (departure,) = departures(play.registry.take_outcome())
    assert (departure.client_id, departure.task_id) == (77, task)


@pytest.mark.parametrize("consumption", [pb.DETERMINISTIC, pb.COORDINATED])
def test_a_consumer_comes_in_the_place_of_one_whose_process_is_gone(consumption):
    play = Play(workers=1)
    old = play.join_ordered(0, 2, consumption=consumption)
    old.peer = "2"
    play.join_ordered(1, 2, consumption=consumption)
    with pytest.raises(AlreadyExistsError):
        play.join_ordered(0, 2, consumption=consumption, now=AWAY_S + 1)
    play.registry.lose_clients("2")
    with pytest.raises(AlreadyExistsError):
        play.join_ordered(0, 2, consumption=consumption, now=AWAY_S)
    new = play.join_ordered(0, 2, consumption=consumption, now=AWAY_S + 1)
    assert old.id not in play.registry.clients
    assert new.iteration is old.iteration
