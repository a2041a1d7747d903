"""Workers that fall silent, start again, or serve some consumers only."""

import re

import pytest
from _cases.data_registry import (
    Play,
    address_of,
    begun,
    forgotten,
    places,
    ranges,
    terms_of,
    waiting,
)

from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import InvalidArgumentError, NotFoundError


def test_a_silent_worker_is_lost_and_has_to_register_again():
    play = Play(workers=2)
    client = play.join()
    play.start(client)
    play.heartbeat(play.workers[1], 5)
    play.registry.expire(now=10)
    assert len(play.registry.workers) == 2
    play.registry.expire(now=11)
    assert list(play.registry.workers.values()) == [play.workers[1]]
    assert places(play.beat(client)) == [(0, 2), (1, 2)]
    with pytest.raises(NotFoundError, match="register again"):
        play.heartbeat(play.workers[0], 12)


def test_who_is_lost_at_work_is_told():
    play = Play(workers=3)
    client = play.join()
    play.start(client)
    play.registry.unregister_worker(play.workers[0].id)  # it leaves
    assert play.registry.take_outcome().losses == []
    play.registry.lose_worker(play.workers[1].id, "its connection broke")
    (loss,) = play.registry.take_outcome().losses
    parts = r"1 unfinished part|2 unfinished parts"
    address = address_of(2)
    assert re.fullmatch(
        rf"data worker {address} is lost \(its connection broke\) with ({parts}); 1 left", loss
    )
    play.registry.expire(now=1000)
    told = play.registry.take_outcome().losses
    assert [text.partition(":")[0] for text in told[-1:]] == [
        "a consumer of a job without a name, in process trainer/1-a, is given up"
    ]
    assert "silent for 10 s" in told[0]
    play.registry.lose_worker(play.workers[2].id, "again")
    assert play.registry.take_outcome().losses == []


def test_the_part_of_a_worker_that_a_consumer_cannot_reach_goes_to_another():
    play = Play(workers=2)
    client = play.join()
    one, _ = play.start(client)
    for worker in play.workers:
        play.heartbeat(worker, 5)
    play.registry.report_unreachable(one, 7, 2.5)
    assert len(play.registry.workers) == 2
    assert places(play.beat(client)) == [(0, 2), (1, 2)]
    play.registry.report_unreachable(one, 9, 2.5)
    assert len(play.registry.workers) == 2


def test_a_worker_that_a_consumer_cannot_reach_is_lost_if_it_is_silent():
    play = Play(workers=1)
    (task,) = play.start(play.join())
    play.heartbeat(play.workers[0], 5)
    play.registry.report_unreachable(task, 8, 2.5)
    assert not play.registry.workers
    play.registry.report_unreachable(task, 9, 2.5)


def test_a_restarted_worker_replaces_the_old_one_and_gets_its_part_back():
    play = Play(workers=1)
    client = play.join()
    (old,) = play.start(client)
    again = play.add_worker(1)
    assert list(play.registry.workers.values()) == [again]
    told = play.beat(client)
    assert places(told) == [(0, 1)]
    assert told.tasks[0].task_id != old


def test_a_restarted_worker_gets_no_new_copy_of_what_it_has_finished():
    play = Play(workers=2)
    client = play.join(terms_of(pb.OFF))
    one, _ = play.start(client)
    play.registry.finish_task(one, 10)
    play.beat(client, used=ranges(p0=[0, 10]))
    play.add_worker(1)
    assert places(play.beat(client)) == [(1, 2)]


def test_local_consumers_read_from_their_own_process():
    play = Play()
    play.add_worker(1, process="trainer/1-a")
    play.add_worker(2, process="trainer/2-c")
    local = terms_of(target=pb.LOCAL)
    assert places(play.beat(play.join(local))) == [(0, 1)]
    with pytest.raises(InvalidArgumentError, match=r"'LOCAL' needs a WorkerServer.*trainer/3"):
        play.join(local, process="trainer/3")


def test_workers_of_several_processes_serve_a_job_that_is_read_locally():
    play = Play()
    play.add_worker(1, process="trainer/1")
    play.add_worker(2, process="trainer/2")
    terms = terms_of(consumption=pb.FIRST_COME, target=pb.LOCAL)
    clients = [play.join(terms, "job", process=f"trainer/{number}") for number in (1, 2)]
    assert [places(play.beat(client)) for client in clients] == [[(0, 1)], [(1, 2)]]


@pytest.mark.parametrize(
    ("target", "expected"), [(pb.AUTO, [(0, 1), (1, 3)]), (pb.ANY, [(0, 1), (1, 2), (2, 3)])]
)
def test_colocated_workers_serve_their_own_host(target, expected):
    play = Play(workers=1)
    play.add_worker(2, process="elsewhere/7", tags=["COLOCATED"])
    play.add_worker(3, process="trainer/7", tags=["COLOCATED"])
    assert places(play.beat(play.join(terms_of(target=target)))) == expected


def test_static_parts_begin_at_their_workers_only():
    play = Play(workers=1, addresses=[address_of(1), address_of(2)])
    client = play.join(terms_of(pb.DATA))
    assert waiting(play.beat(client)) == ([(0, 1)], [], 1)
    play.add_worker(2)
    assert waiting(play.beat(client)) == ([(0, 1), (1, 2)], [], 0)
    with pytest.raises(InvalidArgumentError):
        play.add_worker(3)


def test_a_static_part_that_had_begun_can_be_taken_up_by_others():
    play = Play(workers=2, addresses=[address_of(1), address_of(2)])
    client = play.join(terms_of(pb.DATA))
    play.start(client)
    play.lose(play.workers[1])
    assert places(play.beat(client)) == [(0, 1), (1, 1)]


def test_workers_forget_what_they_are_told_to_forget():
    play = Play(workers=1)
    client = play.join()
    (task,) = play.start(client)
    assert play.heartbeat(play.workers[0], 1, [task, 999]) == [999]
    assert forgotten(play.leave(client)) == [(task, address_of(1))]
    assert play.heartbeat(play.workers[0], 1, [task]) == [task]


def test_workers_are_told_which_tasks_to_begin():
    play = Play(2)
    client = play.join_ordered(shards=4)
    leased = begun(play.registry.take_outcome())
    tasks = {task.task_id: task.worker for task in play.beat(client).tasks}
    assert dict(leased) == tasks
    for number, worker in enumerate(play.workers, 1):
        mine = [task for task, address in tasks.items() if address == address_of(number)]
        assert len(mine) == 2
        # If word of them is lost, the answer to a heartbeat names them, until they have begun.
        assert play.registry.tasks_to_begin(worker.id, 0) == mine
        play.registry.start_task(mine[0])
        assert play.registry.tasks_to_begin(worker.id, 0) == mine[1:]
    play.lose(play.workers[0])
    assert len(begun(play.registry.take_outcome())) == 2
    assert len(play.registry.tasks_to_begin(play.workers[1].id, 0)) == 3
