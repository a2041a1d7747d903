"""How this process was launched, read from its environment. Pure: MPI is not started."""

from __future__ import annotations

from collections.abc import Mapping

# Variables that a launcher sets for each rank, and the launcher that sets them.
_MARKS = (
    ("OMPI_COMM_WORLD_SIZE", "prte"),
    ("PMIX_RANK", "pmix"),
    ("PMI_RANK", "hydra"),
    ("PMI_FD", "hydra"),
)
# How the variables begin by which launchers and batch systems tell a process its place in a job, or
# a launcher its hosts; and those of settings among them, which a user may have made.
_PLACES = (
    *("PMI_", "PMI2_", "PMIX_", "PMIX2_", "HYDI_", "HYDRA_", "MPI_LOCAL", "OMPI_", "OPAL_USER_"),
    *("PRTE_", "MV2_COMM_WORLD_", "SLURM_", "PALS_", "FLUX_", "PBS_", "LSB_", "JSM_", "MPIDIST_"),
)
_SETTINGS = ("OMPI_MCA_", "SLURM_CONF", "MPIDIST_SECRET")
_OF_OMPI_JOBS = ("orte_", "ess", "plm", "ras", "pmix", "num_procs", "initial_wdir", "PREFIXES")
_OWN_LAUNCHER = (
    "Start the script with the mpiexec of the library that mpi4py loads: the one beside this "
    "Python, or the one that its MPI module puts first in PATH; mpidist run takes these"
)


def launcher_of(env: Mapping[str, str]) -> str | None:
    """Local. The launcher that started this process as a rank of an MPI world.

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


def size_hint(env: Mapping[str, str]) -> int | None:
    """Local. The number of ranks that the launcher announces, or None where it says nothing."""
    return _number(env, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def rank_hint(env: Mapping[str, str]) -> int | None:
    """Local. The rank that the launcher gave this process, or None where it says nothing."""
    return _number(env, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def local_size_hint(env: Mapping[str, str]) -> int | None:
    """Local. The number of ranks on this host, or None where the launcher says nothing."""
    return _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Local. An environment for processes on this host that are no part of this one's job.

    Args:
        env: Usually ``os.environ``.

    Returns:
        A new one, without what launchers, batch systems and ``mpidist run`` have put there. What
        the MPI library is told of its transports stays.
    """

    def stays(name: str) -> bool:
        if name.startswith(tuple(f"OMPI_MCA_{word}" for word in _OF_OMPI_JOBS)):
            return False
        return not name.startswith(_PLACES) or name.startswith(_SETTINGS)

    return {name: text for name, text in env.items() if stays(name)}


def start_settings(env: Mapping[str, str], library: str) -> dict[str, str]:
    """Local. Variables that the MPI library needs while it starts, unless the user has set them.

    MPICH over UCX has addresses longer than srun's PMI-2 takes, and fails or hangs with it; its
    own launcher, which sets MPI_LOCALNRANKS, takes them. Over OFI it prefers libfabric's deprecated
    provider "sockets" to "tcp", and one in twelve starts of 6 ranks on 3 nodes hung with that.

    Args:
        env: Usually ``os.environ``.
        library: What the library says of itself.
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
    """Local. What to say if srun started several tasks that MPI cannot see; None if all is well.

    An MPI library that does not speak srun's PMI gives each task a world of one. In the body of
    an sbatch script that is right; in a job step of several tasks it is not.

    Args:
        env: Usually ``os.environ``.
        vendor: Of the MPI library, if known: Open MPI speaks PMIx, and not the others.
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
    """Local. What to say if another library's mpiexec started this rank; None if all is well.

    Each of its ranks is alone in a world of one. Other worlds are never refused, nor children of
    MPI_Comm_spawn: they may have the variables of a job around theirs.

    Args:
        env: Usually ``os.environ``.
        vendor: Of the MPI library.
        size: Of its world.
    """
    sizes = ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"]  # that of the library's own launcher counts first
    if vendor == "Open MPI":
        sizes = ["OMPI_COMM_WORLD_SIZE"] if "PMIX_RANK" in env else sizes[::-1]
    name = next((name for name in sizes if _number(env, name) is not None), "")
    number = _number(env, name) or 1
    if size > 1 or number == 1 or launcher_of(env) is None:
        return None
    return (
        f"rank {rank_hint(env)} is alone in a world of {size}, but its launcher started {number} "
        f"ranks ({name}={number}): that is not the mpiexec of this MPI library, {vendor}. "
        f"{_OWN_LAUNCHER}. A process that shall be alone inside a job must not have {name}"
    )


def unspoken_launcher(env: Mapping[str, str], vendor: str, speaks_pmix: bool) -> str | None:
    """Local. What to say if MPI would not start under Open MPI's launcher; None if it may.

    MPICH ends the process there, without the remedy, unless it was built with PMIx.

    Args:
        env: Usually ``os.environ``.
        vendor: Of the MPI library.
        speaks_pmix: Whether it has loaded a library of PMIx.
    """
    by_open_mpi = {"OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"} <= set(env) and "PMI_SIZE" not in env
    if vendor != "MPICH" or speaks_pmix or not by_open_mpi:
        return None
    return (
        f"Open MPI's launcher started rank {rank_hint(env)} of {size_hint(env)}, but the MPI "
        f"library is {vendor}, which cannot join that world. {_OWN_LAUNCHER}"
    )
