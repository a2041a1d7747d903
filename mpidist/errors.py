"""The error tree.

::

    Error (RuntimeError)                 also called DistError
    |-- DistBackendError                 MPI reported an error
    |   `-- GroupBrokenError             the group takes no collectives after an earlier operation
    |-- DistNetworkError                 an address or a connection is bad
    |-- DistStoreError                   a key-value store failed
    |   `-- QueueEmptyError              a queue of a store is empty, and the caller does not wait
    `-- OpError                          a server, or a call to one, failed; TensorFlow's names
        |-- CancelledError
        |-- UnknownError
        |-- InvalidArgumentError         (ValueError)
        |-- DeadlineExceededError        (TimeoutError)
        |-- NotFoundError                (LookupError)
        |-- AlreadyExistsError
        |-- PermissionDeniedError        (PermissionError)
        |-- ResourceExhaustedError       (MemoryError)
        |-- FailedPreconditionError
        |-- AbortedError
        |-- OutOfRangeError              (IndexError)
        |-- UnimplementedError           (NotImplementedError)
        |-- InternalError
        |-- UnavailableError             (ConnectionError)
        |-- DataLossError
        `-- UnauthenticatedError         (PermissionError)

Each message tells the event, the place (rank, job, task) and the remedy. ``code`` of an
:class:`OpError` is the canonical status code (google.rpc.Code), so that an error raised by a
handler arrives at the caller as the same class.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'sum'?)"`` if a known name is like the given one, else ``""``."""
    from difflib import get_close_matches  # 10 ms, and needed for errors only

    by_lower = {each.lower(): each for each in known}
    close = get_close_matches(str(name).lower(), by_lower, 1)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def type_name(value: object) -> str:
    """Return the name of a value's type, for messages: ``"int"``, ``"cupy.ndarray"``."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


class Error(RuntimeError):
    """Base of every error that mpidist, strategy and dataservice raise by themselves."""


DistError = Error


class DistBackendError(Error):
    """MPI, NCCL or CUDA failed, or a group cannot go on after a failure."""


class GroupBrokenError(DistBackendError):
    """A group takes no collective.

    An earlier blocking collective is still pending past its time limit, an operation failed after
    some of its MPI calls, or the ranks called different collectives.
    """


class DistNetworkError(Error):
    """An address cannot be parsed or reached."""


class DistStoreError(Error):
    """A key-value store failed."""


class QueueEmptyError(DistStoreError):
    """A queue of a store is empty, and the caller did not want to wait."""


class OpError(Error):
    """A server, or a call to one, failed.

    Args:
        message: The event, the place, and the remedy.

    Attributes:
        code: The canonical status code of the class.
        message: The text given.
    """

    code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class CancelledError(OpError):
    """The call was cancelled."""

    code = 1


class UnknownError(OpError):
    """A failure of unknown kind."""

    code = 2


class InvalidArgumentError(OpError, ValueError):
    """An argument is wrong in every state of the system."""

    code = 3


class DeadlineExceededError(OpError, TimeoutError):
    """The deadline passed before the call ended.

    Attributes:
        ranks: World ranks that are late, if the call knows them, as ``monitored_barrier`` does.
    """

    code = 4
    ranks: tuple[int, ...] = ()


class NotFoundError(OpError, LookupError):
    """A requested object does not exist."""

    code = 5


class AlreadyExistsError(OpError):
    """An object that was to be created exists already."""

    code = 6


class PermissionDeniedError(OpError, PermissionError):
    """The caller may not do this."""

    code = 7


class ResourceExhaustedError(OpError, MemoryError):
    """Memory, or another resource, ran out."""

    code = 8


class FailedPreconditionError(OpError):
    """The system is not in the state that the call needs."""

    code = 9


class AbortedError(OpError):
    """The call was aborted, usually because of a concurrent call."""

    code = 10


class OutOfRangeError(OpError, IndexError):
    """A position lies past the end."""

    code = 11


class UnimplementedError(OpError, NotImplementedError):
    """The server does not know this method."""

    code = 12


class InternalError(OpError):
    """An invariant is broken."""

    code = 13


class UnavailableError(OpError, ConnectionError):
    """The server cannot be reached now."""

    code = 14


class DataLossError(OpError):
    """Stored data is damaged."""

    code = 15


class UnauthenticatedError(OpError, PermissionError):
    """The caller has no valid credentials."""

    code = 16


_BY_CODE: dict[int, type[OpError]] = {
    cls.code: cls for cls in OpError.__subclasses__() if cls is not UnknownError
} | {2: UnknownError}


def from_code(code: int, message: str) -> OpError:
    """Return an error of the class with a canonical status code.

    Args:
        code: 1 to 16; any other number gives :class:`UnknownError`.
        message: The text of the error.
    """
    return _BY_CODE.get(code, UnknownError)(message)
