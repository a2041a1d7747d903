"""Look at a rank that may be stuck: its threads, its children, and the stacks of its Python code.

:mod:`mpidist.launcher.rank_wrapper` runs this file when ``look.json`` in the run folder asks it to.
The wrapper is the parent of the rank, on the rank's own host. So a look needs neither a connection,
nor the right to trace other processes. The result is ``look-<rank>.json``.

This file uses few modules, as the wrapper does.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time

TYPE_CHECKING = False  # without the module typing
if TYPE_CHECKING:
    from typing import Any

# A rank looks for requests twice a second, and samples its stacks for a second.
_ANSWER_S, _LATE_S = 1.8, 5.0
_LOCKED = 5  # polls in which the thread waits for the interpreter's lock
_SIGNALS = 3
_PERIOD_S = 0.3
_POLL_S = 0.02
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
# System calls whose first argument is a file descriptor (read, pread64, readv) by machine.
_READS = {"x86_64": {0, 17, 19}, "aarch64": {63, 67, 65}}


def look(rank: str, pid: int, number: int, stacks_signal: int) -> None:
    """Look at a rank for a second or two, and write the result.

    Args:
        rank: The rank.
        pid: Its process.
        number: Number of the request.
        stacks_signal: The signal on which the rank writes its stacks.
    """
    folder = os.environ["MPIDIST_RUN_DIR"]
    began = time.monotonic()
    threads, processes = _threads(pid), descendants(pid)
    answer = _answer(os.path.join(folder, f"stacks-{rank}.json"), pid, number)
    stacks: list[list[list[tuple[str, int, str]]]] = answer.get("samples", [])
    has_handler = bool(int(_status(pid).get("SigCgt", "0"), 16) >> (stacks_signal - 1) & 1)
    if not stacks and has_handler and not _has_ended(pid):
        path = os.path.join(folder, f"stacks-{rank}.txt")
        for _ in range(_SIGNALS):
            stacks += _signalled_stacks(path, pid, stacks_signal)
            time.sleep(_PERIOD_S)
    passed_s = time.monotonic() - began
    status = _status(pid)
    now = _threads(pid)
    record = {
        "number": number,
        "rank": int(rank),
        "pid": pid,
        "host": socket.gethostname(),
        "time": time.time(),
        "state": status.get("State", "?")[:1],
        "tracer": int(status.get("TracerPid", "0")),
        "swapped_kib": int(status.get("VmSwap", "0").split()[0]),
        "resident_kib": int(status.get("VmRSS", "0").split()[0]),
        "threads": _since(threads, now, passed_s),
        "children": _since(processes, descendants(pid), passed_s),
        "has_begun": os.path.exists(os.path.join(folder, f"stacks-{rank}.txt")),
        "has_handler": has_handler,
        "file": _read_file(pid, now.get(str(pid), {})),
        "lock": _file_lock(pid),
        "stacks": stacks,
        "threads_of_python": answer.get("threads", []),
    }
    path = os.path.join(folder, f"look-{rank}.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


def _has_ended(pid: int) -> bool:
    """Return whether the rank, a child of this process, has ended."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _threads(pid: int) -> dict[str, dict[str, Any]]:
    """Return facts on each thread of a process, by the thread's id."""
    found = {tid: _task(f"/proc/{pid}/task/{tid}") for tid in _listed(f"/proc/{pid}/task")}
    return {tid: facts for tid, facts in found.items() if facts}


def descendants(pid: int) -> dict[str, dict[str, Any]]:
    """Return facts on each descendant of a process, by its process id."""
    found: dict[str, dict[str, Any]] = {}
    queue = [str(pid)]
    while queue:
        parent = queue.pop()
        for tid in _listed(f"/proc/{parent}/task"):
            for child in _read(f"/proc/{parent}/task/{tid}/children").split():
                facts = _task(f"/proc/{child}")
                if facts:
                    found[child] = facts
                    queue.append(child)
    return found


def _task(place: str) -> dict[str, Any]:
    """Return facts on a process or thread from its folder in /proc; {} if it has ended."""
    name, _, rest = _read(f"{place}/stat").rpartition(")")
    fields = rest.split()
    if len(fields) <= 12:
        return {}
    wakes = _read(f"{place}/status").rpartition("\nvoluntary_ctxt_switches:")[2].split()
    if not wakes:
        return {}
    return {
        "name": name.partition("(")[2],
        "state": fields[0],
        "ticks": int(fields[11]) + int(fields[12]),  # user and system time, proc(5)
        "wakes": int(wakes[0]),
        "waits_in": _read(f"{place}/wchan"),
        "call": _read(f"{place}/syscall"),
    }


def _since(
    before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], passed_s: float
) -> dict[str, dict[str, Any]]:
    """Return facts with the part of a core that was used since, and the number of wakes."""
    for name, facts in now.items():
        earlier = before.get(name, facts)
        facts["busy"] = (facts["ticks"] - earlier["ticks"]) * _TICK_S / passed_s
        facts["wakes"] -= earlier["wakes"]
    return now


def _answer(path: str, pid: int, number: int) -> dict[str, Any]:
    """Return the answer that a thread of the rank writes, with its stacks; {} if it cannot.

    A thread that sleeps or runs is only late. One that waits for the interpreter's lock may wait
    for C code.
    """
    began, locked = time.monotonic(), 0
    while (waited_s := time.monotonic() - began) < _LATE_S and locked < _LOCKED:
        if _has_ended(pid):
            break
        time.sleep(_POLL_S)
        # The rank replaces the file as a whole.
        answer: dict[str, Any] = json.loads(_read(path) or "{}")
        if answer.get("number") == number:
            return answer
        waits_in = _read(f"/proc/{pid}/task/{answer.get('thread')}/wchan")
        is_locked = waited_s > _ANSWER_S and waits_in.startswith(("futex", "0"))  # 0: hidden
        locked = locked + 1 if is_locked else 0
    return {}


def _signalled_stacks(path: str, pid: int, number: int) -> list[list[list[tuple[str, int, str]]]]:
    """Return the stacks that faulthandler writes on a signal, as a sample; [] if it does not."""
    try:
        os.truncate(path, 0)
        os.kill(pid, number)
    except OSError:
        return []
    text, deadline = "", time.monotonic() + _PERIOD_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, text = text, _read(path)
        if text and text == last:
            break
    sample: list[list[tuple[str, int, str]]] = []
    for line in text.splitlines():
        if _THREAD.fullmatch(line):
            sample.append([])
        elif sample and (found := _FRAME.fullmatch(line)):
            sample[-1].append((found[1], int(found[2]) if found[2].isdigit() else 0, found[3]))
    return [sample] if sample else []


def _status(pid: int) -> dict[str, str]:
    lines = _read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read_file(pid: int, main: dict[str, Any]) -> str:
    """Return the file or pipe from which the main thread reads; "" if it does not read."""
    if _call(main) not in _READS.get(platform.machine(), ()):
        return ""
    try:
        return os.readlink(f"/proc/{pid}/fd/{int(main['call'].split()[1], 16)}")
    except (OSError, ValueError, IndexError):
        return ""


def _file_lock(pid: int) -> dict[str, Any]:
    """Return the file whose lock a process waits for, and its holder; {} if it waits for none.

    The holder is 0 if it is not a process of this host (/proc/locks in proc_locks(5)).
    """
    holder = 0
    for line in _read("/proc/locks").splitlines():
        # 1: -> FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF; a lock stands before its waiters.
        is_waiter = " -> " in line
        owner, place = line.replace(" -> ", " ").split()[4:6]
        if not is_waiter:
            holder = int(owner)
        elif int(owner) == pid:
            inode = int(place.rpartition(":")[2])
            return {"file": _open_file(pid, inode), "holder": max(holder, 0)}
    return {}


def _open_file(pid: int, inode: int) -> str:
    """Return the path of a file that a process has open."""
    folder = f"/proc/{pid}/fd"
    for number in _listed(folder):
        try:
            if os.stat(f"{folder}/{number}").st_ino == inode:
                return os.readlink(f"{folder}/{number}")
        except OSError:  # it has been closed
            continue
    return f"the file with inode {inode}"


def _call(thread: dict[str, Any]) -> int:
    """Return the number of the system call in which a thread is; -1 if it is in none."""
    number = thread.get("call", "").partition(" ")[0]
    return int(number) if number.isdigit() else -1


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process has ended
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # the process has ended, or the system does not show this to us
        return ""
