"""The test bed of batch jobs: a real Slurm with this machine as three nodes.

The daemons use their own munge key, keep all files in one temporary folder and listen on free
ports. :mod:`_cases.slurm_keeper` runs the daemons, and ends everything when this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _cases.slurm_keeper import descendants

NODES = ("n1", "n2", "n3")
GPUS = 2  # of each node; plain files stand in for devices
_CPUS = 16  # of each node, on any machine: tests compute little
_DAEMONS = ("munged", "slurmctld", "slurmd")
_COMMANDS = ("sbatch", "srun", "sinfo", "squeue", "scontrol", "scancel")
_SYSTEM = ("/usr/sbin", "/sbin")  # not in the PATH of every user
_START_S = 60.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING", "SUSPENDED")


def problem():
    """Return the reason why no test bed can run here and the remedy, or an empty string."""
    if os.geteuid() != 0:
        return "it needs root, for Slurm's daemons; run it as root (sudo, or a container)"
    missing = [name for name in (*_DAEMONS, *_COMMANDS) if _program(name) is None]
    if missing:
        return f"it needs {', '.join(missing)}; install slurm-wlm and munge"
    return ""


def _program(name):
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM]))


@dataclass(frozen=True)
class Ended:
    """The result of a job or a command."""

    status: int
    out: str
    err: str


class Bed:
    """The nodes n1, n2 and n3. :meth:`close` ends everything on them.

    Attributes:
        folder: The folder of this bed.
        env: Environment variables that select the bed's Slurm and this Python's programs.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-slurm-"))
        self.folder.chmod(0o755)  # munge requires a socket folder that all users can enter
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
        self._write()
        keeper = Path(__file__).with_name("slurm_keeper.py")
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(keeper), str(self.folder)],
            env={**_without_slurm(os.environ), **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must reach only the tests, which then end the bed
        )
        try:
            if not self._keeper.stdout.readline():
                raise RuntimeError("Slurm's daemons cannot be started; the reason is above")
            self._await_idle()
        except BaseException:
            self.close()
            raise
        self._daemons = set(descendants(self._keeper.pid))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the daemons and all jobs, and remove the folder."""
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()

    def run(self, words, *, env=None, cwd=None, timeout_s=60.0):
        """Run a command that uses Slurm to its end.

        Args:
            words: The command and its arguments.
            env: Variables for the command and for its tasks, since Slurm passes variables on.
            cwd: Folder of the command and its tasks.
            timeout_s: Limit in seconds. At the limit, the command is killed and the test fails.
        """
        process = subprocess.Popen(
            list(map(str, words)),
            env={**_without_slurm(os.environ), **self.env, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.kill()
            out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            late = f"{words[0]} did not end within {timeout_s:g} s"
            raise AssertionError(f"{late}\n{out}\n{err}") from None
        return Ended(process.returncode, out, err)

    def srun(self, *words, **options):
        """Run a job of one step and at most two minutes. Options as in :meth:`run`."""
        return self.run(["srun", "--time=2", *words], **options)

    def sbatch(self, *words, env=None, cwd=None, timeout_s=60.0, watch=None):
        """Run a batch job of at most two minutes to its end.

        Unlike ``sbatch --wait``, which polls every 2 s and later every 32 s, this method polls
        every 50 ms.

        Args:
            words: Options of sbatch, the script and its arguments.
            env: Variables for sbatch and for the job.
            cwd: Folder of sbatch and of the job.
            timeout_s: Limit in seconds. At the limit, the job is killed and the test fails.
            watch: Called with the job and its facts at each poll.
        """
        out, err = (self.folder / f"{secrets.token_hex(4)}.{name}" for name in ("out", "err"))
        options = ["--parsable", "--time=2", f"--output={out}", f"--error={err}"]
        submitted = self.run(["sbatch", *options, *words], env=env, cwd=cwd)
        assert submitted.status == 0, submitted.err
        job = submitted.out.strip()
        deadline = time.monotonic() + timeout_s
        while (facts := self._facts(job))["JobState"] in _RUNNING:
            if time.monotonic() > deadline:
                self.run(["scancel", "--signal=KILL", "--full", job])
                late = f"job {job} did not end within {timeout_s:g} s: {facts}"
                raise AssertionError(f"{late}\n{_text(out)}\n{_text(err)}")
            if watch is not None:
                watch(job, facts)
            time.sleep(_POLL_S)
        status, _, number = facts["ExitCode"].partition(":")
        return Ended(128 + int(number) if int(number) else int(status), _text(out), _text(err))

    def _facts(self, job):
        shown = self.run(["scontrol", "--oneliner", "show", "job", job])
        assert shown.status == 0, shown.err
        first = shown.out.splitlines()[0]  # other lines are components of a heterogeneous job
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def processes(self):
        """Return the command lines of all processes in the bed except its daemons, by pid."""
        found = {}
        for pid in set(descendants(self._keeper.pid)) - self._daemons:
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    def remains(self):
        """Return a line of text for each job and each process left in the bed."""
        queue = self.run(["squeue", "--noheader", "--format=job %i is %T"]).out
        return [*queue.splitlines(), *self.processes().values()]

    def await_end(self, limit_s):
        """Wait until no process is left and all nodes are idle, or the limit is over."""
        deadline = time.monotonic() + limit_s
        while (self.processes() or not self._idle()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def clear(self):
        """Kill all jobs and their remaining processes."""
        self.run(["scancel", "--user=root", "--signal=KILL", "--full"])
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _idle(self):
        said = self.run(["sinfo", "--noheader", "--format=%T %D"])
        return said.out.split() == ["idle", str(len(NODES))]

    def _await_idle(self):
        deadline = time.monotonic() + _START_S
        while not self._idle():
            if time.monotonic() > deadline:
                logs = "\n".join(map(_text, sorted((self.folder / "log").iterdir())))
                raise RuntimeError(f"Slurm's nodes are not there after {_START_S:g} s\n{logs}")
            time.sleep(_POLL_S)

    def _write(self):
        """Write the key, the configuration and the folders."""
        folder = self.folder
        for name in ("log", "spool", "state"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            f"--{name}-file": folder / f"munge.{name}" for name in ("key", "pid", "log", "seed")
        }
        files["--socket"] = folder / "munge.socket"
        munge = [_program("munged"), "--force"]  # otherwise munged refuses folders below /tmp
        munge += [f"{option}={file}" for option, file in files.items()]
        control = [_program("slurmctld"), "-D"]
        nodes = [[_program("slurmd"), "-D", "-N", name] for name in NODES]
        (folder / "commands.json").write_text(json.dumps([[munge], [control, *nodes]]))
        (folder / "slurm.conf").write_text(_configuration(folder))
        for number in range(GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")


def _configuration(folder):
    """Return the text of slurm.conf."""
    control, *ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} "
        f"Gres=gpu:{GPUS} State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    return f"""\
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/log/%n
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
# No control groups: containers have none to give.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes have the CPUs that are written here, not those that are there.
SlurmdParameters=config_overrides
# Heterogeneous jobs start in rounds of bf_interval only, requeued jobs in those of sched_interval.
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=5
MailProg=/bin/true
GresTypes=gpu
{nodes}
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count):
    """Return unused ports, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _without_slurm(env):
    """Return an environment without the variables of a surrounding job."""
    return {name: value for name, value in env.items() if not name.startswith(("SLURM", "SBATCH"))}


def _text(path):
    return path.read_text(errors="replace") if path.exists() else ""


def _die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
