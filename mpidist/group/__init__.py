"""Process groups: ranks that act together.

``WORLD`` is the default group, as ``torch.distributed.group.WORLD``; None before there is one.
"""

from mpidist.group.cartesian import CartesianGroup
from mpidist.group.coalescing import Coalescing
from mpidist.group.gpu_rule import GpuRule
from mpidist.group.making import group_of, make_group
from mpidist.group.prepared import Prepared
from mpidist.group.process_group import ProcessGroup

WORLD: ProcessGroup | None = None

__all__ = [
    "WORLD",
    "CartesianGroup",
    "Coalescing",
    "GpuRule",
    "Prepared",
    "ProcessGroup",
    "group_of",
    "make_group",
]
