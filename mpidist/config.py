"""Environment variables, read once, in one place.

==============================  ========================================================  ========
Variable                        Meaning                                                   Default
==============================  ========================================================  ========
``MPIDIST_RUN_DIR``             folder for process ids, failure records and metrics       none
``MPIDIST_TIMELINE``            folder for timelines, one file a rank                     none
``MPIDIST_JOBS``                job layout set by ``mpidist run``, as ``ps=1,worker=2``   none
``MPIDIST_START_TIMEOUT_S``     seconds that ``Server.start`` waits for the other tasks   60
``MPIDIST_CALL_TIMEOUT_S``      seconds that a call to another task may take              120
``MPIDIST_STALL_S``             seconds after which a waiting operation is reported, and  60
                                lost hosts of ``mpidist run --hosts`` are looked for
``MPIDIST_STALL_ABORT_S``       seconds after which a waiting operation ends the job      never
``MPIDIST_CREDIT_BYTES``        bytes of requests under way from an endpoint to another;  64 MiB
                                four times as many are shared with processes of the host
``MPIDIST_DEBUG``               comparison of collectives between ranks: ``info``, the    info
                                first 100 of a group and later one in 256; ``detail``,
                                every one; ``off``, none
``MPIDIST_GPU_MPI``             1 gives MPI the memory of GPUs; only for an MPI library   0
                                that is built for CUDA
``MPIDIST_HOOKS``               0 leaves sys.excepthook, threading.excepthook,            1
                                sys.stdout and signals alone; see docs/hooks.md
``MPIDIST_SECRET``              shared by processes that speak tcp to each other          none
==============================  ========================================================  ========
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

PER_NODE, COLOCATED = "per_node", "colocated"
"""Values of a job layout in place of a number of tasks."""
_DEBUG = ("info", "off", "detail")


@dataclass(frozen=True)
class Config:
    """The settings of this process; see the table above."""

    run_dir: str | None = None
    timeline: str | None = None
    jobs: str | None = None
    start_timeout_s: float = 60.0
    call_timeout_s: float = 120.0
    stall_s: float = 60.0
    stall_abort_s: float = float("inf")
    credit_bytes: int = 64 << 20
    debug: str = _DEBUG[0]
    gpu_mpi: bool = False
    hooks: bool = True
    secret: str | None = field(default=None, repr=False)

    @property
    def shared_buffer_bytes(self) -> int:
        """Size of a shared send buffer: four times the credit, since receivers keep parts of it."""
        return 4 * self.credit_bytes

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """Read and check the variables.

        Args:
            env: Usually ``os.environ``.

        Returns:
            The settings, with defaults for unset and empty variables.

        Raises:
            ValueError: A number does not parse or is not positive, or a word is unknown. The
                message names the variable.
        """
        values = {}
        for setting in fields(cls):
            variable = f"MPIDIST_{setting.name.upper()}"
            if text := env.get(variable):
                values[setting.name] = _parse(variable, text, setting.default)
        return cls(**values)


def _parse(name: str, text: str, default: Any) -> Any:
    """Return the value of a variable, of the type of its default; None stands for text."""
    if default is None:
        return text
    if isinstance(default, bool | str):
        known = _DEBUG if isinstance(default, str) else ("0", "1")
        if text.lower() not in known:
            raise ValueError(f"{name}={text!r} is none of {', '.join(known)}")
        return text.lower() if isinstance(default, str) else text == "1"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number; unset it or give one") from None
    if not value > 0:
        raise ValueError(f"{name}={text!r} must be positive")
    if isinstance(default, float):
        return value
    if not 1 <= value < 1 << 63:
        raise ValueError(f"{name}={text!r} must be at least 1, and finite")
    return int(value)


@cache
def distribution_version() -> str:
    """Return the version of the installed mpidist; ``"unknown"`` if it is only in the path."""
    from importlib.metadata import PackageNotFoundError, version  # slow

    try:
        return version("mpidist")
    except PackageNotFoundError:
        return "unknown"


config = Config.from_env(os.environ)


def set_debug(level: str) -> None:
    """Set the debug level that groups made later read.

    Args:
        level: ``"off"``, ``"info"`` or ``"detail"``.
    """
    object.__setattr__(config, "debug", level)  # for users the settings are constants
