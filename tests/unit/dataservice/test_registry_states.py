"""Iterations that begin at a state, and jobs that are set back to a state."""

import pytest
from _cases.data_registry import Play, forgotten, places, ranges, terms_of

from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import InvalidArgumentError, NotFoundError


def state_of(position=4, starts=(2, 2), terms=None, **others):
    """Return a state with unknown totals."""
    summary = others.pop("summary", "range")
    return pb.State(
        summary=summary,
        identity=summary.encode(),
        terms=terms or terms_of(consumption=pb.DETERMINISTIC, num_consumers=2, num_shards=2),
        seed=77,
        repetition=others.pop("repetition", 0),
        position=position,
        parts=others.pop(
            "parts",
            [pb.PartState(part=p, start=start, total=-1) for p, start in enumerate(starts)],
        ),
        **others,
    )


def own_state(parts, next_index=0, **terms):
    return state_of(terms=terms_of(**terms), parts=parts, next_index=next_index)


def test_an_iteration_begins_where_its_state_says():
    play = Play(workers=1)
    checkpoint = pb.Checkpoint(index=1, state=b"there", position=1)
    parts = [pb.PartState(part=0, start=2, total=-1, checkpoint=checkpoint)]
    client = play.join_ordered(0, 2, state=state_of(parts=parts))
    assert client.iteration.seed == 77
    first, second = client.iteration.parts.values()
    assert (first.start, first.used.bounds, first.checkpoint) == (2, [0, 2], checkpoint)
    assert (second.start, second.used.bounds, second.checkpoint.index) == (0, [], 0)


def test_dynamic_parts_go_on_with_their_splits_and_what_is_left():
    play = Play(workers=2, length=1000)
    parts = [
        pb.PartState(
            part=number,
            start=5,
            total=-1,
            checkpoint=pb.Checkpoint(index=4, position=1),
            splits=pb.Splits(first=1, bounds=[100 * number, 100 * number + 9]),
        )
        for number in range(2)
    ]
    client = play.join(state=own_state(parts, 400))
    one, two = play.start(client)
    for number, task in enumerate((one, two)):
        assert play.registry.next_split(task, 1) == range(100 * number, 100 * number + 9)
        assert play.registry.next_split(task, 10).start >= 400
    play.add_worker(3)
    assert places(play.beat(client)) == [(0, 1), (1, 2), (2, 3)]


def test_fewer_workers_take_all_parts_of_a_state():
    play = Play(workers=1)
    parts = [pb.PartState(part=number, start=5, total=-1) for number in range(3)]
    client = play.join(state=own_state(parts))
    assert places(play.beat(client)) == [(0, 1), (1, 1), (2, 1)]


def test_what_goes_on_from_a_state_has_the_copies_that_it_had():
    play = Play(workers=3)
    parts = [pb.PartState(part=0, start=5, total=-1), pb.PartState(part=1, start=9, total=9)]
    client = play.join(terms_of(pb.OFF), state=own_state(parts, policy=pb.OFF))
    assert places(play.beat(client)) == [(0, 1)]


def test_parts_that_had_ended_stay_so():
    play = Play(workers=1)
    parts = [pb.PartState(part=number, start=3, total=3) for number in range(2)]
    assert play.beat(play.join(state=own_state(parts))).finished


def test_consumers_that_bring_the_same_state_read_together():
    play = Play(workers=1)
    clients = [play.join_ordered(index, 2, state=state_of()) for index in range(2)]
    assert clients[0].iteration is clients[1].iteration


def test_a_state_of_something_else():
    play = Play()
    with pytest.raises(InvalidArgumentError, match=r"over cubes, read .* parts, not over range"):
        play.join_ordered(0, 2, state=state_of(summary="cubes"))
    with pytest.raises(
        InvalidArgumentError, match=r"DETERMINISTIC by 2 .*, not over range.*EXCLUSIVE"
    ):
        play.join(state=state_of())


def test_some_with_a_state_and_some_without():
    play = Play()
    play.join_ordered(0, 2, state=state_of())
    with pytest.raises(InvalidArgumentError, match="'job' resume from a state and others do not"):
        play.join_ordered(1, 2)


def test_a_state_takes_the_job_back():
    play = Play(workers=1)
    old = [play.join_ordered(index, 2) for index in range(2)]
    tasks = play.start(old[0])
    play.beat(old[0], used=ranges(p0=[0, 9]))
    play.registry.take_outcome()
    new = [play.join_ordered(index, 2, state=state_of()) for index in range(2)]
    assert new[0].iteration is new[1].iteration
    assert new[0].iteration is not old[0].iteration
    outcome = play.registry.take_outcome()
    assert {task for task, _ in forgotten(outcome)} == set(tasks)
    assert outcome.changed["iteration", old[0].iteration.id] is None
    for client in old:
        with pytest.raises(NotFoundError, match="taken its job back to a state"):
            play.beat(client)


def test_restarted_consumers_bring_the_state_that_they_began_with():
    play = Play()
    first = [play.join_ordered(index, 2, state=state_of()) for index in range(2)]
    again = [play.join_ordered(index, 2, state=state_of()) for index in range(2)]
    iterations = {client.iteration.id for client in first}, {c.iteration.id for c in again}
    assert [len(each) for each in iterations] == [1, 1]
    assert iterations[0] != iterations[1]


def test_a_state_brings_back_a_repetition_that_has_finished():
    play = Play(workers=1)
    client = play.join_ordered(0, 1, shards=1)
    (task,) = play.start(client)
    play.registry.finish_task(task, 3)
    play.leave(client, used=ranges(p0=[0, 3]))
    assert play.beat(play.join_ordered(0, 1, shards=1)).finished
    terms = terms_of(consumption=pb.DETERMINISTIC, num_consumers=1, num_shards=1)
    client = play.join_ordered(0, 1, shards=1, state=state_of(2, (2,), terms))
    told = play.beat(client)
    assert (told.finished, places(told)) == (False, [(0, 1)])


def test_other_repetitions_are_left_alone():
    play = Play(workers=1)
    other = play.join_ordered(0, 2, repetition=1)
    play.join_ordered(0, 2)
    play.join_ordered(0, 2, state=state_of())
    assert not play.beat(other).finished


def test_another_number_of_consumers_can_go_on():
    play = Play(workers=1)
    clients = [play.join_ordered(index, 3, state=state_of()) for index in range(3)]
    play.beat(clients[0], used=ranges(p0=[0, 5]))
    play.beat(clients[1], used=ranges(p0=[0, 4]))
    (part, _) = clients[0].iteration.parts.values()
    assert part.used.bounds == [0, 2]
    play.beat(clients[2], used=ranges(p0=[0, 7]))
    assert part.used.bounds == [0, 4]


def test_a_refused_state_leaves_the_job_as_it_is():
    play = Play(workers=1)
    client = play.join_ordered(0, 1)
    other = play.add_dataset("other")
    terms = terms_of(consumption=pb.DETERMINISTIC, num_consumers=2, num_shards=2)
    state = state_of(summary="other", terms=terms)
    with pytest.raises(InvalidArgumentError, match=r"different parameters: existing .* over range"):
        play.join(terms, "job", dataset=other, state=state)
    assert len(play.beat(client).tasks) == 2


def test_parts_that_are_given_up_with_an_unreachable_worker_are_in_the_journal():
    play = Play(workers=2)
    client = play.join_shared(delivery=pb.AT_MOST_ONCE)
    task, _ = play.start(client)
    play.registry.take_outcome()
    play.registry.report_unreachable(task, 0.0, 10.0)
    changed = play.registry.take_outcome().changed
    assert changed["iteration", client.iteration.id].dropped == 1
