"""How a strategy becomes a member of a cluster late, and how it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self

from mpidist import ClusterSpec, Server, errors
from strategy.checkpoints.lock import CheckpointLock
from strategy.connection.connection import Connection
from strategy.connection.pace import Pace
from strategy.local import LocalHost
from strategy.shared.host import Host, given_spec
from strategy.variables import Variables


class Member(ABC):
    """The part of a strategy that deals with its cluster."""

    pace: Pace
    _checkpoint_lock: CheckpointLock
    _connections: list[Connection]
    _variables: Variables
    _own_host: LocalHost | None = None
    _closed = False

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Local. Join a cluster after the strategy has been made, before it has variables.

        Args:
            session_config: A ConfigProto; its device filters are set.
            cluster_spec: The cluster; its Server has been started. One without jobs is none.
            task_type: Job of this task, checked against the Server's if given.
            task_id: Index of this task, checked against the Server's if given.

        Raises:
            RuntimeError: It has variables.
            FailedPreconditionError: No Server has been started, or the strategy has been closed.
            ValueError: The cluster or the task is not the Server's.
        """
        self._check_open()
        spec = given_spec(None, cluster_spec)
        if spec:
            if len(self._variables.by_name) > 1:  # the global step is there from the beginning
                raise RuntimeError("configure comes too late: the strategy has variables already")
            before = self._own_host
            self._connect(Server.current(), spec, task_type, task_id)
            if before is not None:
                before.close()
        if session_config is not None:
            session_config.CopyFrom(self.update_config_proto(session_config))

    def update_config_proto(self, config_proto: Any) -> Any:
        """Local. A copy of a ConfigProto, with filters for the devices that this task needs.

        A worker needs itself and the ps tasks; an evaluator itself; in local mode there are none.

        Args:
            config_proto: TensorFlow's message, or another with ``device_filters``.
        """
        updated = type(config_proto)()
        updated.CopyFrom(config_proto)
        del updated.device_filters[:]
        server = Server.current()
        if server is not None:
            own = f"/job:{server.job_name}/task:{server.task_index}"
            alone = server.job_name == "evaluator"
            updated.device_filters.extend([own] if alone else [own, "/job:ps"])
        return updated

    def finish(self) -> None:
        """Local. End this worker's training: others need not wait for steps of it any more.

        Returns when all its pushes have been applied. The end of the Server's context does it too;
        a worker that waits there for others otherwise, say in a barrier, has to finish before. A
        save or restore by another thread of the process ends first.
        """
        with self._checkpoint_lock.held("finish()"):
            self._finish()

    def close(self) -> None:
        """Local. Finish, and give up what the strategy holds; a second call does nothing.

        In local mode its variables end with it, their memory and the thread of their ps; save what
        is to stay. In a cluster the ps tasks keep them. Neither the strategy nor its variables can
        be used afterwards. Leaving its ``with`` block does the same. A save or restore by another
        thread of the process ends first.
        """
        with self._checkpoint_lock.held("close()"):
            try:
                self._finish()
            finally:
                self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            # It often follows from what failed before, which is to be raised.
            error.add_note(f"Closing the strategy failed too: {late!r}")

    # Inside

    @abstractmethod
    def _connect(
        self,
        host: Host | None,
        spec: ClusterSpec | None,
        task_type: str | None,
        task_id: int | None,
    ) -> None:
        """Become a worker of a cluster, or of none."""

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _finish(self) -> None:
        if self._closed:
            return
        try:
            self._drain()
        finally:
            self.pace.leave()

    def _drain(self) -> None:
        problem: BaseException | None = None
        for connection in self._connections:
            try:
                connection.drain()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _give_up(self) -> None:
        """Let go of the servers, and of their memory; in local mode end them."""
        if self._closed:
            return
        self._closed = True
        for remote in self._variables.remotes.values():
            remote.connection, remote.shared = _CLOSED, None
        for connection in self._connections:
            connection.detach()
        self._connections[:] = [_CLOSED] * len(self._connections)
        if self._own_host is not None:
            self._own_host.close()


class _Closed:
    """Stands where a closed strategy had a connection: whatever is asked of it is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _closed_error()


_CLOSED: Any = _Closed()


def _closed_error() -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        "the strategy has been closed, and its variables with it: use them before close(), or in "
        "the strategy's with block; what it has saved can be restored by another strategy"
    )
