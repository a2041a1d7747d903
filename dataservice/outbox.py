"""What lies between a task's runner and the consumers that ask for its elements."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset import tree
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Parcel, pack_elements, pack_error
from mpidist import Request

# A runner makes this much ahead, and at least two elements.
_BUFFER_ELEMENTS = 4096
_BUFFER_BYTES = 64 << 20
# A reply holds elements of this much together, or one element.
_REPLY_BYTES = 1 << 20


@dataclass(eq=False)
class _Client:
    """Attributes: number of its next request, and requests that came before their turn."""

    next_sequence: int = 0
    early: dict[int, _Ask] = field(default_factory=dict)


@dataclass(eq=False)
class _Ask:
    """Attributes: the request, what it says, and for how many periods it has been held."""

    request: Request
    body: pb.GetElementRequest
    periods: int = 0


class Outbox:
    """Elements in order of production, and requests in order of arrival; the two meet here.

    Each client's requests are taken in the order of their sequence numbers, so that elements
    reach it in order whatever overtakes what on the way.

    Args:
        where: The task and its worker in words, for errors.
        drained: Called once, when the end has been reached and all elements have been given out.

    Attributes:
        where: As given.
    """

    def __init__(self, where: str, drained: Callable[[], None]) -> None:
        self.where = where
        self._drained = drained
        self._changed = threading.Condition()
        self._elements: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._asks: deque[_Ask] = deque()
        self._clients: dict[int, _Client] = {}
        self._ended = False
        self._told_drained = False
        self._failure = b""
        self._closing_error: BaseException | None = None

    # For the runner

    def put(self, element: Any) -> bool:
        """Local. Add an element when there is room; False if nobody wants more."""
        size = tree.nbytes(element)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or self._given_up())
            if self._given_up():
                return False
            self._elements.append((element, size))
            self._bytes += size
        self._serve()
        return True

    def end(self) -> None:
        """Local. There are no more elements."""
        with self._changed:
            self._ended = True
        self._serve()

    def fail(self, error: BaseException) -> None:
        """Local. There are no more elements, because of an error."""
        data = pack_error(error, self.where)
        with self._changed:
            self._failure = self._failure or data
        self._serve()

    # For the service

    def ask(self, request: Request, body: pb.GetElementRequest) -> None:
        """Local. A consumer's request; it is answered now or later."""
        with self._changed:
            error = self._closing_error
            if error is None:
                self._enqueue(_Ask(request, body))
        if error is not None:
            request.fail(error)
        else:
            self._serve()

    def release(self, client_id: int) -> None:
        """Local. Give a client nothing more."""
        with self._changed:
            self._clients.pop(client_id, None)
            self._asks = deque(a for a in self._asks if a.body.client_id != client_id)

    def refresh(self, periods: int) -> None:
        """Local. Answer with nothing what has been held at so many calls: we are alive."""
        with self._changed:
            for ask in self._asks:
                ask.periods += 1
            stale = [ask for ask in self._asks if ask.periods >= periods]
            self._asks = deque(ask for ask in self._asks if ask.periods < periods)
        for ask in stale:
            ask.request.reply(pb.GetElementReply().SerializeToString())

    def close(self, error: BaseException) -> None:
        """Local. Give nothing more, and fail what is held; idempotent."""
        with self._changed:
            self._closing_error = self._closing_error or error
            self._elements.clear()
            asks, self._asks = list(self._asks), deque()
            asks += [ask for client in self._clients.values() for ask in client.early.values()]
            self._clients.clear()
            self._changed.notify_all()
        for ask in asks:
            ask.request.fail(error)

    # Inside

    def _enqueue(self, ask: _Ask) -> None:
        client = self._clients.setdefault(ask.body.client_id, _Client())
        client.early[ask.body.sequence] = ask
        while client.next_sequence in client.early:
            self._asks.append(client.early.pop(client.next_sequence))
            client.next_sequence += 1

    def _given_up(self) -> bool:
        return self._closing_error is not None or bool(self._failure)

    def _has_room(self) -> bool:
        count = len(self._elements)
        return count < 2 or (count < _BUFFER_ELEMENTS and self._bytes < _BUFFER_BYTES)

    def _serve(self) -> None:
        while True:
            with self._changed:
                ask = self._next_ask()
                if ask is None:
                    left = self._elements or self._told_drained or self._given_up()
                    drained = self._ended and not left
                    self._told_drained |= drained
                    break
                elements = self._take(max(ask.body.max_elements, 1))
                last = not self._elements
                end, failure = self._ended and last, self._failure if last else b""
            self._answer(ask, elements, end, failure)
        if drained:
            self._drained()

    def _next_ask(self) -> _Ask | None:
        if self._asks and (self._elements or self._ended or self._failure):
            return self._asks.popleft()
        impatient = next((ask for ask in self._asks if not ask.body.hold), None)
        if impatient is not None:
            self._asks.remove(impatient)
        return impatient

    def _take(self, most: int) -> list[Any]:
        taken: list[Any] = []
        total = 0
        while self._elements and len(taken) < most:
            element, size = self._elements[0]
            if taken and total + size > _REPLY_BYTES:
                break
            self._elements.popleft()
            taken.append(element)
            total += size
        self._bytes -= total
        if taken:
            self._changed.notify_all()
        return taken

    def _answer(self, ask: _Ask, elements: list[Any], end: bool, failure: bytes) -> None:
        parcel = Parcel(b"", ())
        if elements:
            try:
                parcel = pack_elements(elements)
            except BaseException as error:
                # Lost with what was taken: the stream ends here for everybody. An element that
                # decides how it is pickled can raise anything.
                failure, elements, end = pack_error(error, self.where), [], False
                with self._changed:
                    self._failure = failure
                    self._elements.clear()
                    self._changed.notify_all()
        body = pb.GetElementReply(
            count=len(elements), pickle=parcel.pickle, end=end, failure=failure
        )
        ask.request.reply(body.SerializeToString(), parcel.buffers)
