"""The activity of the main thread of a rank, from its stack and the kernel's view of it."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mpidist
from mpidist.launcher.hang.facts import Frame, Rank, Stack
from mpidist.launcher.report import describe_signal
from mpidist.runner import INTERRUPTED

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(mpidist.__file__)))
_OURS = tuple(os.path.join(_ROOT, name, "") for name in ("mpidist", "strategy", "dataservice"))
_STDLIB = tuple(
    os.path.join(os.path.realpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib")
)
_INSTALLED = ("site-packages", "dist-packages")
# Parts of a core. On a loaded machine, a thread that computes gets little; others use none.
_BUSY, _LITTLE = 0.3, 0.05
_WAKES = 3  # within a second or two
_DEBUGGERS = ("pdb.py", "bdb.py", "cmd.py", "pydevd.py")
# Methods of mpi4py that wait for other ranks.
_MPI = re.compile(
    r"\w+\.(?:I?[BRSrs]?[Ss]end|I?[Mm]?[Rr]ecv|[Ss]endrecv\w*|[Bb]arrier|[Bb]cast|[Gg]atherv?|[Ss]catterv?"
    r"|[Aa]ll(?:gatherv?|toall[vw]?|reduce)|[Rr]educe\w*|[Ee]?x?[Ss]can|[Ww]ait\w*|[Tt]est\w*|[Mm]?[Pp]robe"
    r"|Fence|Lock\w*|Flush\w*|Complete|Start|Dup|Split\w*|Create\w*|Free|Finalize|Disconnect)\("
)
_NOT_MPI = ("functools.", "np.", "numpy.", "torch.", "tf.", "jnp.", "add.", "maximum.", "minimum.")
_USES_MPI = re.compile(r"\bmpi4py\b|\bMPI\b")
_OF_TORCH = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_WORK = re.compile(r"\w+\.wait\(")
_USES_TORCH = re.compile(r"\btorch\b")
# Functions of the kernel in which a thread waits, as /proc/PID/wchan shows them.
_SLEEPS = ("hrtimer_nanosleep", "do_nanosleep", "clock_nanosleep")
_CHILD = ("do_wait", "kernel_wait4", "do_wait_pid")
_CHILD_FILES = (
    "/subprocess.py",
    *(
        f"/multiprocessing/{name}.py"
        for name in ("popen_fork", "popen_spawn_posix", "popen_forkserver", "queues", "connection")
    ),
)
_NEAR = 6  # innermost frames
_MOST_THREADS = 3
_PIPE = ("pipe_read", "anon_pipe_read", "pipe_write", "anon_pipe_write", "wait_for_partner")
_POLL = ("poll", "select", "epoll")
_SOCKET = ("unix_stream", "sk_wait", "inet_csk", "tcp_", "skb_wait", "unix_wait", "wait_woken")
_FILE_LOCK = ("lock_inode_wait", "flock", "fcntl_setlk")
_DISK = ("rpc_wait", "nfs", "folio_wait", "io_schedule", "lustre", "fuse", "cl_", "jbd2")


@dataclass(frozen=True)
class Activity:
    """The activity of a rank.

    Attributes:
        kind: ``"waits"`` for ranks in a call of this package, ``"foreign"`` in one of mpi4py or
            torch, ``"start"`` in MPI_Init, ``"computing"``, ``"sleeping"``, ``"swapped"``,
            ``"lock"``, ``"file"``, ``"child"``, ``"socket"``, ``"accept"``, ``"event_loop"``,
            ``"thread"`` for ranks that wait for a thread at their exit, ``"stopped"``,
            ``"debugger"``, ``"ended"``, ``"failed"`` or ``"unknown"``.
        text: The activity in words, which follow the name of the rank.
        frame: The line of the script, or None.
        is_of_helper: Whether the main thread waits for a thread or process that computes.
    """

    kind: str
    text: str
    frame: Frame | None = None
    is_of_helper: bool = False


def is_ours(frame: Frame) -> bool:
    """Return whether a frame belongs to this package."""
    return frame.file.startswith(_OURS)


def is_of_user(frame: Frame) -> bool:
    """Return whether a frame belongs neither to us nor to an installed library."""
    path = os.path.realpath(frame.file)
    is_installed = not set(_INSTALLED).isdisjoint(path.split(os.sep)) or path.startswith(_STDLIB)
    return not (is_ours(frame) or is_installed or frame.file.startswith("<frozen "))


def line_of_user(stack: Stack) -> Frame | None:
    """Return the innermost frame of the user."""
    return next(filter(is_of_user, stack), None)


def activity_of(rank: Rank) -> Activity:
    """Return the activity of the main thread of a rank."""
    if rank.failure is not None:
        reason = rank.failure["reason"]
        if reason == INTERRUPTED:
            return Activity("ended", "was interrupted")
        return Activity("failed", f"has failed: {reason}")
    if rank.exit is not None:
        return _ended(rank.exit)
    look = rank.look
    if look is None:
        return Activity("unknown", "did not answer")
    if look["state"] == "t" or look["tracer"]:
        return Activity("debugger", f"is held by a debugger (process {look['tracer']})")
    if look["state"] == "T":
        return Activity(
            "stopped",
            f"is stopped by a signal; kill -CONT {look['pid']} on {look['host']} resumes it",
        )
    if not rank.stacks or not rank.stacks[-1]:
        if not look["has_begun"]:
            return Activity("unknown", "has not begun its script")
        if not look["has_handler"]:  # the interpreter has ended
            return Activity("ended", "has ended its script, and waits in MPI_Finalize")
        return _by_kernel(rank, None, "its Python stack could not be read")
    stack = rank.stacks[-1]
    frame = line_of_user(stack)
    ours = {each.function for each in stack if is_ours(each)}
    where = f" at {place(frame)}" if frame is not None else ""
    if "_leave_with_all" in ours:
        return Activity("ended", "has ended its script, and waits for the others to end theirs")
    if stack[-1].function == "_shutdown" and os.path.basename(stack[-1].file) == "threading.py":
        return _at_exit(rank)
    if os.path.basename(stack[0].file) in _DEBUGGERS:
        return Activity("debugger", f"is in the Python debugger{where}", frame)
    if "_make_world" in ours:
        return Activity("start", f"waits for the other ranks to start MPI{where}", frame)
    inner = stack[: stack.index(frame)] if frame is not None else stack
    if any(map(is_ours, inner)):
        return Activity("waits", f"is in a call of mpidist{where}", frame)
    activity = _by_kernel(rank, frame, "")
    call = None if frame is None or inner else _call_of_mpi(frame)
    # Calls of MPI poll. Other methods of these names, such as recv of a socket, wait in the kernel.
    if call is not None and (activity.kind == "computing" or _polls(look)):
        return Activity("foreign", f"is in {call}{where}", frame)
    call = _call_of_torch(stack, inner, activity.kind)
    if call is not None:
        return Activity("foreign", f"is in {call}{where}", frame)
    return activity


def is_busy(rank: Rank) -> bool:
    """Return whether a thread of a rank computes."""
    threads = {} if rank.look is None else rank.look["threads"]
    return any(thread["busy"] > _LITTLE for thread in threads.values())


def place(frame: Frame) -> str:
    """Return a line of a script as text."""
    function = "" if frame.function == "<module>" else f" in {frame.function}()"
    return f"{frame}{function}"


def _at_exit(rank: Rank) -> Activity:
    """Return the activity of a rank that has ended its script, but not all of its threads."""
    kept = [thread for thread in rank.other_threads if thread.keeps_alive]
    lines = {thread.name: line_of_user(thread.stack) for thread in kept[:_MOST_THREADS]}
    names = [f"{name!r}" + (f" at {place(line)}" if line else "") for name, line in lines.items()]
    names += ["others"] * (len(kept) > _MOST_THREADS)
    text = f"has ended its script, and waits for its thread{'s' * (len(names) > 1)}"
    kind = "computing" if is_busy(rank) else "thread"
    frame = next(filter(None, lines.values()), None)
    return Activity(kind, " ".join([text, " and ".join(names)]).rstrip(), frame)


def _ended(record: Mapping[str, Any]) -> Activity:
    """Return the activity of a rank that has ended, from its record."""
    if record["terminated"]:
        return Activity("ended", "was ended with the job")
    if record["signal"] is not None:
        return Activity("failed", f"was killed by {describe_signal(record['signal'])}")
    if record["exit_code"]:
        return Activity("failed", f"has ended with status {record['exit_code']}")
    return Activity("ended", "has ended its script")


def _by_kernel(rank: Rank, frame: Frame | None, note: str) -> Activity:
    """Return the activity of a thread that is not in a call of ours, nor of mpi4py."""
    assert rank.look is not None
    main = _main_thread(rank.look)
    busy: float = main.get("busy", 0.0)
    at = f" at {place(frame)}" if frame is not None else f" ({note})" if note else ""
    is_swapped = rank.look["swapped_kib"] > rank.look["resident_kib"]
    if is_swapped and busy < _BUSY and main.get("state") in ("D", "R"):
        return Activity("swapped", f"is mostly swapped out, so that it hardly runs{at}", frame)
    if busy > _BUSY or main.get("state") == "R":
        return Activity(
            "computing", f"runs code{at}, and uses {min(busy, 1.0):.0%} of a core", frame
        )
    blocked = _blocked_in(rank, main, at, frame)
    if blocked.kind in ("lock", "child", "socket", "accept", "event_loop", "file"):
        threads = [each for each in rank.look["threads"].values() if each is not main]
        if any(each["busy"] > _LITTLE for each in (*threads, *rank.look["children"].values())):
            text = f"waits for a thread or a child process that computes{at}"
            return Activity("computing", text, frame, is_of_helper=True)
        if main.get("wakes", 0) > _WAKES:
            return Activity("sleeping", f"wakes up and waits again{at}", frame)
    return blocked


def _blocked_in(rank: Rank, main: Mapping[str, Any], at: str, frame: Frame | None) -> Activity:
    """Return the activity of a thread that waits in the kernel."""
    assert rank.look is not None
    look, waits_in = rank.look, main.get("waits_in", "")
    inner = [each.file for stack in rank.stacks[-1:] for each in stack[:_NEAR]]
    waits_for_child = any(file.endswith(_CHILD_FILES) for file in inner)
    children = children_of(rank)
    if waits_in.startswith(_SLEEPS):
        return Activity("sleeping", f"sleeps{at}", frame)
    polls = any(word in waits_in for word in _POLL)
    functions = [each.function for stack in rank.stacks[-1:] for each in stack[:_NEAR]]
    if polls and "_run_once" in functions and any("/asyncio/" in file for file in inner):
        return Activity("event_loop", f"is in the event loop of asyncio, which is idle{at}", frame)
    if waits_in.startswith(_CHILD) or (children and polls and waits_for_child):
        named = f"its child process {children[0]}" if len(children) == 1 else "a child process"
        return Activity("child", f"waits for {named}{at}", frame)
    if any(word in waits_in for word in _FILE_LOCK) or (look["lock"] and waits_in in ("", "0")):
        path = look["lock"].get("file", "a file")
        return Activity("file", f"waits for the lock of {path}{at}", frame)
    if waits_in.startswith("wait_for_partner"):
        return Activity("file", f"opens a FIFO that no other process has opened{at}", frame)
    if look["file"] or waits_in.startswith(_PIPE):
        what = look["file"] or "a pipe"
        return Activity("file", f"reads or writes {what} and gets no answer{at}", frame)
    if main.get("state") == "D" or any(word in waits_in for word in _DISK):
        return Activity("file", f"waits for a disk or a file server (in {waits_in}){at}", frame)
    if waits_in.startswith("futex"):
        return Activity("lock", f"waits for a lock, a queue or another thread{at}", frame)
    if functions[:1] == ["accept"] or waits_in.startswith("inet_csk_accept"):
        return Activity("accept", f"waits for a process that connects to it{at}", frame)
    if polls or any(word in waits_in for word in _SOCKET):
        return Activity("socket", f"waits for data of a connection{at}", frame)
    call = waits_in if waits_in not in ("", "0") else "a call"  # the kernel may hide the call
    return Activity("unknown", f"waits in {call} of the kernel{at}", frame)


def children_of(rank: Rank) -> list[str]:
    """Return the name and the number of each child process of a rank."""
    children = {} if rank.look is None else rank.look["children"]
    return [f"{child['name']} ({pid})" for pid, child in children.items()]


def _main_thread(look: Mapping[str, Any]) -> Mapping[str, Any]:
    thread: Mapping[str, Any] = look["threads"].get(str(look["pid"]), {})
    return thread


def _polls(look: Mapping[str, Any]) -> bool:
    """Return whether the main thread waits for several connections."""
    return any(word in _main_thread(look).get("waits_in", "") for word in _POLL)


def _call_of_mpi(frame: Frame) -> str | None:
    """Return the call of mpi4py in a line, as it is written; None if there is none."""
    source = linecache.getline(frame.file, frame.line).strip()
    found = _MPI.search(source)
    if found is None or found[0].startswith(_NOT_MPI):
        return None
    if not _USES_MPI.search("".join(linecache.getlines(frame.file))):
        return None
    depths = itertools.accumulate((c == "(") - (c == ")") for c in source[found.end() :])
    length = next((n for n, depth in enumerate(depths, 1) if depth < 0), len(source))
    return source[found.start() : found.end() + length]


def _call_of_torch(stack: Stack, inner: Stack, kind: str) -> str | None:
    """Return the call of torch that waits for other ranks, from its frames; None if there is none.

    Args:
        stack: The stack of the main thread.
        inner: The frames below the line of the user.
        kind: The kind of the activity, as the kernel shows it. In most calls of gloo, the thread
            waits for the threads of gloo.
    """
    last = stack[0]
    # Other files there also compute, as for DTensor. The calls of this one may poll.
    may_wait = kind != "computing" or last.file.endswith("/distributed_c10d.py")
    if inner and may_wait and any(part in last.file for part in _OF_TORCH):
        names = [each.function for each in inner if any(part in each.file for part in _OF_TORCH)]
        name = next((each for each in reversed(names) if each != "wrapper"), last.function)
        return f"torch.distributed.{name}"
    if kind != "lock":
        return None
    if last.function == "_engine_run_backward":
        # DistributedDataParallel reduces the gradients there, outside Python.
        return "backward() of torch"
    found = _WORK.search(linecache.getline(last.file, last.line))
    if found is None or not _USES_TORCH.search("".join(linecache.getlines(last.file))):
        return None
    return f"{found[0]}) of torch"
