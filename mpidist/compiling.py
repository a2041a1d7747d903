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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Local. Have a function compiled when it is first called; what comes of it is kept on disk.

    It leaves the interpreter to other threads while it runs. Taken as a decorator.

    Args:
        function: Of the subset of Python that numba knows.
    """
    import numba  # takes half a second

    # NumPy's division does not look for zeros either; without that, loops become vector code.
    compile_function: Any = partial(numba.njit, error_model="numpy", nogil=True)
    result: Callable[..., Any]
    try:
        result = compile_function(cache=True)(function)
    except RuntimeError:  # there is no folder that could be written to
        result = compile_function()(function)
    return result


@cache
def compiled_fence() -> Any:
    """Local. What orders loads and stores before it against those after it, in compiled code.

    Returns:
        A function without arguments, for functions that are compiled to call.
    """
    from numba import types
    from numba.extending import intrinsic

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    def fence(typing_context: Any) -> Any:
        return types.void(), code

    return intrinsic(fence)
