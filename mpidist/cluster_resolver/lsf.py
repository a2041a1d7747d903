"""The slots of an LSF job."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from mpidist.cluster_resolver.placed import (
    PlacedResolver,
    Placement,
    is_number,
    needed,
    number,
    own_rank,
    slots,
)
from mpidist.errors import InvalidArgumentError

_REMEDY = "Start the script in an LSF job, with mpiexec, blaunch or jsrun"


class LSFClusterResolver(PlacedResolver):
    """Gives the slots of ``$LSB_MCPU_HOSTS``, or ``$LSB_HOSTS``, to jobs, host by host.

    This process's task is the rank that its MPI launcher gave it, jsrun's
    ``JSM_NAMESPACE_RANK``, or, under blaunch, one less than its ``LSF_PM_TASKID``.

    Args:
        jobs: See :class:`PlacedResolver`.
        port_base: Likewise.
        rpc_layer: Likewise.
        skip_first_host: Whether to leave the job's first host out: on systems with jsrun it is
            where the batch script runs, and no task does. By default where jsrun started this
            process. Errors as of :class:`PlacedResolver`.
    """

    source = "LSF's list of hosts"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        skip_first_host: bool | None = None,
    ) -> None:
        self._skip_first_host = skip_first_host
        super().__init__(jobs, port_base, rpc_layer)

    def placement(self) -> Placement:
        """Local. Where the tasks are; see :class:`PlacedResolver`."""
        env = os.environ
        if env.get("LSB_MCPU_HOSTS", "").strip():
            text = env["LSB_MCPU_HOSTS"]
            pairs = _pairs(text)
        else:
            (text,) = needed(env, ("LSB_HOSTS",), "LSF", _REMEDY)
            pairs = [(host, 1) for host in text.split()]
        skips = self._skip_first_host
        if skips or (skips is None and "JSM_NAMESPACE_RANK" in env):
            first = pairs[0][0] if pairs else ""
            pairs = list(itertools.dropwhile(lambda pair: pair[0] == first, pairs))
        rank = own_rank(env, "JSM_NAMESPACE_RANK")
        if rank is None and "LSF_PM_TASKID" in env:
            rank = number(env, "LSF_PM_TASKID") - 1
            if rank < 0:
                raise InvalidArgumentError(
                    "LSF_PM_TASKID is 0, but blaunch counts tasks from 1: unset it, or start the "
                    "script with blaunch"
                )
        return Placement(slots(pairs, text), rank)


def _pairs(text: str) -> list[tuple[str, int]]:
    words = text.split()
    if len(words) % 2 or not all(is_number(count) for count in words[1::2]):
        raise InvalidArgumentError(f"LSB_MCPU_HOSTS={text!r} is not hosts and numbers in turns")
    return [(host, int(count)) for host, count in zip(words[::2], words[1::2], strict=True)]
