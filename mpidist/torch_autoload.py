"""Registers the backend of ``torch.distributed`` at torch's import, through an entry point."""

import os
from typing import Any


def load() -> None:
    """Register the backend ``"mpidist"``. In a rank of MPI, import :mod:`mpidist.torch`.

    torch calls this function at the end of its import. Scripts under mpirun then need no import of
    their own. In other processes, the backend is imported by its first use.
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns the call off.
    """
    from mpidist.mpi.launch_env import is_rank

    if is_rank(os.environ):
        import mpidist.torch  # noqa: F401

        return

    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("mpidist", _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, pg_options: Any) -> Any:
    from mpidist.torch.process_group import make_process_group

    return make_process_group(options, pg_options)
