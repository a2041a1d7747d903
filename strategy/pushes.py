"""How a server takes what workers push, and changes its variables by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, errors
from strategy import kernels
from strategy.catalogue import Catalogue, ServedConnection, ServedVariable
from strategy.configured import Configured
from strategy.means import mean_of_blocks, mean_of_rows
from strategy.owned_shard import OwnedShard, Scratch
from strategy.proto import parameter_server_pb2 as pb
from strategy.shard import BLOCK_BYTES

Array = NDArray[Any]

# Their names are no optimizer's, which have no colon.
_PLAIN: Mapping[int, tuple[str, kernels.Rule]] = {
    pb.ASSIGN: (":assign", kernels.ASSIGN),
    pb.ADD: (":add", kernels.ADD),
    pb.SUB: (":sub", kernels.SUB),
    pb.MUL: (":mul", kernels.MUL),
    pb.DIV: (":div", kernels.DIV),
    pb.MIN: (":min", kernels.MIN),
    pb.MAX: (":max", kernels.MAX),
}


class Rules:
    """The rules by which a server changes variables: the plain ones, and optimizers.

    Args:
        who: The server, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._optimizers: list[Configured] = []
        self._numbers: dict[bytes, int] = {}  # of optimizers, by what workers say of them

    def configure(self, request: Request) -> Reply:
        """Local. A worker tells of an optimizer."""
        asked = pb.OptimizerDef.FromString(request.body)
        content = asked.SerializeToString(deterministic=True)  # numbers come in any order
        number = self._numbers.get(content)
        if number is None:
            self._optimizers.append(Configured(asked, self._who))
            number = pb.FIRST_OPTIMIZER + len(self._optimizers) - 1
            self._numbers[content] = number
        return Reply(pb.ConfigureReply(rule=number).SerializeToString())

    def in_words(self, number: int) -> str:
        """Local. What the rule of a number is, as far as workers' rules can be compared."""
        if number in _PLAIN:
            return _PLAIN[number][0][1:]
        return str(self._optimizers[number - pb.FIRST_OPTIMIZER])

    def find(self, number: int, shard: OwnedShard) -> tuple[str, kernels.Rule, Mapping[str, float]]:
        """Local. The rule of a number for a shard: its name, itself, and its numbers for this step.

        Raises:
            InvalidArgumentError: The shard's dtype does not do, or a schedule fails.
        """
        dtype = shard.layout.dtype
        if number in _PLAIN:
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
            return *_PLAIN[number], {}
        optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
        if not shard.layout.is_floating:
            raise errors.InvalidArgumentError(
                f"{optimizer.kind} cannot change variable {shard.name!r} of dtype {dtype}: "
                "optimizers need bfloat16, float16, float32 or float64"
            )
        step = shard.steps.get(optimizer.name, 0) + 1
        return optimizer.name, optimizer.rule, optimizer.values_at(step)


@dataclass
class _Given:
    """What one worker pushes.

    Attributes:
        push: The message.
        connection: Its way.
        request: To be answered.
        inline: The arrays in the message, as far as they have not been used.
    """

    push: pb.PushRequest
    connection: ServedConnection
    request: Request
    inline: Iterator[Array]

    def dense(self, entry: pb.PushEntry, shard: OwnedShard) -> Iterator[Array]:
        """The change of a whole shard, block by block."""
        layout = shard.layout
        if entry.staged:
            assert self.connection.ring is not None
            return self.connection.ring.read(layout.size, layout.dtype)
        return in_blocks(np.array(next(self.inline)).view(layout.dtype))

    def rows(self, shard: OwnedShard) -> tuple[Array, Array]:
        """Numbers of rows, and what is for them, flat."""
        ids = np.array(next(self.inline)).view(np.int64)
        return ids, np.array(next(self.inline)).view(shard.layout.dtype)


class Pushes:
    """Takes pushes: those of asynchronous workers one by one, those of a synchronous step together.

    Args:
        who: The server, for messages.
        catalogue: Its variables and connections.
        rules: Its rules.
    """

    def __init__(self, who: str, catalogue: Catalogue, rules: Rules) -> None:
        self._who = who
        self._catalogue = catalogue
        self._rules = rules
        self._scratch = Scratch()
        # By the number of the strategy: the pushes of the step that is to be applied next, ...
        self._step: dict[int, dict[int, _Given]] = {}
        self._applied: dict[int, int] = {}  # ... how many steps have been applied, ...
        self._waiting: dict[int, list[tuple[int, Request]]] = {}  # ... and who waits for which.

    def push(self, request: Request) -> Reply:
        """Local. A worker pushes; it is answered when its changes have been applied."""
        push = pb.PushRequest.FromString(request.body)
        connection = self._catalogue.connections[push.connection]
        expected = connection.sequence + 1
        if push.sequence != expected:
            raise errors.InternalError(
                f"{self._who} got push {push.sequence} of connection {push.connection}, of worker "
                f"{connection.worker}, and expected {expected}"
            )
        connection.sequence = expected
        given = _Given(push, connection, request, iter(request.buffers))
        if not push.members and not connection.unfinished:
            reply = pb.PushReply()
            self._apply([given], [reply])
            return Reply(reply.SerializeToString())
        # One after the other: what a connection streams lies in its ring in this order.
        connection.unfinished.append(given)
        if len(connection.unfinished) == 1:
            self._begin(given)
        return LATER

    def wait(self, request: Request) -> Reply:
        """Local. A worker whose gradients came too late waits for all steps before the next."""
        asked = pb.AwaitRequest.FromString(request.body)
        strategy = self._catalogue.connections[asked.connection].strategy
        if self._applied.get(strategy, 0) >= asked.step:
            return Reply()
        self._waiting.setdefault(strategy, []).append((asked.step, request))
        return LATER

    def _begin(self, given: _Given) -> None:
        push = given.push
        if not push.members:
            self._finish([given])
            return
        strategy = given.connection.strategy
        step = self._step.setdefault(strategy, {})
        step[given.connection.worker] = given
        if len(step) == len(push.members):
            self._step[strategy] = {}
            self._finish([step[worker] for worker in push.members])
            self._applied[strategy] = push.step + 1
            waiting = self._waiting.pop(strategy, [])
            self._waiting[strategy] = [pair for pair in waiting if pair[0] > push.step + 1]
            for number, request in waiting:
                if number <= push.step + 1:
                    request.reply()

    def _finish(self, batch: Sequence[_Given]) -> None:
        """Apply what several workers have pushed as one change, and answer them."""
        replies = [pb.PushReply() for _ in batch]
        try:
            self._apply(batch, replies)
        except (Exception, SystemExit) as error:
            for given in batch:
                given.request.fail(error)
        else:
            for given, reply in zip(batch, replies, strict=True):
                given.request.reply(reply.SerializeToString())
        for given in batch:
            unfinished = given.connection.unfinished
            unfinished.popleft()
            if unfinished:
                self._begin(unfinished[0])

    def _apply(self, batch: Sequence[_Given], replies: Sequence[pb.PushReply]) -> None:
        self._check_alike(batch)
        problem: BaseException | None = None
        for entries in zip(*(given.push.entries for given in batch), strict=True):
            variable = self._catalogue.variables[entries[0].variable]
            shard = variable.shard
            change, rest = self._change(batch, entries, shard)
            # A bad entry must not leave its blocks in a ring, nor keep the others from applying.
            try:
                for entry, reply in zip(entries, replies, strict=True):
                    reply.staleness.append(shard.version - min(entry.seen, shard.version))
                change(*self._rules.find(entries[0].rule, shard))
                self._tell_waiting(variable)
            except errors.DeadlineExceededError:
                raise  # a worker's end of its ring is stuck or gone: nothing more will come
            except (Exception, SystemExit) as error:
                problem = problem or error
                for blocks in rest:
                    for _ in blocks:
                        continue
            for reply in replies:
                reply.versions.append(shard.version)
        if problem is not None:
            raise problem

    def _check_alike(self, batch: Sequence[_Given]) -> None:
        """InvalidArgumentError unless all push changes of the same variables, by the same rules."""
        numbers = [
            [(entry.variable, entry.rule, entry.rows) for entry in given.push.entries]
            for given in batch
        ]
        if all(own == numbers[0] for own in numbers):
            return
        kinds = [[self._in_words(entry) for entry in given.push.entries] for given in batch]
        other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is None:
            return
        for given in batch:
            for entry in given.push.entries:
                if entry.staged:
                    for _ in given.dense(entry, self._catalogue.variables[entry.variable].shard):
                        continue
        differing = [sorted(set(kinds[n]) - set(kinds[other - n])) for n in (0, other)]
        raise errors.InvalidArgumentError(
            f"in step {batch[0].push.step} worker {batch[0].connection.worker} pushes to "
            f"{self._who} {differing[0]}, and worker {batch[other].connection.worker} "
            f"{differing[1]}: in mode 'sync' all workers must push alike, in the same order"
        )

    def _in_words(self, entry: pb.PushEntry) -> str:
        name = self._catalogue.variables[entry.variable].shard.name
        rows = "rows of " if entry.rows else ""
        return f"{rows}{name!r} by {self._rules.in_words(entry.rule)}"

    def _change(
        self, batch: Sequence[_Given], entries: Sequence[pb.PushEntry], shard: OwnedShard
    ) -> tuple[Callable[..., None], Sequence[Iterator[Array]]]:
        """What changes a shard, given a rule, and the blocks that it takes one by one."""
        if entries[0].rows:
            ids, rows = mean_of_rows([given.rows(shard) for given in batch], shard.layout)
            return partial(shard.apply_rows, ids=ids, rows=rows), ()
        each = [given.dense(entry, shard) for given, entry in zip(batch, entries, strict=True)]
        blocks = mean_of_blocks(each, shard.layout, self._scratch)
        return partial(shard.apply, blocks=blocks), each

    def _tell_waiting(self, variable: ServedVariable) -> None:
        """Answer those who wait for a variable's first value."""
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()


def in_blocks(flat: Array) -> Iterator[Array]:
    """Local. An array block by block; an empty one is a block too, so that it has versions."""
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, max(flat.size, 1), step):
        yield flat[start : start + step]
