"""Loads the backend of ``torch.distributed`` when a rank imports torch, through an entry point."""

import os


def load() -> None:
    """Import :mod:`mpidist.torch` if a launcher of MPI has started this process.

    torch calls this function at the end of its import. Scripts under mpirun then need no import of
    their own. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns the call off.
    """
    from mpidist.mpi.launch_env import is_rank

    if is_rank(os.environ):
        import mpidist.torch  # noqa: F401
