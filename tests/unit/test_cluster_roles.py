"""Chief and worker roles of tasks, and device filters."""

import pytest

from mpidist import ClusterSpec
from mpidist.cluster import (
    ClusterDeviceFilters,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    validate_cluster_spec,
    worker_count,
)
from mpidist.proto import mpidist_pb2

LED = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}
EQUAL = {"worker": ["b:1", "c:1"], "ps": ["d:1"]}


def test_chiefs_and_workers():
    assert [is_chief(LED, job, 0) for job in LED] == [True, False, False, True]
    assert is_chief(EQUAL, "worker", 0)
    assert not is_chief(EQUAL, "worker", 1)
    assert is_chief(EQUAL, "evaluator", 7)  # in a cluster of its own
    assert not is_chief(EQUAL, None, None)
    assert (worker_count(LED, "worker"), worker_count(LED, "chief")) == (3, 3)
    assert (worker_count(LED, "evaluator"), worker_count(EQUAL, "worker")) == (1, 2)
    assert [id_in_cluster(LED, job, 0) for job in ("chief", "worker", "evaluator")] == [0, 1, 0]
    assert id_in_cluster(EQUAL, "worker", 1) == 1


def test_clusters_in_every_form():
    spec = ClusterSpec(EQUAL)
    for form in (EQUAL, spec, spec.as_cluster_def()):
        assert normalize_cluster_spec(form) == spec
    for other in (None, ["a:1"], "a:1", 3, mpidist_pb2.ServerDef(), mpidist_pb2.ClusterDef):
        with pytest.raises(ValueError, match="a cluster spec is"):
            normalize_cluster_spec(other)


@pytest.mark.parametrize(
    ("cluster", "job", "index", "text"),
    [
        ({"x": ["a:1"]}, None, None, "'x' is not a training job"),
        (EQUAL, "x", 0, "'x' is not a training job"),
        ({"chief": ["a:1", "b:1"]}, None, None, "one chief, and the cluster has 2"),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "one evaluator"),
        (EQUAL, "chief", 0, "no chief 0: the cluster has 0"),
        (EQUAL, "worker", 2, "no worker 2: the cluster has 2"),
        (EQUAL, "worker", -1, "no worker -1"),
        (EQUAL, "worker", None, "no worker None"),
    ],
)
def test_clusters_that_cannot_train(cluster, job, index, text):
    with pytest.raises(ValueError, match=text):
        validate_cluster_spec(cluster, job, index)


@pytest.mark.parametrize("job", ["ps", "chief", "evaluator"])
def test_jobs_without_a_number(job):
    with pytest.raises(ValueError, match=r"ps do not train|no chief|no such job"):
        worker_count(EQUAL, job)
    if job == "ps":
        with pytest.raises(ValueError, match="do not train"):
            id_in_cluster(EQUAL, "ps", 0)


def test_device_filters():
    filters, same = ClusterDeviceFilters(), ClusterDeviceFilters()
    filters.set_device_filters("worker", 1, ["/job:ps", "/job:worker/task:1"])
    filters.set_device_filters("ps", 0, ["/job:worker"])
    same.set_device_filters("ps", 0, ("/job:worker",))
    assert filters != same
    same.set_device_filters("worker", 1, ["/job:x"])
    same.set_device_filters("worker", 1, ["/job:ps", "/job:worker/task:1"])
    assert filters == same
    message = mpidist_pb2.ClusterDeviceFilters.FromString(
        filters.as_cluster_device_filters().SerializeToString()
    )
    assert [job.name for job in message.jobs] == ["ps", "worker"]
    assert list(message.jobs[1].tasks[1].device_filters) == ["/job:ps", "/job:worker/task:1"]
    for wrong in ("/job:ps", [1], [b"/job:ps"], None, 3):
        with pytest.raises(TypeError, match="a list of strings"):
            filters.set_device_filters("ps", 0, wrong)
    same.set_device_filters(b"ps", "0", (each for each in ["/job:worker"]))
    assert filters == same


@pytest.mark.parametrize(
    ("job", "index", "error", "text"),
    [
        (3, 0, TypeError, "the job_name must be a string, not 3"),
        (None, 0, TypeError, "the job_name must be a string, not None"),
        ("ps", None, TypeError, "index of a task of job 'ps' must be a whole number, not None"),
        ("ps", True, TypeError, "must be a whole number, not True"),
        ("ps", -1, ValueError, "must be a whole number from 0 to 2147483647, not -1"),
        ("ps", 2**40, ValueError, f"must be a whole number from 0 to 2147483647, not {2**40}"),
        ("ps", "x", ValueError, "must be a whole number from 0 to 2147483647, not 'x'"),
    ],
)
def test_device_filters_of_what_is_no_task(job, index, error, text):
    filters = ClusterDeviceFilters()
    with pytest.raises(error, match=text):
        filters.set_device_filters(job, index, ["/job:ps"])
    assert filters == ClusterDeviceFilters()
