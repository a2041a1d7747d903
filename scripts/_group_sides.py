"""What bench_group times: each operation as ours, mpi4py's and gloo's."""

import numpy as np

import mpidist as dist

OBJECT = {"a": 1, "bytes": 8}


class Memory:
    """What the operations work on: float32, one part a rank.

    Attributes:
        part: Of ``nbytes``.
        target: As large.
        whole: As many parts as there are ranks.
        other: As large as the whole.
        split: The whole, as a list.
        rows: The same on the root, and None elsewhere.
        pieces: The part in eight, as gradients of layers are.
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
    """Zeros that have memory of their own: what was never written lies in one page of zeros."""
    array = np.empty(count, np.float32)
    array[:] = 0
    return array


def reduce_pieces(comm, memory, mpi):
    """What is done without coalescing."""
    for piece in memory.pieces:
        comm.Allreduce(mpi.IN_PLACE, piece)


def reduce_raw(comm, memory, mpi):
    """In place on the root."""
    is_root = comm.rank == 0
    send, recv = (mpi.IN_PLACE, memory.part) if is_root else (memory.part, None)
    comm.Reduce(send, recv, root=0)


# By name: the call of torch.distributed's name, ours and gloo's alike, and mpi4py's.
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
    """The default group; only ours has it as an object with these methods."""
    return package.GroupMember.WORLD


def sides_of(name, group, nbytes, gloo):
    """An operation by each of those who can carry it out.

    Returns:
        Name of the side to a function.
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
    """An all-reduce that is repeated; MPI's persistent one is the peer."""
    from mpi4py import MPI

    array, other = written_zeros(nbytes // 4), written_zeros(nbytes // 4)
    raw = MPI.COMM_WORLD.Allreduce_init(MPI.IN_PLACE, other)

    def repeat(memory=other):  # which the request does not keep
        raw.Start()
        raw.Wait()

    return {"mpidist": group.prepare("all_reduce", array), "mpi4py": repeat}


def ping_pong_sides(group, nbytes, gloo):
    """There and back between ranks 0 and 1; the others wait at the next barrier."""
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
