"""The membership of a strategy in a cluster: late join, finish and close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Self

from mpidist import ClusterSpec, Server, errors
from strategy.checkpoints.lock import CheckpointLock
from strategy.connection.connection import Connection
from strategy.connection.pace import Pace
from strategy.local import LocalHost
from strategy.shared.host import Host, check_task, given_spec
from strategy.variables import Variables


class Member(ABC):
    """The part of a strategy that joins and leaves a cluster."""

    pace: Pace
    _checkpoint_lock: CheckpointLock
    _connections: list[Connection]
    _variables: Variables
    _host: Host
    _own_host: LocalHost | None = None
    _stop_draining: Callable[[], None]
    _closed = False

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Join a cluster after the strategy was created, but before it has variables.

        Args:
            session_config: A ConfigProto whose device filters are set.
            cluster_spec: The cluster, whose Server must have been started. A cluster without jobs
                is not joined.
            task_type: Job of this task, checked against the Server if given.
            task_id: Index of this task, checked against the Server if given.

        Raises:
            RuntimeError: The strategy has variables.
            FailedPreconditionError: No Server has been started, or the strategy was closed.
            ValueError: The cluster or the task differs from the Server's.
        """
        self._check_open()
        spec = given_spec(None, cluster_spec)
        if spec:
            if len(self._variables.by_name) > 1:  # one is the global step
                raise RuntimeError("configure comes too late: the strategy has variables already")
            server = Server.current()
            if server is not None and server is self._host:  # the strategy has joined already
                check_task(server, spec, task_type, task_id)
            else:
                before = self._own_host
                self._connect(server, spec, task_type, task_id)
                if before is not None:
                    before.close()
        if session_config is not None:
            session_config.CopyFrom(self.update_config_proto(session_config))

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of a ConfigProto with filters for the devices that this task needs.

        A worker needs itself and the ps tasks. An evaluator needs itself. Without a Server there
        are no filters.

        Args:
            config_proto: TensorFlow's message, or another message with ``device_filters``.
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
        """End the training of this worker, so that other workers do not wait for its steps.

        The call returns when all pushes of the strategy have been applied. In mode ``"async"`` the
        call does nothing else. The end of the Server's context also finishes the strategy. Call
        this method before this worker waits for others in another way, such as in a barrier. The
        call waits for saves and restores of other threads of this process; in local mode, only for
        saves and restores of this strategy.
        """
        with self._checkpoint_lock.held("finish()"):
            self._finish()

    def close(self) -> None:
        """Finish and release the strategy; idempotent. The end of a ``with`` block also closes it.

        Neither the strategy nor its variables can be used afterwards. Its name can be used again.
        Let all workers close theirs, and meet in a barrier, before they make the next one.
        In a cluster the ps tasks keep the variables. In local mode the variables, their memory and
        the thread of the ps task are released, so save the variables before. The call waits for
        saves and restores of other threads of this process, as :meth:`finish` does.
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
            # The first error is raised, since it often is the cause of this one.
            error.add_note(f"Closing the strategy failed too: {late!r}")

    # Internals

    @abstractmethod
    def _connect(
        self,
        host: Host | None,
        spec: ClusterSpec | None,
        task_type: str | None,
        task_id: int | None,
    ) -> None:
        """Become a worker of a cluster, or of local mode."""

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
        """Release the connections. In local mode, end the server and release its memory.

        In a cluster only the mapped views of the variables are dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_draining()
        for connection in self._connections:
            connection.detach()
        for remote in list(self._variables.remotes.values()):  # threads may still create some
            remote.connection, remote.shared = _CLOSED, None
        self._connections[:] = [_CLOSED] * len(self._connections)
        if self._own_host is not None:
            self._own_host.close()


class _Closed:
    """The replacement for a connection of a closed strategy. Every use raises an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _closed_error()


_CLOSED: Any = _Closed()


def _closed_error() -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        "the strategy has been closed, and its variables with it: use them before close(), or in "
        "the strategy's with block; what it has saved can be restored by another strategy"
    )
