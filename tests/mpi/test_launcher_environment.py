"""Environments of ``mpidist run``: without HOME, or with variables of other jobs."""

import os
import pwd
import re
import socket
import subprocess
import sys

import pytest

RUN = [sys.executable, "-m", "mpidist", "run", "-n", "3"]
PROGRAM = (
    "import os\nimport mpidist as dist\ndist.init_process_group()\ndist.barrier()\n"
    "if dist.get_rank() == 0:\n"
    "    os.write(1, f'{dist.get_world_size()} {os.environ[\"HOME\"]}\\n'.encode())\n"
)
JOB_S = 60
HOST = socket.gethostname()
HOMES = ["", "/nonexistent", "/proc", os.devnull]
MISSING = "/nonexistent/file"
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOBID": "123",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
}
ONE_NODE = {**SLURM, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1",
            "SLURM_JOB_NODELIST": HOST, "SLURM_NODELIST": HOST}  # fmt: skip
STEP = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}  # fmt: skip
# Leftovers, and the variables that the message must name.
STALE = {
    "slurm": (SLURM, SLURM.keys() - {"SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}),
    "slurm, this host": (ONE_NODE, {"SLURM_NODELIST"}),
    "slurm, a step": (SLURM | STEP, {"SLURM_JOBID"}),
    "slurm, no hosts": ({"SLURM_JOBID": "123"}, {"SLURM_JOBID"}),
    "slurm, no job": (
        {name: SLURM[name] for name in ("SLURM_NNODES", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE")},
        {"SLURM_NODELIST", "SLURM_TASKS_PER_NODE"},
    ),
    "pbs": (
        {"PBS_JOBID": "1.x", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": MISSING},
        {"PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE"},
    ),
    "pbs, no file": (
        {"PBS_JOBID": "1.x", "PBS_ENVIRONMENT": "PBS_BATCH"},
        {"PBS_JOBID", "PBS_ENVIRONMENT"},
    ),
    "grid engine": (
        {"PE_HOSTFILE": MISSING, "SGE_ROOT": "/sge", "JOB_ID": "3"},
        {"PE_HOSTFILE"},
    ),
    "cobalt": ({"COBALT_NODEFILE": MISSING, "COBALT_JOBID": "3"},
               {"COBALT_NODEFILE", "COBALT_JOBID"}),
    "lsf": (
        {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "n1 2 n2 2", "LSB_HOSTS": "n1 n1 n2 n2",
         "LSF_BINDIR": "/nonexistent"},
        {"LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS"},
    ),
}  # fmt: skip


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    return [*RUN, str(path)]


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """Have a Slurm that knows no job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "srun"):
        (folder / name).write_text("#!/bin/sh\necho 'Invalid job id specified' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def run(words, environment):
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=JOB_S,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def works(words, environment, home):
    done = run(words, environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"3 {home}\n", "")


def test_an_empty_environment(command):
    home = pwd.getpwuid(os.getuid()).pw_dir
    works(command, {}, home)
    works([*command[:-1], "--env", "HOME=/tmp", command[-1]], {}, "/tmp")


@pytest.mark.parametrize("home", HOMES)
def test_a_home_that_is_not_a_folder_of_the_user(command, home):
    works(command, {**os.environ, "HOME": home}, home)


def test_a_process_without_a_launcher_and_without_home(command):
    done = run([sys.executable, command[-1]], {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 /")


@pytest.mark.parametrize("name", ["PATH", "USER", "LOGNAME", "LANG", "TMPDIR", "SHELL"])
def test_a_variable_that_is_missing(command, name):
    environment = {key: value for key, value in os.environ.items() if key != name}
    works(command, environment, environment["HOME"])


@pytest.mark.parametrize("folder", ["", MISSING, os.devnull, "long"])
def test_folders_for_temporary_files(command, folder, tmp_path):
    if folder == "long":
        folder = tmp_path / ("x" * 150)
        folder.mkdir()
    works(command, {**os.environ, "TMPDIR": str(folder)}, os.environ["HOME"])


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("left", STALE)
def test_variables_of_a_batch_job_that_is_over(command, left):
    variables, named = STALE[left]
    done = run(command, os.environ | variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("mpidist run: ")
    assert done.stderr.count("\n") == 1
    told = re.search(r"unset ([A-Z_ ]+)", done.stderr)[1].split()
    assert named <= set(told) <= variables.keys()
    rest = {name: value for name, value in variables.items() if name not in told}
    works(command, os.environ | rest, os.environ["HOME"])


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "7", "MPI_LOCALRANKID": "1",
         "MPI_LOCALNRANKS": "4"},
        {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_PORT": "localhost:1"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "a@1", "PMIX_SERVER_URI41": "a.0;tcp4://127.0.0.1:1"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "a@1", "OMPI_COMM_WORLD_RANK": "1",
         "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"MPIDIST_JOBS": "ps:1", "MPIDIST_RUN_KEEPER": "1:1", "MPIDIST_RUN_DIR": MISSING},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"},
        {"SLURM_JOB_ID": "123", **STEP},
        {"LSB_JOBID": "5"},
    ],
)  # fmt: skip
def test_variables_of_an_outer_rank(command, variables):
    works(command, os.environ | variables, os.environ["HOME"])


def test_a_job_in_a_rank(command, tmp_path):
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import subprocess, sys\nimport mpidist as dist\ndist.init_process_group()\n"
        f"sys.exit(subprocess.call({command!r}))\n"
    )
    works([*RUN[:-1], "1", str(outer)], os.environ, os.environ["HOME"])
