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


def start_settings(env: Mapping[str, str], library: str) -> dict[str, str]:
    """Local. Variables that the MPI library needs while it starts, unless the user has set them.

    MPICH over UCX has addresses longer than srun's PMI-2 takes, and fails or hangs with it; its
    own launcher, which sets MPI_LOCALNRANKS, takes them.

    Args:
        env: Usually ``os.environ``.
        library: What the library says of itself.
    """
    device = next((line for line in library.splitlines() if line.startswith("MPICH Device")), "")
    by_srun = launcher_of(env) == "slurm" and "MPI_LOCALNRANKS" not in env
    if by_srun and "ucx" in device and "ofi" in device:
        return {"MPIR_CVAR_CH4_NETMOD": "ofi"}
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
