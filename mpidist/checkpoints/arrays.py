"""Checkpoints of named arrays, for programs on process groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.host_view import host_view
from mpidist.checkpoints import folder
from mpidist.checkpoints.manager import CheckpointManager, Pace, Stateful
from mpidist.checkpoints.tensor_file import read_header, read_tensor, stored_name, write_tensors
from mpidist.collectives.default import group_or_default
from mpidist.errors import DataLossError, InvalidArgumentError, NotFoundError
from mpidist.gpu import HostStaging
from mpidist.group import ProcessGroup, make_group

Array = NDArray[Any]
Rule = Callable[[str, Sequence[Array]], Array]
"""Returns the array of this rank from the name of an array and its parts on all ranks."""


class Checkpoints(CheckpointManager):
    """Collective. Save named arrays every few steps, and go on from them at the next start.

    Each rank writes its own arrays. A checkpoint is complete, or it does not exist. The arrays are
    copied when a checkpoint is due, and written while the training goes on. After SIGUSR1, as a
    batch system sends it before the time limit, the ranks save after the step, and the job ends
    with status 75. ``mpidist run --restarts`` starts a job again that has failed.

    All ranks of the group make the same calls: :meth:`restore` once, :meth:`step` after each step,
    and :meth:`close` at the end. As a context manager, the manager closes at the end of the block.

    Args:
        directory: Folder of all checkpoints. All ranks see it, on one file system.
        arrays: The arrays of this rank by name: NumPy arrays, CPU tensors of torch, or arrays on a
            GPU. They are saved, and written in place by :meth:`restore`.
        every: Steps between two checkpoints. By default there is one only at the end, and after a
            signal.
        keep: Number of checkpoints to keep, at least 1.
        extra: Objects with a state that holds for all ranks, by name of a file: an iterator over
            all batches, or over a data service with a fixed order, or any object with
            ``get_state() -> bytes`` and ``set_state(bytes)``. The state of rank 0 is saved, and
            restored on all ranks.
        own: Objects with a state of each rank, such as one that wraps a random generator.
            ``get_state`` returns bytes. Such a checkpoint can be restored only by as many ranks.
        rule: Returns the array of this rank if the checkpoint was written by another number of
            ranks. Its arguments are the name and the arrays of all ranks of that time. ``"first"``
            takes the array of rank 0, for arrays that are equal on all ranks. By default such a
            checkpoint is an error.
        group: The ranks; by default the default group.

    Raises:
        TypeError: The format of the files does not have a dtype.
        ValueError: ``every`` or ``keep`` is less than 1, or a name is not valid.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> weights, folder = np.zeros(3), tempfile.mkdtemp()
        >>> with dist.Checkpoints(folder, {"weights": weights}, every=10) as checkpoints:
        ...     for step in range(checkpoints.restore(), 25):
        ...         weights += 1
        ...         checkpoints.step()
        >>> weights[:] = 0
        >>> dist.Checkpoints(folder, {"weights": weights}).restore()
        25
        >>> weights
        array([25., 25., 25.])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        arrays: Mapping[str, Any],
        *,
        every: int | None = None,
        keep: int = 3,
        extra: Mapping[str, Stateful] | None = None,
        own: Mapping[str, Stateful] | None = None,
        rule: Rule | str | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        whole = group_or_default(group)
        for array in arrays.values():
            stored_name(host_view(array).dtype)
        if isinstance(rule, str) and rule != "first":
            raise ValueError(f"rule must be 'first' or a function, not {rule!r}")
        # Groups of its own: other threads may use the group of the caller at the same time.
        ranks, written = (
            make_group(whole, whole.ranks, name)
            for name in ("mpidist.Checkpoints", "mpidist.Checkpoints, writing")
        )
        assert ranks is not None
        assert written is not None
        self._written = written
        super().__init__(os.fspath(directory), every, keep, extra, own, ranks, Pace.LOCKSTEP)
        self._own_groups.append(written)
        self._arrays = dict(arrays)
        self._rule = rule
        self._size = ranks.size()
        self._copies: dict[str, Array] = {}

    def _settle(self) -> None:
        """Do nothing: the arrays belong to the caller, and are complete after a step."""

    def _end_steps(self) -> None:
        """Do nothing: the other ranks learn it when they agree."""

    def _parts(self) -> int:
        return self._size

    def _global_step(self) -> int:
        return self._steps

    def _names(self) -> list[str]:
        return list(self._arrays)

    def _copy_arrays(self, paths: Sequence[str]) -> Callable[[], None]:
        for name, array in self._arrays.items():
            view = host_view(array)
            copy = self._copies.get(name)
            if copy is None or copy.shape != view.shape or copy.dtype != view.dtype:
                copy = self._copies[name] = np.empty_like(view, order="C", subok=False)
            np.copyto(copy, view)
        copies, path = dict(self._copies), paths[self._rank]
        checkpoint = os.path.dirname(path).partition(".partial-")[0]

        def write() -> None:
            with folder.reported(checkpoint):
                write_tensors(path, copies, {})

        return write

    def _gather_problems(self, problem: str) -> list[str]:
        problems: list[Any] | None = [None] * self._size if self._rank == 0 else None
        self._written.gather_object(problem, problems, group_dst=0)
        return problems or []

    def _restore_arrays(self, path: str) -> None:
        index = folder.index_of(path)
        files = folder.files_in(path, index, self._parts_writer)
        if len(files) == self._size:
            found = _read(files[self._rank], self._arrays)
        elif self._rule is None:
            raise InvalidArgumentError(
                f"the checkpoint {path!r} was written by {len(files)} ranks, and there are "
                f"{self._size}: start {len(files)} ranks, or give a rule"
            )
        elif isinstance(self._rule, str):
            found = _read(files[0], self._arrays)
        else:
            parts = [_read(file, self._arrays) for file in files]
            found = {name: self._rule(name, [part[name] for part in parts]) for name in parts[0]}
        for name, array in self._arrays.items():
            view = host_view(array, read=False)
            same = found[name].dtype == view.dtype.newbyteorder("=")
            if not same or found[name].shape != view.shape:
                raise InvalidArgumentError(
                    f"the array {name!r} is {_shape(found[name])} in the checkpoint {path!r}, and "
                    f"{_shape(view)} here"
                )
        for name, array in self._arrays.items():
            view = host_view(array, read=False)
            np.copyto(view, found[name])
            if isinstance(view, HostStaging):
                view.upload()
        if self._rank == 0:
            folder.warn_of_others(path, index, self._arrays)


def _shape(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _read(path: str, names: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays from a file.

    Raises:
        NotFoundError: The file lacks an array.
        DataLossError: The file is damaged.
    """
    try:
        tensors, _ = read_header(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    if missing := sorted(set(names) - set(tensors)):
        raise NotFoundError(f"the checkpoint {os.path.dirname(path)!r} has no {missing}")
    try:
        return {name: read_tensor(path, tensors[name]) for name in names}
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, why: object) -> DataLossError:
    return DataLossError(
        f"the file {path!r} of a checkpoint cannot be read ({why}); remove this checkpoint to "
        "restore the one before"
    )
