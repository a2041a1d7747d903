"""Save a training every few steps, and go on from the last checkpoint at the next start.

Every rank of a training makes the same calls on its manager. They meet to save: each rank gives its
number of steps and the states of its iterators to rank 0, which writes the checkpoint. The arrays
of ranks are copied while the ranks wait, and written by a thread while the ranks train. A ps task
copies its variables and writes the copies while the ranks train.

Signals reach ranks at different steps; see :class:`Pace`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import numpy as np

from mpidist.checkpoints import folder
from mpidist.checkpoints.writing_thread import WritingThread
from mpidist.config import config
from mpidist.errors import Error, FailedPreconditionError, InvalidArgumentError, NotFoundError
from mpidist.group import ProcessGroup
from mpidist.mpi import waiting_for
from mpidist.mpi.records import write_manager
from mpidist.runner import STOP_STATUS

logger = logging.getLogger(__name__)


class Pace(Enum):
    """When a rank waits for others in its steps.

    A signal to stop reaches the ranks at different steps.
    """

    LOCKSTEP = "in every step"
    """One rank may enter the next step while another one wants to save. So the ranks compare a flag
    in every step."""
    BOUNDED = "in some steps"
    """A rank leaves the training before it saves, and others do not wait for it any more."""
    FREE = "never"
    """The ranks continue to the step of the fastest rank, and then save."""


class SavedAndStopped(SystemExit):
    """The job was told to stop, and a checkpoint of the last step is complete. The status is 75."""

    def __init__(self) -> None:
        super().__init__(STOP_STATUS)


class Stateful(Protocol):
    """An object that continues from a saved state, such as an iterator of ``dataservice``."""

    def get_state(self) -> bytes:
        """Return the state."""

    def set_state(self, state: bytes) -> None:
        """Continue from a state."""


@dataclass(frozen=True)
class _Report:
    """The contribution of a rank to a save.

    Attributes:
        steps: Number of its steps.
        states: States of its own objects, by name.
        stop: The signal that it has received, or 0.
        ended: Whether it makes no more steps.
    """

    steps: int
    states: dict[str, bytes]
    stop: int
    ended: bool


@dataclass(frozen=True)
class _Decision:
    """The answer of rank 0 to all reports.

    Attributes:
        paths: Path of the part of each process that writes; empty if the save has failed.
        problem: Why the save has failed; empty if it has not.
        stop: The signal after which the job stops, or 0.
        ended: Whether no rank makes more steps.
        until: Step at which the ranks save before the job stops, if some have not reached it; else
            0.
    """

    paths: list[str]
    problem: str
    stop: int
    ended: bool
    until: int = 0


class CheckpointManager(ABC):
    """Base class of managers.

    Args:
        directory: Folder of all checkpoints.
        every: Steps between two checkpoints; None for a checkpoint only at the end, and after a
            signal.
        keep: Number of checkpoints to keep, at least 1.
        extra: Objects with a state that holds for all ranks, by name of the file.
        own: Objects with a state of each rank, by name of the files.
        group: The ranks of the training; None for this process alone. The manager frees it.
        pace: When a rank waits for others in its steps.

    Raises:
        ValueError: ``every`` or ``keep`` is less than 1, or a name of a file is not valid or given
            twice.
    """

    _parts_writer = "rank"

    def __init__(
        self,
        directory: str,
        every: int | None,
        keep: int,
        extra: Mapping[str, Stateful] | None,
        own: Mapping[str, Stateful] | None,
        group: ProcessGroup | None,
        pace: Pace,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, not {every!r}")
        self._directory = os.path.abspath(directory)
        self._every = every
        self._keep = keep
        self._extra, self._own = dict(extra or {}), dict(own or {})
        if both := self._extra.keys() & self._own.keys():
            raise ValueError(f"{min(both)!r} is in extra and in own; give it once")
        folder.Writing(directory, 0, 0, keep, [*self._extra, *self._own])  # checks the arguments
        self._own_groups = [] if group is None else [group]  # freed by close()
        self._group = None if group is None or group.size() == 1 else group
        self._rank = 0 if group is None else group.rank()
        self._pace = Pace.BOUNDED if self._group is None else pace
        self._flags = np.zeros(3, np.int32)
        self._stop = 0
        self._writer = WritingThread()
        self._problem = ""
        self._path: str | None = None
        self._stopped_by = 0
        self._steps = 0
        self._lead = 0  # steps before the slowest rank at the start
        self._until = 0
        self._closed = False
        self._handlers: dict[int, Any] | None = None  # the previous handlers of signals

    @property
    def steps(self) -> int:
        """The number of steps of this rank, also those before a restart."""
        return self._steps

    @property
    def path(self) -> str | None:
        """The last complete checkpoint; None before the first.

        Rank 0 knows it at once, other ranks after :meth:`restore` and :meth:`close`.
        """
        return self._path

    def restore(self) -> int:
        """Collective. Restore the latest complete checkpoint, if there is one.

        Call it once, before the first step.

        Returns:
            The number of steps of this rank in the checkpoint; 0 without a checkpoint.

        Raises:
            NotFoundError: The checkpoint lacks a variable or a state.
            InvalidArgumentError: A variable has another shape or dtype, the states belong to
                another number of ranks, or another kind of manager has written the checkpoint.
            DataLossError: The checkpoint is damaged.
        """
        found = folder.checkpoints(self._directory) if self._rank == 0 else []
        path: str | None = self._tell(found[-1] if found else None)
        if path is None:
            return 0
        for other in found[:-1]:
            if folder.is_damaged(other):
                logger.warning(
                    "the index of the checkpoint %s is damaged: %s is restored", other, path
                )
        self._restore_arrays(path)
        loaded = self._load_states(path) if self._rank == 0 else None
        steps, states, problem = self._tell(loaded)
        if problem is not None:
            raise problem
        self._steps = steps[self._rank % len(steps)]
        self._lead = self._steps - min(steps)
        for name, stateful in (self._extra | self._own).items():
            stateful.set_state(states[name][self._rank % len(states[name])])
        self._path = path
        return self._steps

    def step(self) -> None:
        """Count a step of this rank, and save if a checkpoint is due.

        Collective if a checkpoint is due. In a training whose ranks wait for each other in every
        step, always collective.

        Raises:
            SavedAndStopped: SIGUSR1 or SIGTERM has told the job to stop. It is a SystemExit with
                status 75.
            FailedPreconditionError: The checkpoint before a stop could not be written.
        """
        if self._handlers is None:
            self._begin_steps()
        self._steps += 1
        due = self._every is not None and (self._steps - self._lead) % self._every == 0
        stop, due, _ = self._agree(due=due, ended=False)
        if stop and self._pace is Pace.BOUNDED:
            self._end_steps()
        if self._steps == self._until or (not self._until and (stop or due)):
            self._meet(ended=False)

    def save(self) -> None:
        """Collective. Begin a checkpoint, whether or not it is due.

        If it cannot be written, a warning is logged, and the training goes on.

        Raises:
            SavedAndStopped: See :meth:`step`.
            FailedPreconditionError: The manager was closed.
        """
        if self._pace is Pace.LOCKSTEP:
            self._agree(due=True, ended=False)
        self._meet(ended=False)

    def close(self) -> None:
        """Collective. Save the end of the training, and wait until the checkpoint is complete.

        Ranks may end at different steps: the call returns when all ranks have called it. Until then
        this rank takes part in the checkpoints of the others. A strategy is finished, and makes no
        more steps. A second call does nothing.

        Raises:
            SavedAndStopped: A signal has told the job to stop before all ranks have ended.
            FailedPreconditionError: The checkpoint could not be written.
        """
        if self._closed:
            return
        self._end_steps()
        while True:
            stop, due, going = self._agree(due=False, ended=True)
            if self._pace is Pace.LOCKSTEP and going and not stop and not due:
                continue
            if self._meet(ended=True):
                break
        self._release(is_saved=True)
        for group in self._own_groups:
            group.free()

    def __enter__(self) -> Self:
        self._begin_steps()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._release()

    # For subclasses

    @abstractmethod
    def _settle(self) -> None:
        """Wait until all steps of this rank are in the arrays."""

    @abstractmethod
    def _end_steps(self) -> None:
        """Make no more steps, so that no rank waits for this rank."""

    @abstractmethod
    def _parts(self) -> int:
        """Return the number of processes that write arrays."""

    @abstractmethod
    def _global_step(self) -> int:
        """Return the step that names the checkpoint. Called on rank 0."""

    def _step_of(self, writing: folder.Writing) -> int:
        """Return the step in the files of a checkpoint."""
        return writing.step

    @abstractmethod
    def _copy_arrays(self, paths: Sequence[str]) -> Callable[[], None]:
        """Copy the arrays of this rank, or let ps tasks copy theirs. Return a function that writes.

        Args:
            paths: Path of the file of each process that writes.
        """

    @abstractmethod
    def _restore_arrays(self, path: str) -> None:
        """Collective. Restore the arrays from a checkpoint."""

    def _gather_problems(self, problem: str) -> list[str]:
        """Return the problems of all writing processes, on rank 0. A thread calls it."""
        return [problem]

    def _names(self) -> list[str]:
        """Return the names of the variables, for the index of the checkpoint."""
        return []

    # Internals

    def _begin_steps(self) -> None:
        """Handle the signals that tell the job to stop, from now on.

        Raises:
            FailedPreconditionError: The folder cannot be written.
        """
        if self._rank == 0:
            folder.check_writable(self._directory)
        self._handlers = {}
        if not config.hooks or threading.current_thread() is not threading.main_thread():
            return
        # mpidist run sends SIGUSR1. Launchers send SIGTERM to end ranks after a failure.
        numbers = (signal.SIGUSR1,) if config.run_dir else (signal.SIGUSR1, signal.SIGTERM)
        for number in numbers:
            self._handlers[number] = signal.signal(number, self._note_signal)
        self._record()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = number
        previous = (self._handlers or {}).get(number)
        if callable(previous):
            previous(number, frame)

    def _record(self) -> None:
        """Tell ``mpidist run`` that this rank saves after SIGUSR1, or that the job has saved."""
        members = 1 if self._group is None else self._group.size()
        ready = members if self._handlers and not self._closed else 0
        write_manager(self._rank, ready, self._steps, self._path, self._stopped_by)

    def _release(self, *, is_saved: bool = False) -> None:
        """Restore the handlers of signals.

        Args:
            is_saved: Whether the end of the training is saved. The job may still get SIGUSR1, for
                example while it evaluates, and has nothing more to save. So the signal is ignored
                if it had no handler.
        """
        self._closed = True
        self._writer.close()
        if self._handlers:
            self._record()
        for number, handler in (self._handlers or {}).items():
            if signal.getsignal(number) == self._note_signal:
                ignores = is_saved and number == signal.SIGUSR1 and handler is signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if ignores else handler)

    def _agree(self, *, due: bool, ended: bool) -> tuple[int, bool, bool]:
        """Return the signal, whether a save is due, and whether a rank still makes steps.

        Collective if the ranks work in lockstep; else the values of this rank.
        """
        if self._pace is not Pace.LOCKSTEP:
            return self._stop, due, not ended
        assert self._group is not None
        self._flags[:] = self._stop, due, not ended
        self._group.all_reduce(self._flags, "max")
        return int(self._flags[0]), bool(self._flags[1]), bool(self._flags[2])

    def _meet(self, *, ended: bool) -> bool:
        """Collective. Save. Return whether no rank makes more steps."""
        if self._closed:
            raise FailedPreconditionError("the manager of checkpoints was closed; make a new one")
        self._settle()
        self._join()
        states = _states_of(self._own)
        reports = self._gather(_Report(self._steps, states, self._stop, ended))
        writing, write = None, _nothing
        if self._rank == 0:
            writing, write, decision = self._begin(reports)
        else:
            decision = None
        told: _Decision = self._tell(decision)
        if told.until:
            self._until = told.until
            # Ranks at this step, and ranks that have ended, wait for the others.
            return self._meet(ended=ended) if ended or self._steps == told.until else False
        if self._rank and told.paths:
            try:
                write = self._copy_arrays(told.paths)
            except Error as error:
                write = partial(_fail, error)  # rank 0 learns it from the writing thread
        if told.paths:
            self._writer.start(partial(self._finish, writing, write))
        if told.stop or told.ended:
            self._wait_for_last(told)
        return told.ended

    def _load_states(self, path: str) -> tuple[list[int], dict[str, list[bytes]], Error | None]:
        """Return the steps and states of all ranks, and the reason why they do not fit."""
        index, size = folder.index_of(path), 1 if self._group is None else self._group.size()
        ranks = folder.fact(index, "ranks") or 1
        steps: list[int] | None = folder.fact(index, "steps")
        if steps is None:
            steps = [int(folder.fact(index, "step") or 0)]
            logger.warning(
                "save() has written the checkpoint %s, not a manager: its global step, %d, is "
                "taken for the number of steps of each rank", path, steps[0],
            )  # fmt: skip
        states: dict[str, list[bytes]] = {}
        try:
            for name in self._extra:
                states[name] = [Path(path, name).read_bytes()]
            for name in self._own:
                files = [Path(path, file) for file in _file_names(name, ranks)]
                states[name] = [file.read_bytes() for file in files]
        except OSError as error:
            missing = NotFoundError(
                f"the checkpoint {path!r} has no state of {name!r} ({error.strerror}): leave it "
                "out of extra or own, or give another folder"
            )
            return [], {}, missing
        problem = ""
        if len(steps) not in (1, size):
            problem = f"the {ranks} ranks of checkpoint {path!r} made different numbers of steps"
        elif self._own and ranks != size:
            problem = f"the states {[*self._own]} in checkpoint {path!r} belong to {ranks} ranks"
        if problem:
            text = f"{problem}, and this training has {size}: start it with {ranks}"
            return [], {}, InvalidArgumentError(text)
        return steps, states, None

    def _gather(self, report: _Report) -> list[_Report]:
        """Return the reports of all ranks on rank 0."""
        if self._group is None:
            return [report]
        reports: list[Any] | None = [None] * self._group.size() if self._rank == 0 else None
        self._group.gather_object(report, reports, group_dst=0)
        return reports or []

    def _tell(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks."""
        if self._group is None:
            return value
        values = [value]
        self._group.broadcast_object_list(values, group_src=0)
        return values[0]

    def _begin(
        self, reports: Sequence[_Report]
    ) -> tuple[folder.Writing | None, Callable[[], None], _Decision]:
        """Begin a checkpoint on rank 0, and copy the arrays of rank 0."""
        stop = max(report.stop for report in reports)
        ended = all(report.ended for report in reports)
        running = [report.steps for report in reports if not report.ended] or [0]
        if stop and self._pace is Pace.FREE and min(running) < max(running):
            return None, _nothing, _Decision([], "", stop, ended, max(running))
        if self._path is None and (earlier := folder.checkpoints(self._directory)):
            logger.warning(
                "restore() has not been called, and the folder has the checkpoint %s: it is "
                "removed when there are %d later ones", earlier[-1], self._keep,
            )  # fmt: skip
        files = _states_of(self._extra)
        for name in self._own:
            states = [report.states[name] for report in reports]
            files |= zip(_file_names(name, len(states)), states, strict=True)
        writing = folder.Writing(
            self._directory, self._global_step(), self._parts(), self._keep, files, self._names(),
            self._parts_writer,
        )  # fmt: skip
        steps = [report.steps for report in reports]
        if stop and self._extra and len(set(running)) > 1:
            logger.warning(
                "the ranks stop after different steps, %s, and the states %s hold for those of "
                "rank 0: give them in own to lose and repeat no elements", steps, [*self._extra],
            )  # fmt: skip
        writing.facts["steps"] = steps if len(set(steps)) > 1 else steps[:1]
        writing.facts["ranks"] = len(reports)
        try:
            with ExitStack() as stack:
                stack.enter_context(writing)
                for name, content in files.items():
                    writing.add(name, content)
                write = self._copy_arrays(writing.paths)
                stack.pop_all()
        except Error as error:
            self._problem = _text_of(error)
            return None, _nothing, _Decision([], self._problem, stop, ended)
        return writing, write, _Decision(writing.paths, "", stop, ended)

    def _finish(self, writing: folder.Writing | None, write: Callable[[], None]) -> None:
        """Write the arrays of this rank. On rank 0, complete the checkpoint."""
        problem = ""
        try:
            write()
        except Exception as error:
            problem = _text_of(error)
        problems = self._gather_problems(problem)
        if writing is None:
            return
        try:
            with ExitStack() as stack:
                stack.push(writing)
                if failed := next(filter(None, problems), ""):
                    _fail(FailedPreconditionError(failed))
                writing.name_by(self._step_of(writing))
        except Exception as error:
            self._problem = _text_of(error)
            return
        self._path = writing.path

    def _join(self) -> None:
        """Wait until the last checkpoint is complete. Log a warning if it could not be written."""
        self._wait_for_writer()
        if self._problem:
            logger.warning(
                "a checkpoint could not be written, and the training goes on: %s", self._problem
            )
            self._problem = ""

    def _wait_for_writer(self) -> None:
        with waiting_for("the last checkpoint to be written"):
            self._writer.wait()

    def _wait_for_last(self, decision: _Decision) -> None:
        """Wait for the checkpoint before the end of the job. Stop the job after a signal."""
        self._wait_for_writer()
        stops = bool(decision.stop) and not decision.ended
        problem = self._problem or decision.problem
        if self._rank == 0 and stops and not problem:
            self._stopped_by = decision.stop
            self._record()  # before another rank can end the job
        problem, self._path = self._tell((problem, self._path))
        if problem:
            self._release()
            raise FailedPreconditionError(problem)
        if stops:
            self._release(is_saved=True)
            raise SavedAndStopped


def _file_names(name: str, ranks: int) -> list[str]:
    """Return the names of the files with the states of all ranks."""
    return [f"{name}-{rank}" for rank in range(ranks)]


def _states_of(objects: Mapping[str, Stateful]) -> dict[str, bytes]:
    """Return the states of objects by name."""
    states = {name: stateful.get_state() for name, stateful in objects.items()}
    for name, state in states.items():
        if not isinstance(state, bytes):
            raise TypeError(
                f"get_state() of {name!r} must return bytes, not {type(state).__name__}"
            )
    return states


def _text_of(error: Exception) -> str:
    """Return the text of an error, which is not empty."""
    return str(error) or repr(error)


def _fail(error: Error) -> None:
    """Raise an error."""
    raise error


def _nothing() -> None:
    """Do nothing. This is the write of a process that has no arrays."""
