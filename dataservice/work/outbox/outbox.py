"""Where elements, in order of production, and requests, in order of arrival, meet."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dataservice.compression import compress
from dataservice.dataset import tree
from dataservice.errors import pack_error
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import Parcel, pack_elements
from mpidist import Request

# A runner makes this much ahead, and at least two elements.
AHEAD_BYTES = 64 << 20
AHEAD_ELEMENTS = 4096
# A reply holds elements of this much together, or one element.
_REPLY_BYTES = 1 << 20


@dataclass(eq=False)
class _Client:
    """Attributes: number of its next request, and requests that came before their turn."""

    next_sequence: int = 0
    early: dict[int, Ask] = field(default_factory=dict)


@dataclass(eq=False)
class Ask:
    """A request of a consumer.

    Attributes:
        request: To be answered.
        body: What it says.
        periods: For how many it has been held.
        void: Whether the consumer has said since that it wants other elements: it takes no notice
            of the answer, which must not have any.
    """

    request: Request
    body: pb.GetElementRequest
    periods: int = 0
    void: bool = False


@dataclass
class Answer:
    """What a request gets.

    Attributes:
        elements: The elements.
        first: Index of the first one.
        stop: Elements before it exist.
        end: Whether nothing comes after these.
        error: What is wrong with the request; None if nothing is.
    """

    elements: list[Any] = field(default_factory=list)
    first: int = 0
    stop: int = 0
    end: bool = False
    error: BaseException | None = None


class Outbox(ABC):
    """Elements of a task, numbered from where its runner began, and requests for them.

    Each client's requests are taken in the order of their sequence numbers, so that elements
    reach it in order whatever overtakes what on the way.

    Args:
        where: The task and its worker in words, for errors.
        start: Index of the first element that is put.
        limit_bytes: How much may be made ahead, besides two elements for each consumer.

    Attributes:
        where: As given.
        start: As given.
        waited_s: How long whoever puts elements has waited for room, in seconds.
    """

    def __init__(self, where: str, start: int = 0, limit_bytes: int = AHEAD_BYTES) -> None:
        self.where = where
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self.start = self._produced = start
        self.waited_s = 0.0
        self._bytes = 0
        self._asks: deque[Ask] = deque()
        self._clients: dict[int, _Client] = {}
        self._ended = False
        self._failure = b""
        self._closing_error: BaseException | None = None
        self._last_needed: int | None = None  # at the time when all elements were dropped

    # For the runner

    def put(self, element: Any) -> bool:
        """Local. Add an element when there is room; False if nobody wants more."""
        size = tree.nbytes(element)
        with self._changed:
            if not self._has_room():
                self._wait_for_room()
            if self._given_up():
                return False
            self._keep(self._produced, element, size)
            self._produced += 1
        self._serve()
        return True

    def _wait_for_room(self) -> None:
        began = time.monotonic()
        self._changed.wait_for(lambda: self._has_room() or self._given_up())
        self.waited_s += time.monotonic() - began

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

    @property
    def produced(self) -> int:
        """Local. Index of the next element."""
        return self._produced

    @property
    def needed(self) -> int:
        """Index of the first element that is still needed.

        Closing or failing the outbox does not change it. A heartbeat that is under way may still
        report it, and another worker then continues the part from there: elements that were made
        and not delivered must be made again.
        """
        with self._changed:
            return self._oldest_needed() if self._last_needed is None else self._last_needed

    @property
    def used_up(self) -> bool:
        """Local. Whether there was an end, and consumers have told us that they used all."""
        return False

    @property
    def holders(self) -> list[int]:
        """Local. The ids of clients for which elements are kept until they have used them."""
        return []

    # For the service

    def ask(self, request: Request, body: pb.GetElementRequest) -> None:
        """Local. A consumer's request; it is answered now or later."""
        with self._changed:
            error = self._closing_error
            if error is None:
                self._enqueue(Ask(request, body))
        if error is not None:
            request.fail(error)
        else:
            self._serve()

    def release(self, client_id: int, used: list[int]) -> None:
        """Local. Give a client nothing more.

        Args:
            client_id: The client.
            used: Bounds of the elements that it has used and not said so yet.
        """
        with self._changed:
            self._clients.pop(client_id, None)
            self._asks = deque(a for a in self._asks if a.body.client_id != client_id)
            self._let_go(client_id, used)
            self._changed.notify_all()
        self._serve()

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
            self._drop_all()
            asks, self._asks = list(self._asks), deque()
            asks += [ask for client in self._clients.values() for ask in client.early.values()]
            self._clients.clear()
            self._changed.notify_all()
        for ask in asks:
            ask.request.fail(error)

    # For subclasses; all are called with the lock held

    @abstractmethod
    def _keep(self, index: int, element: Any, size: int) -> None:
        """An element has been made."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether one more may be made."""

    @abstractmethod
    def _take(self, body: pb.GetElementRequest) -> Answer | None:
        """What a request gets now; None if it has to wait."""

    @abstractmethod
    def _note(self, body: pb.GetElementRequest) -> None:
        """A request has come to its turn: what it says besides what it wants."""

    @abstractmethod
    def _let_go(self, client_id: int, used: list[int]) -> None:
        """A client leaves."""

    @abstractmethod
    def _oldest_needed(self) -> int:
        """Return the index of the first element that a consumer may still need."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all elements."""

    # Inside

    def _drop_all(self) -> None:
        self._last_needed = self.needed
        self._clear()

    def _enqueue(self, ask: Ask) -> None:
        client = self._clients.setdefault(ask.body.client_id, _Client())
        client.early[ask.body.sequence] = ask
        while client.next_sequence in client.early:
            ask = client.early.pop(client.next_sequence)
            self._note(ask.body)
            self._asks.append(ask)
            client.next_sequence += 1
        self._changed.notify_all()

    def _given_up(self) -> bool:
        return self._closing_error is not None or bool(self._failure)

    def _serve(self) -> None:
        while True:
            with self._changed:
                found = self._next_answer()
                if found is None:
                    return
                self._changed.notify_all()
            self._answer(*found)

    def _next_answer(self) -> tuple[Ask, Answer, bytes] | None:
        """The first request that need not wait, of every client the oldest."""
        seen = set()
        for ask in self._asks:
            if ask.body.client_id in seen:
                continue
            seen.add(ask.body.client_id)
            answer = Answer() if ask.void else self._take(ask.body)
            failure = b""
            if answer is None:
                failure = self._failure
                if not failure and ask.body.hold:
                    continue
                answer = Answer()
            self._asks.remove(ask)
            return ask, answer, failure
        return None

    def _answer(self, ask: Ask, answer: Answer, failure: bytes) -> None:
        if answer.error is not None:
            ask.request.fail(answer.error)
            return
        parcel, sizes = Parcel(b"", ()), list[int]()
        if answer.elements:
            try:
                parcel = pack_elements(answer.elements)
                if ask.body.codec:
                    parcel, sizes = compress(parcel, ask.body.codec)
            except BaseException as error:
                # Lost with what was taken: the stream ends here for everybody. An element that
                # decides how it is pickled can raise anything.
                failure, answer = pack_error(error, self.where), Answer()
                with self._changed:
                    self._failure = failure
                    self._drop_all()
                    self._changed.notify_all()
        body = pb.GetElementReply(
            count=len(answer.elements),
            pickle=parcel.pickle,
            end=answer.end,
            failure=failure,
            first=answer.first,
            stop=answer.stop,
            sizes=sizes,
        )
        ask.request.reply(body.SerializeToString(), parcel.buffers)


def how_many(sizes: Any, most: int) -> int:
    """Local. How many elements of these sizes, in bytes, go into one reply."""
    total = count = 0
    for size in sizes:
        total += size
        if count == most or (count and total > _REPLY_BYTES):
            break
        count += 1
    return count
