"""What the ranks of a trial do: give MPI the addresses of device memory, and compare what comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda import device_count, on_device
from mpidist.cuda.trial import BEGUN, RIGHT
from mpidist.runtime import world

if TYPE_CHECKING:
    from mpi4py import MPI

# Libraries send by several ways, by size: with the header, through shared memory, from where it is.
_COUNTS = (1, 1 << 10, 3 << 13, (1 << 19) + 1)  # of float64
_TAG = 1


def main() -> None:
    """Collective. Try each way for each size; the first rank says how far it has come."""
    here = world()
    comm, rank = here.comm, here.rank
    if rank == 0:
        print(BEGUN, flush=True)
    # Ranks may share a device; and where there are several, they may not.
    for numbers in ((0, 0), (0, 1))[: device_count()]:
        with on_device(numbers[rank], "the trial of MPI with device memory") as package:
            for size in _COUNTS:
                _try(package, comm, size)
    comm.Barrier()
    if rank == 0:
        print(RIGHT, flush=True)


def _try(package: Any, comm: MPI.Intracomm, size: int) -> None:
    """Every kind of call that groups make, for arrays of one size."""
    from mpi4py import MPI

    rank, ranks = comm.rank, comm.size
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    own = package.asarray(_values(rank, size))
    got, on_host = package.zeros(size), np.zeros(size)
    total, every = package.asarray(_values(rank, size)), package.zeros(ranks * size)
    package.cuda.Device().synchronize()
    comm.Sendrecv(_buffer(own), right, _TAG, _buffer(got), left, _TAG)
    _check(package, got, _values(left, size), f"{size} numbers by Sendrecv")
    comm.Sendrecv(_buffer(own), right, _TAG, on_host, left, _TAG)
    _check(package, on_host, _values(left, size), f"{size} numbers to the host by Sendrecv")
    comm.Sendrecv(_values(rank, size) + 1, right, _TAG, _buffer(got), left, _TAG)
    _check(package, got, _values(left, size) + 1, f"{size} numbers from the host by Sendrecv")
    requests = [comm.Irecv(_buffer(got), left, _TAG), comm.Isend(_buffer(own), right, _TAG)]
    MPI.Request.Waitall(requests)
    _check(package, got, _values(left, size), f"{size} numbers by Isend and Irecv")
    parts = [_values(other, size) for other in range(ranks)]
    comm.Allreduce(MPI.IN_PLACE, _buffer(total))
    _check(package, total, np.sum(parts, 0), f"the sum of {size} numbers by Allreduce")
    comm.Iallreduce(_buffer(own), _buffer(got)).Wait()
    _check(package, got, np.sum(parts, 0), f"the sum of {size} numbers by Iallreduce")
    comm.Allgather(_buffer(own), _buffer(every))
    _check(package, every, np.concatenate(parts), f"{size} numbers a rank by Allgather")
    comm.Bcast(_buffer(own), 0)
    _check(package, own, parts[0], f"{size} numbers by Bcast")


def _values(rank: int, size: int) -> NDArray[np.float64]:
    """What a rank has; sums of them are exact."""
    return np.arange(size, dtype=np.float64) * (rank + 1) + rank


def _buffer(array: Any) -> tuple[Any, Any]:
    """Device memory as mpi4py takes it: by its address alone."""
    from mpi4py import MPI

    return MPI.buffer.fromaddress(array.data.ptr, array.nbytes), MPI.DOUBLE


def _check(package: Any, array: Any, expected: NDArray[np.float64], what: str) -> None:
    package.cuda.Device().synchronize()  # no call of MPI waits for its own copies on the device
    got = package.asnumpy(array)
    if not np.array_equal(got, expected):
        place = int(np.flatnonzero(got != expected)[0])
        sys.exit(f"{what} are wrong: number {place} is {got[place]}, not {expected[place]}")


if __name__ == "__main__":
    main()
