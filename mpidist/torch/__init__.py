"""The backend ``"mpidist"`` of ``torch.distributed``: torch's process groups on MPI.

Import this module, and torch has the backend for tensors on the CPU and on CUDA GPUs::

    import torch.distributed as dist
    import mpidist.torch

    dist.init_process_group("mpidist")

Start the script with ``mpidist run``, mpiexec or srun. MPI knows the ranks, so no address and no
port are needed. DistributedDataParallel, FSDP2, DTensor, DeviceMesh and distributed checkpoints
use the groups like those of torch's own backends. docs/guides/torch_backend.md has the details.

In a rank that a launcher of MPI has started, torch imports this module by itself. With torch 2.14
and later, the backend also has the name ``"mpi"``.
"""

from mpidist.torch.launch import (
    set_launch_variables,
    use_mpi_rendezvous,
    use_torchs_debug_level,
)
from mpidist.torch.process_group import MpidistProcessGroup, register_backend

__all__ = ["MpidistProcessGroup"]

set_launch_variables()
use_mpi_rendezvous()
use_torchs_debug_level()
register_backend()
