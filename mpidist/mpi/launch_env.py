"""The launch environment: facts that launchers tell a process by variables. MPI is not used."""

from __future__ import annotations

import sys
from collections.abc import Mapping

# Variables that launchers set for each rank.
_MARKS = (
    ("OMPI_COMM_WORLD_SIZE", "prte"),
    ("PMIX_RANK", "pmix"),
    ("PMI_RANK", "hydra"),
    ("PMI_FD", "hydra"),
)
_OWN_LAUNCHER = (
    "Start the script with the mpiexec of the library that mpi4py loads: the one beside this "
    "Python, or the one that its MPI module puts first in PATH; mpidist run takes these"
)


def launcher_of(env: Mapping[str, str]) -> str | None:
    """Return the launcher that started this process as a rank of an MPI world.

    Args:
        env: Usually ``os.environ``.

    Returns:
        ``"prte"`` (Open MPI), ``"hydra"`` (MPICH), ``"pmix"``, ``"slurm"`` (srun with a PMI), or
        None for a plain process.
    """
    for variable, launcher in _MARKS:
        if variable in env:
            return "slurm" if "SLURM_PROCID" in env and launcher != "prte" else launcher
    return None


def is_rank(env: Mapping[str, str]) -> bool:
    """Return whether a launcher of MPI has started this process, and not torchrun or Python.

    The processes of torchrun and of multiprocessing inherit the variables of a launcher that has
    started their parent.

    Args:
        env: Usually ``os.environ``.
    """
    of_torchrun = "TORCHELASTIC_RUN_ID" in env
    return launcher_of(env) is not None and not of_torchrun and not is_python_child()


def is_python_child() -> bool:
    """Return whether the module multiprocessing has started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def child_of_rank(env: Mapping[str, str]) -> str | None:
    """Return why this process cannot start MPI if it is a child of a rank."""
    if launcher_of(env) is None or not is_python_child():
        return None
    return (
        "a process that multiprocessing has started is no rank of the job of its parent, and "
        "cannot start MPI: call mpidist in the parent, or start more ranks with mpidist run -n"
    )


def size_hint(env: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the launcher announces, or None."""
    return _number(env, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def rank_hint(env: Mapping[str, str]) -> int | None:
    """Return the rank that the launcher gave this process, or None."""
    return _number(env, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def local_rank_hint(env: Mapping[str, str]) -> int | None:
    """Return the number of this process among the ranks on its host, or None."""
    return _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def local_size_hint(env: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host that the launcher announces, or None."""
    return _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


def start_settings(env: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the variables that the MPI library needs while it starts, unless the user sets them.

    MPICH over UCX has addresses that are longer than srun's PMI-2 takes, and fails or hangs there.
    Its own launcher, which sets MPI_LOCALNRANKS, takes them. MPICH over OFI prefers libfabric's
    deprecated provider "sockets" to "tcp", with which one in twelve starts of 6 ranks on 3 nodes
    hung.

    Args:
        env: Usually ``os.environ``.
        library: Result of ``MPI.Get_library_version()``.
    """
    device = next((line for line in library.splitlines() if line.startswith("MPICH Device")), "")
    by_srun = launcher_of(env) == "slurm" and "MPI_LOCALNRANKS" not in env
    if by_srun and "ucx" in device and "ofi" in device:
        return {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    return {}


def _number(env: Mapping[str, str], *variables: str) -> int | None:
    for variable in variables:
        if env.get(variable, "").isdigit():
            return int(env[variable])
    return None


def foreign_step(env: Mapping[str, str], vendor: str = "") -> str | None:
    """Return an error message if srun started several tasks that MPI cannot see, else None.

    An MPI library that does not speak srun's PMI gives each task a world of one. That is right in
    the body of an sbatch script, and wrong in a job step of several tasks.

    Args:
        env: Usually ``os.environ``.
        vendor: Vendor of the MPI library, if known. Open MPI speaks PMIx alone.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    inside_step = "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "batch").isdigit()
    if not inside_step or not tasks.isdigit() or int(tasks) < 2:
        return None
    spoken = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"} & set(env)
    if spoken or (launcher_of(env) is not None and vendor != "Open MPI"):
        return None
    return (
        f"srun started {tasks} tasks, but this MPI library does not speak srun's PMI, so each task "
        "is alone in a world of one. Start the script with the library's own launcher inside the "
        "allocation (mpidist run, or mpiexec), or give srun the PMI that the library speaks "
        "(srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI, where Slurm has it)"
    )


def foreign_launcher(env: Mapping[str, str], vendor: str, size: int) -> str | None:
    """Return an error message if another library's mpiexec started this rank, else None.

    Each of its ranks is alone in a world of one. Larger worlds are never refused, because they may
    have the variables of a job around theirs. Do not call this in children of MPI_Comm_spawn.

    Args:
        env: Usually ``os.environ``.
        vendor: Vendor of the MPI library.
        size: Number of ranks in the world.
    """
    sizes = ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"]  # the library's own launcher counts first
    if vendor == "Open MPI":
        sizes = ["OMPI_COMM_WORLD_SIZE"] if "PMIX_RANK" in env else sizes[::-1]
    name = next((name for name in sizes if _number(env, name) is not None), "")
    number = _number(env, name) or 1
    if size > 1 or number == 1 or launcher_of(env) is None:
        return None
    return (
        f"rank {rank_hint(env)} is alone in a world of {size}, but its launcher started {number} "
        f"ranks ({name}={number}): that is not the mpiexec of this MPI library, {vendor}. "
        f"{_OWN_LAUNCHER}. If this process should be alone inside a job, unset {name}"
    )


def unspoken_launcher(env: Mapping[str, str], vendor: str, speaks_pmix: bool) -> str | None:
    """Return an error message if MPI cannot start under Open MPI's launcher, else None.

    MPICH ends the process there, without the remedy, unless it was built with PMIx.

    Args:
        env: Usually ``os.environ``.
        vendor: Vendor of the MPI library.
        speaks_pmix: Whether it has loaded a library of PMIx.
    """
    by_open_mpi = {"OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"} <= set(env) and "PMI_SIZE" not in env
    if vendor != "MPICH" or speaks_pmix or not by_open_mpi:
        return None
    return (
        f"Open MPI's launcher started rank {rank_hint(env)} of {size_hint(env)}, but the MPI "
        f"library is {vendor}, which cannot join that world. {_OWN_LAUNCHER}"
    )
