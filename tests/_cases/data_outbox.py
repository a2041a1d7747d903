"""An outbox without endpoints: requests that remember their answers."""

from collections import Counter

from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import unpack


class FakeRequest:
    """Attributes: the answer, its elements, and the error, of which there is one at most."""

    def __init__(self):
        self.body = None
        self.elements = []
        self.error = None

    def reply(self, body=b"", buffers=()):
        assert self.body is None
        assert self.error is None
        self.body = pb.GetElementReply.FromString(body)
        self.elements = list(unpack(self.body.pickle, buffers)) if self.body.count else []
        assert len(self.elements) == self.body.count

    def fail(self, error):
        assert self.body is None
        self.error = error

    @property
    def indices(self):
        """Index of the first element, and the bound of those that exist."""
        return self.body.first, self.body.stop


class Box:
    """Numbers the requests of every client.

    Attributes:
        outbox: The outbox.
        told: How often it has said that its end is reached.
    """

    def __init__(self, make):
        self.told = 0
        self.outbox = make(self._tell)
        self._sequence = Counter()

    def _tell(self):
        self.told += 1

    def put(self, *elements):
        for element in elements:
            assert self.outbox.put(element)

    def ask(self, client=1, most=10, hold=True, sequence=None, **others):
        if sequence is None:
            sequence = self._sequence[client]
            self._sequence[client] += 1
        request = FakeRequest()
        body = pb.GetElementRequest(
            client_id=client, max_elements=most, hold=hold, sequence=sequence, **others
        )
        self.outbox.ask(request, body)
        return request

    def seek(self, start, period=1, offset=0, client=1, **others):
        return self.ask(client, seek=True, start=start, period=period, offset=offset, **others)
