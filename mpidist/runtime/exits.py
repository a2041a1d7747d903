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
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidist.config import config
from mpidist.errors import UnavailableError
from mpidist.runtime import fork, metrics, records, streams
from mpidist.runtime.backoff import Backoff
from mpidist.runtime.waits import Waiting, Waits, missing_rank

if TYPE_CHECKING:
    from mpidist.runtime.world import World

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_METRICS_PERIOD_S = 1.0
_TAG = 1
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
            not is_good_end(self.code)
            and sys._getframe().f_back is None
            and threading.current_thread() is threading.main_thread()
            and not sys.is_finalizing()
            and _exits is not None
        ):
            text = f"Traceback (most recent call last):\n{self._stack}SystemExit: {self.code}"
            _exits.fail(f"sys.exit({self.code!r})", text, self.code)


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
        self.waits = Waits()
        self.left: dict[int, float] = {}
        self._counts_of_left: dict[int, dict[int, int]] = {}
        self._reported = 0, 0.0  # what was told last, by its id and when it was first seen
        self._stop = threading.Event()
        self._failing = threading.Lock()
        self._watchdog = threading.Thread(target=self._watch, name="mpidist-watchdog", daemon=True)

    def start(self) -> None:
        """Local. Install the hooks and start the watchdog."""
        records.write_rank(self.identity, self._started)
        metrics.start_timeline(self.world.rank)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # In whole lines and at once: the launcher puts the output of all ranks together.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        before = (sys.excepthook, threading.excepthook, sys.exit, builtins.exit, builtins.quit)

        def forget() -> None:
            global _exits
            _exits = None
            sys.excepthook, threading.excepthook, sys.exit = before[:3]
            builtins.exit, builtins.quit = before[3:]
            atexit.unregister(self._leave)

        fork.in_parent_only(forget)
        sys.excepthook = self._uncaught
        threading.excepthook = self._uncaught_in_thread
        sys.exit = _exit
        builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
        atexit.register(self._leave)
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
            code: Of the exit, as ``sys.exit`` takes it. The status of the job is its lowest byte;
                1 if that is 0, so that 256 does not look like a good end, or if it is no integer.
        """
        code = (code & 0xFF or 1) if isinstance(code, int) else 1
        _ignore_interrupts()
        if not self._failing.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending the job
        reason = reason.strip().partition("\n")[0]
        text = trace.rstrip() + "\n" if trace.strip() else ""
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not stop the abort
            sys.stdout.flush()
            sys.stderr.write(f"{text}mpidist: {self.identity} ends the job: {reason}\n")
            sys.stderr.flush()
        records.write_failure(self.identity, reason, trace, code)
        metrics.write_timeline()
        for handle in (1, 2):
            streams.wait_until_read(handle)
        threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
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
        text = "".join(traceback.format_exception(kind, error, trace))
        self.fail("".join(traceback.format_exception_only(error)), text)

    def _interrupted(self) -> None:
        self.fail("interrupted (Ctrl-C)", "", 130)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            error = args.exc_value or args.exc_type()
            self._uncaught(args.exc_type, error, args.exc_traceback)

    # Leaving

    def _leave(self) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            fork.end_mpi()
            return
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
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
        self._stop.set()
        self._watchdog.join()
        self._write_metrics()
        notes = self._send_notes()
        self.left[self.world.rank] = time.monotonic()
        backoff = Backoff(longest_s=5e-3)
        while len(self.left) < self.world.size or not MPI.Request.Testall(notes):
            if not self._read_note():
                backoff.pause()
        fork.end_mpi()
        for callback in reversed(self.world.at_leave):
            callback()
        if self._finalize:
            MPI.Finalize()

    def _send_notes(self) -> list[Any]:
        note = np.array(sorted(self.waits.counts.items()), np.int64).reshape(-1)
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        return [self.world.control.Isend(note, dest=other, tag=_TAG) for other in others]

    def _read_note(self) -> bool:
        from mpi4py import MPI

        status = MPI.Status()
        message = self.world.control.Improbe(tag=_TAG, status=status)
        if message is None:
            return False
        note = np.empty(status.Get_count(MPI.INT64_T), np.int64)
        message.Recv(note)
        self._counts_of_left[status.source] = {int(g): int(n) for g, n in note.reshape(-1, 2)}
        self.left[status.source] = time.monotonic()
        return True

    # Watching

    def _watch(self) -> None:
        from mpi4py import MPI

        written = time.monotonic()
        while not self._stop.wait(_PERIOD_S) and not MPI.Is_finalized():
            while self._read_note():
                pass
            now = time.monotonic()
            if now - written >= _METRICS_PERIOD_S:
                written = now
                self._write_metrics()
            self._look_at_waits(now)

    def _look_at_waits(self, now: float) -> None:
        # No name of an operation outlives this: its arrays may be large.
        for operation, since in self.waits.observe(now):
            self._check(operation, since, now)
            if now - since > config.stall_s and self._reported != (id(operation), since):
                self._reported = id(operation), since
                logger.warning(
                    "%s: %s has waited for %.0f s; the other ranks have not made the call, or "
                    "are stuck themselves (MPIDIST_DEBUG=detail tells whose collectives differ)",
                    self.identity,
                    operation.describe(),
                    now - since,
                )

    def _write_metrics(self) -> None:
        tasks = metrics.snapshot()
        if tasks:  # process groups have none
            records.write_metrics(self.identity, tasks)
        metrics.write_timeline()

    def _check(self, operation: Waiting, since: float, now: float) -> None:
        gone = missing_rank(operation, since, self.left, self._counts_of_left, now)
        if gone is not None:
            self.fail(
                f"{operation.describe()} waits for rank {gone}, whose script has ended; every "
                "rank of a group must make the same calls",
                _stacks(),
            )
        if now - since > config.stall_abort_s:
            self.fail(
                f"{operation.describe()} has waited for {now - since:.0f} s, the limit set by "
                "MPIDIST_STALL_ABORT_S",
                _stacks(),
            )


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
    """Local. The exits of this rank; MPI must have been started."""
    assert _exits is not None, "MPI has not been started"
    return _exits


def _is_consequence(error: BaseException | None) -> bool:
    from mpi4py import MPI

    while error is not None:
        if isinstance(error, (MPI.Exception, UnavailableError)):
            return True
        error = error.__cause__
    return False


def is_good_end(code: Any) -> bool:
    """Local. Whether a SystemExit with this code is no failure."""
    return code is None or (isinstance(code, int) and code == 0)


def _exit(status: Any = None) -> NoReturn:
    raise ExitCall(status)


def _ignore_interrupts() -> None:
    """Have a second Ctrl-C, which launchers pass on beside the terminal's, not stop the end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _abort(code: int) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)


def _exit_later(code: int) -> None:
    time.sleep(_ABORT_LIMIT_S)
    os._exit(code)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
