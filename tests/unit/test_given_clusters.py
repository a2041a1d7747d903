"""Resolvers of clusters that somebody describes: the script, TF_CONFIG, or other resolvers."""

import json
import os
import subprocess
import sys

import pytest

from mpidist import ClusterSpec
from mpidist.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

SPEC = ClusterSpec({"ps": ["a:1"], "worker": ["b:2", "c:3"]})


def test_simple():
    resolver = SimpleClusterResolver(SPEC, "there:5", rpc_layer="grpc")
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() == SPEC
    assert resolver.cluster_spec() is not SPEC
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.master() == "grpc://there:5"
    assert resolver.master("worker") == "grpc://there:5"
    assert resolver.master("worker", 1) == "grpc://c:3"
    assert resolver.master("worker", 0, "mpi") == "mpi://b:2"
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}
    resolver.rpc_layer = None
    assert resolver.master("ps", 0) == "a:1"


def test_simple_says_what_it_was_given():
    resolver = SimpleClusterResolver(
        SPEC, task_type="worker", task_id=0, environment="google", num_accelerators={"GPU": 2}
    )
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.environment == "google"
    assert resolver.num_accelerators("ps", 0, None) == {"GPU": 2}
    assert SimpleClusterResolver(SPEC, rpc_layer="grpc").master() == ""


@pytest.mark.parametrize(("spec", "master"), [({"worker": ["a:1"]}, ""), (None, ""), (SPEC, 7)])
def test_simple_takes_no_other_types(spec, master):
    with pytest.raises(TypeError):
        SimpleClusterResolver(spec, master)


def test_union_follows_the_order_of_its_resolvers():
    first = SimpleClusterResolver(SPEC, "first:1", rpc_layer="grpc", num_accelerators={"GPU": 1})
    second = SimpleClusterResolver(
        ClusterSpec({"worker": ["d:4"], "evaluator": ["e:5"]}), task_type="worker", task_id=0
    )
    union = UnionResolver(first, second)
    assert union.cluster_spec() == ClusterSpec(
        {"ps": ["a:1"], "worker": ["b:2", "c:3", "d:4"], "evaluator": ["e:5"]}
    )
    assert union.cluster_spec().jobs == ["ps", "worker", "evaluator"]
    assert union.master() == "grpc://first:1"
    assert union.master("worker", 2) == "grpc://d:4"
    assert union.num_accelerators() == {"GPU": 1}
    assert (union.task_type, union.task_id, union.environment) == (None, None, "")
    told = UnionResolver(second, first, task_type="ps", task_id=0, rpc_layer="mpi")
    assert (told.task_type, told.task_id) == ("ps", 0)
    assert told.master("ps", 0) == "mpi://a:1"
    assert told.master() == "mpi://a:1"
    assert UnionResolver(second, task_type="evaluator").task_id == 0


def test_union_keeps_indices_that_are_given():
    sparse = SimpleClusterResolver(ClusterSpec({"worker": {3: "d:4", 1: "c:3"}}))
    union = UnionResolver(SimpleClusterResolver(ClusterSpec({"worker": ["b:2"]})), sparse)
    assert union.cluster_spec() == {"worker": {0: "b:2", 1: "c:3", 3: "d:4"}}
    with pytest.raises(KeyError, match="task 1 of job 'worker'"):
        UnionResolver(sparse, SimpleClusterResolver(SPEC)).cluster_spec()


def test_union_of_a_job_without_tasks():
    empty = SimpleClusterResolver(ClusterSpec({"worker": [], "ps": []}))
    union = UnionResolver(empty, SimpleClusterResolver(SPEC), empty)
    assert union.cluster_spec() == SPEC


def test_union_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="ClusterResolvers"):
        UnionResolver(SPEC)
    with pytest.raises(TypeError, match="port"):
        UnionResolver(SimpleClusterResolver(SPEC), port=1)


@pytest.fixture
def tf_config(monkeypatch):
    def put(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    return put


CLUSTER = {"ps": ["a:1"], "worker": ["b:2", "c:3"]}


def test_tf_config(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.rpc_layer == "grpc"
    assert resolver.environment == ""
    assert resolver.master() == "grpc://c:3"
    assert resolver.master("ps", 0) == "grpc://a:1"
    assert resolver.master(rpc_layer="mpi") == "mpi://c:3"
    tf_config({"cluster": CLUSTER, "task": {"type": "ps", "index": "0"}, "environment": "cloud"})
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)  # it is read again
    assert resolver.master() == "a:1"
    assert resolver.environment == "cloud"


def test_what_is_given_goes_before_tf_config(tf_config):
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"})
    resolver = TFConfigClusterResolver("worker", 0, "mpi", "here")
    assert resolver.master() == "mpi://b:2"
    assert resolver.environment == "here"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "x"
    assert resolver.master() == "x://a:1"
    resolver.task_type = resolver.task_id = resolver.rpc_layer = None
    assert resolver.master() == "grpc://c:3"


def test_master_of_a_session_and_of_one_task(tf_config):
    tf_config({"cluster": CLUSTER, "session_master": "there:9", "rpc_layer": "grpc"})
    assert TFConfigClusterResolver().master("ps", 0) == "there:9"
    for cluster in ({}, {"worker": ["a:1"]}):
        tf_config({"cluster": cluster})
        assert TFConfigClusterResolver().master() == ""


@pytest.mark.parametrize(
    "text", ["", "  ", "{}", '{"cluster": {}, "task": {}}', '{"cluster": null, "task": null}']
)
def test_without_tf_config(tf_config, text):
    tf_config(text)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.master() == ""


def test_a_task_that_is_not_named(tf_config):
    tf_config({"cluster": CLUSTER})
    resolver = TFConfigClusterResolver()
    with pytest.raises(FailedPreconditionError, match='"task"'):
        resolver.master()
    with pytest.raises(ValueError, match="no task 2"):
        resolver.master("worker", 2)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "7", '"x"', "nonsense", '{"cluster": 7}', '{"cluster": ["a:1"]}',
        '{"cluster": {"worker": "a:1"}}', '{"cluster": {"worker": [1]}}',
        '{"cluster": {"worker": {"x": "a:1"}}}', '{"cluster": {"worker": 3}}',
        '{"cluster": []}', '{"cluster": false}', '{"cluster": 0}', '{"cluster": ""}',
        '{"cluster": {"worker": {"0": "a:1", "00": "b:1"}}}',
        '{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}}',
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "cluster": {}}',
        '{"cluster": {"worker": {"%s": "a:1"}}}' % ("9" * 5000), "9" * 5000,
        '{"cluster": {}, "task": {"index": %s}}' % ("9" * 5000),
    ],
)  # fmt: skip
def test_broken_tf_config(tf_config, text):
    tf_config(text)
    with pytest.raises(InvalidArgumentError, match="TF_CONFIG") as caught:
        TFConfigClusterResolver().cluster_spec()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("before", ["\ufeff", "\ufeff ", "\ufeff\r\n\t"])
def test_byte_order_mark_before_tf_config(tf_config, before):
    value = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}
    tf_config(before + json.dumps(value))
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://c:3"
    tf_config(before)
    assert not resolver.cluster_spec()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
@pytest.mark.parametrize("flags", [(), ("-X", "utf8=0")])
def test_byte_order_mark_in_any_locale(locale, flags):
    code = (
        "from mpidist.cluster_resolver import TFConfigClusterResolver\n"
        "print(TFConfigClusterResolver().cluster_spec().as_dict())"
    )
    environment = {"TF_CONFIG": "\ufeff" + json.dumps({"cluster": CLUSTER}), "LC_ALL": locale}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(CLUSTER), done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff\ufeff{}", " \ufeff{}", "\udcff\udcfe{}", "\udcff", "b'{}'", "'{}'", "$TF_CONFIG",
        "\ufeff[]", "\ufeff{", '"{}"', "null", "true", "{} {}", "{},", "{}\ufeff", "{}#",
        "{'cluster': {}}", '{\\"cluster\\": {}}',
    ],
)  # fmt: skip
def test_tf_config_of_another_form(tf_config, text):
    tf_config(text)
    with pytest.raises(InvalidArgumentError, match="TF_CONFIG") as caught:
        TFConfigClusterResolver().cluster_spec()
    str(caught.value).encode()  # it can be printed


def test_escapes_in_tf_config(tf_config):
    tf_config('{"cluster": {"\\u0070s": ["\\u0061:1"], "worker": ["b:2", "c\\u003a3"]}}\r\n')
    assert TFConfigClusterResolver().cluster_spec() == SPEC


def test_indices_in_tf_config(tf_config):
    tf_config({"cluster": {"worker": {"0": "a:1", "10": "b:1", "2": "c:1"}}})
    spec = TFConfigClusterResolver().cluster_spec()
    assert spec == {"worker": {0: "a:1", 2: "c:1", 10: "b:1"}}


@pytest.mark.parametrize(
    "task",
    ['"worker"', "[1]", '{"index": "one"}', '{"index": [1]}', '{"index": 1.7}', '{"index": true}',
     '{"index": 1e400}', '{"type": ["worker"]}', "[]", "false", "0", '""',
     '{"index": 1, "index": 2}', '{"index": "%s"}' % ("9" * 5000)],
)  # fmt: skip
def test_broken_task_in_tf_config(tf_config, task):
    tf_config(f'{{"cluster": {{}}, "task": {task}}}')
    with pytest.raises(InvalidArgumentError, match="TF_CONFIG"):
        _ = TFConfigClusterResolver().task_id, TFConfigClusterResolver().task_type
