"""Conditions under which the Servers of a cluster start on real ranks, or refuse to start."""

import gc
import threading
import time

import pytest
from _cases.clusters import counted, spec_of
from _cases.endpoints import LIMIT_S
from _cases.jobs import run_ranks

from mpidist import ClusterSpec, Server, errors, open_endpoint
from mpidist.cluster import membership
from mpidist.cluster.membership import membership_inbox
from mpidist.mpi import world as start_world
from strategy import ParameterServerStrategy, get_variable


@pytest.fixture
def world(world):
    start_world()  # collective, so no test may run it on some ranks only
    return world


def by_rank(count):
    """Return a cluster of the first ``count`` ranks."""
    return counted({"worker": count}, start_world().hosts[:count])


def wait_until(condition):
    """Serve the inbox of this rank until a condition holds."""
    assert membership_inbox().endpoint.serve(condition, time.monotonic() + LIMIT_S)


def wait_for_hello(rank, spec):
    """Serve the inbox until another rank has begun to start a Server of a cluster."""
    digest, states = spec.digest(), membership_inbox().states
    wait_until(lambda: any(state.cluster_digest == digest for state in states[rank]))


def names_both(rank):
    return pytest.raises(
        errors.InvalidArgumentError,
        match=rf"rank [01] \(worker [01]\) has another cluster spec than rank {rank} ",
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("addresses", ["of another kind", "with ranks"])
def test_more_tasks_than_ranks(world, addresses):
    host = start_world().host
    cluster = counted({"ps": 1, "worker": 2}, [host] * 3)
    if addresses == "of another kind":
        cluster = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:1"]})
    job, task = cluster.tasks()[world.rank]
    began = time.monotonic()
    with pytest.raises(
        errors.FailedPreconditionError,
        match=rf"{job} {task} on rank {world.rank} cannot start: the cluster has 3 tasks, and the "
        r"world has 2 ranks\..* mpidist run --ps 1 --worker 2 SCRIPT",
    ):
        Server(cluster, job, task)
    took_s = time.monotonic() - began
    world.Barrier()
    assert took_s < 5
    assert Server.current() is None


@pytest.mark.ranks(2)
def test_more_tasks_than_ranks_where_some_share_one(world):
    hosts = start_world().hosts
    spec = ClusterSpec(
        {"ps": [f"{hosts[0]}:0"], "worker": [f"{h}:{r}" for r, h in enumerate(hosts)]}
    )
    with Server(spec, "worker", world.rank) as server:
        tasks = server.own_tasks
        server.job_group("worker").barrier()
    assert tasks == [("worker", world.rank), *([("ps", 0)] if world.rank == 0 else [])]


@pytest.mark.ranks(2)
def test_two_tasks_of_a_job_at_one_address(world):
    began = time.monotonic()
    with pytest.raises(
        errors.InvalidArgumentError,
        match=r"tasks \[0, 1\] of job 'worker' have the same address a:2222: give each its own",
    ):
        Server({"worker": ["a:2222", "a:2222"]}, "worker", world.rank)
    took_s = time.monotonic() - began
    world.Barrier()
    assert took_s < 5


@pytest.mark.ranks(2)
def test_a_rank_with_two_tasks_that_starts_as_the_ps(world):
    """Refuse to start a ps on rank 0, because its script has the worker."""
    hosts = start_world().hosts
    spec = ClusterSpec(
        {"ps": [f"{hosts[0]}:0"], "worker": [f"{h}:{r}" for r, h in enumerate(hosts)]}
    )
    began = time.monotonic()
    if world.rank == 0:
        with pytest.raises(
            errors.FailedPreconditionError,
            match=r"ps 0 is on rank 0 together with worker 0, which is the task of the script: use",
        ):
            Server(spec, "ps", 0)
        assert time.monotonic() - began < 5
    world.Barrier()
    with Server(spec, "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(2)
def test_the_number_of_the_rank_is_in_use(world):
    with (
        open_endpoint("mpi", world.rank) as endpoint,
        pytest.raises(
            errors.AlreadyExistsError,
            match=f"worker {world.rank} cannot start: {endpoint.address} is in use already; close",
        ),
    ):
        Server(by_rank(2), "worker", world.rank)
    world.Barrier()
    with Server(by_rank(2), "worker", world.rank):
        world.Barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("first", ["those who need nobody", "who needs them"])
def test_a_cluster_that_counts_on_ranks_of_another(world, first):
    """Start two ranks with a spec of two tasks, and the third with a spec of three."""
    if world.rank < 2:
        if first == "who needs them":
            wait_until(lambda: membership_inbox().states[2])
        with Server(by_rank(2), "worker", world.rank):
            world.Barrier()
            world.Barrier()
    else:
        if first == "those who need nobody":
            world.Barrier()
        began = time.monotonic()
        with names_both(2):
            Server(by_rank(3), "worker", 2)
        took_s = time.monotonic() - began
        if first == "who needs them":
            world.Barrier()
        world.Barrier()
        assert took_s < 10
    # The states of the earlier clusters are forgotten.
    with Server(by_rank(3), "worker", world.rank):
        world.Barrier()


@pytest.mark.ranks(3)
def test_a_rank_of_a_cluster_of_its_own_is_missed(world):
    """Report the third rank, which starts a separate cluster, to the two waiting ranks."""
    if world.rank == 2:
        alone = counted({"worker": 1}, [start_world().host], 2)
        with Server(alone, "worker", 0):
            world.Barrier()
    else:
        with pytest.raises(
            errors.InvalidArgumentError,
            match=rf"rank 2 \(worker 0\) has another cluster spec than rank {world.rank} \(worker",
        ):
            Server(by_rank(3), "worker", world.rank)
        world.Barrier()
    with Server(by_rank(3), "worker", world.rank):
        world.Barrier()


@pytest.mark.ranks(3)
def test_specs_that_differed_before_a_rank_came(world):
    """Start the third rank after two ranks have found the difference and have given up."""
    spec = ClusterSpec({"worker": ["a:1", "b:1", "c:2" if world.rank == 1 else "c:1"]})
    if world.rank == 2:
        world.Barrier()
    with pytest.raises(errors.InvalidArgumentError, match=r"has another cluster spec than rank"):
        Server(spec, "worker", world.rank)
    if world.rank < 2:
        world.Barrier()
    world.Barrier()
    # All ranks may try again, some later than others.
    if world.rank == 2:
        wait_for_hello(0, by_rank(3))
    with Server(by_rank(3), "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(3)
def test_ranks_that_claim_one_task_before_another_does(world, monkeypatch):
    if world.rank == 2:
        world.Barrier()
    with pytest.raises(errors.InvalidArgumentError, match=r"ranks . and . both say that they are"):
        Server({"worker": ["a:1", "b:1", "c:1"]}, "worker", 0)
    if world.rank < 2:
        world.Barrier()
    world.Barrier()
    # A second attempt is accepted, even if another rank is late.
    spec = by_rank(3)
    if world.rank == 0:
        monkeypatch.setattr(membership, "_PATIENCE_S", 0.0)
        wait_for_hello(2, spec)
    elif world.rank == 1:
        wait_for_hello(0, spec)
    with Server(spec, "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(3)
def test_clusters_beside_each_other(world, monkeypatch):
    """Start one cluster on rank 0 and another on the other ranks. Addresses do not name ranks."""
    monkeypatch.setattr(membership, "_PATIENCE_S", 0.0)
    if world.rank == 0:
        with Server(by_rank(1), "worker", 0):
            world.Barrier()
            world.Barrier()
    else:
        world.Barrier()
        if world.rank == 2:
            wait_until(lambda: membership_inbox().states[1])
        with Server({"worker": ["a:1", "b:1"]}, "worker", world.rank - 1) as server:
            server.job_group("worker").barrier()
        world.Barrier()
    world.Barrier()
    spec = by_rank(3)
    if world.rank == 0:
        wait_for_hello(1, spec)
    with Server(spec, "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(3)
def test_a_rank_may_come_from_another_cluster(world, monkeypatch):
    """Start the third rank early, while the others are still in a cluster without it."""
    monkeypatch.setattr(membership, "_PATIENCE_S", LIMIT_S)
    if world.rank < 2:
        with Server(by_rank(2), "worker", world.rank) as server:
            group = server.job_group("worker")
            wait_until(lambda: membership_inbox().states[2])
            group.barrier()
    with Server(by_rank(3), "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(3)
def test_hellos_of_a_cluster_that_is_over_are_forgotten(world, monkeypatch):
    """Send hellos to all ranks, because the addresses name no ranks."""
    monkeypatch.setattr(membership, "_PATIENCE_S", 0.0)
    if world.rank < 2:
        with Server({"worker": ["a:1", "b:1"]}, "worker", world.rank) as server:
            server.job_group("worker").barrier()
    world.Barrier()
    spec = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
    if world.rank < 2:
        wait_for_hello(2, spec)
    with Server(spec, "worker", world.rank) as server:
        server.job_group("worker").barrier()


@pytest.mark.ranks(2)
def test_two_threads_start_one_server(world):
    """Start rank 1 late, so that both threads of rank 0 are in start() at the same time."""
    server = Server(by_rank(2), "worker", world.rank, start=False)
    started = []

    def start():
        server.start()
        started.append(str(server.endpoint.address))

    if world.rank == 0:
        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert started == [str(server.endpoint.address)] * 2
    else:
        wait_for_hello(0, by_rank(2))
        time.sleep(0.3)
    with server:
        assert Server.current() is server
        server.job_group("worker").barrier()


@pytest.mark.ranks(2)
def test_a_server_without_a_name_stays_started_until_it_is_stopped(world):
    """Let a strategy find the Server. The next Server starts only after this one stops."""
    spec = spec_of(world, 1)
    values, refused = [], []
    for _ in range(3):
        if world.rank == 0:
            with Server(spec, "ps", 0) as server:
                server.join()
        else:
            Server(spec, "worker", 0)
            values.append(train())
            gc.collect()
            try:
                Server(spec, "worker", 0)
            except errors.AlreadyExistsError as error:
                refused.append(error.message)
            Server.current().stop()
    assert values == ([] if world.rank == 0 else [3.0] * 3)
    assert len(refused) == len(values)
    assert all("stop it first" in message for message in refused)


def test_a_server_that_nobody_holds_at_the_end_of_a_script(tmp_path):
    source = """
        import mpidist
        from mpidist.cluster_resolver import MPIClusterResolver
        resolver = MPIClusterResolver({"ps": 1, "worker": -1})
        job, task = resolver.task_type, resolver.task_id
        if job == "ps":
            mpidist.Server(resolver.cluster_spec(), job, task).join()
        else:
            mpidist.Server(resolver.cluster_spec(), job, task)
        print(job + "\\n", end="")
    """
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.split()) == ["ps", "worker"]
    assert "ignored" not in ended.err


@pytest.mark.parametrize("addresses", ["with ranks", "of another kind"])
def test_a_script_that_ends_before_its_server_starts(tmp_path, addresses):
    source = f"""
        import mpidist
        from mpidist.cluster_resolver import MPIClusterResolver
        resolver = MPIClusterResolver({{"ps": 1, "worker": -1}})
        spec = resolver.cluster_spec()
        if {addresses == "of another kind"}:
            spec = {{"ps": ["a:1"], "worker": ["a:2"]}}
        if resolver.task_type == "worker":
            try:
                mpidist.Server(spec, "worker", 0)
            except mpidist.errors.UnavailableError as error:
                print(error)
    """
    began = time.monotonic()
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err
    assert "worker 0 on rank 1 waits for ps 0 to start, and the script of rank 0 " in ended.out
    assert time.monotonic() - began < 20


def train():
    strategy = ParameterServerStrategy()
    assert strategy.extended.parameter_devices == ("/job:ps/task:0",)
    with strategy.scope():
        variable = get_variable("v", (), "f8", "zeros")
    variable.assign_add(3.0)
    return float(variable.read_value())
