"""Servers with an endpoint of their own, and the task of the job ``data`` of ``mpidist.Server``."""

from __future__ import annotations

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from typing import Self

from dataservice.dispatch.dispatcher import Dispatcher
from dataservice.options import DispatcherConfig, WorkerConfig, seconds_of
from dataservice.work.worker import DataWorker
from mpidist import Endpoint, Server, Work, launched, open_endpoint
from mpidist.errors import (
    AlreadyExistsError,
    CancelledError,
    DistNetworkError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from mpidist.mpi import waiting_for

logger = logging.getLogger(__name__)

# The thread that registers gives up before start() does, so that start() raises its error.
_REGISTRATION_GRACE_S = 5.0
# The longest time that join() waits for a failed thread to print its traceback.
_TRACEBACK_S = 1.0


class _Server(ABC):
    """A server that is created, started and stopped once."""

    def __init__(self, protocol: str | None, port: int, peer: str | None = None) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or port < 0:
            raise InvalidArgumentError(f"port must be 0, for a free one, or positive, not {port!r}")
        self._protocol = protocol
        self._port = port
        self._peer = peer
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._stopping = False
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._failed_thread = threading.current_thread()

    @property
    def stopped(self) -> bool:
        """True if the server was stopped or has failed. :meth:`join` raises the reason."""
        return self._stopped.is_set()

    def start(self) -> None:
        """Start the server. Do nothing if it runs.

        Raises:
            FailedPreconditionError: The server was stopped.
            CancelledError: Another thread has stopped the server meanwhile.
            AlreadyExistsError: The port is in use, or belongs to another rank.
            UnavailableError: A worker finds no dispatcher in time.
        """
        with self._lock:
            if self._stopped.is_set():
                raise FailedPreconditionError(
                    f"a {type(self).__name__} cannot be started after stopped; make a new one"
                )
            if self._endpoint is not None:
                return
            endpoint = self._open()
            try:
                self._serve(endpoint)
            except BaseException:
                endpoint.close()
                raise
            self._endpoint = endpoint
        atexit.register(self.stop)

    def join(self) -> None:
        """Block until the server is stopped.

        Raises:
            FailedPreconditionError: The server was never started.
            InternalError: A bug has ended the server; the cause is attached.
        """
        if self._endpoint is None and not self._stopped.is_set():
            raise FailedPreconditionError(f"the {type(self).__name__} has not been started")
        with waiting_for("requests"):
            self._stopped.wait()
        if self._failure is not None:
            # The reason comes after the traceback, so that a log ends with it.
            if self._failed_thread is not threading.current_thread():
                self._failed_thread.join(_TRACEBACK_S)
            raise InternalError(
                f"the {type(self).__name__} has ended by an unexpected error: {self._failure!r}"
            ) from self._failure

    def stop(self) -> None:
        """Stop the server. Idempotent; ends a start() of another thread."""
        self._stopping = True
        self._interrupt()
        with self._lock:
            if self._stopped.is_set():
                return
            try:
                if self._endpoint is not None:
                    self._finish()
            finally:
                if self._endpoint is not None:
                    self._endpoint.close()
                    atexit.unregister(self.stop)
                self._stopped.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _fail(self, error: BaseException) -> None:
        """Stop the server because of a bug, which join() raises."""
        logger.critical("a %s ends: %r", type(self).__name__, error)
        self._failed_thread = threading.current_thread()
        self._failure = error
        self.stop()

    def _interrupt(self) -> None:  # noqa: B027
        """End a wait of ``_serve`` in another thread."""

    def _open(self) -> Endpoint:
        protocol = self._protocol
        # In a plain process, a port that the user names is for other processes.
        if (protocol, self._peer) == (None, None) and self._port and not launched():
            protocol = "tcp"
        try:
            return open_endpoint(protocol, self._port or None, peer=self._peer)
        except DistNetworkError as error:
            raise AlreadyExistsError(f"a {type(self).__name__} cannot start: {error}") from error

    def _address(self, endpoint: Endpoint) -> str:
        address = endpoint.address
        return f"{self._protocol or address.protocol}://{address.host}:{address.port}"

    @abstractmethod
    def _serve(self, endpoint: Endpoint) -> None:
        """Register the services and serve."""

    @abstractmethod
    def _finish(self) -> None:
        """Undo ``_serve``."""


class DispatchServer(_Server):
    """Coordinates the workers and the consumers of a data service.

    In a launched world the first use of mpidist is collective over all ranks: start a Server or a
    process group on all of them before a DispatchServer on one.

    Args:
        port: Number of the endpoint; 0 takes a free one. Over mpi, a rank has the numbers whose
            remainder is the rank when they are divided by the size of the world. Or a
            DispatcherConfig.
        protocol: ``"mpi"``, ``"tcp"``, ``"inproc"``, or a name of the TensorFlow interface, which
            is kept in ``target``. ``"grpc"`` is mpi in a launched world and tcp in a plain process.
            None is mpi in a launched world. In a plain process None is tcp if a port is given, and
            otherwise inproc, for this process alone.
            After a config, this place is that of ``start``.
        start: Whether to start the server at once.
        config: In place of port and protocol, which must be left out then.

    Raises:
        AlreadyExistsError: The port is in use, or belongs to another rank.
        UnimplementedError: The config asks for something that this version cannot do.
        ValueError: The port is negative, the protocol unknown, or one of them is given beside a
            config.
    """

    def __init__(
        self,
        port: int | DispatcherConfig = 0,
        protocol: str | bool | None = None,
        start: bool = True,
        *,
        config: DispatcherConfig | None = None,
    ) -> None:
        if isinstance(protocol, bool):
            start, protocol = protocol, None
        if isinstance(port, DispatcherConfig):
            _check_alone("a DispatcherConfig", config=config, protocol=protocol)
            config = port
        elif config is None:
            config = DispatcherConfig(port=port, protocol=protocol)
        else:
            _check_config(config, DispatcherConfig)
            _check_alone("config", port=port, protocol=protocol)
        super().__init__(config.protocol, config.port)
        self._config = config
        self._dispatcher: Dispatcher | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """``protocol://host:port``. The part behind ``://`` serves as dispatcher_address.

        Raises:
            FailedPreconditionError: The server is not running.
        """
        if self._endpoint is None:
            raise FailedPreconditionError("a DispatchServer has no target before it is started")
        return self._address(self._endpoint)

    def _serve(self, endpoint: Endpoint) -> None:
        self._dispatcher = Dispatcher(endpoint, self._config, self._fail)
        endpoint.serve_in_thread()

    def _finish(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.close()


class WorkerServer(_Server):
    """Evaluates datasets for the consumers of a data service.

    Args:
        port: Number of the endpoint; 0 takes a free one. Or a WorkerConfig.
        dispatcher_address: ``host:port`` of the dispatcher, with or without ``protocol://``. After
            a config, this place is that of ``start``.
        worker_address: The address that consumers call, as ``host:port``; ``%port%`` stands for
            the port. None takes the endpoint's address.
        protocol: As for :class:`DispatchServer`; None takes that of the dispatcher: in a plain
            process tcp, unless the dispatcher is in this process, over inproc.
        start: Whether to start the server at once. This waits until the dispatcher knows the
            worker.
        config: In place of port, addresses and protocol, which must be left out then.

    Raises:
        AlreadyExistsError: The port is in use, or belongs to another rank.
        UnavailableError: No dispatcher answers in time.
        ValueError: The dispatcher's address is missing or wrong, the port negative, the protocol
            unknown, or one of them is given beside a config.
    """

    def __init__(
        self,
        port: int | WorkerConfig = 0,
        dispatcher_address: str | bool | None = None,
        worker_address: str | None = None,
        protocol: str | None = None,
        start: bool = True,
        *,
        config: WorkerConfig | None = None,
    ) -> None:
        if isinstance(dispatcher_address, bool):
            start, dispatcher_address = dispatcher_address, None
        addresses = {"dispatcher_address": dispatcher_address, "worker_address": worker_address}
        if isinstance(port, WorkerConfig):
            _check_alone("a WorkerConfig", config=config, protocol=protocol, **addresses)
            config = port
        elif config is None:
            config = WorkerConfig(dispatcher_address, worker_address, port, protocol)
        else:
            _check_config(config, WorkerConfig)
            _check_alone("config", port=port, protocol=protocol, **addresses)
        super().__init__(config.protocol, config.port, config.dispatcher_address)
        self._config = config
        self._worker: DataWorker | None = None
        if start:
            self.start()

    def _serve(self, endpoint: Endpoint) -> None:
        config = self._config
        address = self._address(endpoint)
        if config.worker_address is not None:
            protocol = address.partition("://")[0]
            host_port = config.worker_address.replace("%port%", str(endpoint.address.port))
            address = f"{protocol}://{host_port}"
        assert config.dispatcher_address is not None
        endpoint.serve_in_thread()
        self._worker = DataWorker(endpoint, config.dispatcher_address, address, config, self._fail)
        if self._stopping:
            self._worker.close()
        patience_s = seconds_of(config.dispatcher_timeout_ms, 60.0)
        try:
            self._worker.registration.wait(patience_s + _REGISTRATION_GRACE_S)
        except BaseException:
            self._worker.close()
            raise

    def _interrupt(self) -> None:
        if self._worker is not None and not self._worker.registration.is_completed():
            self._worker.close()

    def _finish(self) -> None:
        assert self._worker is not None
        self._worker.close()


class DataTask:
    """A data worker, and in task 0 also the dispatcher, at the endpoint of a Server.

    Args:
        server: The Server of this task, which runs the serving loop of its endpoint.
    """

    def __init__(self, server: Server) -> None:
        endpoint = server.endpoint
        self._dispatcher: Dispatcher | None = None
        if server.own_index("data") == 0:
            self._dispatcher = Dispatcher(endpoint, DispatcherConfig())
        dispatcher = server.task_address("data", 0)
        self._worker = DataWorker(
            endpoint, dispatcher, str(endpoint.address), WorkerConfig(dispatcher)
        )
        self._worker.registration.add_done_callback(_raise_on_failure)

    def close(self) -> None:
        """Stop the worker and the dispatcher, before the Server closes the endpoint. Idempotent."""
        # The whole cluster is ending, and the dispatcher's process may already be gone.
        self._worker.close(leave=False)
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None


def _check_alone(given: str, **others: object) -> None:
    """Raise InvalidArgumentError if arguments that a config has are given beside it."""
    twice = [name for name, value in others.items() if value is not None and value != 0]
    if twice:
        raise InvalidArgumentError(
            f"{' and '.join(twice)} would be ignored beside {given}: give what you mean in the "
            "config alone"
        )


def _check_config(config: object, kind: type) -> None:
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__}, not {config!r}")


def _raise_on_failure(registration: Work) -> None:
    # This runs on the worker's thread, where an uncaught error ends the job and names this task.
    if not isinstance(registration.exception(), CancelledError):
        registration.wait()
