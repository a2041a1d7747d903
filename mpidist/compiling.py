"""Functions that numba compiles. Needs the extra ``fast``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Local. Have a function compiled when it is first called; what comes of it is kept on disk.

    It leaves the interpreter to other threads while it runs. Taken as a decorator.

    Args:
        function: Of the subset of Python that numba knows.
    """
    import numba  # takes half a second

    # NumPy's division does not look for zeros either; without that, loops become vector code.
    compile_function: Any = partial(numba.njit, error_model="numpy", nogil=True)
    result: Callable[..., None]
    try:
        result = compile_function(cache=True)(function)
    except RuntimeError:  # there is no folder that could be written to
        result = compile_function()(function)
    return result
