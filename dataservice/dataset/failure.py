"""Errors that take the place of elements until their turn to be raised has come."""

from __future__ import annotations

from typing import Any

from dataservice.errors import pack_error, unpack_error


class Failure:
    """An error in the place of an element.

    Args:
        error: The error. The frame that caught it is removed from its traceback: that frame refers
            to this object, and the two would form a circle. Pickled, it becomes an UnknownError if
            its class cannot be pickled.

    Attributes:
        error: The error.
    """

    def __init__(self, error: BaseException) -> None:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (pack_error(self.error),)


def _unpacked(data: bytes) -> Failure:
    return Failure(unpack_error(data))
