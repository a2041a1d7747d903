"""Device names in TensorFlow's format, such as ``/job:worker/task:0/device:CPU:0``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

_PARTS = {
    "job": re.compile(r"job:([A-Za-z_][\w.]*)"),
    "replica": re.compile(r"replica:(\d+)"),
    "task": re.compile(r"task:(\d+)"),
    "device": re.compile(r"(?:device:)?((?:CPU|GPU)(?::(?:\d+|\*))?)", re.IGNORECASE),
}


@dataclass(frozen=True)
class Device:
    """A device name, which may be partial. None stands for any value.

    Attributes:
        job: Name of the job.
        replica: Index of the replica; has no effect.
        task: Index of the task.
        device: Device of the task, such as ``CPU:0`` or ``GPU:1``.
    """

    job: str | None = None
    replica: str | None = None
    task: str | None = None
    device: str | None = None

    def merged(self, inner: Device) -> Device:
        """Return this name with the parts of an inner scope in place of its own parts."""
        given = {field.name: getattr(inner, field.name) for field in fields(inner)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def __str__(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "".join(f"/{name}:{value}" for name, value in parts if value is not None)


def parse(name: str) -> Device:
    """Parse a device name.

    Raises:
        ValueError: The name is not valid.
    """
    found: dict[str, str] = {}
    for word in filter(None, name.split("/")):
        for part, pattern in _PARTS.items():
            match = pattern.fullmatch(word)
            if match is not None and part not in found:
                value = match[1].upper() if part == "device" else match[1]
                found[part] = f"{value}:0" if value in ("CPU", "GPU") else value
                break
        else:
            raise ValueError(
                f"{name!r} is no name of a device: expected parts of "
                "'/job:worker/task:0/device:CPU:0'"
            )
    return Device(**found)
