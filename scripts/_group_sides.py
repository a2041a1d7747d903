"""Sides of bench_group: each operation by mpidist, mpi4py and gloo."""

import numpy as np

import mpidist as dist

OBJECT = {"a": 1, "bytes": 8}


class Memory:
    """Arrays and objects for the operations. All arrays are float32.

    Attributes:
        part: Array of ``nbytes``.
        target: Array of the size of the part.
        whole: Array with the size of one part for each rank.
        other: Array of the size of the whole.
        split: Views of the whole, one for each rank.
        others: Views of ``other``, one for each rank.
        rows: The list ``split`` on the root, None on other ranks.
        pieces: Eight arrays with an eighth of the elements of the part, like gradients of layers.
        objects: List with a place for the object of each rank.
        given: Objects to scatter on the root, None on other ranks.
        at_root: List for the gathered objects on the root, None on other ranks.
    """

    def __init__(self, group, nbytes, zeros):
        count, size = nbytes // 4, group.size()
        self.part, self.target = zeros(count), zeros(count)
        self.whole, self.other = zeros(size * count), zeros(size * count)
        self.split = [self.whole[n * count : (n + 1) * count] for n in range(size)]
        self.others = [self.other[n * count : (n + 1) * count] for n in range(size)]
        self.rows = self.split if group.rank() == 0 else None
        self.pieces = [zeros(max(count // 8, 1)) for _ in range(8)]
        self.objects = [None] * size
        self.given = [OBJECT] * size if group.rank() == 0 else None
        self.at_root = [None] * size if group.rank() == 0 else None


def written_zeros(count):
    """Return zeros in memory of their own.

    Without writes, all pages of the array would map to a single page of zeros.
    """
    array = np.empty(count, np.float32)
    array[:] = 0
    return array


def reduce_pieces(comm, memory, mpi):
    """Reduce each piece by a call of its own, without coalescing."""
    for piece in memory.pieces:
        comm.Allreduce(mpi.IN_PLACE, piece)


def reduce_raw(comm, memory, mpi):
    """Reduce to rank 0, in place on this root."""
    is_root = comm.rank == 0
    send, recv = (mpi.IN_PLACE, memory.part) if is_root else (memory.part, None)
    comm.Reduce(send, recv, root=0)


# By name: the call of mpidist and of gloo, which has the same form, and the call of mpi4py.
ON_ARRAYS = {
    "all_reduce": (
        lambda d, m: d.all_reduce(m.part),
        lambda comm, m, mpi: comm.Allreduce(mpi.IN_PLACE, m.part),
    ),
    "broadcast": (
        lambda d, m: d.broadcast(m.part, 0),
        lambda comm, m, mpi: comm.Bcast(m.part, 0),
    ),
    "reduce": (lambda d, m: d.reduce(m.part, 0), reduce_raw),
    "all_gather": (
        lambda d, m: d.all_gather(m.split, m.part),
        lambda comm, m, mpi: comm.Allgather(m.part, m.whole),
    ),
    "all_gather_into_tensor": (
        lambda d, m: d.all_gather_into_tensor(m.whole, m.part),
        lambda comm, m, mpi: comm.Allgather(m.part, m.whole),
    ),
    "gather": (
        lambda d, m: d.gather(m.part, m.rows, 0),
        lambda comm, m, mpi: comm.Gather(m.part, m.whole if comm.rank == 0 else None, 0),
    ),
    "scatter": (
        lambda d, m: d.scatter(m.part, m.rows, 0),
        lambda comm, m, mpi: comm.Scatter(m.whole if comm.rank == 0 else None, m.part, 0),
    ),
    "reduce_scatter": (
        lambda d, m: d.reduce_scatter(m.target, m.split),
        lambda comm, m, mpi: comm.Reduce_scatter_block(m.whole, m.target),
    ),
    "reduce_scatter_tensor": (
        lambda d, m: d.reduce_scatter_tensor(m.target, m.whole),
        lambda comm, m, mpi: comm.Reduce_scatter_block(m.whole, m.target),
    ),
    "all_to_all": (
        lambda d, m: d.all_to_all(m.others, m.split),
        lambda comm, m, mpi: comm.Alltoall(m.whole, m.other),
    ),
    "all_to_all_single": (
        lambda d, m: d.all_to_all_single(m.other, m.whole),
        lambda comm, m, mpi: comm.Alltoall(m.whole, m.other),
    ),
    "all_reduce_coalesced": (
        lambda d, m: d.all_reduce_coalesced(m.pieces),
        reduce_pieces,
    ),
}
OF_MPI_ALONE = {
    "scan": (
        lambda d, m: group_of(d).scan(m.part),
        lambda comm, m, mpi: comm.Scan(mpi.IN_PLACE, m.part),
    ),
    "exscan": (
        lambda d, m: group_of(d).exscan(m.part),
        lambda comm, m, mpi: comm.Exscan(mpi.IN_PLACE, m.part),
    ),
}
WITHOUT_SIZE = {
    "barrier": (lambda d, m: d.barrier(), lambda comm, m, mpi: comm.Barrier()),
    "all_gather_object": (
        lambda d, m: d.all_gather_object(m.objects, OBJECT),
        lambda comm, m, mpi: comm.allgather(OBJECT),
    ),
    "gather_object": (
        lambda d, m: d.gather_object(OBJECT, m.at_root, 0),
        lambda comm, m, mpi: comm.gather(OBJECT, 0),
    ),
    "broadcast_object_list": (
        lambda d, m: d.broadcast_object_list([OBJECT], 0),
        lambda comm, m, mpi: comm.bcast([OBJECT], 0),
    ),
    "scatter_object_list": (
        lambda d, m: d.scatter_object_list([None], m.given, 0),
        lambda comm, m, mpi: comm.scatter(m.given, 0),
    ),
}
NAMES = [*ON_ARRAYS, "prepared all_reduce", *OF_MPI_ALONE, *WITHOUT_SIZE, "ping-pong"]


def group_of(package):
    """Return the default group of a package.

    Only the default group of mpidist has the operations that this file calls on it.
    """
    return package.GroupMember.WORLD


def sides_of(name, group, nbytes, gloo):
    """Return functions that carry out an operation, by the name of the side.

    Only sides that have the operation are included.
    """
    if name == "ping-pong":
        return ping_pong_sides(group, nbytes, gloo)
    if name == "prepared all_reduce":
        return prepared_sides(group, nbytes)
    from mpi4py import MPI

    call, raw = (ON_ARRAYS | OF_MPI_ALONE | WITHOUT_SIZE)[name]
    ours = Memory(group, nbytes, written_zeros)
    sides = {
        "mpidist": lambda: call(dist, ours),
        "mpi4py": lambda: raw(MPI.COMM_WORLD, ours, MPI),
    }
    if gloo is not None and name not in OF_MPI_ALONE:
        import torch

        theirs = Memory(group, nbytes, lambda count: torch.from_numpy(written_zeros(count)))
        sides["gloo"] = lambda: call(gloo, theirs)
    return sides


def prepared_sides(group, nbytes):
    """Return a prepared all_reduce, and as its peer a persistent one of MPI, by name."""
    from mpi4py import MPI

    array, other = written_zeros(nbytes // 4), written_zeros(nbytes // 4)
    raw = MPI.COMM_WORLD.Allreduce_init(MPI.IN_PLACE, other)

    def repeat(memory=other):  # the request holds no reference to the array
        raw.Start()
        raw.Wait()

    return {"mpidist": group.prepare("all_reduce", array), "mpi4py": repeat}


def ping_pong_sides(group, nbytes, gloo):
    """Return functions that send an array back and forth between ranks 0 and 1.

    On other ranks the functions do nothing. These ranks wait at the next barrier.
    """
    from mpi4py import MPI

    array = written_zeros(nbytes // 4)
    comm, rank = MPI.COMM_WORLD, group.rank()
    if rank > 1:
        return dict.fromkeys(("mpidist", "mpi4py", *(("gloo",) if gloo else ())), lambda: None)
    other = 1 - rank

    def turns(send, recv):
        def ping():
            send()
            recv()

        def pong():
            recv()
            send()

        return ping if rank == 0 else pong

    sides = {
        "mpidist": turns(lambda: dist.send(array, other), lambda: dist.recv(array, other)),
        "mpi4py": turns(lambda: comm.Send(array, other), lambda: comm.Recv(array, other)),
    }
    if gloo is not None:
        import torch

        tensor = torch.zeros(nbytes // 4)
        sides["gloo"] = turns(lambda: gloo.send(tensor, other), lambda: gloo.recv(tensor, other))
    return sides
