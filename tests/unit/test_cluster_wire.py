"""The cluster messages are those of TensorFlow, field by field."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from mpidist import ClusterSpec, Server
from mpidist.proto import mpidist_pb2

TYPES = descriptor_pb2.FieldDescriptorProto
# Field number, name and type of each message: cluster.proto, tensorflow_server.proto,
# device_filters.proto and config.proto. Braces mark a map, and a star marks a repeated field.
MESSAGES = {
    "JobDef": ["1 name string", "2 tasks {int32,string}", "99 future string"],
    "ClusterDef": ["1 job JobDef*", "99 future string"],
    "TaskDeviceFilters": ["1 device_filters string*"],
    "JobDeviceFilters": ["1 name string", "2 tasks {int32,TaskDeviceFilters}"],
    "ClusterDeviceFilters": ["1 jobs JobDeviceFilters*"],
    "ConfigProto": [
        "1 device_count {string,int32}",
        "2 intra_op_parallelism_threads int32",
        "4 device_filters string*",
        "5 inter_op_parallelism_threads int32",
        "7 allow_soft_placement bool",
        "8 log_device_placement bool",
        "11 operation_timeout_in_ms int64",
        "99 future string",
    ],
    "ServerDef": [
        "1 cluster ClusterDef",
        "2 job_name string",
        "3 task_index int32",
        "4 default_session_config ConfigProto",
        "5 protocol string",
        "6 port int32",
        "7 cluster_device_filters ClusterDeviceFilters",
        "8 replica int32",
        "99 future string",
    ],
}


def set_type(field, kind):
    scalar = getattr(TYPES, f"TYPE_{kind.upper()}", None)
    field.type = scalar or TYPES.TYPE_MESSAGE
    if scalar is None:
        field.type_name = f".other.{kind}"


def add_map(message, field, kinds):
    entry = message.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    for number, (name, kind) in enumerate(zip(("key", "value"), kinds, strict=True), 1):
        set_type(entry.field.add(name=name, number=number, label=1), kind)
    field.label, field.type = TYPES.LABEL_REPEATED, TYPES.TYPE_MESSAGE
    field.type_name = f".other.{message.name}.{entry.name}"


@pytest.fixture(scope="module")
def other():
    """Return the classes of another library: same names and numbers, and one new field."""
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="other", syntax="proto3")
    for message_name, fields in MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for number, name, kind in (text.split() for text in fields):
            field = message.field.add(name=name, number=int(number), label=1)
            if kind.startswith("{"):
                add_map(message, field, kind.strip("{}").split(","))
                continue
            if kind.endswith("*"):
                field.label = TYPES.LABEL_REPEATED
            set_type(field, kind.rstrip("*"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"other.{name}"))
        for name in MESSAGES
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_numbers_names_and_types(other, name):
    ours = getattr(mpidist_pb2, name).DESCRIPTOR
    known = {f.number: f for f in other[name].DESCRIPTOR.fields if f.number != 99}
    assert {f.number: f.name for f in ours.fields} == {n: f.name for n, f in known.items()}
    for field in ours.fields:
        theirs = known[field.number]
        assert (field.type, field.is_repeated) == (theirs.type, theirs.is_repeated)


def server_def(classes):
    definition = classes("ServerDef")(job_name="worker", task_index=3, protocol="grpc")
    definition.port, definition.replica = 2222, 2
    for job, tasks in (("ps", {0: "a:1"}), ("worker", {3: "b:2", 1: "c:3"})):
        added = definition.cluster.job.add(name=job)
        for index, address in tasks.items():
            added.tasks[index] = address
    definition.cluster_device_filters.jobs.add(name="ps").tasks[0].device_filters.append("/cpu:0")
    config = definition.default_session_config
    config.device_count["GPU"] = 2
    config.allow_soft_placement = True
    config.operation_timeout_in_ms = 1 << 40
    config.device_filters.append("/job:ps")
    return definition


def ours(name):
    return getattr(mpidist_pb2, name)


def to_bytes(message):
    return message.SerializeToString(deterministic=True)


def test_bytes_are_interchangeable(other):
    mine, theirs = server_def(ours), server_def(other.__getitem__)
    assert to_bytes(mine) == to_bytes(theirs)
    assert other["ServerDef"].FromString(to_bytes(mine)) == theirs
    assert mpidist_pb2.ServerDef.FromString(to_bytes(theirs)) == mine


def test_unknown_fields_survive(other):
    theirs = server_def(other.__getitem__)
    theirs.future = "x"
    theirs.default_session_config.future = "y"
    server = Server(theirs, start=False)
    assert other["ServerDef"].FromString(to_bytes(server.server_def)) == theirs


def test_unknown_fields_of_a_cluster_survive(other):
    theirs = server_def(other.__getitem__).cluster
    theirs.future, theirs.job[1].future = "x", "y"
    spec = ClusterSpec(theirs)
    known = ClusterSpec(spec.as_dict())
    spec.as_cluster_def().job[0].name = "changed"  # changes only a copy
    theirs_sorted = other["ClusterDef"]()
    theirs_sorted.CopyFrom(theirs)
    theirs_sorted.job.sort(key=lambda job: job.name)
    for message in (
        spec.as_cluster_def(),
        ClusterSpec(spec).as_cluster_def(),
        Server(theirs, "ps", start=False).server_def.cluster,
        Server(spec, "ps", start=False).server_def.cluster,
        Server(theirs, "ps", start=False).cluster_spec.as_cluster_def(),
    ):
        assert other["ClusterDef"].FromString(to_bytes(message)) == theirs_sorted
    # Tasks do not compare unknown fields.
    assert spec == known
    assert spec.digest() == known.digest()


def test_other_messages_of_another_library(other):
    cluster = {"worker": ["a:1"]}
    for name in ("ServerDef", "JobDef", "ConfigProto"):
        with pytest.raises(TypeError, match=f"not from {name}"):
            ClusterSpec(other[name]())
    for name in ("ClusterDef", "ServerDef", "JobDef"):
        with pytest.raises(TypeError, match=f"config must be a ConfigProto, not {name}"):
            Server(cluster, config=other[name](), start=False)
    with pytest.raises(TypeError, match="not from JobDef"):
        Server(other["JobDef"](), start=False)


def test_messages_of_tensorflow():
    tensorflow = pytest.importorskip("tensorflow")
    theirs = tensorflow.train.ClusterSpec({"ps": ["a:1"], "worker": {3: "b:2", 1: "c:3"}})
    cluster = theirs.as_cluster_def()
    config = tensorflow.compat.v1.ConfigProto(intra_op_parallelism_threads=4)
    definition = tensorflow.train.ServerDef(cluster=cluster, job_name="worker", task_index=3)
    for server in (
        Server(definition, config=config, start=False),
        Server(cluster, "worker", 3, config=config, start=False),
    ):
        assert ClusterSpec(server.server_def.cluster) == ClusterSpec(theirs.as_dict())
        assert (server.job_name, server.task_index) == ("worker", 3)
        assert server.server_def.default_session_config.intra_op_parallelism_threads == 4
    for wrong in (definition, config, cluster.job[0], tensorflow.train.ClusterDef):
        for kind in (ClusterSpec, tensorflow.train.ClusterSpec):
            with pytest.raises(TypeError):
                kind(wrong)


def test_messages_of_another_library(other):
    theirs = server_def(other.__getitem__)
    spec = ClusterSpec(theirs.cluster)
    assert spec == {"ps": {0: "a:1"}, "worker": {1: "c:3", 3: "b:2"}}
    assert other["ClusterDef"].FromString(to_bytes(spec.as_cluster_def())) == theirs.cluster
    config = other["ConfigProto"](intra_op_parallelism_threads=4)
    server = Server(theirs.cluster, "ps", config=config, start=False)
    assert server.server_def.default_session_config.intra_op_parallelism_threads == 4
    assert (server.job_name, server.task_index) == ("ps", 0)
