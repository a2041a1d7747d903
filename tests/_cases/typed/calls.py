"""A typed program. Type checkers must report an error in exactly the lines marked as errors."""

from typing import assert_type

import numpy as np

import mpidist as dist
from dataservice import distribute
from strategy import ParameterServerStrategy


def asynchronous(array: np.ndarray, parts: list[np.ndarray], chosen: bool) -> None:
    """Check that the type of the result depends on ``async_op``."""
    assert_type(dist.all_reduce(array, async_op=True), dist.Work)
    assert_type(dist.all_reduce(array, "max", async_op=chosen), dist.Work | None)
    assert_type(dist.broadcast(array, 0, async_op=True), dist.Work)
    assert_type(dist.reduce(array, 0, dist.ReduceOp.MIN, async_op=True), dist.Work)
    assert_type(dist.all_gather(parts, array, async_op=True), dist.Work)
    assert_type(dist.all_gather_single(array, array, async_op=True), dist.Work)
    assert_type(dist.all_gather_into_tensor(array, array, async_op=True), dist.Work)
    assert_type(dist.gather(array, parts, async_op=True), dist.Work)
    assert_type(dist.scatter(array, parts, async_op=True), dist.Work)
    assert_type(dist.reduce_scatter(array, parts, "sum", async_op=True), dist.Work)
    assert_type(dist.reduce_scatter_single(array, array, async_op=True), dist.Work)
    assert_type(dist.reduce_scatter_tensor(array, array, async_op=True), dist.Work)
    assert_type(dist.all_to_all(parts, parts, async_op=True), dist.Work)
    assert_type(dist.all_to_all_single(array, array, async_op=True), dist.Work)
    assert_type(dist.all_reduce_coalesced(parts, async_op=True), dist.Work)
    assert_type(dist.all_gather_coalesced([parts], parts, async_op=True), dist.Work)
    assert_type(dist.barrier(async_op=True), dist.Work)
    dist.all_reduce(array, async_op=True).wait()
    dist.all_reduce(array).wait()  # error
    dist.all_reduce(array, async_op=False).wait()  # error
    dist.all_reduce(array, async_op=chosen).wait()  # error
    dist.barrier().wait()  # error


def methods(group: dist.ProcessGroup, array: np.ndarray, parts: list[np.ndarray]) -> None:
    """Check that the methods of a group have the types of the functions."""
    assert_type(group.all_reduce(array, "sum", async_op=True), dist.Work)
    assert_type(group.all_reduce_coalesced(parts, async_op=True), dist.Work)
    assert_type(group.reduce(array, 0, async_op=True), dist.Work)
    assert_type(group.reduce_scatter(array, parts, async_op=True), dist.Work)
    assert_type(group.reduce_scatter_tensor(array, array, async_op=True), dist.Work)
    assert_type(group.scan(array, async_op=True), dist.Work)
    assert_type(group.exscan(array, async_op=True), dist.Work)
    assert_type(group.broadcast(array, 0, async_op=True), dist.Work)
    assert_type(group.all_gather(parts, array, async_op=True), dist.Work)
    assert_type(group.all_gather_into_tensor(array, array, async_op=True), dist.Work)
    assert_type(group.all_gather_coalesced([parts], parts, async_op=True), dist.Work)
    assert_type(group.gather(array, parts, async_op=True), dist.Work)
    assert_type(group.scatter(array, parts, async_op=True), dist.Work)
    assert_type(group.all_to_all(parts, parts, async_op=True), dist.Work)
    assert_type(group.all_to_all_single(array, array, async_op=True), dist.Work)
    assert_type(group.barrier(async_op=True), dist.Work)
    assert_type(group.isend(array, 1), dist.Work)
    grid = dist.new_cartesian_group((2,))
    assert_type(grid.neighbor_all_gather(array, array, async_op=True), dist.Work)
    assert_type(grid.neighbor_all_to_all(array, array, async_op=True), dist.Work)
    group.all_reduce(array, async_op=True).wait()
    group.all_reduce(array).wait()  # error
    group.all_reduce(array, "total")  # error


def messages(array: np.ndarray) -> None:
    """Check that a rank outside the group gets no Work."""
    pair = dist.new_group([0, 1])
    assert_type(dist.isend(array, 1), dist.Work)
    assert_type(dist.irecv(array), dist.Work)
    dist.isend(array, 1, pair).wait()  # error
    if isinstance(pair, dist.ProcessGroup):
        dist.isend(array, 1, pair).wait()
    assert_type(dist.recv(array), int)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, array, 1)])
    assert_type(works, list[dist.Work])


def options(array: np.ndarray, name: str) -> None:
    """Check arguments that take a closed set of strings."""
    dist.all_reduce(array, "MEAN")
    dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(0.5))
    dist.all_reduce(array, "total")  # error
    dist.init_process_group("cpu:mpi,cuda:nccl", "env://")
    dist.init_process_group(dist.get_default_backend_for_device("cuda:0"))
    dist.init_process_group(dist.Backend(name))
    dist.init_process_group("gloo")  # error
    dist.new_group(backend=dist.get_backend())
    dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.init_device_mesh("cpu", (2,), backend_override={0: "mpi"})
    dist.init_device_mesh("tpu", (2, 2))  # error
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.set_debug_level("DETAIL")  # error
    objects: list[object] = [None]
    dist.all_gather_object(objects, name, weights_only=True)  # error
    dist.everybody()  # error
    ParameterServerStrategy(mode="sync", transport="p2p", nan="skip")
    ParameterServerStrategy(mode="synch")  # error
    ParameterServerStrategy(transport="ucx")  # error
    distribute("distributed_epoch", "host:5050", delivery="at_most_once")
    distribute("parallel-epochs", "host:5050")  # error
