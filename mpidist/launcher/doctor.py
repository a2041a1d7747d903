"""``mpidist doctor``: check MPI and the GPUs of this machine, and print remedies for problems."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mpidist.config import distribution_version
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.launcher.hang.facts import running_jobs
from mpidist.launcher.hang.report import report_on
from mpidist.launcher.hang.torch_trace import write_torch_traces
from mpidist.launcher.vendors import Launcher, LauncherError, find_launcher, vendor_of

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIBRARY_S = 30.0
_JOB_S = 90.0
_PROBE_S = 120.0
_SYSTEM_S = 10.0
_CLEAN_UP_S = 10.0
_PROBE = str(Path(__file__).absolute().with_name("probe.py"))
_LEAST_SHARED_BYTES = 4 << 20
_SHARED_BYTES = 64 << 20  # Docker's default, which a variable or two fill
_LIBRARY = (
    "import mpi4py\n"
    "mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI\n"
    "print(mpi4py.__version__, MPI.Get_library_version())"
)
_ADDRESS = "import socket; print(socket.gethostbyname(socket.gethostname()))"
_INSTALL = (
    'install one, for example pip install "mpidist[mpich]", or load the cluster\'s MPI module'
)


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: ``"ok"``, ``"warning"`` or ``"problem"``.
        fact: The observation.
        remedy: The remedy; empty if none is needed.
    """

    name: str
    verdict: str
    fact: str
    remedy: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check MPI and the GPUs of this machine, or say why a job hangs",
        description="Check MPI, its launcher, shared memory and GPUs, and run a job of two ranks. "
        "With --hang, say why a job of mpidist run hangs.",
        epilog="The exit status is 1 if there is a problem, or if the job is stuck. The MPI "
        "library and the two ranks run in processes of their own, with time limits. --hang takes "
        "about two seconds, and does not disturb the job.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--hang", action="store_true", help="say why a job hangs")
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="RUN_DIR",
        help="with --hang: the --run-dir of the job, also after its end; by default the newest job "
        "without --run-dir that runs on this host",
    )
    parser.add_argument(
        "--torch-trace",
        metavar="DIR",
        help="with --hang: write the last operations of the ranks to DIR, in the format of torch's "
        "flight recorder, for torchfrtrace",
    )
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    if namespace.hang:
        return _report_hang(parser, namespace)
    if namespace.torch_trace is not None or namespace.folder is not None:
        parser.error(f"{namespace.folder or '--torch-trace'} needs --hang")
    return _check_machine(as_json=namespace.json)


def _report_hang(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    """Print why a job hangs. Return 1 if it is stuck."""
    jobs = [] if namespace.folder else running_jobs()
    if not jobs and not namespace.folder:
        parser.error(
            "no job without --run-dir is running on this host; if yours has one, name it: mpidist "
            "doctor --hang RUN_DIR"
        )
    folder = Path(namespace.folder or jobs[0][0])
    try:
        report = report_on(folder)
        if namespace.torch_trace is not None:
            write_torch_traces(folder, Path(namespace.torch_trace))
    except FileNotFoundError as error:
        parser.error(str(error))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"cannot report on the job of {folder}: {error}")
    if namespace.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("\n".join([*_choice(jobs), *report.lines()]))
    return int(report.cause.verdict == "stuck")


def _choice(jobs: Sequence[tuple[Path, str]]) -> list[str]:
    """Return lines that name the first job, on which the report is, and the other jobs."""
    lines = [f"The job is {command}." for _, command in jobs[:1]]
    lines += (
        f"Another job runs on this host: {command}. Ask it by mpidist doctor --hang {folder}"
        for folder, command in jobs[1:]
    )
    return [*lines, ""] if lines else []


def _check_machine(*, as_json: bool) -> int:
    found = []
    for finding in findings(os.environ):
        found.append(finding)
        if not as_json:
            print(f"{finding.verdict:8} {finding.name:14} {finding.fact}", flush=True)
            if finding.remedy:
                print(f"{'':8} {'':14} -> {finding.remedy}", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    return int(any(finding.verdict == PROBLEM for finding in found))


def findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the results of all checks, one after the other.

    Args:
        env: Usually ``os.environ``.
    """
    package = _package()
    yield package
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", OK, f"{cores} for this process, on {socket.gethostname()}")
    library = _library()
    yield library
    launcher = None
    try:
        launcher = find_launcher()
    except LauncherError as error:
        yield Finding("launcher", PROBLEM, "no usable launcher", str(error))
    else:
        yield _launcher(launcher, library)
    yield _shared_memory()
    yield _host_name()
    if package.verdict != PROBLEM:
        yield from _batch_job(env)
        yield from _probed(
            "GPUs",
            [sys.executable, "-P", _PROBE, "gpus"],
            "look at nvidia-smi and dmesg, and check that CuPy and the driver are of the same "
            "version of CUDA (cupy-cuda12x, cupy-cuda13x)",
        )
    extras = [name for name in ("numba", "ml_dtypes", "torch", "cupy") if find_spec(name)]
    yield Finding("packages", OK, f"found: {', '.join(extras) or 'no optional ones'}")
    if PROBLEM not in (package.verdict, library.verdict) and launcher is not None:
        limit = ("--timeout", f"{_JOB_S:g}")
        run = [sys.executable, "-m", "mpidist", "run", "-n", "2", *limit, _PROBE, "ranks"]
        yield from _probed("two ranks", run, f"run it yourself: {shlex.join(run)}")


def _package() -> Finding:
    """Check that scripts can import mpidist. Up to here this command needs none of its packages."""
    fact = f"{distribution_version()}, Python {platform.python_version()}"
    try:
        import_module("mpidist.public")
    except Exception as error:
        return Finding(
            "mpidist", PROBLEM, f"{fact}: it cannot be imported: {type(error).__name__}: {error}",
            "see pip check; install NumPy, mpi4py and mpidist anew, into the same environment",
        )  # fmt: skip
    if distribution_version() == "unknown":
        return Finding(
            "mpidist", WARNING, f"{fact}: not installed, but on Python's path",
            "jobs ps and data are found only where it is installed: pip install .",
        )  # fmt: skip
    return Finding("mpidist", OK, fact)


def _library() -> Finding:
    """Check the MPI library that mpi4py loads. Loading a broken one may kill the process."""
    shown, problem = _ask([sys.executable, "-P", "-c", _LIBRARY], _LIBRARY_S)
    if problem:
        return Finding("MPI library", PROBLEM, problem, _INSTALL)
    version, _, text = shown.strip().partition(" ")
    words = " ".join(text.partition("\n")[0].partition(",")[0].split())
    return Finding("MPI library", OK, f"{words}, by mpi4py {version}")


def _launcher(launcher: Launcher, library: Finding) -> Finding:
    fact = f"{launcher.path} ({launcher.vendor.name})"
    vendor = vendor_of(library.fact)
    if library.verdict == OK and vendor is not None and vendor != launcher.vendor:
        return Finding(
            "launcher", PROBLEM, f"{fact}, but the library is {vendor.name}'s",
            "its ranks would each be alone: put the library's own mpiexec first in PATH",
        )  # fmt: skip
    return Finding("launcher", OK, fact)


def _shared_memory() -> Finding:
    free, total = shared_memory_space()
    fact = f"{free >> 20} of {total >> 20} MiB free in {SHARED_MEMORY}"
    if free < _LEAST_SHARED_BYTES or not os.access(SHARED_MEMORY, os.W_OK):
        remedy = f"MPI must be able to write a few MiB there: {REMEDY}, and have it writable"
        return Finding("shared memory", PROBLEM, fact, remedy)
    if free < _SHARED_BYTES:
        return Finding(
            "shared memory", WARNING, fact, f"Open MPI and shared windows may need more: {REMEDY}"
        )
    return Finding("shared memory", OK, fact)


def _host_name() -> Finding:
    name = socket.gethostname()
    shown, problem = _ask([sys.executable, "-c", _ADDRESS], _SYSTEM_S)
    if problem:
        return Finding(
            "host name", WARNING, f"{name} has no address ({problem})",
            "tasks that speak TCP across hosts need it: give it one in DNS or /etc/hosts",
        )  # fmt: skip
    where = ""
    if shown.startswith("127."):
        where = ", which jobs of several hosts cannot use to reach this one"
    return Finding("host name", OK, f"{name} is {shown.strip()}{where}")


def _batch_job(env: Mapping[str, str]) -> Iterator[Finding]:
    from mpidist.mpi.launch_env import foreign_step

    problem = foreign_step(env)
    if problem is not None:
        yield Finding("batch job", PROBLEM, "a Slurm step of several tasks without PMI", problem)
    elif "SLURM_JOB_ID" in env:
        nodes = env.get("SLURM_JOB_NODELIST", "one node")
        yield Finding("batch job", OK, f"Slurm job {env['SLURM_JOB_ID']} on {nodes}")


def _probed(name: str, command: list[str], remedy: str) -> Iterator[Finding]:
    """Yield the findings of a probe. A probe that fails, or finds nothing, is a problem."""
    shown, problem = _ask(command, _PROBE_S)
    found = [Finding(*json.loads(line)) for line in shown.splitlines() if line.startswith('["')]
    yield from found
    if problem or not found:
        yield Finding(name, PROBLEM, problem or "the check prints nothing", remedy)


def _ask(command: list[str], limit_s: float) -> tuple[str, str]:
    """Run a command. Return its output, and the reason for which it failed, or ""."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException as error:
            out = ""
            process.terminate()  # mpidist run then ends its ranks, and removes its files
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, _ = process.communicate(timeout=_CLEAN_UP_S)
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return out, f"no answer within {limit_s:g} s"
            raise
    if process.returncode == 0:
        return out, ""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return out, lines[-1] if lines else f"its process ended with status {process.returncode}"
