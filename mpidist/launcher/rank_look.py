"""Look at a rank that may be stuck: its threads, its children, and the stacks of its Python code.

:mod:`mpidist.launcher.rank_wrapper` runs this file when ``look.json`` in the run folder asks it to.
The wrapper is the parent of the rank, on the rank's own host. So a look needs neither the
interpreter of the rank, which C code may hold, nor a connection, nor the right to trace other
processes. The result is ``look-<rank>.json``.

This file uses few modules, as the wrapper does.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time

TYPE_CHECKING = False  # without the module typing
if TYPE_CHECKING:
    from typing import Any

_PERIOD_S = 1.0  # between the two samples
_STACKS_S = 0.4
_POLL_S = 0.02
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# System calls whose first argument is a file descriptor (read, pread64, readv) by machine.
_READS = {"x86_64": {0, 17, 19}, "aarch64": {63, 67, 65}}


def look(rank: str, pid: int, number: int, stacks_signal: int) -> None:
    """Sample a rank twice, and write the result.

    Args:
        rank: The rank.
        pid: Its process.
        number: Number of the request.
        stacks_signal: The signal on which the rank writes its stacks.
    """
    folder = os.environ["MPIDIST_RUN_DIR"]
    began = time.monotonic()
    before = _threads(pid)
    stacks = [_stacks(rank, pid, folder, stacks_signal)]
    time.sleep(max(began + _PERIOD_S - time.monotonic(), 0.0))
    after, passed_s = _threads(pid), time.monotonic() - began
    stacks.append(_stacks(rank, pid, folder, stacks_signal))
    for tid, thread in after.items():
        ticks = thread.pop("ticks")
        earlier = before.get(tid, {"ticks": ticks})["ticks"]
        thread["busy"] = (ticks - earlier) * _TICK_S / passed_s
    status = _status(pid)
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
        "threads": after,
        "has_handler": bool(_caught(pid) >> (stacks_signal - 1) & 1),
        "file": _read_file(pid, after.get(str(pid), {})),
        "children": _children(pid),
        "stacks": stacks,
    }
    path = os.path.join(folder, f"look-{rank}.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


def _threads(pid: int) -> dict[str, dict[str, Any]]:
    """Return facts on each thread of a process, by the thread's id."""
    found: dict[str, dict[str, Any]] = {}
    for tid in _listed(f"/proc/{pid}/task"):
        place = f"/proc/{pid}/task/{tid}"
        name, _, rest = _read(f"{place}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > 12:
            found[tid] = {
                "name": name.partition("(")[2],
                "state": fields[0],
                "ticks": int(fields[11]) + int(fields[12]),  # user and system time, proc(5)
                "waits_in": _read(f"{place}/wchan"),
                "call": _read(f"{place}/syscall"),
            }
    return found


def _stacks(rank: str, pid: int, folder: str, number: int) -> str:
    """Return the stacks that the rank writes on a signal; "" if it cannot."""
    path = os.path.join(folder, f"stacks-{rank}.txt")
    if not _caught(pid) >> (number - 1) & 1:  # the signal would end the process
        return ""
    try:
        os.truncate(path, 0)
        os.kill(pid, number)
    except OSError:
        return ""
    text, deadline = "", time.monotonic() + _STACKS_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, text = text, _read(path)
        if text and text == last:
            break
    return text


def _caught(pid: int) -> int:
    """Return the signals that a process handles, as bits; see proc(5)."""
    return int(_status(pid).get("SigCgt", "0"), 16)


def _status(pid: int) -> dict[str, str]:
    lines = _read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read_file(pid: int, main: dict[str, Any]) -> str:
    """Return the file or pipe from which the main thread reads; "" if it does not read."""
    number, *arguments = str(main.get("call", "")).split() or [""]
    if not number.isdigit() or int(number) not in _READS.get(platform.machine(), ()):
        return ""
    try:
        return os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")
    except (OSError, ValueError, IndexError):
        return ""


def _children(pid: int) -> list[dict[str, object]]:
    """Return the children of a process."""
    found: list[dict[str, object]] = []
    for tid in _listed(f"/proc/{pid}/task"):
        for child in _read(f"/proc/{pid}/task/{tid}/children").split():
            name, _, rest = _read(f"/proc/{child}/stat").rpartition(")")
            if rest:
                found.append(
                    {"pid": int(child), "name": name.partition("(")[2], "state": rest.split()[0]}
                )
    return found


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
