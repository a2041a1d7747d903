"""Tasks from the ranks of a launched world."""

import pytest
from _cases.clusters import spec_of
from _cases.jobs import run_job, run_ranks

from mpidist import Server, errors
from mpidist.cluster_resolver import MPIClusterResolver


@pytest.mark.ranks(3)
def test_tasks_in_rank_order(world):
    resolver = MPIClusterResolver({"ps": 1, "worker": -1})
    spec = resolver.cluster_spec()
    specs = world.allgather(spec.as_dict())
    host = spec_of(world, 1).task_address("ps", 0).rpartition(":")[0]
    expected = [("ps", 0), ("worker", 0), ("worker", 1)]
    assert specs == [{"ps": [f"{host}:0"], "worker": [f"{host}:1", f"{host}:2"]}] * 3
    assert (resolver.task_type, resolver.task_id) == expected[world.rank]
    assert resolver.rpc_layer == "mpi"
    assert resolver.environment == ""
    assert resolver.master() == f"mpi://{host}:{world.rank}"
    assert resolver.master("worker", 1) == f"mpi://{host}:2"
    assert resolver.master("ps", 0, rpc_layer="grpc") == f"grpc://{host}:0"
    assert [spec.task_of(rank) for rank in range(3)] == expected
    with pytest.raises(ValueError, match="no task 2"):
        resolver.master("worker", 2)


@pytest.mark.ranks(2)
def test_all_ranks_are_workers_unless_told(world):
    resolver = MPIClusterResolver()
    assert resolver.cluster_spec().jobs == ["worker"]
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.task_id == world.rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ({"ps": 2, "worker": -1}, "need at least 3 ranks, and there are 2"),
        ({"ps": 1, "worker": 3}, "need at least 4 ranks"),
        ({"ps": 1}, r"use 1 of 2 ranks; give one job -1"),
        ({"ps": -1, "worker": -1}, "with -1 for one job at most"),
        ({}, "needs a job with a task"),
        ({"worker": 0}, "needs a job with a task"),
    ],
)
def test_jobs_that_do_not_fit(world, jobs, text):
    with pytest.raises(ValueError, match=text):
        MPIClusterResolver(jobs)


@pytest.mark.ranks(2)
def test_local_server_beside_the_world(world):
    with Server.create_local_server() as server:
        assert server.cluster_spec.as_dict() == {"local": ["localhost:0"]}
        assert server.job_name == "local"
        with pytest.raises(errors.AlreadyExistsError):
            Server.create_local_server()
    world.Barrier()


LAYOUT = """
import os
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver({"ps": 2, "worker": -1})
os.write(1, f"{resolver.task_type} {resolver.task_id}\\n".encode())
"""


def test_the_launchers_layout_wins(tmp_path):
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "1", "--data", "1"), LAYOUT)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.split("\n"))[1:] == ["data 0", "ps 0", "worker 0"]


def test_the_scripts_jobs_without_a_layout(tmp_path):
    ended = run_ranks(tmp_path, 3, LAYOUT)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.split("\n"))[1:] == ["ps 0", "ps 1", "worker 0"]


DESCRIBED = """
import json, os
from mpi4py import MPI
import mpidist
from mpidist.cluster_resolver import auto
from strategy import ParameterServerStrategy, get_variable

# Which rank is which task is only known to the ranks.
kind, index = [("worker", 1), ("ps", 0), ("worker", 0)][MPI.COMM_WORLD.rank]
cluster = {"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
resolver = auto({"worker": -1})
assert type(resolver).__name__ == "TFConfigClusterResolver"
with mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        strategy = ParameterServerStrategy(resolver)
        assert strategy.worker_index == index
        with strategy.scope():
            total = get_variable("total", (), initializer="zeros")
        total.assign_add(index + 1)
        server.job_group("worker").barrier()
        os.write(1, f"{server.target} {float(total.numpy())}\\n".encode())
        server.job_group("worker").barrier()
"""


def test_tf_config_tells_ranks_their_tasks(tmp_path):
    ended = run_ranks(tmp_path, 3, DESCRIBED)
    assert ended.status == 0, ended.err
    assert sorted(ended.out.split("\n"))[1:] == ["mpi://b:2222 3.0", "mpi://c:2222 3.0"]
