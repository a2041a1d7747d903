"""Errors that take the places of elements until it is their turn to be raised."""

from __future__ import annotations

import pickle

from mpidist.errors import UnknownError


class Failure:
    """An error in the place of an element.

    Args:
        error: The error, without the frame that has caught it, which would be in a circle with what
            it keeps. One that cannot be pickled becomes an UnknownError where this is.

    Attributes:
        error: The error.
    """

    def __init__(self, error: BaseException) -> None:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        self.error = error

    def __reduce__(self) -> tuple[type[Failure], tuple[BaseException]]:
        error = self.error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as why:
            name = type(error).__qualname__
            error = UnknownError(f"{name}: {error} ({name} itself cannot be pickled: {why})")
        return Failure, (error,)
