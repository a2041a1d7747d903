"""The keeper of :mod:`_cases.slurm_bed`. It ends the daemons and jobs when its input ends.

The keeper is a separate process, so it cleans up even if the tests are killed. It is the subreaper
of its descendants: orphans become its children, so daemons of jobs cannot escape.

    python -I -S slurm_keeper.py FOLDER

FOLDER has ``commands.json``: first the commands to run to their end, then the commands to keep
running. FOLDER is removed at the end. The keeper prints one line: the pids of the running commands.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def descendants(root):
    """Return the pids of all descendants of a process, without zombies."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # the process has ended
        children.setdefault(int(parent), []).append((int(stat.parent.name), state))
    found, unseen = [], [root]
    while unseen:
        for pid, state in children.get(unseen.pop(), ()):
            unseen.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def _start(folder):
    first, kept = json.loads((folder / "commands.json").read_text())
    for command in first:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    pids = []
    for command in kept:
        log = (folder / "log" / "daemons").open("a")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        pids.append(process.pid)
    return pids


def _reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all():
    """Kill all descendants. Children of killed processes become children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def main(folder):
    """Run the daemons until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        pids = _start(folder)
        signal.signal(signal.SIGCHLD, _reap)
        print(*pids, flush=True)
        os.read(0, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
