"""How a rank leaves, and how the job ends when one fails.

* An uncaught exception in any thread, or a nonzero ``sys.exit``, prints the traceback with the
  rank's name, leaves a failure record, and ends the job through MPI_Abort. Left to itself either
  MPI library would hang the other ranks for ever.
* A rank whose script ends well sends every other rank a leave note, which says how many
  collectives it has taken part in, group by group, and waits, asleep, until all have left; then
  all clean up and finalize MPI together.
* One watchdog thread a rank reads the notes. If this rank waits for one that has left, nobody
  will ever come: the job ends, saying who waits for whom. Waiting for long is reported.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.errors import FailedPreconditionError, UnavailableError
from mpidist.runner import (
    INTERRUPTED,
    INTERRUPTED_STATUS,
    exit_reason,
    explain,
    reason_of,
    status_of,
)
from mpidist.runtime import fork, metrics, records, streams
from mpidist.runtime.backoff import Backoff
from mpidist.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from mpidist.runtime.world import World

# MPI_Abort can itself hang on a broken network; a rank that vanishes is noticed all the same.
_ABORT_LIMIT_S = 3.0
# When MPI fails, or what another rank served is gone, it is mostly because that rank has failed, or
# one that it needed: they, or the launcher, are to say why first.
_OTHERS_FIRST_S = 1.0


class ExitCall(SystemExit):
    """What ``sys.exit`` raises on a rank: a SystemExit that is noticed when it ends the script.

    The interpreter drops it, with no Python frame left on the stack, just before it shuts down.
    Dropped anywhere else it has been caught, and means nothing.
    """

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        # The interpreter parts an exception from its traceback before it drops it.
        self._stack = "".join(traceback.format_stack(sys._getframe(2)))

    def __del__(self) -> None:
        if (
            status_of(self.code)
            and sys._getframe().f_back is None
            and threading.current_thread() is threading.main_thread()
            and not sys.is_finalizing()
            and _exits is not None
        ):
            # Formats a code whose __str__ fails, too.
            last = "".join(traceback.format_exception_only(SystemExit(self.code)))
            text = f"Traceback (most recent call last):\n{self._stack}{last}"
            _exits.fail(exit_reason(self.code), text, self.code)


class Exits:
    """The hooks and the watchdog of one rank.

    Args:
        world: The MPI world.
        finalize: Whether MPI is ours to finalize.

    Attributes:
        waits: What this rank waits for; kept by those who block.
        left: When the leave note of each rank that has left arrived.
        world: The MPI world.
        identity: Who this rank is.
    """

    def __init__(self, world: World, finalize: bool) -> None:
        self.world = world
        self._finalize = finalize
        self.identity = records.Identity(world.rank, os.getpid(), world.host)
        self._started = time.time()
        self._failing = threading.Lock()
        self._leaving = False
        self._watchdog = Watchdog(world, self.identity, self.fail)
        self.waits, self.left = self._watchdog.waits, self._watchdog.left
        self._hooks_before = sys.excepthook, threading.excepthook
        # A process that no launcher started keeps Python's own behavior: no rank waits for it.
        self._plain = world.launcher is None and world.size == 1

    def start(self) -> None:
        """Local. Install the hooks and start the watchdog."""
        records.write_rank(self.identity, self._started)
        metrics.start_timeline(self.world.rank)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # In whole lines and at once: the launcher puts the output of all ranks together.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        before = (sys.exit, builtins.exit, builtins.quit)

        def forget() -> None:
            global _exits
            _exits = None
            sys.excepthook, threading.excepthook = self._hooks_before
            sys.exit, builtins.exit, builtins.quit = before
            atexit.unregister(self._leave)

        fork.in_parent_only(forget)
        atexit.register(self._leave)
        if not self._plain:
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread
            sys.exit = _exit
            builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
        self._watchdog.start()

    def identify(self, job: str, task: int) -> None:
        """Local. Say which task this rank is, for messages and records."""
        self.identity.job, self.identity.task = job, task
        records.write_rank(self.identity, self._started)

    def fail(self, reason: str, trace: str, code: Any = 1) -> NoReturn:
        """Local. End the job: print, leave a record, abort; does not return.

        Args:
            reason: Its first line is kept.
            trace: A traceback, or other text to print before the reason.
            code: The argument of ``sys.exit``; see :func:`mpidist.runner.status_of`. 0 counts as 1.
        """
        code = status_of(code) or 1
        _ignore_interrupts()
        if not self._failing.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending the job
        reason = reason.strip().partition("\n")[0]
        text = trace.rstrip() + "\n" if trace.strip() else ""
        # Whatever a script has made of its streams, it must not stop the abort.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{text}mpidist: {self.identity} ends the job: {reason}\n")
            sys.stderr.flush()
        records.write_failure(self.identity, reason, trace, code)
        metrics.write_timeline()
        for handle in (1, 2):
            streams.wait_until_read(handle)
        # Python 3.12 and later start no thread at the interpreter's shutdown; this one is C.
        faulthandler.dump_traceback_later(_ABORT_LIMIT_S, exit=True, file=2)
        _abort(code)
        os._exit(code)

    # Hooks

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _ignore_interrupts()
        if isinstance(error, KeyboardInterrupt):
            self._interrupted()
        if _is_consequence(error):
            time.sleep(_OTHERS_FIRST_S)
        explain(error)
        text = "".join(traceback.format_exception(kind, error, trace))
        self.fail(reason_of(error), text)

    def _interrupted(self) -> None:
        self.fail(INTERRUPTED, "", INTERRUPTED_STATUS)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        # A daemon that outlives a script that has ended well finds closed what it uses.
        if self._leaving and args.thread and args.thread.daemon:
            self._hooks_before[1](args)
        elif not issubclass(args.exc_type, SystemExit):
            error = args.exc_type() if args.exc_value is None else args.exc_value
            self._uncaught(args.exc_type, error, args.exc_traceback)

    # Leaving

    def _leave(self) -> None:
        from mpi4py import MPI

        self._leaving = True
        if MPI.Is_finalized():
            fork.end_mpi()
            return
        last = getattr(sys, "last_value", None)
        if isinstance(last, KeyboardInterrupt) and not self._plain:
            self._interrupted()  # a second Ctrl-C has ended the hook as it began
        try:
            self._leave_with_all()
        except KeyboardInterrupt:  # nobody may be left waiting for this rank
            _ignore_interrupts()
            self._interrupted()

    def _leave_with_all(self) -> None:
        from mpi4py import MPI

        for callback in reversed(self.world.before_leave):
            callback()
        self._watchdog.stop()
        notes = self._watchdog.send_notes()
        self.left[self.world.rank] = time.monotonic()
        backoff = Backoff(longest_s=5e-3)
        while len(self.left) < self.world.size or not MPI.Request.Testall(notes):
            if not self._watchdog.read_note():
                backoff.pause()
        fork.end_mpi()
        for callback in reversed(self.world.at_leave):
            callback()
        if self._finalize:
            MPI.Finalize()


_exits: Exits | None = None


def install(world: World, finalize: bool) -> None:
    """Local. Make this rank leave properly; called once, when MPI is started."""
    global _exits
    _exits = Exits(world, finalize)
    _exits.start()


def installed() -> bool:
    """Local. Whether :func:`install` has been called."""
    return _exits is not None


def this_rank() -> str:
    """Local. This rank in words, with its host and, once known, its task; empty without MPI."""
    return "" if _exits is None else str(_exits.identity)


def exits() -> Exits:
    """Return the exits of this rank.

    Raises:
        FailedPreconditionError: MPI has not been started in this process, or this process was
            forked from one in which it has.
    """
    if _exits is None:
        fork.check()
        raise FailedPreconditionError(
            "MPI has not been started in this process: call mpidist.init_process_group() or start "
            "a Server over mpi first"
        )
    return _exits


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


def _exit(status: Any = None) -> NoReturn:
    raise ExitCall(status)


def _ignore_interrupts() -> None:
    """Have a second Ctrl-C, which launchers pass on beside the terminal's, not stop the end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _abort(code: int) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)
