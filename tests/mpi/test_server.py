"""Servers of a cluster on real ranks: start, join, stop, and error messages."""

import threading
import time

import numpy as np
import pytest
from _cases.clusters import counted, spec_of
from _cases.endpoints import LIMIT_S
from _cases.jobs import run_ranks

from mpidist import ClusterSpec, Server, errors
from mpidist.cluster.membership import membership_inbox
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.proto.mpidist_pb2 import TaskState


@pytest.mark.ranks(2, 3)
def test_life(world):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    server = Server(spec, job, task, start=False)
    before = Server.current()
    with pytest.raises(errors.FailedPreconditionError, match="is not running"):
        _ = server.endpoint
    server.start()
    server.start()  # no effect
    during = Server.current()
    with pytest.raises(errors.AlreadyExistsError, match=f"has a Server already: {server.target}"):
        Server(spec, job, task)
    if job == "ps":
        server.join()
    server.stop()
    server.stop()
    with pytest.raises(errors.FailedPreconditionError, match="was stopped cannot start"):
        server.start()
    with pytest.raises(errors.FailedPreconditionError, match="was stopped; make a new one"):
        _ = server.endpoint
    server.join()
    assert before is None
    assert during is server
    assert Server.current() is None
    assert (server.job_name, server.task_index) == (job, task)
    assert server.cluster_spec == spec
    assert server.target == f"mpi://{spec.task_address(job, task)}"
    assert server.server_def.job_name == job
    assert server.server_def.task_index == task
    assert server.own_tasks == [(job, task)]
    assert server.own_index(job) == task
    with pytest.raises(errors.NotFoundError, match="no task of job 'data'"):
        server.own_index("data")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("protocol", "scheme"), [(None, "mpi"), ("mpi", "mpi"), ("grpc", "grpc"), ("grpc+verbs",) * 2]
)
def test_targets(world, protocol, scheme):
    resolver = MPIClusterResolver({"worker": 1, "chief": 1})
    job, task = resolver.task_type, resolver.task_id
    with Server(resolver.cluster_spec(), job, task, protocol) as server:
        target, address = server.target, server.task_address(job, task)
        world.Barrier()
    assert (job, task) == (("worker", 0), ("chief", 0))[world.rank]
    assert target == f"{scheme}://{resolver.cluster_spec().task_address(job, task)}"
    assert address == resolver.master()
    assert address.startswith("mpi://")


@pytest.mark.ranks(3)
def test_addresses_of_another_kind(world):
    """Learn the ranks from the announcements of the tasks, in any order."""
    spec = ClusterSpec({"worker": {3: "a:2222", 5: "b:2222"}, "ps": ["c:2222"]})
    job, task = [("worker", 5), ("ps", 0), ("worker", 3)][world.rank]
    with Server(spec, job, task) as server:
        if job == "ps":
            server.join()
            return
        ranks = [server.task_address(*t).rpartition(":")[2] for t in spec.tasks()]
        group = server.job_group("worker")
        total = np.array([float(world.rank)])
        group.all_reduce(total)
        members, target = group.ranks, server.target
        is_near = server.memory.is_near(0)
        group.barrier()
    assert ranks == ["2", "0", "1"]
    assert members == (2, 0)
    assert total[0] == 2.0
    assert target == f"mpi://{'b' if task == 5 else 'a'}:2222"
    assert is_near


@pytest.mark.ranks(2)
def test_the_job_group_of_a_server_of_one_process(world):
    with Server.create_local_server() as server:
        group = server.job_group("local")
        array = np.array([1.0 + world.rank])
        group.all_reduce(array)
    assert group.size() == 1
    assert array[0] == 1.0 + world.rank


@pytest.mark.ranks(3)
def test_job_groups(world):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        group = server.job_group(job)
        again = server.job_group(job)
        with pytest.raises(ValueError, match="is not in job"):
            server.job_group("worker" if job == "ps" else "ps")
        with pytest.raises(ValueError, match="no such job"):
            server.job_group("chief")
        array = np.array([1.0])
        group.all_reduce(array)
        world.Barrier()
    assert again is group
    assert group.rank() == task
    assert array[0] == (1.0 if job == "ps" else 2.0)


@pytest.mark.ranks(3)
def test_join_ends_when_the_others_are_done_or_wait_themselves(world):
    spec = counted({"ps": 1, "worker": 1, "data": 1}, [hostname()] * 3)
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        if job == "worker":
            world.Barrier()
        else:
            joined = threading.Thread(target=server.join)
            joined.start()
            world.Barrier()  # the worker is still up, so no join returns yet
            joined.join(LIMIT_S)
            assert not joined.is_alive()


@pytest.mark.ranks(2)
def test_stop_ends_join(world):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    server = Server(spec, job, task)
    joined = threading.Thread(target=server.join)
    joined.start()
    world.Barrier()
    if world.rank == 0:
        server.stop()  # no worker has left yet, so only stop() ends this join
        joined.join(LIMIT_S)
    world.Barrier()
    joined.join(LIMIT_S)
    server.stop()
    assert not joined.is_alive()


@pytest.mark.ranks(3)
def test_an_evaluator_keeps_nobody(world):
    spec = counted({"ps": 1, "worker": 1, "evaluator": 1}, [hostname()] * 3)
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        if job == "ps":
            server.join()
        if job == "evaluator":
            world.recv(source=0)
    if job == "ps":
        world.send("the ps has returned", 2)


@pytest.mark.ranks(2)
def test_a_server_again_and_again(world):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    for _ in range(10):
        with Server(spec, job, task) as server:
            if job == "ps":
                server.join()
    assert Server.current() is None


@pytest.mark.ranks(3)
@pytest.mark.parametrize("late", ["in its last Server", "between two Servers"])
def test_a_task_may_start_its_next_server_before_others_have_left_the_last(world, late):
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    server = Server(spec, job, task)
    if job == "ps":
        if late == "between two Servers":
            server.stop()
        states = membership_inbox().states

        def others_have_started_again():
            hellos = [w for rank in (1, 2) for w in states[rank] if w.state == TaskState.STARTED]
            return len(hellos) == 2

        deadline = time.monotonic() + LIMIT_S
        assert membership_inbox().endpoint.serve(others_have_started_again, deadline)
    server.stop()
    with Server(spec, job, task) as server:
        group = server.job_group(job)
        if job == "ps":
            server.join()
        size = group.size()
    assert size == (1 if job == "ps" else 2)


@pytest.mark.ranks(2)
def test_a_server_that_could_not_start_is_forgotten(world):
    short = ClusterSpec({"worker": [f"a:{1 + world.rank}", "b:9"]})
    with pytest.raises(errors.InvalidArgumentError, match="another cluster spec"):
        Server(short, "worker", world.rank)
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    with Server(spec, job, task) as server:
        if job == "ps":
            server.join()


@pytest.mark.ranks(2)
def test_specs_that_differ_name_the_ranks(world):
    mine = ClusterSpec({"worker": ["a:1", f"b:{2 + world.rank}"]})
    with pytest.raises(
        errors.InvalidArgumentError,
        match=rf"rank {1 - world.rank} \(worker {1 - world.rank}\) has another cluster spec than "
        rf"rank {world.rank} \(worker {world.rank}\)",
    ):
        Server(mine, "worker", world.rank)
    world.Barrier()
    assert Server.current() is None


@pytest.mark.ranks(2)
def test_two_ranks_that_claim_one_task(world):
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    with pytest.raises(errors.InvalidArgumentError, match=r"ranks .* both say that they are wor"):
        Server(spec, "worker", 0)
    world.Barrier()


@pytest.mark.ranks(2)
def test_wrong_task_of_a_spec_with_ranks(world):
    spec = counted({"worker": 2}, [hostname()] * 2)
    with pytest.raises(errors.FailedPreconditionError, match=f"and this is rank {world.rank}"):
        Server(spec, "worker", 1 - world.rank)
    with pytest.raises(ValueError, match="job 'worker' has no task 2"):
        Server(spec, "worker", 2)
    world.Barrier()


def hostname():
    from mpidist.mpi import world

    return world().host


ONE_MISSING = """
import mpidist
from mpidist.mpi import world
here = world()
spec = mpidist.ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]})
here.comm.Barrier()
if here.rank < 2:
    job, task = [("ps", 0), ("worker", 1)][here.rank]
    try:
        mpidist.Server(spec, job, task)
    except mpidist.errors.DeadlineExceededError as error:
        print(str(error) + "\\n", end="")
here.comm.Barrier()
"""


def test_missing_task_is_named_within_the_limit(tmp_path):
    ended = run_ranks(tmp_path, 3, ONE_MISSING, env={"MPIDIST_START_TIMEOUT_S": "2"})
    assert ended.status == 0, ended.err
    for who in ("ps 0 on rank 0", "worker 1 on rank 1"):
        assert f"{who} waited 2 s for worker 0 to start: every task must start" in ended.out


FORKED = """
import os
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver({"worker": 2})
with mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id):
    child = os.fork() if resolver.task_id else None  # two tracebacks could mix their lines
    if child == 0:
        raise SystemExit(3)
    assert child is None or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
"""


@pytest.mark.parametrize("optimize", ["", "1"])
def test_a_forked_child_that_leaves_the_server(tmp_path, optimize):
    ended = run_ranks(tmp_path, 2, FORKED, env={"PYTHONOPTIMIZE": optimize})
    assert ended.status == 0, ended.err
    assert ended.err.count("FailedPreconditionError: process") == 1
    assert "was forked from process" in ended.err


def test_exception_inside_the_server_ends_the_job(tmp_path):
    source = """
        import mpidist
        from mpidist.cluster_resolver import MPIClusterResolver
        resolver = MPIClusterResolver({"ps": 1, "worker": -1})
        job, task = resolver.task_type, resolver.task_id
        with mpidist.Server(resolver.cluster_spec(), job, task) as server:
            if (job, task) == ("worker", 1):
                raise RuntimeError("a step failed")
            server.join()
    """
    ended = run_ranks(tmp_path, 3, source)
    assert ended.status == 1, ended.err
    assert "rank 2 (worker 1) on" in ended.err
    assert "ends the job: RuntimeError: a step failed" in ended.err
