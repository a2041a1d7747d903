"""The ways between the GPUs of a group's members: which there are, and which is the fastest."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import host_view
from mpidist.config import config
from mpidist.cuda import DeviceArray, NotDirectError, Way, cupy, finish, on_device
from mpidist.errors import DistBackendError, FailedPreconditionError
from mpidist.group.device_mpi import DeviceMpi
from mpidist.group.direct_call import Call, on_gpus
from mpidist.group.process_group import ProcessGroup
from mpidist.group.way_makers import MAKERS
from mpidist.group.way_table import STAGED, WayTable

logger = logging.getLogger("mpidist")

NAMES = tuple(MAKERS)

LEAST_BYTES = 64 << 10
"""Smaller operations go through the host: to agree on a way would cost as much."""
SIZES = (LEAST_BYTES, 1 << 20, 16 << 20)
_ROUNDS = 3


class Ways:
    """Finds the ways of a group, and chooses among them. All members do so alike.

    Args:
        group: Whose.

    Attributes:
        found: Whether they have been looked for.
        from_bytes: Operations of fewer bytes go through the host.
        table: What was found.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._made: dict[str, Way] = {}
        self._number = -1
        self.found = False
        self.from_bytes: float = LEAST_BYTES
        self.table = WayTable()

    def close(self) -> None:
        """Collective. Give back what the ways hold; none is there afterwards."""
        while self._made:
            self._made.popitem()[1].close()

    def abandon(self) -> None:
        """Local. The same, where others may not do so."""
        while self._made:
            self._made.popitem()[1].abandon()

    def choice(self, nbytes: int, names: Sequence[str]) -> Way | None:
        """Local. The fastest of some ways; None if the host is faster."""
        for name in self.table.order(nbytes):
            if name == STAGED:
                return None
            if name in names:
                return self._made[name]
        return None

    def refused(self, way: Way, error: NotDirectError) -> None:
        """Collective. Take note of a call that a way did not take, on all members."""
        logger.info("group %r: %s goes through the host: %s", self._group.name, way.name, error)
        if error.lasting:
            self.table.missing[way.name] = str(error)
            self._made.pop(way.name).close()

    def can(self, name: str, call: Call) -> bool:
        """Local. Whether a call can go by a way, as far as this member knows."""
        way = self._made.get(name)
        if way is None or call.arrays is None or call.name not in way.carries:
            return False
        if not call.fits(self._group.rank(), self._group.size(), self._number):
            return False
        dtype = call.arrays[0].dtype
        return not call.reduction or way.reduces(dtype, call.reduction)

    def message(self, array: Any, write: bool) -> Any:
        """Local. Memory of an array on a GPU that MPI takes in a message; None for all others."""
        way = self._made.get("mpi")
        if not isinstance(way, DeviceMpi) or array.__class__ is np.ndarray:
            return None
        (there,) = on_gpus([array]) or (None,)
        if there is None or there.number != self._number or (write and not there.writeable):
            return None
        return way.message(there)

    def check(self) -> None:
        """Local. FailedPreconditionError if the way that ``MPIDIST_GPU_WAY`` names is not there."""
        if config.gpu_way in self.table.missing:
            raise FailedPreconditionError(
                f"MPIDIST_GPU_WAY={config.gpu_way}, but group {self._group.name!r} cannot go this "
                f"way: {self.table.missing[config.gpu_way]}"
            )

    def find(self, number: int) -> None:
        """Collective. Make the ways that there are, prove them, and take their times.

        Args:
            number: Of the GPU of this member.

        Raises:
            FailedPreconditionError: ``MPIDIST_GPU_WAY`` is not the same on all members.
        """
        said = self._all(config.gpu_way)
        if len(set(said)) > 1:
            each = dict(zip(self._group.ranks, said, strict=True))
            raise FailedPreconditionError(f"MPIDIST_GPU_WAY differs between ranks: {each}")
        self._number = number
        wanted = NAMES if config.gpu_way == "auto" else (config.gpu_way,)
        missing = self.table.missing
        with on_device(number, "finding the ways to other GPUs"):
            for name in wanted:
                why = self._make(name) or self._prove(name)
                if why is not None:
                    missing[name] = why
            self._measure(staged=config.gpu_way == "auto")
        self.found = True
        logger.info("group %r between GPUs: %s", self._group.name, self.table)

    # Inside

    def _make(self, name: str) -> str | None:
        """Collective. Make a way; why it is not there, if it is not."""
        maker = MAKERS[name](self._group, self._number)
        why = self._first_of(maker.why_not())
        if why is None:
            why = maker.why_not_together(self._all(maker.place()))
        if why is not None:
            return why

        def make() -> None:
            self._made[name] = maker.make()

        why = self._try(make)
        if why is not None and name in self._made:  # not on all members
            self._made.pop(name).abandon()
        return why

    def _prove(self, name: str) -> str | None:
        """Collective. Have a way carry numbers whose sum is known; why it is not right."""
        way, package, held = self._made[name], cupy(), list[Any]()
        rank, size = self._group.rank(), self._group.size()
        ramp = np.arange(LEAST_BYTES // 4 + 3, dtype=np.float32) % 1000
        op = "AVG" if way.reduces(ramp.dtype, "AVG") else "SUM"
        wanted = size * ramp + size * (size - 1) // 2
        if op == "AVG":
            wanted /= size

        def place() -> None:
            held.extend((package.asarray(ramp + rank), package.asarray(ramp * (rank + 1))))

        def begin() -> None:
            way.all_reduce(DeviceArray(held[0]), op)
            way.broadcast(DeviceArray(held[1]), size - 1)

        def compare() -> None:
            for array, right in zip(held, (wanted, ramp * size), strict=True):
                if not np.array_equal(host_view(array), right):
                    raise DistBackendError("it gives wrong numbers")

        # Nobody waits for what others may not have begun.
        why = self._try(place) or self._try(begin) or self._try(compare)
        if why is not None:
            self._made.pop(name).abandon()
        return why

    def _try(self, attempt: Callable[[], None]) -> str | None:
        """Collective. Why something failed on some member; None if it did on none."""
        problem = None
        try:
            attempt()
        except Exception as error:  # whatever it is, all are told, and go on without the way
            problem = str(error) or repr(error)
        return self._first_of(problem)

    def _measure(self, staged: bool) -> None:
        """Collective. Take the times of the ways that there are."""
        zeros: list[Any] = []
        why = self._try(lambda: zeros.append(cupy().asarray(np.zeros(SIZES[-1] // 4, "f4"))))
        if why is not None:
            self.table.missing |= dict.fromkeys(self._made, why)
            self.close()
        if not self._made:  # where one was named, each operation says so
            self.from_bytes = float("inf") if staged else LEAST_BYTES
            return
        names = [*self._made, *([STAGED] if staged else [])]
        for size in SIZES:
            array = zeros[0][: size // 4]
            times = np.array([self._time(name, array) for name in names])
            ProcessGroup.all_reduce(self._group, times, "max")
            self.table.seconds[size] = dict(zip(names, times.tolist(), strict=True))
        direct = [size for size in SIZES if self.table.order(size)[0] != STAGED]
        # Down to where the next smaller size would be the nearer one.
        self.from_bytes = min(direct, default=float("inf"))

    def _time(self, name: str, array: Any) -> float:
        group, doing, times = self._group, f"timing all_reduce by {name}", []
        for _ in range(1 + _ROUNDS):
            finish(self._number, doing)
            group.barrier()
            begun = time.perf_counter()
            if name == STAGED:
                ProcessGroup.all_reduce(group, array)
            else:
                self._made[name].all_reduce(DeviceArray(array), "SUM")
            finish(self._number, doing)
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])

    def _first_of(self, problem: str | None) -> str | None:
        """Collective. The first problem that a member has, with who has it."""
        problems = self._all(problem)
        ranks = [rank for rank, one in zip(self._group.ranks, problems, strict=True) if one]
        if not ranks:
            return None
        first = problems[self._group.ranks.index(ranks[0])]
        return first if len(set(problems)) == 1 else f"rank {ranks[0]}: {first}"

    def _all(self, fact: Any) -> list[Any]:
        """Collective. What each member says."""
        facts: list[Any] = [None] * self._group.size()
        self._group.all_gather_object(facts, fact)
        return facts
