"""Facts of the launch, as the variables and the rendezvous that torch's scripts expect."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from mpidist.mpi import world
from mpidist.mpi.launch_env import (
    launcher_of,
    local_rank_hint,
    local_size_hint,
    rank_hint,
    size_hint,
)
from mpidist.torch.store import MpidistStore

# torch's C++ code keeps stores, but not their Python objects, which have the methods.
_stores: list[MpidistStore] = []
_HINTS = {
    "RANK": rank_hint,
    "WORLD_SIZE": size_hint,
    "LOCAL_RANK": local_rank_hint,
    "LOCAL_WORLD_SIZE": local_size_hint,
}


def set_launch_variables(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.

    Scripts for torchrun read them. Nothing is set if one of them is set already, or if the launcher
    of MPI does not tell all four.
    """
    values = {name: hint(env) for name, hint in _HINTS.items()}
    if launcher_of(env) and None not in values.values() and values.keys().isdisjoint(env):
        env.update({name: str(value) for name, value in values.items()})


def use_mpi_rendezvous() -> None:
    """Let ``init_process_group`` find the ranks through MPI if ``MASTER_ADDR`` is not set.

    torch's rendezvous ``env://`` is replaced, for all backends. With ``MASTER_ADDR`` in the
    environment, or with a ``WORLD_SIZE`` that is not MPI's, torch's own rendezvous runs.
    """
    # A function of the package has the name of the module.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = module._rendezvous_handlers
    torchs_own = handlers["env"]

    def from_mpi(
        url: str, timeout: timedelta = default_pg_timeout, **kwargs: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        if "MASTER_ADDR" not in os.environ:
            here = world()
            if os.environ.get("WORLD_SIZE", str(here.size)) == str(here.size):
                _stores.append(MpidistStore(timeout))
                yield _stores[-1], here.rank, here.size
                return
        yield from torchs_own(url, timeout=timeout, **kwargs)

    handlers["env"] = from_mpi
