"""Debug levels and breakpoints of torch.distributed."""

from __future__ import annotations

import enum
import logging
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from mpidist.collectives.arrays import barrier
from mpidist.collectives.default import existing_groups, get_rank, get_world_size
from mpidist.config import Config, config, set_debug

if TYPE_CHECKING:
    from pdb import Pdb

logger = logging.getLogger(__name__)

_passed: Counter[tuple[str, int]] = Counter()  # calls of breakpoint, by file and line


class DebugLevel(enum.IntEnum):
    """The levels of ``MPIDIST_DEBUG``, with the names of torch's ``TORCH_DISTRIBUTED_DEBUG``.

    With INFO, the default, the ranks of a group compare the first 100 collectives, and later one in
    256 with all since the last comparison. With DETAIL they compare every one before it runs, and
    with OFF none. A difference is an error on all ranks.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process."""
    return DebugLevel[config.debug.upper()]


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of groups that are made later.

    A group takes the level of its first rank when it is made. Existing groups keep theirs.

    Args:
        level: The new level. Before the first call it is the level of ``MPIDIST_DEBUG``.

    Raises:
        TypeError: The level is no DebugLevel.
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"the debug level is a DebugLevel, not {level!r}")
    set_debug(level.name.lower())


def set_debug_level_from_env() -> None:
    """Set the debug level that the environment variable ``MPIDIST_DEBUG`` names now.

    Raises:
        ValueError: The variable names no level.
    """
    set_debug(Config.from_env(os.environ).debug)


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Collective. Stop one rank in the debugger pdb. The other ranks wait for it in a barrier.

    The debugger reads the standard input of the rank. ``mpidist run --stdin`` gives the input of
    the command to rank 0. Type ``up`` to get to the frame of the caller. The watchdog reports ranks
    that wait for long, and ends the job if ``MPIDIST_STALL_ABORT_S`` is set.

    Args:
        rank: World rank that stops. The default is 0.
        skip: Number of calls of this line that do nothing before the first stop. The default is 0.
        timeout_s: Seconds to which shorter time limits of all groups are raised, so that ranks
            can wait for a rank that is stepped through. None leaves the limits as they are.

    Raises:
        ValueError: There is no default group, or the rank is not in the world.
    """
    if not 0 <= rank < get_world_size():
        raise ValueError(f"rank {rank} is not in a world of {get_world_size()}")
    caller = sys._getframe(1)
    place = (caller.f_code.co_filename, caller.f_lineno)
    _passed[place] += 1
    if _passed[place] <= skip:
        logger.warning("%s:%d: call %d of breakpoint is skipped", *place, _passed[place])
        return
    for group in existing_groups():
        if timeout_s is not None and group.timeout is not None and group.timeout < timeout_s:
            group.set_timeout(timeout_s)
    if get_rank() == rank:
        debugger = _make_debugger(rank)
        debugger.message(f"rank {rank} has stopped; type 'up' to get to the caller of breakpoint")
        debugger.set_trace()
    barrier()


def _make_debugger(rank: int) -> Pdb:
    import pdb  # slow to import, and rarely used

    class Debugger(pdb.Pdb):
        def do_EOF(self, arg: str) -> bool | None:
            self.message(
                f"the standard input of rank {rank} has ended: mpidist run --stdin gives the "
                "input of the command to rank 0"
            )
            return super().do_EOF(arg)

    return Debugger()
