"""What is known of the ways between GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STAGED = "staged"
"""Through the host, whole: the way of every group."""


@dataclass
class WayTable:
    """Which ways there are between the GPUs of a group's members.

    Attributes:
        seconds: What an all_reduce of so many bytes took, by way; ``"staged"`` is through the host.
        missing: Why others are not used, by way.
    """

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def order(self, nbytes: int) -> list[str]:
        """Local. The ways for an operation of so many bytes, the fastest first."""
        if not self.seconds:
            return []
        # By the measured size that is nearest on a scale of powers.
        size = min(self.seconds, key=lambda size: abs(np.log(size / max(nbytes, 1))))
        times = self.seconds[size]
        return sorted(times, key=lambda name: times[name])

    def __str__(self) -> str:
        if not (self.seconds or self.missing):
            return "no operation has gone between GPUs yet"
        lines = []
        for size, times in self.seconds.items():
            each = (f"{name} {1e6 * times[name]:.0f} us" for name in self.order(size))
            lines.append(f"all_reduce of {size >> 10} KiB: {', '.join(each)}")
        return "\n".join([*lines, *(f"no {name}: {why}" for name, why in self.missing.items())])
