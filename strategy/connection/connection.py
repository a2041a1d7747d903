"""A worker's connection to a ps task: variables, pulls and pushes."""

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

_MAX_PUSHES = 16  # pushes in flight


class Connection(Line):
    """The connection of a worker's strategy to one ps task.

    Args:
        host: The place of this process in the cluster.
        index: Index of the ps task.
        worker: Index of this worker.
        transport: ``"auto"``, ``"shared"``, ``"rma"`` or ``"p2p"``.
        mode: The synchronization mode.
        strategy: Number of strategies that the worker created before.
        gpu: Index of the GPU of the ps task that holds the variables; None for the host.

    Attributes:
        metrics: The metrics of the worker.
        pulls: Pulls by message.
        snapshots: Messages about checkpoints.
        siblings: The connections of the strategy to all ps tasks, in order, this one included.
        pushing_to_all: Lock that a push to several ps tasks holds.

    Raises:
        FailedPreconditionError: ``"shared"`` was requested, but the worker cannot map the memory
            of the ps task. Or the ps task has no CuPy or no GPU.
        InvalidArgumentError: The ps task has no such GPU, or other workers use another GPU or mode.
    """

    def __init__(
        self,
        host: Host,
        index: int,
        worker: int,
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
        """Announce a new variable to the ps task that compares the creation order of all workers.

        Args:
            name: Name of the variable, which any ps task may hold.
            layout: Shape and dtype.
            ordinal: Number of variables that this worker created before.
            server: Index of the ps task that holds the variable.
            origin: The whole variable, and the part of it that this variable holds.
            count: Number of parts of the whole variable.

        Raises:
            InvalidArgumentError: Another worker created a different variable with this ordinal.
        """
        asked = pb.CreateRequest(name=name, ordinal=ordinal, worker=self._worker, server=server)
        asked.connection = self.number
        asked.shape.extend(layout.shape)
        asked.dtype = layout.dtype.name
        asked.part.CopyFrom(_part_of(origin, count))
        self.call("Announce", asked)

    def retract(self, ordinal: int) -> None:
        """Retract the announcement of a variable that was not created."""
        asked = pb.CreateRequest(ordinal=ordinal, worker=self._worker, connection=self.number)
        self.call("Retract", asked)

    def create(
        self, name: str, layout: Layout, ordinal: int, origin: Origin, count: int
    ) -> tuple[Remote, bool]:
        """Create a variable, or find the variable if another worker has created it.

        Args:
            name: Name of the variable.
            layout: Shape and dtype.
            ordinal: See :meth:`announce`.
            origin: See :meth:`announce`.
            count: See :meth:`announce`.

        Returns:
            The variable, and True if this worker must push the initial value.

        Raises:
            InvalidArgumentError: Another worker created a different variable of this name. The
                message names both workers.
            DeadlineExceededError: The server needs another memory segment, and workers that must
                take part in its allocation have not created the variable. The message names them.
            ResourceExhaustedError: The server has no memory for the variable.
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
        """Let another worker push the initial value of a variable in place of this worker."""
        self.call("Abandon", pb.ReadRequest(variable=remote.number))

    def rule_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer in pushes. The first call registers the optimizer."""
        rule = self._rules.get(optimizer)
        if rule is None:
            reply = self.call("Configure", definition(optimizer))
            rule = self._rules[optimizer] = pb.ConfigureReply.FromString(reply.body).rule
        return rule

    @property
    def sequence(self) -> int:
        """Sequence number of the last push."""
        return self._sequence

    def push(
        self,
        changes: Sequence[Change],
        decision: Decision | None = None,
        sent: Sequence[int] = (),
    ) -> Work:
        """Push changes to variables of this server, which applies the changes in order.

        Large pushes are sent in several messages. The server applies a push after it has received
        all messages. The arrays may be changed when the call returns.

        Args:
            changes: The changes. Synchronous workers push an empty list to servers without changes,
                because servers count the steps.
            decision: The step of the changes, and the members of the step. None for a push that
                belongs to no step.
            sent: Sequence numbers of the last pushes to all servers, this push included. Empty if
                there is one server.

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
                self._send("PushSlice", request, arrays)
            push = PushMessage(self.number, slices=len(slices), sent=sent)
            push.entries = [_entry_of(change) for change in changes]
            if decision is not None:
                push.step, push.members = decision.step, decision.members
            self._wait_for_credit(last)  # an interrupt up to here loses no push
            try:
                self._sequence = push.sequence = self._sequence + 1
                call = self._send("Push", push.pack(), last)
            except BaseException:  # Ctrl-C: the push may have been sent
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
        """Send an empty push in place of a push that was counted on other servers but not sent.

        Args:
            sent: See :meth:`push`.
        """
        with self._pushing:
            self._pass_by(sent)

    def _pass_by(self, sent: Sequence[int]) -> None:
        self._sequence += 1
        with contextlib.suppress(errors.Error):  # the server has ended
            push = PushMessage(self.number, self._sequence, sent=sent)
            # Later reads wait for it, and so for the push that may have been sent before.
            self._under_way.append(self.start("Push", push.pack()))

    def detach(self) -> None:
        """Tell the server that the strategy was closed. All pushes must have ended."""
        with self._pushing:
            self._closed = True
            deadline = time.monotonic() + settings.call_timeout_s
            for call, _ in self._sent:  # of an interrupted push; a notice might overtake them
                call.block(deadline)
        with contextlib.suppress(errors.Error):  # the server has ended
            body = pb.AttachReply(connection=self.number).SerializeToString()
            self._host.endpoint.notify(self.address, "ps/Detach", body)

    def make_room(self) -> None:
        """Wait until another push may be sent. This may raise the error of an earlier push."""
        with self._pushing:
            self._check_open()
            self._make_room()

    def enter(self, step: int, description: str | None) -> Work:
        """Ask the first server to count this worker in a synchronous step.

        Args:
            step: Number of the step.
            description: The variables and the optimizer of the changes; None without changes.

        Returns:
            A Work whose result is a :class:`Decision`. Its call has no deadline.
        """
        asked = pb.EnterRequest(connection=self.number, step=step)
        if description is not None:
            asked.gives, asked.description = True, description
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
        """Wait like :meth:`settle`, also for pushes that other threads are sending."""
        with self._pushing:
            pass
        self.settle()

    def settle(self) -> None:
        """Wait until all pushes over this connection have been applied, from any thread.

        Raises:
            Exception: The error of a push, unless the Work of the push has raised it already.
        """
        self._check_open()
        if self._under_way:
            with self._pushing:
                waiting = list(self._under_way)
            with self.metrics.timed("wait for pushes", "waited_s"):
                for work in waiting:
                    work.block(float("inf"))
            # Remove the pushes after the wait, since other threads may wait for them, too. Keep
            # pushes that were sent meanwhile: their errors have not been raised.
            with self._pushing:
                self._under_way = [work for work in self._under_way if work not in waiting]
            for work in waiting:
                if _needs_attention(work):
                    work.wait()

    def _grow(self, request: pb.GrowRequest) -> None:
        """Promise to take part in allocating server memory, and do so if the server asks for it."""
        body = request.SerializeToString()
        # The promise has no deadline, because only the server knows which workers are in the
        # collective. After the call timeout this worker asks the server to withdraw the promise.
        endpoint = self._host.endpoint
        promise = endpoint.call(self.address, "ps/Grow", body, timeout=float("inf"))
        deadline = time.monotonic() + settings.call_timeout_s
        while not (promise.is_completed() or self._reach.mate_has_left()):
            promise.block(min(deadline, time.monotonic() + LOOK_S))
            if time.monotonic() >= deadline:
                break
        if not promise.is_completed():
            withdrawal = endpoint.call(self.address, "ps/Withdraw", body)
            # The server may have entered the collective before the withdrawal arrives. Then it
            # answers the withdrawal only after this worker has entered, too.
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

    def _send(self, method: str, message: Any, arrays: Sequence[Array]) -> Work:
        """Send one message of a push. The arrays may be changed when the call returns."""
        call = self.start(method, message, arrays, copy=True)
        nbytes = sum([array.nbytes for array in arrays])
        self._sent.append((call, nbytes))
        self.metrics.values["out_bytes"] += nbytes
        return call

    def _wait_for_credit(self, arrays: Sequence[Array]) -> None:
        """Wait until a message fits into half of the credit, so that pushes take bounded memory."""
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
        """Record the reply to a push. Return the version and the staleness of each change."""
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
    """Return the definition of an optimizer for the server, without a constant learning rate."""
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
    """Return whether a push is in flight, or has failed with an error that nothing has raised."""
    if not work.is_completed():
        return True
    # An error with a context belongs to another error, which is raised in its place.
    return work.error is not None and not work.is_seen and work.error.__context__ is None
