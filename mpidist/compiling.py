"""Functions that numba compiles. Needs the extra ``fast``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)


@cache
def can_compile() -> bool:
    """Local. Whether numba is installed and works here; says so if only the second is not true."""
    if find_spec("numba") is None:
        return False
    try:
        import_module("numba")  # takes half a second
    except ImportError as error:
        logger.warning(
            "NumPy does what compiled code would do faster: numba cannot be imported: %s", error
        )
        return False
    return True


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
