"""The slots of a PBS job: PBS Pro, OpenPBS and Torque."""

from __future__ import annotations

import os

from mpidist.cluster_resolver.placed import (
    PlacedResolver,
    Placement,
    needed,
    own_rank,
    read_lines,
    slots,
)

_REMEDY = "Start the script in a PBS job, with mpiexec or pbsdsh"


class PBSClusterResolver(PlacedResolver):
    """Gives the lines of ``$PBS_NODEFILE``, one a task, to jobs, in their order.

    This process's task is the rank that its MPI launcher gave it, or, under Torque's pbsdsh, its
    ``PBS_VNODENUM``. Arguments and errors as of :class:`PlacedResolver`.
    """

    source = "PBS_NODEFILE"

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        (path,) = needed(os.environ, ("PBS_NODEFILE",), "PBS", _REMEDY)
        hosts = read_lines(path, "PBS_NODEFILE")
        tasks = slots([(host, 1) for host in hosts], f"PBS_NODEFILE={path}")
        return Placement(tasks, own_rank(os.environ, "PBS_VNODENUM"))
