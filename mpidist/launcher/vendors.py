"""The flags and the environment that the launchers of the MPI vendors need.

One row for each vendor. No other module knows the flags of a launcher.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpidist.home_folder import home_folder
from mpidist.launcher.hosts import most_ranks_on_a_host, stale_batch_job

_VERSION_TIMEOUT_S = 30


class LauncherError(Exception):
    """There is no usable launcher. The message has the remedy."""


@dataclass(frozen=True)
class Vendor:
    """A kind of ``mpiexec``.

    Attributes:
        name: Name of the vendor.
        signs: Texts in the output of ``mpiexec --version`` that identify the vendor.
        rank_variable: Environment variable that has the rank of a process.
        flags: Options that are always passed.
        passed_on: Signals that the launcher sends on to all ranks.
        oversubscribe: Options for more ranks than cores.
        root: Options for the user root.
        hosts: Option before a list of hosts with numbers of ranks, as ``a:2,b:1``. Empty if it is
            not known.
        pass_variable: Option before the name of a variable that ranks on other hosts are to get.
            Empty if the launcher passes the whole environment on.
        environment: Variables that are set unless the user has set them.
        scratch_variable: Variable for the folder in which the launcher keeps its files on its own
            host. It leaves them there when it is killed. Empty if it keeps none.
        scratch_choice: Variable by which a user chooses that folder for all hosts. It is an error
            to set both.
        shared_files: Beginnings of the names of files that the library makes in /dev/shm.
        needs_srun: Whether it starts all ranks of a Slurm job by srun, also those of its own host.
        removed: Variables of a job around this one that stop the ranks.
    """

    name: str
    signs: tuple[str, ...]
    rank_variable: str
    flags: tuple[str, ...] = ()
    passed_on: tuple[int, ...] = (signal.SIGUSR1,)
    oversubscribe: tuple[str, ...] = ()
    root: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    pass_variable: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    scratch_variable: str = ""
    scratch_choice: str = ""
    shared_files: tuple[str, ...] = ()
    needs_srun: bool = False
    removed: tuple[str, ...] = ()


VENDORS = (
    Vendor(
        name="openmpi",
        signs=("Open MPI", "OpenRTE", "prterun"),
        rank_variable="OMPI_COMM_WORLD_RANK",
        # By default two ranks are bound to one core each, which all threads of a rank would share.
        flags=("--bind-to", "none"),
        passed_on=(signal.SIGUSR1, signal.SIGUSR2),
        oversubscribe=("--oversubscribe",),
        root=("--allow-run-as-root",),
        hosts=("--host",),
        pass_variable=("-x",),
        # Where UCX has no devices, its one-sided component fails, with a message each time.
        environment={"OMPI_MCA_mpi_yield_when_idle": "true", "OMPI_MCA_osc": "^ucx"},
        scratch_variable="PRTE_MCA_prte_local_tmpdir_base",
        scratch_choice="PRTE_MCA_prte_tmpdir_base",
        shared_files=("sm_segment.", "vader_segment.", "osc_sm", "osc_rdma", "ucx_shm_posix"),
    ),
    Vendor(
        name="intelmpi",
        signs=("Intel(R) MPI",),
        rank_variable="PMI_RANK",
        environment={"I_MPI_THREAD_YIELD": "2"},
        shared_files=("Intel_MPI", "shm-intel"),
    ),
    Vendor(
        name="mpich",
        signs=("HYDRA", "MPICH"),
        rank_variable="PMI_RANK",
        hosts=("-hosts",),
        environment={"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
        shared_files=("mpich_shm_", "mpich_shar_tmp", "mpich_vci_", "ucx_shm_posix"),
        needs_srun=True,
        # A rank of Open MPI, or of srun --mpi=pmix, has it. MPICH's ranks refuse to start with it.
        removed=("PMIX_NAMESPACE",),
    ),
)


def vendor_of(version: str) -> Vendor | None:
    """Return the vendor whose launcher printed a version text, or None if it is not known."""
    for vendor in VENDORS:
        if any(sign in version for sign in vendor.signs):
            return vendor
    return None


@dataclass(frozen=True)
class Launcher:
    """An installed ``mpiexec``.

    Attributes:
        path: The executable.
        vendor: Its vendor.
    """

    path: str
    vendor: Vendor

    def command(
        self, ranks: int, variables: Sequence[str] = (), slots: Sequence[tuple[str, int]] = ()
    ) -> list[str]:
        """Return the command line that starts ranks, up to the program to run.

        Args:
            ranks: Number of ranks.
            variables: Names of environment variables that every rank must get.
            slots: Hosts in the order of their ranks, each with its number of ranks. By default the
                launcher takes this host, the hosts of the batch job, or those of its own settings.

        Raises:
            LauncherError: Hosts are given, and how the launcher takes them is not known.
        """
        vendor = self.vendor
        words = [self.path, *vendor.flags]
        if slots:
            if not vendor.hosts:
                raise LauncherError(
                    f"how {self.path} ({vendor.name}) takes hosts is not known here: give them in "
                    "its own variables or configuration, and leave out --hosts and --hostfile"
                )
            words += [*vendor.hosts, ",".join(f"{host}:{number}" for host, number in slots)]
        if most_ranks_on_a_host(ranks, slots, os.environ) > len(os.sched_getaffinity(0)):
            words += vendor.oversubscribe
        if os.geteuid() == 0:
            words += vendor.root
        for name in variables if vendor.pass_variable else ():
            words += [*vendor.pass_variable, name]
        return [*words, "-n", str(ranks)]

    def environment(self, given: Mapping[str, str], ranks: int) -> dict[str, str]:
        """Return the environment of the ranks: a new dict.

        Args:
            given: The environment of the user. Its values win.
            ranks: Number of ranks that share the cores of a host.
        """
        share = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        # Ranks write to a pipe, and their output must appear at once all the same.
        ours = {"PYTHONUNBUFFERED": "1", **dict.fromkeys(threads, share), **self.vendor.environment}
        ours["HOME"] = home_folder()
        kept = {name: text for name, text in given.items() if name not in self.vendor.removed}
        return {**ours, **kept}


def find_launcher() -> Launcher:
    """Return the launcher of the MPI library that this Python's mpi4py loads.

    A launcher beside the interpreter belongs to an MPI library installed with pip, which mpi4py
    prefers. Otherwise the launcher in PATH is taken.

    Raises:
        LauncherError: There is none, its vendor is not known, or the environment has variables of a
            batch job that does not exist (any more).
    """
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("mpirun")
    if path is None:
        raise LauncherError(
            "no mpiexec beside this Python or in PATH; install an MPI library, for example with "
            'pip install "mpidist[mpich]"'
        )
    try:
        shown = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"{path} --version does not run ({error}); repair the MPI") from error
    vendor = vendor_of(shown.stdout + shown.stderr)
    if vendor is None:
        raise LauncherError(
            f"{path} is of no known vendor ({', '.join(v.name for v in VENDORS)}); start "
            "the script with it directly"
        )
    if problem := stale_batch_job(os.environ, needs_srun=vendor.needs_srun):
        raise LauncherError(problem)
    return Launcher(path, vendor)
