"""The GPUs that a process may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

_DRIVER_FOLDER = "/proc/driver/nvidia/gpus"


def visible_gpus(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the GPUs of this host that this process may use.

    ``CUDA_VISIBLE_DEVICES`` has the same effect as in CUDA: an empty value hides all GPUs, and a
    name that does not exist hides all GPUs after it.

    Args:
        env: The environment; by default ``os.environ``.

    Returns:
        Numbers, or names from ``CUDA_VISIBLE_DEVICES``: ``["0", "1"]``, ``["GPU-8a3f..."]``.
    """
    count = _count_gpus()
    visible = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    if visible is None or count == 0:
        return [str(number) for number in range(count)]
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name in names or (_is_number(name) and not 0 <= int(name) < count):
            break
        names.append(name)
    return names


def _count_gpus() -> int:
    """Return the number of GPUs of this host, from NVML or from the driver's folder in /proc."""
    try:
        import pynvml
    except ImportError:
        return len(os.listdir(_DRIVER_FOLDER)) if os.path.isdir(_DRIVER_FOLDER) else 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # there is no driver
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _is_number(name: str) -> bool:
    return name.isascii() and name.removeprefix("-").isdigit()
