"""A worker's connection to a ps task: variables, pushes, and access to shared memory."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary, finalize

import cloudpickle
from numpy.typing import NDArray

from mpidist import Reply, Work, errors, gather_works, task_metrics
from mpidist.config import config as settings
from strategy.client.changes import Change, arrays_of, entries_of, messages_of
from strategy.client.pull import RemoteVariable
from strategy.client.waits import block
from strategy.optimizers import Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.cluster import Host, workers_of
from strategy.protocol.layout import Layout, RmaShardView, ShardView
from strategy.protocol.partition import Origin
from strategy.protocol.push_message import PushMessage, unpack_reply
from strategy.protocol.rounds import Decision

Transport = Literal["auto", "shared", "rma", "p2p"]
TRANSPORTS = get_args(Transport)


Array = NDArray[Any]

PushResult = tuple[Sequence[int], Sequence[int]]
"""The versions after the changes of a push, and the staleness of the changes."""


def push_all(
    changes: Sequence[Change],
    to: Sequence[Connection] = (),
    decision: Decision | None = None,
) -> Work:
    """Push changes to the servers of their variables; see :meth:`Connection.push`.

    Args:
        changes: Changes of variables on any servers.
        to: Connections that get a push even without changes. They come first, in this order.
        decision: See :meth:`Connection.push`.

    Returns:
        A Work. Its result is the versions after the changes and their staleness, one of each for
        each variable, in order.
    """
    first = to[0] if to else changes[0].connection
    if len(first.siblings) == 1:
        return first.push(changes, decision)
    by_server: dict[Connection, list[int]] = {connection: [] for connection in to}
    for position, change in enumerate(changes):
        by_server.setdefault(change.connection, []).append(position)
    # Each push carries the sequence number of the last push to every server (a vector clock), so
    # threads must not interleave pushes to several servers.
    with first.pushing_to_all:
        for connection in by_server:
            connection.make_room()  # may raise, so before the first server gets its part
        sent = [0] * (1 + max([connection.index for connection in first.siblings]))
        for connection in first.siblings:
            sent[connection.index] = connection.sequence + (connection in by_server)
        works = []
        try:
            for connection, positions in by_server.items():
                own = [changes[position] for position in positions]
                works.append(connection.push(own, decision, sent))
        except BaseException as error:  # Ctrl-C too
            _pass_by(first, by_server, sent)
            for work in works:
                work.add_done_callback(partial(_attach, error))
            raise
    if len(works) == 1:
        return works[0]
    counts = [len(change.remotes) for change in changes]
    whole = gather_works("push", works)
    whole.add_done_callback(lambda _: _tell_once(works))
    return whole.then(lambda results: _in_order(results, list(by_server.values()), counts))


def _pass_by(first: Connection, to: Iterable[Connection], sent: Sequence[int]) -> None:
    """After a failed push, send an empty push to each server that did not receive its part.

    The vector clocks of the other parts name the missing parts, and a checkpoint would wait for
    them for ever. If no server received a part, nothing is sent.
    """
    pairs = [(one, sent[one.index]) for one in first.siblings if one in to]
    if any(one.sequence >= last for one, last in pairs):
        for one, last in pairs:
            if one.sequence < last:
                one.pass_by(sent)


def _attach(cause: BaseException, work: Work) -> None:
    """Mark the error of a part of a push as reported, because ``cause`` is raised in its place."""
    if work.error is not None:
        work.error.__context__ = cause


def _tell_once(works: Sequence[Work]) -> None:
    """Combine the errors of several servers: the first error gets the others as notes."""
    problems = [error for error in (work.error for work in works) if error is not None]
    for other in problems[1:]:
        problems[0].add_note(f"Another server says: {other}")
        other.__context__ = problems[0]


def _in_order(
    results: Sequence[PushResult], positions: Sequence[Sequence[int]], counts: Sequence[int]
) -> PushResult:
    """Combine the results of several servers.

    Args:
        results: The result of each server.
        positions: The positions of each server's changes among all changes.
        counts: The number of variables of each change.
    """
    by_change: list[PushResult] = [((), ())] * len(counts)
    for (versions, staleness), own in zip(results, positions, strict=True):
        begin = 0
        for position in own:
            end = begin + counts[position]
            by_change[position] = versions[begin:end], staleness[begin:end]
            begin = end
    return (
        [version for versions, _ in by_change for version in versions],
        [late for _, staleness in by_change for late in staleness],
    )


def shard_view(
    host: Host, index: int, transport: str, layout: Layout, reply: pb.CreateReply
) -> ShardView | RmaShardView | None:
    """Return the shard of a new variable. Return None if it must be read by messages.

    Args:
        host: The place of this process in the cluster.
        index: Index of the ps task that holds the variable.
        transport: One of :data:`TRANSPORTS`.
        layout: Shape and dtype.
        reply: The reply of the ps task, which says where the variable lies.

    Raises:
        FailedPreconditionError: The transport is ``"shared"``, but the memory is not shared.
    """
    if transport == "p2p":
        return None
    offsets = (reply.versions_offset, reply.data_offset)
    memory = host.memory.map(index, reply.segment)
    if memory is not None:
        return ShardView(memory, layout, *offsets, host.memory.sync)
    if transport == "rma" and not host.memory.is_near(index):
        addresses = [reply.address + offset for offset in offsets]
        return RmaShardView(host.memory, index, layout, *addresses)
    if transport == "shared":
        raise errors.FailedPreconditionError(
            f"{host.job_name} {host.task_index} cannot map the memory of ps {index} (a warning "
            "gives the reason), as transport 'shared' requires; use 'auto'"
        )
    return None


_MAX_PUSHES = 16  # pushes in flight


class Connection:
    """The connection of a worker's strategy to one ps task.

    Args:
        host: The place of this process in the cluster.
        index: Index of the ps task.
        worker: Index of this worker.
        transport: ``"auto"``, ``"shared"``, ``"rma"`` or ``"p2p"``.
        mode: The synchronization mode.
        strategy: Name of the strategy.
        gpu: Index of the GPU of the ps task that holds the variables; None for the host.

    Attributes:
        address: Address of the endpoint of the ps task.
        index: Index of the ps task.
        task: Name of the ps task, as in ``"ps 0"``.
        number: Number of this connection on the server.
        strategy: Name of the strategy.
        metrics: The metrics of the worker.
        first_step: Number of the worker's first step. Valid for the first server.
        restores: Number of restores that this worker has completed. Valid for the first server.
        siblings: The connections of the strategy to the ps tasks of ``parameter_devices``, this one
            included.
        pushing_to_all: Lock that a push holds if there are several siblings.

    Raises:
        FailedPreconditionError: ``"shared"`` was requested, but the worker cannot map the memory
            of the ps task. Or the ps task has no CuPy or no GPU.
        AlreadyExistsError: This worker has an open strategy of this name.
        InvalidArgumentError: The ps task has no such GPU, or other workers use another GPU or mode.
    """

    def __init__(
        self,
        host: Host,
        index: int,
        worker: int,
        transport: str,
        mode: pb.Mode,
        strategy: str,
        gpu: int | None = None,
    ) -> None:
        self._host = host
        self.address = host.task_address("ps", index)
        self.index = index
        self.task = f"ps {index}"
        self._worker = worker
        self.metrics = task_metrics(host.job_name, host.task_index)
        self._transport = transport
        is_near = host.memory.is_near(index)
        if transport == "shared" and not is_near:
            raise errors.FailedPreconditionError(
                f"ps {index} is on another node than {host.job_name} {host.task_index}, so "
                "transport 'shared' cannot read its memory; use 'auto'"
            )
        self.siblings: Sequence[Connection] = (self,)
        self.pushing_to_all = threading.RLock()
        self._rules: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._dropped: deque[int] = deque()  # rules of optimizers that no longer exist
        self._sequence = 0
        self._decision: Decision | None = None  # of the last push
        self._closed = False
        self._pushing = threading.Lock()
        self._under_way: list[Work] = []
        self._sent: deque[tuple[Work, int]] = deque()  # requests of pushes, and their bytes
        asked = pb.AttachRequest(worker=worker, strategy=strategy, mode=mode, gpu=gpu)
        asked.one_sided = transport == "rma" and not is_near
        reply = pb.AttachReply.FromString(self.call("Attach", asked).body)
        self.number = reply.connection
        self.first_step, self.restores = reply.step, reply.restores
        self.strategy = strategy

    def call(self, method: str, message: Any) -> Reply:
        """Call a method of the server, and wait for the reply; see :meth:`start`."""
        reply: Reply = self.start(method, message).result()
        return reply

    def start(
        self,
        method: str,
        message: Any,
        buffers: Sequence[Array] = (),
        into: Sequence[Array] | None = None,
        timeout: float = math.inf,
        *,
        copy: bool = False,
    ) -> Work:
        """Call a method of the server.

        Args:
            method: Name of the method.
            message: A protobuf message, or its bytes.
            buffers: See :meth:`mpidist.Endpoint.call`.
            into: See :meth:`mpidist.Endpoint.call`.
            timeout: Seconds. The default is no limit while the server is alive: it may wait for
                other workers, or write a checkpoint.
            copy: See :meth:`mpidist.Endpoint.call`.
        """
        body = message if isinstance(message, bytes) else message.SerializeToString()
        return self._host.endpoint.call(
            self.address, f"ps/{method}", body, buffers, timeout=timeout, into=into, copy=copy
        )

    def define(self, definition: pb.Definition) -> pb.Definition:
        """Return the definition of a variable in the directory.

        The first call with a name stores its definition. Later calls return the stored definition.
        Only for the first server, which keeps the directory.

        Args:
            definition: The definition of this worker. The method sets its worker and connection.

        Raises:
            InvalidArgumentError: Another worker has defined another shape or dtype.
        """
        definition.worker, definition.connection = self._worker, self.number
        return pb.Definition.FromString(self.call("Define", definition).body)

    def undefine(self, name: str) -> None:
        """Tell the directory that this strategy could not create any part of a variable."""
        self.call("Undefine", pb.Definition(name=name, connection=self.number))

    def create(
        self, name: str, layout: Layout, origin: Origin, definer: int
    ) -> tuple[RemoteVariable, bool]:
        """Create a variable, or find the variable if another worker has created it.

        Args:
            name: Name of the variable, or of a part of one.
            layout: Shape and dtype.
            origin: The whole variable, and the part of it.
            definer: Index of the worker that has defined the variable.

        Returns:
            The variable, and True if this worker must push the initial value.

        Raises:
            FailedPreconditionError: Transport ``"shared"`` cannot read the variable.
            InvalidArgumentError: Another worker created a different variable of this name.
            ResourceExhaustedError: The server has no memory for the variable.
        """
        part = origin.part
        asked = pb.CreateRequest(
            name=name,
            shape=layout.shape,
            dtype=layout.dtype.name,
            worker=self._worker,
            connection=self.number,
            variable=origin.variable,
            whole=part.whole,
            part=pb.PartOf(axis=part.axis, start=part.start, stop=part.stop),
        )

        def describe() -> tuple[str, list[str]]:
            tasks = [self.task] if definer == self._worker else self.worker_tasks([definer])
            return f"the initial value of variable {name!r}", tasks

        work = self.start("CreateVariable", asked)
        block([work], describe)
        reply = pb.CreateReply.FromString(work.result().body)
        try:
            shared = shard_view(self._host, self.index, self._transport, layout, reply)
        except errors.FailedPreconditionError:
            if reply.must_initialize:
                self.abandon(reply.variable)
            raise
        gpu = reply.gpu if reply.HasField("gpu") else None
        remote = RemoteVariable(
            name, origin, layout, self, reply.variable, shared, gpu, reply.version
        )
        return remote, reply.must_initialize

    def abandon(self, variable: int) -> None:
        """Let another worker push the initial value of a variable in place of this worker.

        Args:
            variable: Number of the variable.
        """
        self.call("Abandon", pb.AbandonRequest(variable=variable, connection=self.number))

    def rule_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer in pushes.

        The first call registers the optimizer, and tells the server which ones no longer exist.
        """
        rule = self._rules.get(optimizer)
        if rule is None:
            asked = pb.ConfigureRequest(optimizer=definition(optimizer), connection=self.number)
            while self._dropped:  # the garbage collector may append meanwhile
                asked.dropped.append(self._dropped.popleft())
            rule = pb.ConfigureReply.FromString(self.call("Configure", asked).body).rule
            self._rules[optimizer] = rule
            finalize(optimizer, self._dropped.append, rule).atexit = False
        return rule

    @property
    def sequence(self) -> int:
        """Sequence number of the last push."""
        return self._sequence

    def worker_tasks(self, workers: Sequence[int]) -> list[str]:
        """Return the names of the tasks of workers, as in ``"worker 1"``, by their indices."""
        tasks = workers_of(self._host.cluster_spec)
        return [f"{tasks[worker][0]} {tasks[worker][1]}" for worker in workers]

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
            sent: Sequence number of the last push to each server, this push included, by index of
                the ps task. May be left out if the strategy has one server.

        Returns:
            A Work. Its result is the versions after the changes and their staleness, one of each
            for each variable.
        """
        begin = time.time()
        with self._pushing:
            self._check_open()
            self._make_room()
            *slices, last = messages_of(arrays_of(changes))
            for index, arrays in enumerate(slices):
                self._wait_for_credit(arrays)
                request = pb.SliceRequest(connection=self.number, index=index)
                self._send("PushSlice", request, arrays)
            push = PushMessage(self.number, slices=len(slices))
            remotes: list[RemoteVariable] = []
            rates: list[float] = []
            for change in changes:
                remotes += change.remotes
                rates += [change.rate] * len(change.remotes)
                push.entries += change.entries or entries_of(change)
            push.seen, push.rates = [remote.seen for remote in remotes], rates
            if decision is not None:
                push.step, push.members = decision.step, decision.members
            self._wait_for_credit(last)  # an interrupt up to here leaves no gap in the sequence
            try:
                self._sequence = push.sequence = self._sequence + 1
                self._decision = decision
                push.sent = sent or self._clock()
                call = self._send("Push", push.pack(), last)
            except BaseException:  # Ctrl-C: the push may have been sent
                self._pass_by(sent)
                raise
            for remote in remotes:
                remote.seen += 1
            work = call.then(lambda reply: _applied(reply, remotes))
            self._under_way.append(work)
        self.metrics.note("push", begin)
        return work

    def send_array(self, method: str, message: Any, slices: Sequence[Array]) -> None:
        """Call a method with an array in slices. No push is sent between the slices.

        Args:
            method: Name of the method.
            message: The message, which travels with the last slice.
            slices: The slices, at least one. PushSlice messages carry all but the last.
        """
        with self._pushing:
            for index, array in enumerate(slices[:-1]):
                request = pb.SliceRequest(connection=self.number, index=index)
                self.start("PushSlice", request, (array,)).wait()
            self.start(method, message, (slices[-1],)).wait()

    def pass_by(self, sent: Sequence[int]) -> None:
        """Send an empty push in place of the part of a failed push.

        After a failed push to several servers, call this method for each server that did not
        receive its part. The vector clocks of the other parts name this part.

        Args:
            sent: See :meth:`push`.
        """
        with self._pushing:
            self._pass_by(sent)

    def _pass_by(self, sent: Sequence[int]) -> None:
        self._sequence += 1
        with contextlib.suppress(errors.Error):  # the server has ended
            push = PushMessage(self.number, self._sequence, sent=sent or self._clock())
            # Later reads wait for it, and so for the push that may have been sent before.
            self._under_way.append(self.start("Push", push.pack()))

    def _clock(self) -> Sequence[int]:
        """Return the vector clock of the last push, for a strategy with this server alone."""
        return [0] * self.index + [self._sequence]

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

    def drain(self) -> None:
        """Wait like :meth:`settle`, also for pushes that other threads are sending."""
        with self._pushing:
            pass
        self.settle()

    def settle(self) -> None:
        """Wait for the pushes of all threads over this connection.

        Raises:
            Exception: The error of a push, unless the Work of the push has raised it already.
        """
        self._check_open()
        if self._under_way:
            with self._pushing:
                waiting = list(self._under_way)
            with self.metrics.timed("wait for pushes", "waited_s"):
                block(waiting, self._describe_pushes)
            # Remove the pushes after the wait, since other threads may wait for them, too. Keep
            # pushes that were sent meanwhile: their errors have not been raised.
            with self._pushing:
                self._under_way = [work for work in self._under_way if work not in waiting]
            for work in waiting:
                if _needs_attention(work):
                    work.wait()

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
        sent = self._sent
        while sent and sent[0][0].is_completed():
            sent.popleft()
        left = settings.credit_bytes // 2 - sum([array.nbytes for array in arrays])
        while sent and sum([nbytes for _, nbytes in sent]) > left:
            block([sent[0][0]], self._describe_pushes)
            sent.popleft()

    def _make_room(self) -> None:
        self._under_way = [work for work in self._under_way if _needs_attention(work)]
        while len(self._under_way) >= _MAX_PUSHES:
            earliest = self._under_way.pop(0)
            block([earliest], self._describe_pushes)
            earliest.wait()

    def _describe_pushes(self) -> tuple[str, list[str]]:
        """Describe a wait for pushes. The pushes of a step also need those of the other members."""
        decision, pushes = self._decision, f"pushes of strategy {self.strategy!r}"
        if decision is None:
            return f"{self.task} to apply {pushes}", [self.task]
        others = self.worker_tasks([one for one in decision.members if one != self._worker])
        return f"{self.task} to apply {pushes} up to step {decision.step}", [self.task, *others]


def _applied(reply: Reply, remotes: Sequence[RemoteVariable]) -> PushResult:
    """Record the versions in the reply to a push. Return the versions and the staleness."""
    versions, staleness = unpack_reply(reply.body)
    for remote, version in zip(remotes, versions, strict=True):
        if version > remote.known:
            remote.known = version
    return versions, staleness


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
