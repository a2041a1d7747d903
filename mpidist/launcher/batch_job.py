"""Whether the batch job that the environment describes still exists."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping

from mpidist.errors import InvalidArgumentError
from mpidist.host_list import expand_hosts

_SCONTROL_S = 20.0
# The variables by which launchers and mpidist find the hosts of a job. Without them, both ignore
# the other variables of the batch system.
_SLURM = (
    *("SLURM_JOBID", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
    *("SLURM_TASKS_PER_NODE",),
)
_PBS = ("PBS_NODEFILE", "PBS_JOBID", "PBS_ENVIRONMENT")
_GRID_ENGINE = ("PE_HOSTFILE",)
# MPICH reads the file. Open MPI needs the file if it finds the number of the job.
_COBALT = ("COBALT_NODEFILE", "COBALT_JOBID")
_LSF = ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE")


def stale_job(environ: Mapping[str, str], *, needs_srun: bool) -> str:
    """Return an error message if variables are left over from a batch job; "" if none are.

    Launchers trust such variables: they hang in srun, connect to hosts of other users, or end with
    a message of their own.

    Args:
        environ: The environment of the launcher.
        needs_srun: Whether the launcher starts all ranks of a Slurm job by srun, also those of its
            own host. Containers often lack Slurm's programs.
    """
    for names, problem in (
        (_SLURM, _slurm_problem(environ, needs_srun=needs_srun)),
        (_PBS, _pbs_problem(environ)),
        (_GRID_ENGINE, _file_problem(environ, "PE_HOSTFILE")),
        (_LSF, _lsf_problem(environ)),
        (_COBALT, _file_problem(environ, "COBALT_NODEFILE")),
    ):
        if problem:
            found = " ".join(name for name in names if name in environ)
            return f"{problem}; if this shell is not in a batch job: unset {found}"
    return ""


def _slurm_problem(environ: Mapping[str, str], *, needs_srun: bool) -> str:
    # SLURM_JOB_ID alone makes no launcher look for the job.
    if not any(environ.get(name) for name in _SLURM if name != "SLURM_JOB_ID"):
        return ""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        return "variables of Slurm are set without SLURM_JOB_ID"
    if shutil.which("scontrol") and shutil.which("srun"):
        return _scontrol_problem(job)
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if needs_srun or not _is_this_host(hosts):
        return f"SLURM_JOB_ID is {job}, but srun and scontrol are not in PATH"
    return ""


def _scontrol_problem(job: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", "--", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"SLURM_JOB_ID is {job}, and scontrol show job does not answer ({error})"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"SLURM_JOB_ID is {job}, and scontrol show job fails ({said})"
    if "JobState=RUNNING" not in done.stdout:
        return f"SLURM_JOB_ID is {job}, and that job does not run any more"
    return ""


def _is_this_host(text: str) -> bool:
    try:
        hosts = expand_hosts(text)
    except InvalidArgumentError:
        return False
    own = socket.gethostname().partition(".")[0]
    return {host.partition(".")[0] for host in hosts} == {own}


def _pbs_problem(environ: Mapping[str, str]) -> str:
    # Open MPI reads the file if these two are set, MPICH if the name of the file is.
    if "PBS_NODEFILE" not in environ and {"PBS_JOBID", "PBS_ENVIRONMENT"} <= environ.keys():
        return "PBS_JOBID is set, and PBS_NODEFILE is not"
    return _file_problem(environ, "PBS_NODEFILE")


def _lsf_problem(environ: Mapping[str, str]) -> str:
    if not any(environ.get(name, "").strip() for name in ("LSB_MCPU_HOSTS", "LSB_HOSTS")):
        return ""
    programs = os.pathsep.join([environ.get("LSF_BINDIR", ""), environ.get("PATH", os.defpath)])
    if shutil.which("blaunch", path=programs) is None:
        return "variables of LSF name hosts, but blaunch is neither in LSF_BINDIR nor in PATH"
    return _file_problem(environ, "LSB_DJOB_HOSTFILE")


def _file_problem(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        return ""
    try:
        with open(environ[name], "rb"):
            return ""
    except OSError as error:
        return f"the host file {name}={environ[name]} cannot be read ({error.strerror})"
