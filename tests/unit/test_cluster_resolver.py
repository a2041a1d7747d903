"""MPIClusterResolver in a plain process."""

import socket

import numpy as np
import pytest

import mpidist
from mpidist import ClusterSpec
from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver import mpi as resolver_module
from mpidist.cluster_resolver.job_layout import assign_ranks, check_jobs
from mpidist.config import Config

HOST = f"{socket.gethostname()}:0"


@pytest.mark.parametrize(
    ("jobs", "job"),
    [
        (None, "worker"),
        ({"worker": -1}, "worker"),
        ({"ps": 1, "worker": -1}, "worker"),
        ({"ps": 2, "data": 1, "worker": 5}, "worker"),
        ({"worker": 1, "chief": 1}, "worker"),
        ({"ps": 1, "chief": 1}, "chief"),
        ({"ps": 1, "worker": 0}, "ps"),
    ],
)
def test_task_0_of_every_job_lives_here(jobs, job):
    resolver = MPIClusterResolver(jobs)
    expected = [name for name, count in (jobs or {"worker": -1}).items() if count]
    assert resolver.cluster_spec() == ClusterSpec({name: [HOST] for name in expected})
    assert resolver.cluster_spec().jobs == expected
    assert (resolver.task_type, resolver.task_id) == (job, 0)


@pytest.mark.parametrize(
    "jobs", [{}, {"worker": 0}, {"worker": -2}, {"ps": -1, "worker": -1}, {"a": 1, "b": -3}]
)
def test_layouts_that_there_are_not(jobs):
    with pytest.raises(ValueError, match="job"):
        MPIClusterResolver(jobs)


def test_master():
    resolver = MPIClusterResolver({"ps": 1, "worker": 1})
    assert isinstance(resolver, ClusterResolver)
    assert resolver.rpc_layer == "inproc"
    assert resolver.master() == f"inproc://{HOST}"
    assert resolver.master("ps", 0, "grpc") == f"grpc://{HOST}"
    assert MPIClusterResolver(rpc_layer="mpi").master() == f"mpi://{HOST}"
    resolver.task_type = "ps"
    assert resolver.master(rpc_layer="x") == f"x://{HOST}"
    for task in (("chief", 0), ("worker", 1)):
        with pytest.raises(ValueError, match="no"):
            resolver.master(*task)


def test_the_rest_of_the_interface():
    resolver = MPIClusterResolver()
    assert resolver.environment == ""
    assert all(count > 0 for count in resolver.num_accelerators().values())


def test_a_server_takes_what_it_says():
    resolver = MPIClusterResolver({"ps": 1, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, resolver.rpc_layer
    ) as server:
        assert server.target == resolver.master()


@pytest.fixture
def launcher(monkeypatch):
    """``launcher(layout)``: as if ``mpidist run`` had set the layout."""

    def set_layout(layout):
        config = Config.from_env({"MPIDIST_JOBS": layout})
        monkeypatch.setattr(resolver_module, "config", config)

    return set_layout


@pytest.mark.parametrize(
    ("jobs", "differ"),
    [
        (None, False),
        ({"chief": 1, "data": -1}, False),
        ({"data": 2, "chief": 1}, False),
        ({"worker": -1}, True),
        ({"chief": 1, "data": 1}, True),
    ],
)
def test_the_layout_of_the_launcher_wins(launcher, caplog, jobs, differ):
    launcher("chief=1,ps=0,data=2")
    with caplog.at_level("INFO"):
        resolver = MPIClusterResolver(jobs)
    assert resolver.cluster_spec().jobs == ["chief", "data"]
    assert resolver.task_type == "chief"
    assert ("replaces the script's" in caplog.text) == differ
    assert (str(jobs) in caplog.text) == differ


@pytest.mark.parametrize(
    "layout", ["worker", "worker=", "=1", "worker=x", "ps=1,,worker=1", "ps=1,ps=2"]
)
def test_layouts_of_another_form(launcher, layout):
    launcher(layout)
    with pytest.raises(ValueError, match=f"MPIDIST_JOBS='{layout}' is not of the form"):
        MPIClusterResolver()


NODES = [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("jobs", "ranks"),
    [
        ({"ps": 1, "worker": -1}, {"ps": [0], "worker": [1, 2, 3, 4, 5]}),
        ({"worker": 4, "ps": 2}, {"worker": [0, 1, 2, 3], "ps": [4, 5]}),
        ({"ps": "per_node", "worker": -1}, {"ps": [0, 2, 5], "worker": [1, 3, 4]}),
        ({"ps": "per_node", "x": 1, "worker": 2}, {"ps": [0, 2, 5], "x": [1], "worker": [3, 4]}),
        ({"ps": "colocated", "worker": 6}, {"ps": [0, 2, 5], "worker": [0, 1, 2, 3, 4, 5]}),
        ({"ps": range(4, 6), "worker": -1}, {"ps": [4, 5], "worker": [0, 1, 2, 3]}),
        ({"worker": -1, "ps": [5, 1]}, {"worker": [0, 2, 3, 4], "ps": [5, 1]}),
        ({"ps": [0], "worker": range(1, 6)}, {"ps": [0], "worker": [1, 2, 3, 4, 5]}),
        ({"ps": np.arange(1), "worker": np.int64(5)}, {"ps": [0], "worker": [1, 2, 3, 4, 5]}),
    ],
)  # fmt: skip
def test_ranks_of_jobs(jobs, ranks):
    assert assign_ranks(check_jobs(jobs), NODES) == ranks
    assert list(assign_ranks(check_jobs(jobs), NODES)) == list(jobs)


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ({"ps": "per_node", "worker": 4}, "need at least 7 ranks, and there are 6"),
        ({"ps": "per_node", "worker": 2}, "use 5 of 6 ranks; give one job -1"),
        ({"ps": "per_node"}, "use 3 of 6 ranks; give one job -1"),
        ({"ps": "per_node", "x": 3, "worker": -1}, "need at least 7 ranks, and there are 6"),
        ({"ps": [6], "worker": -1}, "rank 6, and there are 6"),
        ({"ps": [1], "x": [1, 2], "worker": -1}, r"ranks \[1\] of x have another job"),
    ],
)
def test_ranks_that_do_not_fit(jobs, text):
    with pytest.raises(ValueError, match=text):
        assign_ranks(check_jobs(jobs), NODES)


@pytest.mark.parametrize(
    ("jobs", "error", "text"),
    [
        ({"ps": "everywhere"}, ValueError, "'everywhere'.*'per_node'"),
        ({"ps": [1, 1]}, ValueError, "repeat"),
        ({"ps": [-1]}, ValueError, "negative"),
        ({"ps": 1.5}, TypeError, "a number of tasks, or their ranks"),
        ({"ps": [0.5]}, TypeError, "a number of tasks, or their ranks"),
        ({"ps": None, "worker": 1}, TypeError, "a number of tasks, or their ranks"),
        ({"ps": range(0)}, ValueError, "needs a job with a task"),
        ({"ps": True}, TypeError, "a number of tasks, or their ranks"),
        ({"ps": b"1"}, TypeError, "a number of tasks, or their ranks"),
        (["ps"], TypeError, "a dict of names"),
    ],
)
def test_tasks_of_another_form(jobs, error, text):
    with pytest.raises(error, match=text):
        MPIClusterResolver(jobs)


@pytest.mark.parametrize("layout", ["ps=per_node,worker=-1", "ps=colocated,worker=3"])
def test_layouts_by_node_in_one_process(launcher, layout):
    launcher(layout)
    resolver = MPIClusterResolver({"worker": 2})
    assert resolver.cluster_spec() == ClusterSpec({"ps": [HOST], "worker": [HOST]})
    assert resolver.task_type == "worker"
