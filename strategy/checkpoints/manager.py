"""The manager of a strategy's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mpidist.checkpoints.folder import Writing
from mpidist.checkpoints.manager import CheckpointManager, Pace, Stateful
from strategy.checkpoints.lock import CheckpointLock
from strategy.checkpoints.parts import step_in

if TYPE_CHECKING:
    from mpidist.group import ProcessGroup
    from strategy.client.checkpoints import CheckpointClient
    from strategy.parameter_server_strategy import ParameterServerStrategy


class StrategyCheckpoints(CheckpointManager):
    """Saves the variables of a strategy; see :meth:`ParameterServerStrategy.checkpoints`.

    Args:
        strategy: The strategy.
        client: Lets the ps tasks save.
        lock: Lets saves and restores of this process run one after the other.
        directory: Folder of all checkpoints.
        every: Steps between two checkpoints, or None.
        keep: Number of checkpoints to keep.
        extra: Objects with a state that holds for all workers, by name.
        own: Objects with a state of each worker, by name.
        group: The workers; None for one worker.
        pace: When a worker waits for others in its steps.
    """

    _parts_writer = "ps"

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        client: CheckpointClient,
        lock: CheckpointLock,
        directory: str,
        every: int | None,
        keep: int,
        extra: Mapping[str, Stateful] | None,
        own: Mapping[str, Stateful] | None,
        group: ProcessGroup | None,
        pace: Pace,
    ) -> None:
        super().__init__(directory, every, keep, extra, own, group, pace)
        self._strategy = strategy
        self._client = client
        self._lock = lock

    def _settle(self) -> None:
        self._strategy.drain()

    def _end_steps(self) -> None:
        self._strategy.finish()

    def _parts(self) -> int:
        return self._client.servers

    def _global_step(self) -> int:
        return int(self._strategy.global_step)

    def _names(self) -> list[str]:
        return list(self._strategy.creator.by_name)

    def _step_of(self, writing: Writing) -> int:
        return step_in(writing.paths, self._strategy.global_step.name, writing.step)

    def _copy_arrays(self, paths: Sequence[str]) -> Callable[[], None]:
        """Let the ps tasks copy their variables, as the chief."""
        if not self._strategy.is_chief:
            return _nothing
        self._lock.acquire("the save of a checkpoint")
        try:
            save = self._client.begin_save(paths, copies=True)
        except BaseException:
            self._lock.release()
            raise
        self._lock.hand_over()

        def write() -> None:
            try:
                save.end()
            finally:
                self._lock.release()

        return write

    def _restore_arrays(self, path: str) -> None:
        self._strategy.restore(path)


def _nothing() -> None:
    """Do nothing. The ps tasks write for all workers."""
