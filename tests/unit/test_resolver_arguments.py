"""Arguments that all resolvers accept, and arguments that no resolver accepts."""

import json

import numpy as np
import pytest
from _cases import batch_systems
from _cases.batch_systems import Client, step

from mpidist import ClusterSpec, errors
from mpidist.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    LSFClusterResolver,
    MPIClusterResolver,
    MPIJobClusterResolver,
    PBSClusterResolver,
    SGEClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)


@pytest.fixture(autouse=True)
def put(monkeypatch):
    return batch_systems.setter(monkeypatch)


@pytest.fixture
def gpus(monkeypatch):
    return batch_systems.gpu_counter(monkeypatch)


@pytest.fixture(params=["slurm", "pbs", "kubernetes", "mpi", "tf_config", "simple", "union"])
def resolver(request, put, gpus, tmp_path):
    """Return a resolver of a job "worker" with tasks 0 and 1. It runs in task 1 with 2 GPUs."""
    gpus(4)
    kind, workers = request.param, ["a:1", "b:2"]
    if kind == "slurm":
        step(put, 1, "n1", "2")
        return SlurmClusterResolver(auto_set_gpu=False)
    if kind == "pbs":
        gpus(2)
        (tmp_path / "nodes").write_text("a\nb\n")
        put(PBS_NODEFILE=tmp_path / "nodes", PBS_VNODENUM=1)
        return PBSClusterResolver()
    if kind == "kubernetes":
        gpus(2)
        pods = [(f"worker-{n}", "Running", f"10.0.0.{n}") for n in (0, 1)]
        client = Client(job_name_tensorflow=pods)
        return KubernetesClusterResolver(override_client=client, task_type="worker", task_id=1)
    if kind == "mpi":
        gpus(2)
        return MPIClusterResolver({"worker": -1, "ps": 1})
    if kind == "tf_config":
        gpus(2)
        task = {"type": "worker", "index": 1}
        put(TF_CONFIG=json.dumps({"cluster": {"worker": workers}, "task": task}))
        return TFConfigClusterResolver()
    spec = ClusterSpec({"worker": workers})
    simple = SimpleClusterResolver(spec, num_accelerators={"GPU": 2}, task_type="worker", task_id=1)
    return simple if kind == "simple" else UnionResolver(simple, task_type="worker", task_id=1)


def test_arguments_by_name(resolver):
    assert isinstance(resolver, ClusterResolver)
    task = {"task_type": "worker", "task_id": 0}
    assert resolver.num_accelerators() == {"GPU": 2}
    assert resolver.num_accelerators(**task, config_proto=None) == {"GPU": 2}
    if not isinstance(resolver, (SimpleClusterResolver, UnionResolver, SlurmClusterResolver)):
        with pytest.raises(ValueError, match="9"):
            resolver.num_accelerators("worker", 9)
    for name, value in {**task, "config_proto": object()}.items():
        assert resolver.num_accelerators(**{name: value}) == {"GPU": 2}
    spec = resolver.cluster_spec()
    other = resolver.task_id
    first, own = (spec.task_address("worker", index) for index in (0, other))
    assert resolver.master(**task, rpc_layer="x") == f"x://{first}"
    assert resolver.master(rpc_layer="x", task_id=0, task_type="worker") == f"x://{first}"
    if not isinstance(resolver, SimpleClusterResolver):  # its default is the given master
        assert resolver.master(task_id=0, rpc_layer="x") == f"x://{first}"
        assert resolver.master(task_type="worker", rpc_layer="x") == f"x://{own}"
        assert resolver.master(rpc_layer="x") == f"x://{own}"


def test_the_abstract_resolver():
    with pytest.raises(TypeError, match=r"abstract.*cluster_spec"):
        ClusterResolver()

    class Own(ClusterResolver):
        rpc_layer = "grpc"

        def cluster_spec(self):
            return ClusterSpec({"worker": ["a:1"]})

    assert Own().master() == ""
    assert Own().master("worker", 0) == "grpc://a:1"


@pytest.fixture(params=[PBSClusterResolver, SGEClusterResolver, LSFClusterResolver,
                        MPIJobClusterResolver, SlurmClusterResolver])  # fmt: skip
def batch(request, put, gpus, tmp_path):
    """Return a function that makes a batch system's resolver of two tasks for given jobs."""
    (tmp_path / "nodes").write_text("a\nb\n")
    (tmp_path / "slots").write_text("a 1 all.q@a\nb 1 all.q@b\n")
    put(PBS_NODEFILE=tmp_path / "nodes", PE_HOSTFILE=tmp_path / "slots", LSB_HOSTS="a b")
    step(put, 1, "n[1-2]", "1(x2)")
    more = {}
    if request.param is MPIJobClusterResolver:
        more = {"hostfile": str(tmp_path / "nodes"), "discover_script": str(tmp_path / "none")}
    return lambda jobs: request.param(jobs=jobs, **more)


@pytest.mark.parametrize(
    "jobs",
    [["worker"], "worker", 4, {"worker": None}, {"worker": [0, 1]}, {"worker": 1.7},
     {"worker": True}, {"worker": "2"}, {"ps": "per_node", "worker": -1}, {"worker": range(2)}],
    ids=str,
)  # fmt: skip
def test_jobs_of_another_form(batch, jobs):
    wrong = "rules are" if jobs in ({"worker": "2"},) else "a number of tasks|a dict of names"
    with pytest.raises((TypeError, errors.InvalidArgumentError), match=wrong):
        batch(jobs)


@pytest.mark.parametrize("jobs", [{}, {"worker": 0}, {"worker": -2}, {"a": -1, "b": -1}], ids=str)
def test_numbers_of_tasks_that_there_are_not(batch, jobs):
    with pytest.raises(errors.InvalidArgumentError, match="job"):
        batch(jobs)


def test_jobs_that_are_numbers(batch):
    assert batch({"ps": 0, "worker": np.int64(2)}).cluster_spec().jobs == ["worker"]
    assert batch({"ps": 1, "worker": -1}).cluster_spec().jobs == ["ps", "worker"]


def tf_config(monkeypatch):
    cluster = {"ps": ["a:1"], "worker": ["b:2", "c:3"]}
    told = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    return TFConfigClusterResolver()


def simple(monkeypatch):
    spec = ClusterSpec({"ps": ["a:1"], "worker": ["b:2", "c:3"]})
    return SimpleClusterResolver(spec, task_type="worker", task_id=1, num_accelerators={"GPU": 2})


def union(monkeypatch):
    return UnionResolver(simple(monkeypatch), tf_config(monkeypatch))


@pytest.mark.parametrize("make", [tf_config, simple])
@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (("nosuch",), "no such job: 'nosuch'"),
        (("nosuch", 0), "no such job: 'nosuch'"),
        (("worker", 2), "job 'worker' has no task 2"),
        (("ps", 1), "job 'ps' has no task 1"),
        ((None, 7), "job 'worker' has no task 7"),
    ],
)
def test_accelerators_of_a_task_that_there_is_not(monkeypatch, make, task, problem):
    for resolver in (make(monkeypatch), UnionResolver(make(monkeypatch))):
        with pytest.raises(ValueError, match=problem):
            resolver.num_accelerators(*task)


@pytest.mark.parametrize("make", [tf_config, simple, union])
@pytest.mark.parametrize("task", [(), ("worker",), ("worker", 0), (None, 0), ("ps", 0)])
def test_accelerators_of_a_task_that_there_is(monkeypatch, make, task):
    monkeypatch.setattr("mpidist.cluster_resolver.base.visible_gpus", lambda: ["0", "1"])
    assert make(monkeypatch).num_accelerators(*task) == {"GPU": 2}
