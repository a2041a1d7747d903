"""Errors that travel to the process that reports them."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from mpidist.errors import OpError, UnknownError


def pack_error(error: BaseException, where: str = "") -> bytes:
    """Pickle an error so that another process can raise it.

    SystemExit, KeyboardInterrupt and other errors that are no Exception become an UnknownError that
    names them. Raised unchanged, they would end the script that reads the elements. Errors that
    cannot be pickled become an UnknownError, too.

    Args:
        error: The error. It is not changed.
        where: The place of the failure in words. It is added to the error as a note, together with
            the traceback. By default nothing is added.
    """
    told = traceback.TracebackException.from_exception(error)
    notes = list(getattr(error, "__notes__", ()))
    if where:
        notes.append(f"raised in {where}:\n{''.join(told.format()).rstrip()}")
    name = type(error).__qualname__
    reason = f"{name} is not raised here, where it would end the script"
    data: bytes
    if isinstance(error, Exception):
        try:
            data = cloudpickle.dumps(_Noted(error, notes))
            pickle.loads(data)
        except BaseException as why:
            # For instance, a constructor that takes other arguments than the error stores. The
            # pickle functions of the error's class can raise anything.
            told_why = traceback.TracebackException.from_exception(why)
            reason = f"{name} itself cannot be pickled: {told_why}"
        else:
            return data
    place = f"raised in {where}; " if where else ""
    data = cloudpickle.dumps(_Noted(UnknownError(f"{name}: {told} ({place}{reason})"), notes))
    return data


def unpack_error(data: bytes) -> Exception:
    """Return the error of :func:`pack_error`."""
    error: Exception = pickle.loads(data)
    return error


def code_and_message(error: BaseException) -> tuple[int, str]:
    """Return an error's code and text, for :func:`mpidist.errors.from_code`.

    An OpError keeps its class. Any other error becomes an UnknownError that names it.
    """
    if isinstance(error, OpError):
        return error.code, str(error)
    told = traceback.TracebackException.from_exception(error)  # even if str() raises
    return UnknownError.code, f"{type(error).__qualname__}: {told}"


class _Noted:
    """Pickles an error with notes, which a ``__reduce__`` of the error's class may leave out."""

    def __init__(self, error: Exception, notes: list[str]) -> None:
        self._error = error
        self._notes = notes

    def __reduce__(self) -> tuple[Any, ...]:
        return _noted, (self._error, self._notes)


def _noted(error: Exception, notes: list[str]) -> Exception:
    error.__notes__ = notes
    return error
