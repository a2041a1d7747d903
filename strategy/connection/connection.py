"""A worker's line to a parameter server: variables, pulls and pushes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from mpidist import Reply, Work, errors, task_metrics
from mpidist.config import config as settings
from strategy.connection.change import Change
from strategy.connection.line import LOOK_S, Line
from strategy.connection.pulls import Pulls
from strategy.connection.reach import Reach
from strategy.connection.remote import Remote
from strategy.connection.snapshots import Snapshots
from strategy.optimizers import Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.host import Host
from strategy.shared.parts import Origin
from strategy.shared.push_layout import arrays_of, messages_of
from strategy.shared.push_message import (
    PLACES,
    ROWS,
    WHOLE,
    Entry,
    PushMessage,
    unpack_reply,
    wire_number,
)
from strategy.shared.rounds import Decision
from strategy.shared.shard import Layout

Array = NDArray[Any]

_MAX_PUSHES = 16  # pushes under way at once


class Connection(Line):
    """Local. One worker's line to one ps task.

    Args:
        host: The process's place in the cluster.
        index: Of the ps task.
        worker: Index among the workers.
        workers: How many workers there are.
        transport: ``"auto"``, ``"shared"``, ``"rma"`` or ``"p2p"``.
        mode: How it waits for other workers.
        strategy: How many strategies the worker has made before.
        gpu: Which GPU of the ps its variables are to live on; None for the host.

    Attributes:
        metrics: What the worker has done so far.
        pulls: Pulls by message.
        snapshots: What is said of checkpoints.
        siblings: The connections of the strategy, this one included, in their order.
        pushing_to_all: Held while changes go to several of them.

    Raises:
        FailedPreconditionError: ``"shared"`` was asked for, and the memory of the ps cannot be
            reached; or the ps has no CuPy, or no GPU.
        InvalidArgumentError: The ps has no such GPU, or other workers want another one.
    """

    def __init__(
        self,
        host: Host,
        index: int,
        worker: int,
        workers: int,
        transport: str,
        mode: pb.Mode,
        strategy: int,
        gpu: int | None = None,
    ) -> None:
        super().__init__(host, index)
        self._worker = worker
        self.metrics = task_metrics(host.job_name, host.task_index)
        self._reach = Reach(host, index, transport)
        self.siblings: Sequence[Connection] = (self,)
        self.pushing_to_all = threading.RLock()
        self._rules: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._sequence = 0
        self._closed = False
        self._pushing = threading.Lock()
        self._under_way: list[Work] = []
        self._sent: deque[tuple[Work, int]] = deque()  # requests of pushes, and their bytes
        asked = pb.AttachRequest(worker=worker, mode=mode, strategy=strategy, gpu=gpu)
        reply = pb.AttachReply.FromString(self.call("Attach", asked).body)
        self.number = reply.connection
        self.pulls = Pulls(self)
        self.snapshots = Snapshots(self, worker)

    def announce(
        self, name: str, layout: Layout, ordinal: int, server: int, origin: Origin, count: int
    ) -> None:
        """Local. Have one server compare the order in which workers create variables.

        Args:
            name: Of the variable, wherever it is placed.
            layout: Shape and dtype.
            ordinal: How many variables this worker created before.
            server: Index of the ps task on which it is placed.
            origin: What of which variable it is.
            count: Into how many parts that is divided.

        Raises:
            InvalidArgumentError: Another worker created another variable at this place.
        """
        asked = pb.CreateRequest(name=name, ordinal=ordinal, worker=self._worker, server=server)
        asked.connection = self.number
        asked.shape.extend(layout.shape)
        asked.dtype = layout.dtype.name
        asked.part.CopyFrom(_part_of(origin, count))
        self.call("Announce", asked)

    def retract(self, ordinal: int) -> None:
        """Local. Take back that a variable is announced, which has not been made."""
        asked = pb.CreateRequest(ordinal=ordinal, worker=self._worker, connection=self.number)
        self.call("Retract", asked)

    def create(
        self, name: str, layout: Layout, ordinal: int, origin: Origin, count: int
    ) -> tuple[Remote, bool]:
        """Local. Make a variable, or find it if another worker has made it.

        Args:
            name: Of the variable.
            layout: Shape and dtype.
            ordinal: How many variables this worker created before.
            origin: What of which variable it is.
            count: Into how many parts that is divided.

        Returns:
            The variable, and whether this worker must push its first value.

        Raises:
            InvalidArgumentError: Another worker created it otherwise; the message names both.
            DeadlineExceededError: The server has no room, and other workers of its node, whom it
                needs to make some, have not created the variable; the message names them.
            ResourceExhaustedError: The server has no room.
        """
        asked = pb.CreateRequest(
            name=name,
            shape=layout.shape,
            dtype=layout.dtype.name,
            ordinal=ordinal,
            worker=self._worker,
            connection=self.number,
            only_shared=self._reach.only_shared,
            part=_part_of(origin, count),
        )
        while True:
            reply = pb.CreateReply.FromString(self.call("CreateVariable", asked).body)
            if not reply.grow:
                break
            self._grow(pb.GrowRequest(segment=reply.grow, create=asked))
        shared = self._reach.shard(layout, reply)
        whole = origin.variable
        gpu = reply.gpu if reply.HasField("gpu") else None
        remote = Remote(name, whole, layout, self, reply.variable, shared, gpu, reply.version)
        return remote, reply.must_initialize

    def abandon(self, remote: Remote) -> None:
        """Local. Leave the first value of a variable, which this worker should give, to another."""
        self.call("Abandon", pb.ReadRequest(variable=remote.number))

    def rule_of(self, optimizer: Optimizer) -> int:
        """Return the number by which pushes name an optimizer. The first call tells the server."""
        rule = self._rules.get(optimizer)
        if rule is None:
            reply = self.call("Configure", definition(optimizer))
            rule = self._rules[optimizer] = pb.ConfigureReply.FromString(reply.body).rule
        return rule

    @property
    def sequence(self) -> int:
        """Of the last push."""
        return self._sequence

    def push(
        self,
        changes: Sequence[Change],
        decision: Decision | None = None,
        sent: Sequence[int] = (),
    ) -> Work:
        """Send changes to variables of this server, which applies them in order.

        Large pushes are sent in several messages. The server changes nothing before it has all of
        them. The arrays may be used again when the call returns.

        Args:
            changes: The changes. Synchronous workers also push none, since servers count the steps.
            decision: The step to which the changes belong, and its members; None for no step.
            sent: The sequence numbers of the last pushes to all servers, this one included. Empty
                if there is one server.

        Returns:
            A Work whose result is the list of (version, staleness) after each change.
        """
        begin = time.time()
        with self._pushing:
            self._check_open()
            self._make_room()
            with np.errstate(all="ignore"):  # the server does not report overflow either
                *slices, last = messages_of(arrays_of(changes))
            for index, arrays in enumerate(slices):
                self._wait_for_credit(arrays)
                request = pb.SliceRequest(connection=self.number, index=index)
                self._send("PushSlice", request.SerializeToString(), arrays)
            push = PushMessage(self.number, slices=len(slices), sent=sent)
            push.entries = [_entry_of(change) for change in changes]
            if decision is not None:
                push.step, push.members = decision.step, decision.members
            self._wait_for_credit(last)  # an interrupt here changes nothing
            self._sequence = push.sequence = self._sequence + 1
            try:
                call = self._send("Push", push.pack(), last)
            except BaseException:  # Ctrl-C: it may have been sent
                self._pass_by(sent)
                raise
            for change in changes:
                change.remote.seen += 1
            remotes = [change.remote for change in changes]
            gradients = [change.rule >= pb.FIRST_OPTIMIZER for change in changes]
            work = call.then(lambda reply: self._applied(reply, remotes, gradients))
            self._under_way.append(work)
        self.metrics.note("push", begin)
        return work

    def pass_by(self, sent: Sequence[int]) -> None:
        """Send an empty push in place of a push that other servers expect here.

        Args:
            sent: See :meth:`push`.
        """
        with self._pushing:
            self._pass_by(sent)

    def _pass_by(self, sent: Sequence[int]) -> None:
        self._sequence += 1
        with contextlib.suppress(errors.Error):  # the server has ended
            push = PushMessage(self.number, self._sequence, sent=sent)
            self.start_raw("Push", push.pack())

    def detach(self) -> None:
        """Tell the server that the strategy was closed, after all pushes have ended."""
        with self._pushing:
            self._closed = True
        with contextlib.suppress(errors.Error):  # the server has ended
            body = pb.AttachReply(connection=self.number).SerializeToString()
            self._host.endpoint.notify(self.address, "ps/Detach", body)

    def make_room(self) -> None:
        """Wait until another push may be under way; raise errors of earlier pushes."""
        with self._pushing:
            self._check_open()
            self._make_room()

    def enter(self, step: int, what: str | None) -> Work:
        """Ask the first server to count this worker in a synchronous step.

        Args:
            step: Number of the step.
            what: The variables and the optimizer of the changes, in words; None without changes.

        Returns:
            A Work whose result is a :class:`Decision`. Its call has no deadline.
        """
        asked = pb.EnterRequest(
            connection=self.number, step=step, gives=what is not None, what=what or ""
        )
        return self.start("Enter", asked, timeout=float("inf")).then(_decision)

    def wait_for(self, step: int) -> Work:
        """Ask the server to reply when all steps before this one have been applied."""
        return self.start("Await", pb.AwaitRequest(connection=self.number, step=step))

    def fail(self, step: int) -> Work:
        """Tell the server that this worker cannot push its part of a step."""
        return self.start("Fail", pb.AwaitRequest(connection=self.number, step=step))

    def tick(self, clock: int) -> Work:
        """Tell the first server how many steps this worker has made.

        Returns:
            A Work that ends when the worker may go on. Its call has no deadline.
        """
        asked = pb.ClockRequest(connection=self.number, clock=clock)
        return self.start("Clock", asked, timeout=float("inf"))

    def missing(self) -> list[int]:
        """Return the workers for which others wait, as the first server knows."""
        reply = self.call("Missing", pb.AttachReply(connection=self.number))
        return list(pb.MissingReply.FromString(reply.body).workers)

    def leave(self) -> None:
        """Tell the first server that others must not wait for this worker any more."""
        self.call("Leave", pb.AttachReply(connection=self.number))

    def drain(self) -> None:
        """Local. The same as :meth:`settle`, of pushes, too, that another thread is just making."""
        with self._pushing:
            pass
        self.settle()

    def settle(self) -> None:
        """Local. Wait until every push through this connection has been applied, of any thread.

        Raises:
            Exception: What a push failed with, unless it has been raised from its Work already.
        """
        self._check_open()
        if self._under_way:
            with self._pushing:
                waiting = list(self._under_way)
            with self.metrics.timed("wait for pushes", "waited_s"):
                for work in waiting:
                    work.block(float("inf"))
            # Not before: another thread may be about to wait for them too. And no others: one that
            # has come and failed meanwhile has not been raised anywhere.
            with self._pushing:
                self._under_way = [work for work in self._under_way if work not in waiting]
            for work in waiting:
                if _needs_attention(work):
                    work.wait()

    def _grow(self, request: pb.GrowRequest) -> None:
        """Take part in making a segment of the server's memory, if it comes to that."""
        body = request.SerializeToString()
        # The promise holds until the server answers: only then is it known who is in the
        # collective. The server is asked to take it back if that does not come in time.
        endpoint = self._host.endpoint
        promise = endpoint.call(self.address, "ps/Grow", body, timeout=float("inf"))
        deadline = time.monotonic() + settings.call_timeout_s
        while not (promise.is_completed() or self._reach.mate_has_left()):
            promise.block(min(deadline, time.monotonic() + LOOK_S))
            if time.monotonic() >= deadline:
                break
        if not promise.is_completed():
            withdrawal = endpoint.call(self.address, "ps/Withdraw", body)
            # It may have begun before the server hears of this, and then the server answers no
            # more until this worker has taken part.
            while not (promise.is_completed() or withdrawal.is_completed()):
                promise.block(time.monotonic() + LOOK_S)
            if not promise.is_completed():
                withdrawal.wait()
        reply = pb.GrowReply.FromString(promise.result().body)
        if reply.enter:
            self._reach.grow(reply)

    def _check_open(self) -> None:
        if self._closed:  # another thread has closed the strategy during this push
            raise errors.FailedPreconditionError("the strategy was closed during a push")

    def _send(self, method: str, body: bytes, arrays: Sequence[Array]) -> Work:
        """Send one message of a push. The arrays may be changed when this returns."""
        call = self.start_raw(method, body, arrays, copy=True)
        nbytes = sum([array.nbytes for array in arrays])
        self._sent.append((call, nbytes))
        self.metrics.values["out_bytes"] += nbytes
        return call

    def _wait_for_credit(self, arrays: Sequence[Array]) -> None:
        """Wait until a message fits in, so that the messages of pushes take bounded memory."""
        self._sent = deque(one for one in self._sent if not one[0].is_completed())
        left = settings.credit_bytes // 2 - sum([array.nbytes for array in arrays])
        while self._sent and sum([nbytes for _, nbytes in self._sent]) > left:
            self._sent[0][0].block(float("inf"))
            self._sent.popleft()

    def _applied(
        self,
        reply: Reply,
        remotes: Sequence[Remote],
        gradients: Sequence[bool],
    ) -> list[tuple[int, int]]:
        """What has become of a push: version and staleness of each of its changes."""
        versions, staleness = unpack_reply(reply.body)
        pairs = list(zip(versions, staleness, strict=True))
        for remote, (version, _) in zip(remotes, pairs, strict=True):
            remote.known = max(remote.known, version)
        values = self.metrics.values
        values["changes"] += sum(gradients)
        values["staleness"] += sum(itertools.compress([late for _, late in pairs], gradients))
        return pairs

    def _make_room(self) -> None:
        self._under_way = [work for work in self._under_way if _needs_attention(work)]
        while len(self._under_way) >= _MAX_PUSHES:
            self._under_way.pop(0).wait()


def _decision(reply: Reply) -> Decision:
    answer = pb.EnterReply.FromString(reply.body)
    return Decision(answer.step, tuple(answer.members), answer.problem)


def _entry_of(change: Change) -> Entry:
    kind = WHOLE
    if change.ids is not None:
        kind = ROWS
    elif change.places is not None:
        kind = PLACES
    remote = change.remote
    return remote.number, change.rule, remote.seen, change.rate, kind, wire_number(change.wire)


def _part_of(origin: Origin, count: int) -> pb.PartOf:
    part = origin.part
    return pb.PartOf(
        variable=origin.variable,
        shape=part.whole,
        axis=part.axis,
        start=part.start,
        stop=part.stop,
        count=count,
    )


def definition(optimizer: Optimizer) -> pb.OptimizerDef:
    """Return what the server must know of an optimizer: all but a learning rate that can be set."""
    definition = pb.OptimizerDef(
        kind=type(optimizer).__name__,
        name=optimizer.name,
        values=optimizer.hyperparameters,
        slots=optimizer.slots(),
    )
    if callable(optimizer.learning_rate):
        definition.schedule = cloudpickle.dumps(optimizer.learning_rate)
    if isinstance(optimizer, Function):
        definition.function = cloudpickle.dumps(optimizer.update)
    return definition


def _needs_attention(work: Work) -> bool:
    """Whether a push goes on, or failed with an error that has not been raised anywhere yet."""
    if not work.is_completed():
        return True
    # With a context, it goes with another one.
    return work.error is not None and not work.is_seen and work.error.__context__ is None
