"""Elements of buffers that are lost, doubled or told wrongly."""

from _cases.data_buffer import Box

from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.work.buffers import FirstComeBuffer, RetainingBuffer


def make(start=0, used=(), held=(), keeps=True):
    sets = {client: RangeSet(bounds) for client, bounds in dict(held).items()}
    return Box(
        lambda tell: FirstComeBuffer(
            "task 2", pb.Checkpoint(index=start), tell, RangeSet(used), sets, keeps
        )
    )


def test_what_came_back_in_any_order_is_told_by_its_indices():
    box = make()
    box.put(*range(6))
    box.ask(client=1, most=1)
    box.ask(client=2, most=4)
    box.ask(client=3, most=1)
    box.ask(client=2, hold=False, used=pb.Ranges(bounds=[1, 2, 3, 5]))
    for client in (2, 3, 1):
        box.buffer.release(client, [])
    got = {}
    while request := box.ask(client=4, hold=False):
        if not request.elements:
            break
        first = request.body.first
        got |= dict(zip(range(first, first + len(request.elements)), request.elements, strict=True))
    assert got == {0: 0, 2: 2, 5: 5}


def test_what_came_back_is_needed_although_later_elements_were_given_before():
    box = make()
    box.put(*range(6))
    box.ask(client=2, most=2)
    box.ask(client=1, most=2)
    box.buffer.release(2, [])
    assert box.ask(client=1, most=2).elements == [0, 1]
    assert box.buffer.needed == 0


def test_what_a_consumer_held_and_told_as_used_before_it_was_made_again():
    box = make(held={1: [1, 3]})
    box.ask(client=1, hold=False, used=pb.Ranges(bounds=[1, 2]))
    box.put(*range(4))
    box.buffer.release(1, [])
    got = [element for _ in range(4) for element in box.ask(client=2, hold=False).elements]
    assert sorted(got) == [0, 2, 3]


def test_a_request_that_waits_does_not_take_what_a_later_seek_asks_for():
    box = Box(lambda tell: RetainingBuffer("task 2", pb.Checkpoint(), tell, 2))
    box.put(0)
    assert box.seek(0).elements == [0]
    before = box.ask()
    after = box.seek(1, 2, 1)
    box.put(1)
    assert before.body is not None
    assert before.elements == []
    assert after.elements == [1]


def test_a_consumer_whose_requests_all_wait_can_still_say_what_it_has_used():
    box = Box(lambda tell: RetainingBuffer("task 2", pb.Checkpoint(), tell, 1, 1))
    box.put(0, 1)
    assert box.seek(0, most=1).elements == [0]
    assert box.ask(most=1).elements == [1]
    waiting = box.ask()
    assert waiting.body is not None or not box.begin_put(2).is_alive()


def test_all_is_used_up_when_consumers_have_said_so():
    box = make()
    box.put(*range(4))
    box.ask(client=1, most=2)
    box.ask(client=2, most=2)
    box.buffer.end()
    assert (box.told, box.consumed, box.buffer.holders) == (1, False, [1, 2])
    assert box.ask(client=1, used=pb.Ranges(bounds=[0, 2])).body.end
    assert (box.told, box.consumed, box.buffer.holders) == (1, False, [2])
    box.buffer.release(2, [2, 3])
    assert (box.told, box.consumed, box.buffer.holders) == (1, False, [])
    assert box.ask(client=1).elements == [3]
    assert (box.told, box.consumed) == (1, False)
    assert box.ask(client=1, used=pb.Ranges(bounds=[3, 4])).body.end
    assert (box.told, box.consumed) == (2, True)


def test_what_is_not_kept_is_never_known_to_be_used_up():
    box = make(keeps=False)
    box.put(0)
    assert box.ask().elements == [0]
    box.buffer.end()
    assert (box.told, box.consumed, box.buffer.holders) == (1, False, [])


def test_who_holds_elements_of_a_worker_that_was_lost_is_known():
    box = make(held={7: [1, 3]})
    assert box.buffer.holders == [7]
    box.buffer.release(7, [])
    assert box.buffer.holders == []
