"""The check that the batch job of the environment still exists."""

import socket

import pytest

from mpidist.launcher.hosts import stale_batch_job

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NODELIST": "n[1-2]"}
HERE = {**JOB, "SLURM_NODELIST": socket.gethostname()}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Return a function that puts a program into an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name, text="exit 0"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'JobId=7 JobName=x'; echo '   JobState=RUNNING Reason=None'", ""),
        ("echo 'JobId=7'; echo '   JobState=COMPLETED'", "does not run"),
        ("echo 'JobId=7'; echo '   JobState=PENDING'", "does not run"),
        ("echo first >&2; echo 'Invalid job id' >&2; exit 1", "fails (Invalid job id)"),
        ("exit 1", "fails (no message)"),
        ('test "$*" = "show job -- 7" && echo JobState=RUNNING', ""),
    ],
)
@pytest.mark.parametrize("needs_srun", [True, False])
def test_slurm_is_asked(program, text, problem, needs_srun):
    program("srun")
    program("scontrol", text)
    for environment in (JOB, HERE):
        found = stale_batch_job(environment, needs_srun=needs_srun)
        assert problem in found
        assert bool(found) == bool(problem)


@pytest.mark.usefixtures("program")
def test_a_container_without_the_programs_of_slurm():
    """A launcher that works without srun may start ranks if this host is the only host."""
    assert "not in PATH" in stale_batch_job(JOB, needs_srun=False)
    assert "not in PATH" in stale_batch_job(HERE, needs_srun=True)
    assert stale_batch_job(HERE, needs_srun=False) == ""


def test_other_batch_systems(program, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    for name in ("PBS_NODEFILE", "PE_HOSTFILE", "COBALT_NODEFILE"):
        assert stale_batch_job({name: str(hosts)}, needs_srun=True) == ""
        assert f"unset {name}" in stale_batch_job({name: f"{hosts}.gone"}, needs_srun=True)
        assert f"unset {name}" in stale_batch_job({name: ""}, needs_srun=True)
    lsf = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 1", "PATH": str(tmp_path)}
    assert "blaunch" in stale_batch_job(lsf, needs_srun=True)
    program("blaunch")
    assert stale_batch_job(lsf, needs_srun=True) == ""
    assert stale_batch_job({**lsf, "PATH": "", "LSF_BINDIR": str(tmp_path)}, needs_srun=True) == ""
    gone = {**lsf, "LSB_DJOB_HOSTFILE": f"{hosts}.gone"}
    assert "LSB_DJOB_HOSTFILE" in stale_batch_job(gone, needs_srun=True)


def test_no_batch_job():
    assert stale_batch_job({}, needs_srun=True) == ""
    assert stale_batch_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, needs_srun=True) == ""
