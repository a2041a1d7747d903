"""Requests that a consumer made before it changed its mind about what it wants."""

from dataservice.proto import dataservice_pb2 as pb
from dataservice.work.buffers import RetainingBuffer


class Asked:
    """A request, and its answer once there is one."""

    process = "rank 1"

    def __init__(self):
        self.answer = None

    def reply(self, body=b"", buffers=()):
        assert self.answer is None
        self.answer = pb.GetElementReply.FromString(body)


def test_a_request_before_a_seek_takes_nothing_away():
    buffer = RetainingBuffer("a task", pb.Checkpoint(), lambda: None, 1)
    requests = []

    def ask(**seek):
        requests.append(Asked())
        body = pb.GetElementRequest(
            client_id=1, sequence=len(requests) - 1, max_elements=1, hold=True, **seek
        )
        buffer.ask(requests[-1], body)

    ask(seek=True, start=0, period=2, offset=1)
    ask()
    # Both are held. What answers them the consumer will not look at: it has asked anew.
    ask(seek=True, start=0, period=1, offset=0)
    assert [request.answer.count for request in requests[:2]] == [0, 0]
    for element in "ab":
        assert buffer.put(element)
    ask()
    assert [(request.answer.count, request.answer.first) for request in requests[2:]] == [
        (1, 0),
        (1, 1),
    ]
