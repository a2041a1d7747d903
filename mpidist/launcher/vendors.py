"""What the launchers of the MPI vendors want: their flags and their environment.

One row a vendor; this table is the only place that knows a launcher's flags.
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
from mpidist.launcher.batch_job import stale_job
from mpidist.launcher.hosts import ranks_together

_VERSION_TIMEOUT_S = 30


class LauncherError(Exception):
    """No usable launcher; the message says what to do."""


@dataclass(frozen=True)
class Vendor:
    """A kind of ``mpiexec``.

    Attributes:
        name: The vendor's name.
        signs: Texts in the output of ``mpiexec --version`` that tell the vendor.
        rank_variable: The environment variable that tells a process its rank.
        flags: Always passed.
        passed_on: Signals that it hands to all ranks.
        oversubscribe: Passed when there are more ranks than cores.
        root: Passed when the user is root.
        hosts: Before a list of hosts and numbers of ranks, as ``a:2,b:1``; empty if it takes none.
        pass_variable: Puts the name of a variable on the command line, so that ranks on other
            hosts get it; empty where the launcher passes the whole environment anyway.
        environment: Set unless the user has set them.
        scratch_variable: Tells the launcher where to keep files of its own, which it leaves when it
            is killed, on its own host; empty if it keeps none.
        scratch_choice: By which a user tells it so for all hosts; both are an error.
        shared_folders: Variables that tell the library where to make the files that ranks map.
        shared_files: How the names start of those that it may make in /dev/shm itself.
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
    shared_folders: tuple[str, ...] = ()
    shared_files: tuple[str, ...] = ()
    needs_srun: bool = False
    removed: tuple[str, ...] = ()


VENDORS = (
    Vendor(
        name="openmpi",
        signs=("Open MPI", "OpenRTE", "prterun"),
        rank_variable="OMPI_COMM_WORLD_RANK",
        # A rank bound to one core, the default for two ranks, would share it among its threads.
        flags=("--bind-to", "none"),
        passed_on=(signal.SIGUSR1, signal.SIGUSR2),
        oversubscribe=("--oversubscribe",),
        root=("--allow-run-as-root",),
        hosts=("--host",),
        pass_variable=("-x",),
        # The UCX one-sided component fails on hosts without its devices, and says so every time.
        environment={"OMPI_MCA_mpi_yield_when_idle": "true", "OMPI_MCA_osc": "^ucx"},
        scratch_variable="PRTE_MCA_prte_local_tmpdir_base",
        scratch_choice="PRTE_MCA_prte_tmpdir_base",
        shared_folders=(
            "OMPI_MCA_btl_sm_backing_directory",
            "OMPI_MCA_osc_sm_backing_directory",
            "OMPI_MCA_osc_rdma_backing_directory",
            "UCX_POSIX_DIR",
        ),
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
        shared_folders=("UCX_POSIX_DIR",),
        shared_files=("mpich_shm_", "mpich_shar_tmp", "mpich_vci_", "ucx_shm_posix"),
        needs_srun=True,
        # Of ranks of Open MPI, and of srun --mpi=pmix. MPICH's ranks refuse to start beside it.
        removed=("PMIX_NAMESPACE",),
    ),
)


def vendor_of(version: str) -> Vendor | None:
    """Local. The vendor whose launcher printed a version text.

    Args:
        version: The output of ``mpiexec --version``.

    Returns:
        Its row, or None.
    """
    for vendor in VENDORS:
        if any(sign in version for sign in vendor.signs):
            return vendor
    return None


@dataclass(frozen=True)
class Launcher:
    """A vendor's ``mpiexec`` at a place.

    Attributes:
        path: The executable.
        vendor: Its kind.
    """

    path: str
    vendor: Vendor

    def command(
        self,
        ranks: int,
        *,
        cores: int,
        root: bool,
        variables: Sequence[str] = (),
        places: Sequence[tuple[str, int]] = (),
    ) -> list[str]:
        """Local. The command line that starts ranks, up to the program to run.

        Args:
            ranks: How many.
            cores: How many cores those of a host may use.
            root: Whether the user is root.
            variables: Names of environment variables that every rank must get.
            places: Hosts, and how many ranks each takes, in the order of the ranks; by default
                what the launcher finds: this host, a batch system's, or those of its own settings.

        Returns:
            The words of the command.

        Raises:
            LauncherError: Hosts are given, and how the launcher takes them is not known.
        """
        vendor = self.vendor
        words = [self.path, *vendor.flags]
        if places:
            if not vendor.hosts:
                raise LauncherError(
                    f"how {self.path} ({vendor.name}) takes hosts is not known here: give them in "
                    "its own variables or configuration, and leave out --hosts and --hostfile"
                )
            words += [*vendor.hosts, ",".join(f"{host}:{number}" for host, number in places)]
        if ranks_together(ranks, places, os.environ) > cores:
            words += vendor.oversubscribe
        if root:
            words += vendor.root
        for name in variables if vendor.pass_variable else ():
            words += [*vendor.pass_variable, name]
        return [*words, "-n", str(ranks)]

    def environment(self, given: Mapping[str, str], *, ranks: int, cores: int) -> dict[str, str]:
        """Return the environment of the ranks: a new dict.

        Args:
            given: The environment of the user, which is kept.
            ranks: The number of ranks that share the cores.
            cores: The number of cores.
        """
        share = str(max(1, cores // ranks))
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        # What a rank prints must be seen when it is printed, though it goes through a pipe.
        ours = {"PYTHONUNBUFFERED": "1", **dict.fromkeys(threads, share), **self.vendor.environment}
        ours["HOME"] = home_folder()
        kept = {name: text for name, text in given.items() if name not in self.vendor.removed}
        return {**ours, **kept}


def find_launcher() -> Launcher:
    """Return the launcher of the MPI library that this Python's mpi4py loads.

    The one beside the interpreter belongs to an MPI library installed with pip, which mpi4py
    prefers; otherwise the system's is taken.

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
    if problem := stale_job(os.environ, needs_srun=vendor.needs_srun):
        raise LauncherError(problem)
    return Launcher(path, vendor)
