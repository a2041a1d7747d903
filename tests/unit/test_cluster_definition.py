"""The cluster and the task that a Server derives from its arguments."""

import pytest

from mpidist import ClusterSpec, Server
from mpidist.proto.mpidist_pb2 import ClusterDef, ConfigProto, JobDef, ServerDef

CLUSTER = {"ps": ["a:1"], "worker": ["b:2", "c:3"]}


def definition(*args, **kwargs):
    return Server(*args, start=False, **kwargs).server_def


def given(**fields):
    cluster = ClusterSpec(fields.pop("cluster", CLUSTER)).as_cluster_def()
    return ServerDef(cluster=cluster, **fields)


@pytest.mark.parametrize(
    "cluster", [CLUSTER, ClusterSpec(CLUSTER), ClusterSpec(CLUSTER).as_cluster_def()]
)
def test_any_form_of_cluster(cluster):
    result = definition(cluster, "worker", 1)
    assert ClusterSpec(result.cluster) == ClusterSpec(CLUSTER)
    assert (result.job_name, result.task_index, result.protocol) == ("worker", 1, "")


def test_the_only_job_and_its_only_task_are_inferred():
    result = definition({"worker": {5: "a:1"}})
    assert (result.job_name, result.task_index) == ("worker", 5)
    result = definition(CLUSTER, "ps")
    assert (result.job_name, result.task_index) == ("ps", 0)
    result = definition({"worker": ["a:1", "b:2"]}, task_index=1)
    assert (result.job_name, result.task_index) == ("worker", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CLUSTER,), "job_name is missing"),
        ((CLUSTER, None, 0), "job_name is missing"),
        ((CLUSTER, "worker"), r"task_index is missing, and job 'worker' has several.*\[0, 1\]"),
        (({"worker": ["a", "b"]},), "task_index is missing"),
        (({},), "job_name is missing, and the cluster has no jobs"),
        (({"worker": []},), "task_index is missing, and job 'worker' has no tasks"),
        (({"worker": ["\ud800:1"]},), "must be text in UTF-8, not"),
        (({"worker": [b"\xff:1"]},), "must be text in UTF-8, not"),
        ((CLUSTER, "chief", 0), "no such job: 'chief'"),
        ((CLUSTER, "worker", 2), "has no task 2"),
        ((CLUSTER, "worker", -1), "has no task -1"),
        ((CLUSTER, "worker", 2**40), f"has no task {2**40}"),
        ((CLUSTER, "", 0), "no such job: ''"),
        ((given(), "worker"), r"task_index is missing, and job 'worker' has several.*\[0, 1\]"),
        ((given(task_index=1), "ps"), "job 'ps' has no task 1"),
        ((given(job_name="worker", task_index=7),), "has no task 7"),
        ((CLUSTER, "ps", 0, "pigeon"), "unknown protocol 'pigeon'.*mpi.*grpc"),
        ((given(job_name="ps", protocol="pigeon"),), "unknown protocol 'pigeon'"),
        ((CLUSTER, "ps", 0, "tcp"), "'tcp' is for endpoints and data services"),
    ],
)
def test_what_cannot_be_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        definition(*arguments)


def test_all_arguments_by_name():
    server = Server(
        server_or_cluster_def=given(job_name="ps"),
        job_name="worker",
        task_index=1,
        protocol="grpc",
        config=ConfigProto(allow_soft_placement=True),
        start=False,
    )
    assert server.server_def == given(
        job_name="worker",
        task_index=1,
        protocol="grpc",
        default_session_config=ConfigProto(allow_soft_placement=True),
    )


class Serialized:
    """An object with the method SerializeToString that is not a protobuf message."""

    def SerializeToString(self):
        return b""


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        (None, "NoneType"),
        (3, "int"),
        (["a:1"], "list"),
        ("a:1", "str"),
        (JobDef(name="worker", tasks={0: "a:1"}), "JobDef"),
        (ConfigProto(), "ConfigProto"),
        (Serialized(), "Serialized"),
    ],
)
def test_what_is_no_cluster(cluster, name):
    with pytest.raises(TypeError, match=f"not from {name}"):
        definition(cluster)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {}}, "config must be a ConfigProto, not dict"),
        ({"config": ClusterDef()}, "config must be a ConfigProto, not ClusterDef"),
        ({"config": ConfigProto}, "config must be a ConfigProto, not"),
        ({"job_name": 3}, "the job_name must be a string, not 3"),
        ({"protocol": 3}, "the protocol must be a string, not 3"),
        ({"task_index": "x"}, "the task_index must be a whole number, not 'x'"),
        ({"task_index": "0"}, "the task_index must be a whole number, not '0'"),
        ({"task_index": 1.7}, "the task_index must be a whole number, not 1.7"),
        ({"task_index": True}, "the task_index must be a whole number, not True"),
    ],
)
def test_wrong_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        definition(CLUSTER, **{"job_name": "worker", "task_index": 0, **arguments})


def test_a_server_def_is_taken_as_it_is():
    asked = given(job_name="worker", task_index=1, protocol="grpc", port=7, replica=3)
    result = definition(asked)
    assert result == asked
    asked.task_index = 0
    assert result.task_index == 1


def test_arguments_override_a_server_def():
    asked = given(job_name="worker", task_index=1, protocol="grpc")
    result = definition(asked, task_index=0, protocol="grpc+local")
    assert (result.job_name, result.task_index, result.protocol) == ("worker", 0, "grpc+local")
    result = definition(asked, job_name="ps", task_index=0)
    assert (result.job_name, result.task_index, result.protocol) == ("ps", 0, "grpc")


def test_a_server_def_without_a_job():
    result = definition(given(cluster={"worker": {4: "a:1"}}))
    assert (result.job_name, result.task_index) == ("worker", 4)
    with pytest.raises(ValueError, match="job_name is missing"):
        definition(given())


def test_a_task_index_without_a_job():
    workers = {"worker": ["a:1", "b:2", "c:3"]}
    for result in (
        definition(given(cluster=workers, task_index=2)),
        definition(given(cluster=workers, task_index=2), "worker"),
        definition(given(cluster=workers, task_index=1), "worker", 2),
        definition(given(task_index=2, cluster={**CLUSTER, **workers}), job_name=b"worker"),
    ):
        assert (result.job_name, result.task_index) == ("worker", 2)
    assert definition(given(cluster=workers, task_index=1), task_index=0).task_index == 0


def test_configs_are_merged():
    asked = given(job_name="ps")
    asked.default_session_config.CopyFrom(
        ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    )
    result = definition(asked, config=ConfigProto(inter_op_parallelism_threads=5))
    assert result.default_session_config == ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=5
    )
    assert asked.default_session_config.inter_op_parallelism_threads == 2


@pytest.mark.parametrize(
    ("protocol", "scheme"),
    [
        (None, "inproc"),
        ("inproc", "inproc"),
        ("grpc", "grpc"),
        ("grpc+verbs", "grpc+verbs"),
        ("grpc+local", "grpc+local"),
    ],
)
def test_targets_keep_the_name_of_the_protocol(protocol, scheme):
    server = Server(CLUSTER, "worker", 1, protocol, start=False)
    assert server.target == f"{scheme}://c:3"
    assert server.server_def.protocol == (protocol or "")
