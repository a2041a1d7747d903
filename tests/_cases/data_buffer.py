"""A buffer without endpoints, and requests that record their replies."""

import threading
import time
from collections import Counter

from dataservice.payload import unpack
from dataservice.proto import dataservice_pb2 as pb


class FakeRequest:
    """A request that records its reply: the body and the elements, or the error."""

    process = "rank 1"

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
        """The index of the first element, and the bound of the existing elements."""
        return self.body.first, self.body.stop


class Box:
    """A buffer with numbered requests for each client.

    Attributes:
        buffer: The buffer.
        told: Number of times that the buffer has reported its end.
    """

    def __init__(self, make):
        self.told = 0
        self.buffer = make(self._tell)
        self._sequence = Counter()

    @property
    def consumed(self):
        """True if the buffer reports to the dispatcher that all elements were used."""
        progress = pb.TaskProgress()
        self.buffer.report(progress)
        return progress.used_up

    def _tell(self):
        self.told += 1

    def fills_at(self, count):
        """Wait until a thread has put ``count`` elements.

        Return whether the thread then finds no room for more elements.
        """
        deadline = time.monotonic() + 20
        while self.buffer.produced < count:
            assert time.monotonic() < deadline, self.buffer.produced
            time.sleep(0.001)
        time.sleep(0.05)
        return self.buffer.produced == count

    def begin_put(self, element):
        """Put an element on another thread and return the thread. A full buffer blocks it."""
        thread = threading.Thread(target=self.buffer.put, args=(element,), daemon=True)
        thread.start()
        thread.join(0.05)
        return thread

    def put(self, *elements):
        for element in elements:
            assert self.buffer.put(element)

    def ask(self, client=1, most=10, hold=True, sequence=None, **others):
        if sequence is None:
            sequence = self._sequence[client]
            self._sequence[client] += 1
        request = FakeRequest()
        body = pb.GetElementRequest(
            client_id=client, max_elements=most, hold=hold, sequence=sequence, **others
        )
        self.buffer.ask(request, body)
        return request

    def seek(self, start, period=1, offset=0, client=1, **others):
        return self.ask(client, seek=True, start=start, period=period, offset=offset, **others)
