"""Our resolvers and cluster specs against TensorFlow's, where it is installed."""

import inspect
import json
import random

import pytest

from mpidist import ClusterSpec
from mpidist import cluster as cluster_package
from mpidist import cluster_resolver as resolvers
from mpidist.cluster_resolver import SimpleClusterResolver, TFConfigClusterResolver, UnionResolver
from mpidist.proto.mpidist_pb2 import ClusterDef

tensorflow = pytest.importorskip("tensorflow")
theirs = tensorflow.distribute.cluster_resolver

JOBS = ("ps", "worker", "chief", "evaluator", "x")


def drawn_cluster(rng):
    cluster = {}
    for job in rng.sample(JOBS, rng.randint(0, 4)):
        addresses = [f"host{rng.randint(0, 30)}:{rng.randint(1, 9999)}" for _ in range(5)]
        indices = sorted(rng.sample(range(12), rng.randint(1, 4)))
        dense = addresses[: rng.randint(1, 4)]
        cluster[job] = dense if rng.random() < 0.6 else dict(zip(indices, addresses, strict=False))
    return cluster


def same(mine, other, method, *arguments):
    """Check that both give equal results, or errors of the same type. Return the result."""
    answers = []
    for one in (mine, other):
        try:
            answers.append(getattr(one, method)(*arguments))
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            answers.append(next(kind for kind in (TypeError, ValueError, KeyError, RuntimeError)
                                if isinstance(error, kind)))  # fmt: skip
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.parametrize("seed", range(60))
def test_specs(seed):
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    mine, other = ClusterSpec(cluster), tensorflow.train.ClusterSpec(cluster)
    assert mine.as_dict() == other.as_dict()
    assert repr(mine) == repr(other)
    assert bool(mine) == bool(other)
    assert mine.jobs == other.jobs
    data = other.as_cluster_def().SerializeToString(deterministic=True)
    assert mine.as_cluster_def().SerializeToString(deterministic=True) == data
    assert ClusterSpec(ClusterDef.FromString(data)) == mine
    assert ClusterSpec(other.as_cluster_def()) == mine
    assert tensorflow.train.ClusterSpec(mine.as_dict()) == other
    for job in (*cluster, "none"):
        same(mine, other, "num_tasks", job)
        same(mine, other, "task_indices", job)
        same(mine, other, "job_tasks", job)
        for index in range(5):
            same(mine, other, "task_address", job, index)


@pytest.mark.parametrize("seed", range(60))
def test_tf_configs(seed, monkeypatch):
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    config = {"cluster": {job: tasks for job, tasks in cluster.items() if isinstance(tasks, list)}}
    if rng.random() < 0.8:
        config["task"] = {"type": rng.choice(JOBS), "index": rng.randint(0, 3)}
    others = {"rpc_layer": "grpc", "session_master": "there:1"}
    config |= {name: value for name, value in others.items() if rng.random() < 0.3}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    mine, other = TFConfigClusterResolver(), theirs.TFConfigClusterResolver()
    assert mine.cluster_spec().as_dict() == other.cluster_spec().as_dict()
    assert (mine.task_type, mine.task_id) == (other.task_type, other.task_id)
    assert mine.rpc_layer == other.rpc_layer
    named = [("worker", 0), ("ps", 1), ("worker", 1, "x")]
    for arguments in (*named, (), (None, None, "x")) if "task" in config else named:
        same(mine, other, "master", *arguments)


@pytest.mark.parametrize("seed", range(40))
def test_simple_ones_and_their_union(seed):
    rng = random.Random(seed)
    clusters = [drawn_cluster(rng) for _ in range(rng.randint(1, 3))]
    task = rng.choice([(None, None), ("worker", 1), ("ps", 0)])
    layer = rng.choice([None, "grpc"])
    mine = [SimpleClusterResolver(ClusterSpec(c), "m:1", *task, rpc_layer=layer) for c in clusters]
    other = [
        theirs.SimpleClusterResolver(tensorflow.train.ClusterSpec(c), "m:1", *task, rpc_layer=layer)
        for c in clusters
    ]
    for arguments in ((), ("worker", 0), ("chief", 0, "x")):
        same(mine[0], other[0], "master", *arguments)
    union, joined = UnionResolver(*mine), theirs.UnionResolver(*other)
    for one in (union, joined):
        one.as_dict = lambda one=one: one.cluster_spec().as_dict()
    same(union, joined, "as_dict")
    assert (union.task_type, union.task_id) == (joined.task_type, joined.task_id)
    same(union, joined, "master")


@pytest.mark.parametrize("seed", range(60))
def test_roles(seed):
    from tensorflow.python.distribute import multi_worker_util

    rng = random.Random(seed)
    cluster = {job: [f"{job}{n}:1" for n in range(rng.randint(1, 2))]
               for job in rng.sample(JOBS, rng.randint(1, 4))}  # fmt: skip
    for job in (*JOBS, "ps"):
        for index in range(3):
            for name in ("is_chief", "id_in_cluster"):
                same(cluster_package, multi_worker_util, name, cluster, job, index)
        # If the evaluator is not in the cluster, TensorFlow raises a KeyError.
        if job in cluster or job != "evaluator":
            same(cluster_package, multi_worker_util, "worker_count", cluster, job)


def test_arguments_of_kubernetes():
    ours, others = (
        inspect.signature(one.KubernetesClusterResolver).parameters for one in (resolvers, theirs)
    )
    places = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert places == list(others)
    members = [
        {member.name: member.value for member in one.KubernetesExecutableLocation}
        for one in (resolvers, theirs)
    ]
    assert members[0] == members[1]


def test_device_filters():
    from tensorflow.python.training import server_lib

    mine, other = cluster_package.ClusterDeviceFilters(), server_lib.ClusterDeviceFilters()
    for one in (mine, other):
        one.set_device_filters("worker", 1, ["/job:ps", "/job:worker/task:1"])
        one.set_device_filters("ps", 0, ["/job:worker"])
    theirs_as_bytes = other._as_cluster_device_filters().SerializeToString(deterministic=True)
    ours_as_bytes = mine.as_cluster_device_filters().SerializeToString(deterministic=True)
    assert ours_as_bytes == theirs_as_bytes
