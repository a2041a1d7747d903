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
    """Return whether numba can be imported. A broken installation is logged."""
    if find_spec("numba") is None:
        return False
    try:
        import_module("numba")  # takes half a second
    except ImportError as error:
        logger.warning(
            "NumPy is used in place of faster compiled code: numba cannot be imported: %s", error
        )
        return False
    return True


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, and cache the code on disk. A decorator.

    The compiled function releases the GIL.

    Args:
        function: A function in the subset of Python that numba compiles.
    """
    import numba  # takes half a second

    # As in NumPy, division does not test for zeros. Without the test loops are vectorised.
    compile_function: Any = partial(numba.njit, error_model="numpy", nogil=True)
    result: Callable[..., Any]
    try:
        result = compile_function(cache=True)(function)
    except RuntimeError:  # no cache folder is writable
        result = compile_function()(function)
    return result


@cache
def compiled_fence() -> Any:
    """Return a memory fence that compiled functions can call, without arguments."""
    from numba import types
    from numba.extending import intrinsic

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    def fence(typing_context: Any) -> Any:
        return types.void(), code

    return intrinsic(fence)
