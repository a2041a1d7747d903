"""The slots of a job of Grid Engine (SGE, UGE, OGS)."""

from __future__ import annotations

import os

from mpidist.cluster_resolver.placed import (
    PlacedResolver,
    Placement,
    is_number,
    needed,
    own_rank,
    read_lines,
    slots,
)
from mpidist.errors import InvalidArgumentError

_REMEDY = "Start the script in a job with a parallel environment (qsub -pe), with mpiexec"


class SGEClusterResolver(PlacedResolver):
    """Gives the slots of ``$PE_HOSTFILE`` to jobs, host by host.

    This process's task is the rank that its MPI launcher gave it. Arguments and errors as of
    :class:`PlacedResolver`.
    """

    source = "PE_HOSTFILE"

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        (path,) = needed(os.environ, ("PE_HOSTFILE",), "Grid Engine", _REMEDY)
        pairs = []
        for line in read_lines(path, self.source):
            host, *rest = line.split()  # then a queue, and processors
            if not rest or not is_number(rest[0]):
                raise InvalidArgumentError(f"{path} has no number of slots in the line {line!r}")
            pairs.append((host, int(rest[0])))
        return Placement(slots(pairs, f"PE_HOSTFILE={path}"), own_rank())
