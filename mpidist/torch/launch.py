"""Facts of the launch, as the variables and the rendezvous that torch's scripts expect."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from mpidist.config import set_debug
from mpidist.mpi import world
from mpidist.mpi.launch_env import (
    is_rank,
    local_rank_hint,
    local_size_hint,
    rank_hint,
    size_hint,
)
from mpidist.torch.store import MpidistStore

# Each rendezvous has entries of its own: gloo would connect to the addresses of the last one.
_numbers = itertools.count()
_HINTS = {
    "RANK": rank_hint,
    "WORLD_SIZE": size_hint,
    "LOCAL_RANK": local_rank_hint,
    "LOCAL_WORLD_SIZE": local_size_hint,
}
# torch's own rendezvous reads these.
_FOR_TORCH = frozenset(("MASTER_ADDR", "RANK", "WORLD_SIZE"))


def set_launch_variables(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.

    Scripts for torchrun read them. Nothing is set if one of them is set already, or if the launcher
    of MPI does not tell all four.
    """
    values = {name: hint(env) for name, hint in _HINTS.items()}
    if is_rank(env) and None not in values.values() and values.keys().isdisjoint(env):
        env.update({name: str(value) for name, value in values.items()})


def use_torchs_debug_level() -> None:
    """Compare every call if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``.

    ``MPIDIST_DEBUG`` wins if it is set.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL" and "MPIDIST_DEBUG" not in os.environ:
        set_debug("detail")


def use_mpi_rendezvous() -> None:
    """Let ``init_process_group`` find the ranks through MPI.

    torch's rendezvous ``env://`` is replaced, for all backends. In a process that no launcher of
    MPI has started, and under torchrun, torch's own rendezvous runs if there are variables for it.
    """
    # A function of the package has the name of the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = module._rendezvous_handlers
    torchs_own = handlers["env"]

    def from_mpi(
        url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        if not is_rank(os.environ) and not _FOR_TORCH.isdisjoint(os.environ):
            yield from torchs_own(url, timeout=timeout, **kwargs)
            return
        here = world()
        _check(url, here.rank, here.size)
        store = _store()
        store.set_timeout(timeout)
        yield dist.PrefixStore(f"rendezvous {next(_numbers)}", store), here.rank, here.size

    handlers["env"] = from_mpi


@cache
def _store() -> MpidistStore:
    """Return the store of this process.

    torch's C++ code keeps a store, but not its Python object, which has the methods.
    """
    return MpidistStore(default_pg_timeout)


def _check(url: str, rank: int, size: int) -> None:
    """Raise ValueError if arguments or variables contradict MPI.

    Args:
        url: The URL of the rendezvous. torch puts the arguments of ``init_process_group`` there.
        rank: Rank of this process in MPI's world.
        size: Number of ranks in MPI's world.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    for name, truth in (("rank", rank), ("world_size", size)):
        for source, value in (
            (f"{name}=", given.get(name, str(truth))),
            (f"the environment variable {name.upper()}=", os.environ.get(name.upper(), str(truth))),
        ):
            if value != str(truth):
                raise ValueError(
                    f"{source}{value} contradicts MPI, which has rank {rank} of {size}: leave it "
                    "out, or unset it"
                )
