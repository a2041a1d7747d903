"""``mpidist doctor``: check MPI and the GPUs of this machine, and print remedies for problems."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from mpidist.config import distribution_version
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.launcher.vendors import Launcher, LauncherError, find_launcher, vendor_of

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIBRARY_S = 30.0
_PROBE_S = 90.0
_SYSTEM_S = 10.0
_CLEAN_UP_S = 10.0
_PROBE, _GPU_PROBE = (
    str(Path(__file__).absolute().with_name(name)) for name in ("probe.py", "gpu_probe.py")
)
_LEAST_SHARED_BYTES = 4 << 20
_SHARED_BYTES = 64 << 20  # Docker's default, which a variable or two fill
_LIBRARY = (
    "import mpi4py\n"
    "mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI\n"
    "print(mpi4py.__version__, MPI.Get_library_version())"
)
_T = TypeVar("_T")
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
        help="check MPI and the GPUs of this machine, and print remedies for problems",
        description="Check MPI, its launcher, shared memory and GPUs, and run a job of two ranks.",
        epilog="The exit status is 1 if there is a problem. The MPI library and the two ranks run "
        "in processes of their own, with time limits.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=lambda namespace: _run(as_json=namespace.json))


def _run(*, as_json: bool) -> int:
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
    cores = len(os.sched_getaffinity(0))
    package = _package()
    yield package
    yield Finding("cores", OK, f"{cores} for this process, on {socket.gethostname()}")
    library = _library()
    yield library
    launcher, finding = _launcher(library)
    yield finding
    yield _shared_memory()
    yield _host_name()
    if package.verdict != PROBLEM:
        yield from _batch_job(env)
        for finding in _gpus(env):
            yield finding
    extras = [name for name in ("numba", "ml_dtypes", "torch", "cupy") if find_spec(name)]
    yield Finding("packages", OK, f"found: {', '.join(extras) or 'no optional ones'}")
    if PROBLEM not in (package.verdict, library.verdict) and launcher is not None:
        yield from _two_ranks()


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
    try:
        done = _child([sys.executable, "-P", "-c", _LIBRARY], _LIBRARY_S)
    except subprocess.TimeoutExpired:
        return Finding("MPI library", PROBLEM, "it does not load in time", _INSTALL)
    if done.returncode != 0:
        return Finding("MPI library", PROBLEM, _last_line(done.stderr), _INSTALL)
    version, _, text = done.stdout.strip().partition(" ")
    words = " ".join(text.partition("\n")[0].partition(",")[0].split())
    return Finding("MPI library", OK, f"{words}, by mpi4py {version}")


def _launcher(library: Finding) -> tuple[Launcher | None, Finding]:
    try:
        launcher = find_launcher()
    except LauncherError as error:
        return None, Finding("launcher", PROBLEM, "no usable launcher", str(error))
    return launcher, _compared(launcher, library)


def _compared(launcher: Launcher, library: Finding) -> Finding:
    fact = f"{launcher.path} ({launcher.vendor.name})"
    vendor = vendor_of(library.fact)
    if library.verdict == OK and vendor is not None and vendor != launcher.vendor:
        return Finding(
            "launcher", PROBLEM, f"{fact}, but the library is {vendor.name}'s",
            "its ranks would each be alone: put the library's own mpiexec first in PATH",
        )  # fmt: skip
    return Finding("launcher", OK, fact)


def mismatch(launcher: Launcher) -> str:
    """Return an error message if a launcher and the library that mpi4py loads differ, else "".

    Loads the library, in a process of its own.
    """
    finding = _compared(launcher, _library())
    return f"the launcher is {finding.fact}: {finding.remedy}" if finding.remedy else ""


def _shared_memory() -> Finding:
    free, total = shared_memory_space()
    fact = f"{free >> 20} of {total >> 20} MiB free in {SHARED_MEMORY}"
    if free < _LEAST_SHARED_BYTES or not os.access(SHARED_MEMORY, os.W_OK):
        remedy = f"MPI must be able to write a few MiB there: {REMEDY}, and have it writable"
        return Finding("shared memory", PROBLEM, fact, remedy)
    if free < _SHARED_BYTES:
        return Finding("shared memory", WARNING, fact, f"larger variables need more: {REMEDY}")
    return Finding("shared memory", OK, fact)


def _gpus(env: Mapping[str, str]) -> Iterator[Finding]:
    from mpidist.cluster_resolver.accelerators import visible_gpus

    try:
        count = len(_in_time(lambda: visible_gpus(env)))
    except TimeoutError as error:
        remedy = "the driver hangs: look at dmesg, and have the host restarted"
        yield Finding("GPUs", PROBLEM, f"they cannot be counted ({error})", remedy)
        return
    yield Finding("GPUs", OK, f"{count} that this process may use")
    if find_spec("cupy") is not None:
        yield _cupy(count)
    elif count:
        remedy = "pip install 'mpidist[cuda13]', or [cuda12], as the driver needs (see nvidia-smi)"
        yield Finding("CuPy", WARNING, "none, without which arrays on GPUs cannot be sent", remedy)


def _cupy(gpus: int) -> Finding:
    """Copy arrays to the GPUs and back, in a process of its own because a failure may kill it."""
    verdict = PROBLEM if gpus else WARNING
    remedy = (
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES, and check that CuPy and the driver are of "
        "the same version of CUDA (cupy-cuda12x, cupy-cuda13x)"
    )
    try:
        done = _child([sys.executable, "-P", _GPU_PROBE], _PROBE_S)
    except subprocess.TimeoutExpired:
        return Finding("CuPy", verdict, "a copy to a GPU and back does not end", remedy)
    if done.returncode != 0:
        fact = _last_line(done.stderr) or f"its process ended with status {done.returncode}"
        return Finding("CuPy", verdict, fact, remedy)
    return Finding("CuPy", OK, _last_line(done.stdout))


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = _in_time(lambda: socket.gethostbyname(name))
    except OSError as error:  # TimeoutError, too
        return Finding(
            "host name", WARNING, f"{name} has no address ({error})",
            "tasks that speak TCP across hosts need it: give it one in DNS or /etc/hosts",
        )  # fmt: skip
    where = ", an address within this host" if address.startswith("127.") else ""
    return Finding("host name", OK, f"{name} is {address}{where}")


def _batch_job(env: Mapping[str, str]) -> Iterator[Finding]:
    from mpidist.mpi.launch_env import foreign_step

    problem = foreign_step(env)
    if problem is not None:
        yield Finding("batch job", PROBLEM, "a Slurm step of several tasks without PMI", problem)
    elif "SLURM_JOB_ID" in env:
        nodes = env.get("SLURM_JOB_NODELIST", "one node")
        yield Finding("batch job", OK, f"Slurm job {env['SLURM_JOB_ID']} on {nodes}")


def _two_ranks() -> Iterator[Finding]:
    """Check a job of two ranks on this host."""
    facts = _facts_of_two_ranks("two ranks", _PROBE, _INSTALL)
    if isinstance(facts, Finding):
        yield facts
    else:
        yield from _verdicts(facts)


def _facts_of_two_ranks(name: str, script: str, remedy: str) -> dict[str, Any] | Finding:
    """Return the JSON object that a script prints on two ranks, or a problem with a name."""
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", "--timeout", f"{_PROBE_S:g}"]
    try:
        done = _child([*command, script], 2 * _PROBE_S)
        facts = json.loads(_last_line(done.stdout) or "null")
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Finding(name, PROBLEM, f"their job says nothing ({error})", remedy)
    if done.returncode != 0 or not isinstance(facts, dict):
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        remedy = errors[-1].strip() if errors else f"run it yourself: {' '.join(command)} {script}"
        return Finding(name, PROBLEM, _last_line(done.stderr), remedy)
    return facts


def _verdicts(facts: dict[str, Any]) -> Iterator[Finding]:
    fact = f"a world of {facts['ranks']}, thread level {facts['thread_level']}"
    if facts["ranks"] == 2:
        yield Finding("two ranks", OK, fact)
    else:
        remedy = "mpiexec and the library do not belong together: install both from one place"
        yield Finding("two ranks", PROBLEM, fact, remedy)
    right = facts["sums_are_right"]
    speed = f"all_reduce of 8 B in {facts['all_reduce_us']:.1f} us, broadcast of 4 MiB at "
    yield Finding(
        "collectives", OK if right else PROBLEM,
        speed + f"{facts['broadcast_gib_s']:.1f} GiB/s" if right else "sums are wrong",
        "" if right else "this MPI library adds wrongly on this machine: take another version",
    )  # fmt: skip
    right = facts["one_sided_is_right"]
    yield Finding(
        "one-sided", OK if right else PROBLEM, "put and get work" if right else "a put was lost",
        "" if right else 'leave ParameterServerStrategy(transport="rma") out',
    )  # fmt: skip
    yield Finding("GPU memory", OK, facts["gpu_rule"])


def _in_time(call: Callable[[], _T]) -> _T:
    """Return the result of a system call; TimeoutError if it does not return in time."""
    found: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)  # the process does not wait if it hangs
    thread.start()
    thread.join(_SYSTEM_S)
    for problem in problems:
        raise problem
    if not found:
        raise TimeoutError(f"no answer within {_SYSTEM_S:g} s")
    return found[0]


def _child(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException:
            process.terminate()  # mpidist run then ends its ranks, and removes its files
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_CLEAN_UP_S)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
