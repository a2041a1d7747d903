"""Run the user's script inside a rank of ``mpidist run``, as ``python`` would run it.

The interpreter drops the status of a ``SystemExit`` before it calls exit handlers, so the runner
executes the script itself and sees its end. A rank that fails writes its reason into the run
folder. If mpi4py has started MPI, the process then ends at once, because the exit handlers of
mpi4py would wait in MPI_Finalize for the other ranks.

:mod:`mpidist.launcher.rank_wrapper` starts this file by its path::

    python runner.py RANK_VARIABLE SCRIPT [ARGUMENT ...]
    python runner.py RANK_VARIABLE -m MODULE [ARGUMENT ...]

It uses few modules, all of the standard library: it starts with every rank, and must work where a
file beside the script hides the package ``mpidist``.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

RUNNER_FILE = os.path.abspath(__file__)
_PACKAGES = ("mpidist", "strategy", "dataservice")
_PYC_HEADER_BYTES = 16  # PEP 552
INTERRUPTED = "interrupted (Ctrl-C)"
"""The reason of a rank that ends by a KeyboardInterrupt."""
INTERRUPTED_STATUS = 130
"""The exit status of such a rank, as a shell shows it for a program that SIGINT ends."""
STOP_STATUS = 75
"""Exit status of a job that has saved after a signal: EX_TEMPFAIL of sysexits.h, "try again"."""
STACKS_SIGNAL = signal.SIGRTMAX - 4
"""Has a rank write the stacks of its threads to ``stacks-<rank>.txt`` by faulthandler."""
_frames_lock = _thread.allocate_lock()
_LOOK_S = 0.5
_SAMPLES, _MOST_KEPT = 50, 5
_SAMPLE_S = 0.02
OUTPUT_LIMIT_S = 0.5
"""Seconds that an ending rank waits at most until the launcher has read the output."""


def hidden_packages() -> list[str]:
    """Return a sentence for each of our packages that a module of the user hides."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = []
    for name in _PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not os.path.abspath(file).startswith(os.path.join(ours, name, "")):
            found.append(
                f"{file} hides the package {name!r} that mpidist installs; rename your file"
            )
    return found


def _hints(error: BaseException) -> list[str]:
    """Return :func:`hidden_packages` for an error that a hidden package may have caused."""
    causes = (ImportError, AttributeError)
    caused = isinstance(error, causes) or isinstance(error.__cause__, causes)
    return hidden_packages() if caused else []


def explain(error: BaseException) -> None:
    """Add a note to an import error, or to a missing name, that a hidden package may have caused.

    Args:
        error: An exception that ends the script.
    """
    # An exception class of the user may refuse attributes, as frozen dataclasses do.
    with contextlib.suppress(Exception):
        for sentence in _hints(error):
            if sentence not in getattr(error, "__notes__", ()):
                error.add_note(sentence)


def reason_of(error: BaseException) -> str:
    """Return one line with the reason for which an exception ended the script.

    Args:
        error: The exception. Its methods may fail.

    Returns:
        The exception's type, the first line of its message, and the notes of :func:`explain`.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    try:
        if isinstance(error, SyntaxError):  # its str() has the file and the line
            return f"{type(error).__name__}: {error}"
        import traceback

        text = traceback.format_exception_only(error)[0].strip().partition("\n")[0]
        return "; ".join([text, *_hints(error)])
    except BaseException:
        return type(error).__name__


def exit_reason(code: Any, call: str = "sys.exit") -> str:
    """Return one line with the exit call that ended the script.

    Args:
        code: The argument of the exit. Its ``__repr__`` may fail.
        call: Name of the function or class that got the argument.
    """
    try:
        text = repr(code)
    except BaseException:
        text = f"<{type(code).__name__} object, whose __repr__ fails>"
    return f"{call}({text})"


def status_of(code: Any) -> int:
    """Return the exit status of a ``SystemExit``.

    Args:
        code: The argument of ``sys.exit``.

    Returns:
        0 for None and 0. The lowest byte of another integer, but 1 if that is 0, so that 256 does
        not look like success. 1 for everything else.
    """
    if code is None or (isinstance(code, int) and code == 0):
        return 0
    return (code & 0xFF or 1) if isinstance(code, int) else 1


def is_first(text: str, folder: str | None) -> bool:
    """Return True on the first rank that prints a text. Others need not print it again.

    Args:
        text: The text. Every rank is the first to print an empty text.
        folder: The run folder, where the ranks agree by a file. Without one, each rank is the
            first.
    """
    if not text or folder is None:
        return True
    import zlib

    path = os.path.join(folder, f"printed-{zlib.crc32(text.encode('utf-8', 'replace')):08x}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # the folder may be gone while a job ends
        return True
    return True


class Runner:
    """One run of a script.

    Args:
        rank: The rank of this process in the world.
        folder: The run folder, for the record of a failure.
        words: The script and its arguments, or ``-m``, a module and its arguments.
    """

    def __init__(self, rank: int, folder: str, words: list[str]) -> None:
        self._rank = rank
        self._folder = folder
        self._words = words
        self._pid = os.getpid()
        self._over = False
        self._previous_hook = threading.excepthook

    def run(self) -> None:
        """Run the script to its end. Leave a record and the right status if it fails."""
        threading.excepthook = self._uncaught_in_thread
        self._write_stacks_on_request()
        try:
            self._execute()
        except BaseException as caught:
            error = caught
        else:
            self._over = True
            return
        # After the except clause, so that sys.exc_info() is empty in sys.excepthook.
        try:
            raise self._end(error)
        finally:
            del error  # its traceback refers to this frame

    def _end(self, error: BaseException) -> BaseException:
        """Record an exception that ends the script. Return the exception for the interpreter.

        If MPI runs, the process of a rank that fails ends here.
        """
        if os.getpid() != self._pid:  # a forked child
            if isinstance(error, KeyboardInterrupt):
                return error  # the interpreter prints it, and ends the process by SIGINT
            status = None if isinstance(error, SystemExit) else _show(error)
        else:
            status = 1
            try:
                status = self._exit(error) if isinstance(error, SystemExit) else self._fail(error)
                self._over = not status
            finally:
                # Even if they fail: the exit handler of mpi4py would wait in MPI_Finalize.
                if status and _mpi_runs():
                    _end_now(status)
        if not isinstance(error, SystemExit):
            return SystemExit(status)
        if isinstance(error.code, int):
            error.code = status_of(error.code)
        return error

    def _execute(self) -> None:
        main = types.ModuleType("__main__")
        # The names that this version of Python gives to every script.
        names = [name for name in globals() if name.startswith("__")]
        main.__dict__.update({name: globals()[name] for name in names}, __doc__=None)
        sys.modules["__main__"] = main
        path = self._words[0]
        if path == "-m":
            name, *arguments = self._words[1:]
            _begin("-m", arguments, os.getcwd())
            _run_module(name, alter_argv=True)
        elif _is_archive(path):
            _begin(path, self._words[1:], os.path.abspath(path))
            _run_module("__main__", alter_argv=False)
        else:
            _begin(path, self._words[1:], os.path.dirname(os.path.realpath(path)))
            code, loader = _load(path)
            main.__dict__.update(__file__=os.path.abspath(path), __loader__=loader)
            exec(code, main.__dict__)

    def _write_stacks_on_request(self) -> None:
        """Write the stacks of all threads when ``look.json`` in the run folder asks for them.

        A thread looks for that file. While C code holds the interpreter's lock, the thread does not
        run, and the launcher sends ``STACKS_SIGNAL``. At other times faulthandler could crash: it
        reads frames that other threads change meanwhile.
        """
        path = os.path.join(self._folder, f"stacks-{self._rank}")
        try:
            self._stacks = open(f"{path}.txt", "ab", buffering=0)  # noqa: SIM115
            # faulthandler restores this at the end. The default would end the process.
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
            faulthandler.register(STACKS_SIGNAL, self._stacks)
        except OSError as error:
            sys.stderr.write(f"mpidist run: rank {self._rank} cannot write stacks ({error})\n")
        request = os.path.join(self._folder, "look.json")
        # Not a threading.Thread, which scripts would see. The script may replace functions.
        _thread.start_new_thread(
            _answer_looks, (request, f"{path}.json", _thread.get_ident(), time.sleep, os.stat)
        )

    def _uncaught_in_thread(self, args: Any) -> None:
        # After the script's end, daemon threads may fail on closed resources.
        late = self._over and args.thread is not None and args.thread.daemon
        if args.exc_type is SystemExit or late or os.getpid() != self._pid:
            self._previous_hook(args)
            return
        status = 1
        try:
            with contextlib.suppress(Exception):  # standard error may fail
                self._previous_hook(args)
            error = args.exc_type() if args.exc_value is None else args.exc_value
            status = _status_of_error(error)
            self._record(reason_of(error), status)
        finally:
            _end_now(status)

    def _exit(self, error: SystemExit) -> int:
        """Record a nonzero SystemExit, and print its text if MPI runs. Return its status."""
        status = status_of(error.code)
        if not status:
            return 0
        reason = exit_reason(error.code)
        module = sys.modules.get("mpidist.mpi.world")
        world = None if module is None else module.started_world()
        if world is not None:
            import traceback

            trace = ""  # a job that has saved and stopped has not failed
            if error.code != STOP_STATUS:
                error.with_traceback(_of_user(error.__traceback__))
                trace = "".join(traceback.format_exception(error))
            world.shutdown.end_job(reason, trace, error.code)
        self._record(reason, status)
        if _mpi_runs():
            _print_code(error.code)
        return status

    def _fail(self, error: BaseException) -> int:
        """Print and record an exception. Return the status.

        Only the first of several ranks with one traceback prints it.
        """
        if _mpi_runs():
            _ignore_interrupts()
        status, trace = _status_of_error(error), _trace_of(error)
        prints = is_first(trace, self._folder)
        if prints:
            status = _show(error, status)
        self._record(reason_of(error), status, trace)
        if not prints:
            time.sleep(OUTPUT_LIMIT_S)  # the end of this rank could cut off the other one's output
        return status

    def _record(self, reason: str, status: int, trace: str = "") -> None:
        """Write ``failure-<rank>.json``, as mpidist.mpi.records does once MPI runs.

        It raises no error, because the rank must end: the script may have replaced functions of
        modules, and standard error.
        """
        try:
            import socket

            record = {
                "rank": self._rank,
                "pid": self._pid,
                "host": socket.gethostname(),
                "reason": reason.partition("\n")[0],
                "traceback": trace,
                "exit_code": status,
                "time": time.time(),
            }
            _write_json(os.path.join(self._folder, f"failure-{self._rank}.json"), record)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                sys.stderr.write(
                    f"mpidist run: cannot record why rank {self._rank} failed ({error}); its "
                    "traceback is above\n"
                )


def _answer_looks(
    request: str, answer: str, main: int, sleep: Callable[[float], None], stat: Callable[[str], Any]
) -> None:
    """Write stacks whenever a file changes, for ever.

    Args:
        request: The file. It has the number of the request.
        answer: The file to write: the system's number of this thread, the number of the request,
            samples of the frames of all threads, innermost first, and for each thread its name and
            whether it is no daemon; the main thread is the last.
            Kept are the first samples in which the main thread is at a new line, and the last one.
        main: Identifier of the main thread.
        sleep: ``time.sleep``.
        stat: ``os.stat``.
    """
    changed, own = 0, _thread.get_ident()
    facts: dict[str, Any] = {"thread": _thread.get_native_id()}
    with contextlib.suppress(OSError), open(answer, "w", encoding="utf-8") as file:
        file.write(str(facts).replace("'", '"'))  # json is imported when it is needed
    while True:
        sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # there is no request, or the folder is gone
            if stat(request).st_mtime_ns == changed:
                continue
            changed = stat(request).st_mtime_ns
            samples: list[list[list[tuple[str, int, str]]]] = []
            for number in range(_SAMPLES):
                frames = current_frames()
                threads = [ident for ident in frames if ident not in (own, main)]
                sample = [_frames_of(frames[ident]) for ident in (*threads, main)]
                del frames
                is_new = not samples or sample[-1] != samples[-1][-1]
                if (is_new and len(samples) < _MOST_KEPT) or number == _SAMPLES - 1:
                    samples.append(sample)
                sleep(_SAMPLE_S)
            import json

            # Not threading.enumerate(), which takes a lock that the script may hold.
            known = dict(threading._active)  # type: ignore[attr-defined]
            made = [known.get(ident) for ident in threads]
            kinds = [("", False) if one is None else (one.name, not one.daemon) for one in made]
            del known, made
            with open(request, encoding="utf-8") as file:
                facts |= {"number": json.load(file)["number"], "samples": samples, "threads": kinds}
            _write_json(answer, facts)


def current_frames() -> dict[int, FrameType]:
    """Return the current frame of each thread, by the thread's identifier.

    A garbage collection within ``sys._current_frames`` waits for ever, up to Python 3.11.7 and
    3.12.0 (CPython issue 106883).
    """
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _write_json(path: str, record: dict[str, Any]) -> None:
    """Write a record as a whole or not at all."""
    import json

    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


def _frames_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of a frame and its callers."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _begin(name: str, arguments: list[str], folder: str) -> None:
    """Set ``sys.argv`` and ``sys.path`` as the interpreter sets them for a script."""
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _is_archive(path: str) -> bool:
    """Return whether a path is a folder or a zip file, of which ``__main__.py`` runs.

    The interpreter asks the same hooks. They open regular files only: a pipe can be read only once,
    and the compiler needs its bytes.
    """
    for hook in sys.path_hooks:
        with contextlib.suppress(ImportError):
            hook(path)
            return True
    return False


def _load(path: str) -> tuple[types.CodeType, object]:
    """Return the code of a script, and the value of its ``__loader__``."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    with io.open_code(path) as file:
        data = file.read()
    if path.endswith(".pyc"):
        import marshal

        code: types.CodeType = marshal.loads(data[_PYC_HEADER_BYTES:])
        return code, SourcelessFileLoader("__main__", path)
    code = compile(data, os.path.abspath(path), "exec", dont_inherit=True)
    return code, SourceFileLoader("__main__", path)


def _run_module(name: str, *, alter_argv: bool) -> None:
    import runpy

    # ``python -m`` calls this function, too. run_module() would remove the module from sys.modules
    # at its end, where pickle and other threads still need it.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this file and of runpy."""
    ours = (__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _status_of_error(error: BaseException) -> int:
    return INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else 1


def _trace_of(error: BaseException) -> str:
    """Return the text that ``sys.excepthook`` prints for an exception.

    It is empty if the script has replaced the hook or standard error.
    """
    own_hook = getattr(sys, "excepthook", None) is not sys.__excepthook__
    if own_hook or sys.stderr is not sys.__stderr__:
        return ""
    explain(error)
    try:
        import traceback

        trace = _of_user(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # the methods of an exception may fail
        return ""


def _show(error: BaseException, status: int = 1) -> int:
    """Print an uncaught exception by ``sys.excepthook``, as the interpreter does.

    Args:
        error: The exception.
        status: The exit status of the exception.

    Returns:
        The status. A hook that calls ``sys.exit`` gives another one, but not 0.
    """
    explain(error)
    # Not by assignment, which frozen dataclasses refuse.
    BaseException.with_traceback(error, _of_user(error.__traceback__))
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        _print_code(end.code)
        return status_of(end.code) or status
    except BaseException as failure:
        with contextlib.suppress(Exception):
            BaseException.with_traceback(failure, _of_user(failure.__traceback__))
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(error), error, error.__traceback__)
    return status


def _print_code(code: Any) -> None:
    """Print the argument of ``sys.exit`` unless it is a status, as the interpreter does."""
    if code is not None and not isinstance(code, int):
        with contextlib.suppress(BaseException):  # of its __str__
            print(code, file=sys.stderr)


def _ignore_interrupts() -> None:
    """Ignore SIGINT, so that a second Ctrl-C does not stop the end of the rank."""
    with contextlib.suppress(Exception):  # not in other threads
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    except AttributeError:  # its import has failed half-way
        return False


def _end_now(status: int) -> NoReturn:
    """End the process without exit handlers. The launcher then ends the other ranks."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # The script may have replaced its streams, and the rank must end all the same.
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    variable, *script_words = sys.argv[1:]
    # The script may change the environment, so it is read before.
    Runner(int(os.environ[variable]), os.environ["MPIDIST_RUN_DIR"], script_words).run()
