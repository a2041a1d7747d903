"""The error tree.

::

    Error (RuntimeError)                 also called DistError
    |-- DistBackendError                 MPI reported an error
    |   `-- GroupBrokenError             a timed-out collective is still pending on the group
    |-- DistNetworkError                 an address or a connection is bad
    |-- DistStoreError                   a key-value store failed
    |   `-- QueueEmptyError              a queue of a store is empty, and nobody is to wait
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

Each message says what happened, where (rank, job, task) and what to do. ``code`` of an
:class:`OpError` is the canonical status code (google.rpc.Code), so that an error raised by a
handler arrives at the caller as the same class.
"""


def type_name(value: object) -> str:
    """Local. What kind of thing a value is, for messages: ``"int"``, ``"cupy.ndarray"``."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


class Error(RuntimeError):
    """Base of every error that mpidist, strategy and dataservice raise by themselves."""


DistError = Error


class DistBackendError(Error):
    """MPI reported an error."""


class GroupBrokenError(DistBackendError):
    """A collective of this group timed out and is still pending; the group takes no other."""


class DistNetworkError(Error):
    """An address cannot be parsed or reached."""


class DistStoreError(Error):
    """A key-value store failed."""


class QueueEmptyError(DistStoreError):
    """A queue of a store is empty, and the caller did not want to wait."""


class OpError(Error):
    """A server, or a call to one, failed.

    Args:
        message: What happened, where, and what to do.

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
    """A failure of no better-known kind."""

    code = 2


class InvalidArgumentError(OpError, ValueError):
    """An argument is wrong whatever the state of the system."""

    code = 3


class DeadlineExceededError(OpError, TimeoutError):
    """The deadline passed before the call ended."""

    code = 4


class NotFoundError(OpError, LookupError):
    """Something that was asked for does not exist."""

    code = 5


class AlreadyExistsError(OpError):
    """Something to be created exists already."""

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
    """The call was given up, usually because others interfered."""

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
    """The caller did not prove who it is."""

    code = 16


_BY_CODE: dict[int, type[OpError]] = {
    cls.code: cls for cls in OpError.__subclasses__() if cls is not UnknownError
} | {2: UnknownError}


def from_code(code: int, message: str) -> OpError:
    """Local. The error of a canonical status code.

    Args:
        code: 1 to 16; any other number gives :class:`UnknownError`.
        message: Its text.

    Returns:
        An instance of the class with that code.
    """
    return _BY_CODE.get(code, UnknownError)(message)
