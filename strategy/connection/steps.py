"""What workers that wait for each other say to the servers."""

from __future__ import annotations

from mpidist import Reply, Work
from strategy.connection.line import Line
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.rounds import Decision


class Steps:
    """Local, all of it. The steps of a worker, on its line to one ps task.

    Args:
        line: The line.
    """

    def __init__(self, line: Line) -> None:
        self._line = line

    def enter(self, step: int, what: str | None) -> Work:
        """Local. Ask the first server to count this worker in a step.

        Args:
            step: Which.
            what: What its changes are of, in words; None: it has none.

        Returns:
            A Work whose result is a :class:`Decision`. Its call has no deadline.
        """
        asked = pb.EnterRequest(
            connection=self._line.number, step=step, gives=what is not None, what=what or ""
        )
        work = self._line.start("Enter", asked, timeout=float("inf"))
        return work.then(_decision)

    def wait_for(self, step: int) -> Work:
        """Local. Ask the server to answer when all steps before this one have been applied."""
        return self._line.start("Await", pb.AwaitRequest(connection=self._line.number, step=step))

    def fail(self, step: int) -> Work:
        """Local. Tell the server that this worker cannot push what was to count in a step."""
        return self._line.start("Fail", pb.AwaitRequest(connection=self._line.number, step=step))

    def tick(self, clock: int) -> Work:
        """Local. Tell the first server how many steps this worker has made.

        Returns:
            A Work that ends when it may go on. Its call has no deadline.
        """
        asked = pb.ClockRequest(connection=self._line.number, clock=clock)
        return self._line.start("Clock", asked, timeout=float("inf"))

    def missing(self) -> list[int]:
        """Local. The workers for which others wait, as the first server knows."""
        reply = self._line.call("Missing", pb.AttachReply(connection=self._line.number))
        return list(pb.MissingReply.FromString(reply.body).workers)

    def leave(self) -> None:
        """Local. Tell the first server that others need not wait for this worker any more."""
        self._line.call("Leave", pb.AttachReply(connection=self._line.number))


def _decision(reply: Reply) -> Decision:
    answer = pb.EnterReply.FromString(reply.body)
    return Decision(answer.step, tuple(answer.members), answer.problem)
