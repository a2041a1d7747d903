"""How a rank leaves, how a job ends, and the hooks that this needs.

* A rank whose script ends sends a leave note to every other rank. The note has the number of
  collectives that the rank took part in, by group. The rank sleeps until all ranks have left. Then
  all of them clean up and finalize MPI together.
* If a rank waits for one that has left, its watchdog ends the job and names both.
* An uncaught exception in any thread ends the job through MPI_Abort, with its traceback and the
  name of the rank. Without this hook the other ranks wait until their watchdogs notice.

docs/hooks.md lists every change that mpidist makes outside its own objects. The hooks that can be
turned off are set when MPI starts, and only in a process that a launcher has started.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import io
import os
import signal
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.config import config
from mpidist.errors import UnavailableError
from mpidist.mpi import fork, records
from mpidist.mpi.backoff import Backoff
from mpidist.mpi.pending import DETAIL_HINT, pending_ops
from mpidist.mpi.watchdog import Watchdog
from mpidist.runner import (
    INTERRUPTED,
    INTERRUPTED_STATUS,
    OUTPUT_LIMIT_S,
    explain,
    is_first,
    reason_of,
    status_of,
)

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI_Abort can hang on a broken network. Other ranks notice a process that has ended.
_ABORT_LIMIT_S = 3.0
# An error of MPI, or of a call to another rank, mostly follows from the failure of that rank. The
# failed rank, or the launcher, should give the reason first.
_OTHERS_FIRST_S = 1.0
_READ_POLL_S = 1e-3

_ending = threading.Lock()  # locked for good by the thread that ends the job


class _CExitHandler:
    """Calls a function when C code ends the process by ``exit(3)``, until the handler is removed.

    MPICH ends the process in this way after some errors, also where errors are to be returned.

    Args:
        call: The function.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._libc = ctypes.CDLL(None)
        self._handle = ctypes.create_string_buffer(1)  # its address names the handler
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._exiting)
        # Other C libraries cannot remove a handler, and they call it after the interpreter's end.
        if "CS_GNU_LIBC_VERSION" in os.confstr_names:
            self._libc["__cxa_atexit"](self._callback, None, self._handle)

    def remove(self) -> None:
        """Remove the handler. This must happen before the end of the interpreter."""
        self._call = None
        self._libc["__cxa_finalize"](self._handle)  # it calls the handler, and removes it

    def _exiting(self, _argument: int | None) -> None:
        if self._call is not None:
            self._call()


class Shutdown:
    """The hooks, the watchdog and the end of this rank.

    Args:
        identity: This rank.
        control: Carries the messages between watchdogs.
        finalize: Whether mpidist has started MPI and so finalizes it.
        hooks: Whether to set the hooks that can be turned off.

    Attributes:
        identity: This rank.
        hooks: Whether those hooks are set.
        left: Time at which the leave note of each rank that has left arrived.
        before_leave: Local clean-up, last registered first. Threads that use MPI end here.
        at_leave: Collective clean-up, in the same order on all ranks, after every rank has left.
    """

    def __init__(
        self, identity: records.Identity, control: MPI.Intracomm, *, finalize: bool, hooks: bool
    ) -> None:
        self.identity = identity
        self.hooks = hooks
        self.before_leave: list[Callable[[], None]] = []
        self.at_leave: list[Callable[[], None]] = []
        self._control = control
        self._finalize = finalize
        self._leaving = False
        self._watchdog = Watchdog(control, pending_ops, identity, self.end_job)
        self.left = self._watchdog.left
        self._previous = sys.excepthook, threading.excepthook
        self._c_exit: _CExitHandler | None = None

    def install(self) -> None:
        """Set the hooks and start the watchdog."""
        atexit.register(self._leave)
        if self.hooks:
            if isinstance(sys.stdout, io.TextIOWrapper):
                # The launcher merges the output of all ranks, line by line.
                sys.stdout.reconfigure(line_buffering=True, write_through=False)
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread
            self._c_exit = _CExitHandler(self._exited_in_c)
        self._watchdog.start()

    def uninstall(self) -> None:
        """Restore the previous hooks in a forked child, which is no rank of the job."""
        atexit.unregister(self._leave)
        if self.hooks:
            sys.excepthook, threading.excepthook = self._previous
        if self._c_exit is not None:
            self._c_exit.remove()

    def end_job(self, reason: str, trace: str = "", code: Any = 1) -> NoReturn:
        """End the job on all ranks; see :func:`end_job`."""
        if self.hooks:
            _ignore_interrupts()
        end_job(self.identity, reason, trace, code, _abort)

    # Hooks

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _ignore_interrupts()
        if isinstance(error, KeyboardInterrupt):
            self._end_interrupted()
        if _is_consequence(error):
            time.sleep(_OTHERS_FIRST_S)
        explain(error)
        text = "".join(traceback.format_exception(kind, error, trace))
        self.end_job(reason_of(error), text)

    def _end_interrupted(self) -> NoReturn:
        self.end_job(INTERRUPTED, code=INTERRUPTED_STATUS)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        # During a normal shutdown daemon threads may fail, because the objects they use are closed.
        if self._leaving and args.thread and args.thread.daemon:
            self._previous[1](args)
        elif not issubclass(args.exc_type, SystemExit):
            error = args.exc_type() if args.exc_value is None else args.exc_value
            self._uncaught(args.exc_type, error, args.exc_traceback)

    def _exited_in_c(self) -> None:
        pending = list(pending_ops.current.copy().values())
        operations = [operation.describe() for operation in pending]
        # MPI_Abort ends the process by exit(3), too.
        if operations and not _ending.locked():
            stack = "".join(traceback.format_stack()[:-2])  # without this function
            time.sleep(_OTHERS_FIRST_S)
            reason = f"MPI has ended the process in {', '.join(operations)}; see its message above"
            if config.debug != "detail" and any(operation.sequence for operation in pending):
                reason += DETAIL_HINT
            end_job(self.identity, reason, f"Stack (most recent call last):\n{stack}")

    # Leaving

    def _leave(self) -> None:
        from mpi4py import MPI

        self._leaving = True
        if self._c_exit is not None:
            self._c_exit.remove()
        if MPI.Is_finalized():
            fork.end_mpi()
            return
        if self.hooks and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self._end_interrupted()  # a second Ctrl-C has ended the hook as it began
        try:
            self._leave_with_all()
        except KeyboardInterrupt:  # the other ranks would wait for this one for ever
            self._end_interrupted()

    def _leave_with_all(self) -> None:
        from mpi4py import MPI

        for callback in reversed(self.before_leave):
            callback()
        self._watchdog.stop()
        notes = self._watchdog.send_notes()
        self.left[self._control.rank] = time.monotonic()
        backoff = Backoff(longest_s=5e-3)
        while len(self.left) < self._control.size or not MPI.Request.Testall(notes):
            if not self._watchdog.read_note():
                backoff.pause()
        fork.end_mpi()
        for callback in reversed(self.at_leave):
            callback()
        if self._finalize:
            MPI.Finalize()


def end_job(
    identity: records.Identity,
    reason: str,
    trace: str = "",
    code: Any = 1,
    abort: Callable[[int], object] = os._exit,
) -> NoReturn:
    """End the job: print the reason, leave a failure record, and end this process.

    Only the first of several ranks with one traceback prints it.

    Args:
        identity: This rank.
        reason: The reason; its first line is used.
        trace: A traceback or other text to print before the reason.
        code: The argument of ``sys.exit``; see :func:`mpidist.runner.status_of`. 0 counts as 1. If
            it is no number, it is printed alone, as Python prints it.
        abort: Ends the job with a status.
    """
    status = status_of(code) or 1
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is ending the job
    reason = reason.strip().partition("\n")[0]
    prints = is_first(trace, config.run_dir)
    # The script may have replaced its streams, and the job must end all the same.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        text = f"{trace.rstrip()}\nmpidist: {identity} ends the job: {reason}".lstrip()
        if prints:
            # torch's excepthook buffers sys.stderr in memory while it calls the previous hook.
            stream = sys.__stderr__ or sys.stderr
            stream.write(f"{text if isinstance(code, int) else code}\n")
            stream.flush()
    records.write_failure(identity, reason, trace, status)
    if not prints:
        time.sleep(OUTPUT_LIMIT_S)  # the abort of this rank could cut off the other one's output
    for descriptor in (1, 2):
        wait_until_read(descriptor)
    # Python 3.12 and later start no thread during the interpreter's shutdown; this one is in C.
    faulthandler.dump_traceback_later(_ABORT_LIMIT_S, exit=True, file=2)
    abort(status)
    os._exit(status)


def wait_until_read(descriptor: int) -> None:
    """Wait up to half a second until the reader of a pipe has read all of it.

    MPICH's launcher drops the output that it has not read when a rank aborts.

    Args:
        descriptor: A file descriptor. Nothing happens if it is no pipe.
    """
    deadline = time.monotonic() + OUTPUT_LIMIT_S
    unread = array.array("i", [1])
    with contextlib.suppress(OSError):  # the descriptor is closed
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return
        while unread[0] and time.monotonic() < deadline:
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
            time.sleep(_READ_POLL_S)


def _is_consequence(error: BaseException | None) -> bool:
    from mpi4py import MPI

    seen = set[int]()
    # "raise error from error" makes an exception its own cause.
    while error is not None and id(error) not in seen:
        if isinstance(error, (MPI.Exception, UnavailableError)):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _ignore_interrupts() -> None:
    """Ignore SIGINT, because launchers send it too when the terminal sends it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _abort(code: int) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)
