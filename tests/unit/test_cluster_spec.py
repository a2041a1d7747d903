"""ClusterSpec: TensorFlow's rules, and ranks."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import ClusterSpec, Server
from mpidist.cluster import normalize_cluster_spec
from mpidist.cluster_resolver import SimpleClusterResolver, UnionResolver
from mpidist.errors import NotFoundError
from mpidist.proto.mpidist_pb2 import ClusterDef, ConfigProto, JobDef, ServerDef
from strategy.protocol.cluster import given_spec

SPARSE = {"ps": ["a:1", "b:2"], "worker": {3: "d:4", 1: "c:3"}}

clusters = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.lists(st.text(max_size=8), max_size=4)
    | st.dictionaries(st.integers(0, 2**31 - 1), st.text(max_size=8), max_size=4),
    max_size=4,
)


def dense(cluster):
    return {
        job: dict(tasks) if isinstance(tasks, dict) else dict(enumerate(tasks))
        for job, tasks in cluster.items()
    }


@given(clusters)
def test_every_form_gives_the_same_spec(cluster):
    spec = ClusterSpec(cluster)
    for other in (
        ClusterSpec(spec),
        ClusterSpec(spec.as_cluster_def()),
        ClusterSpec(spec.as_dict()),
        ClusterSpec(dense(cluster)),
    ):
        assert other == spec
        assert other.as_dict() == spec.as_dict()
        assert repr(other) == repr(spec)
        assert other.digest() == spec.digest()
    assert spec == dense(cluster)
    assert bool(spec) == bool(cluster)
    assert spec.jobs == list(cluster)


@given(clusters, clusters)
def test_equality_and_digests(first, second):
    equal = dense(first) == dense(second)
    one, two = ClusterSpec(first), ClusterSpec(second)
    assert (one == two) == equal
    assert (one != two) != equal
    assert (one.digest() == two.digest()) == equal


@given(clusters)
def test_lookups(cluster):
    spec = ClusterSpec(cluster)
    for job, tasks in dense(cluster).items():
        assert spec.num_tasks(job) == len(tasks)
        assert spec.task_indices(job) == sorted(tasks)
        assert all(spec.task_address(job, index) == tasks[index] for index in tasks)
    everything = [(job, i) for job, tasks in dense(cluster).items() for i in sorted(tasks)]
    assert spec.tasks() == everything


def test_dicts_and_lists():
    spec = ClusterSpec(SPARSE)
    assert spec.as_dict() == {"ps": ["a:1", "b:2"], "worker": {1: "c:3", 3: "d:4"}}
    assert spec.job_tasks("ps") == ["a:1", "b:2"]
    assert spec.job_tasks("worker") == [None, "c:3", None, "d:4"]
    assert ClusterSpec({"a": {1: "y", 0: "x"}}).as_dict() == {"a": ["x", "y"]}
    assert ClusterSpec({"a": ("x", "y")}).as_dict() == {"a": ["x", "y"]}


def test_a_job_without_tasks():
    spec = ClusterSpec({"a": [], "b": {}})
    assert spec
    assert spec.as_dict() == {"a": {}, "b": {}}
    assert spec.job_tasks("a") == spec.task_indices("b") == []
    assert spec.num_tasks("a") == 0


def test_repr_is_sorted_by_job():
    assert repr(ClusterSpec({"w": {2: "c"}, "a": ["b"]})) == (
        "ClusterSpec({'a': ['b'], 'w': {2: 'c'}})"
    )
    assert repr(ClusterSpec({})) == "ClusterSpec({})"


def test_equality_with_other_things():
    spec = ClusterSpec({"a": ["x"]})
    assert spec == {"a": {0: "x"}}
    assert spec != {"a": ["x"]}
    assert spec != {"a": {0: "y"}}
    assert spec != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)


def test_bytes_and_keys_become_text_and_numbers():
    tasks = {"7": "y", 3.0: "z", b"4": "v", np.int32(5): "w"}
    assert ClusterSpec({b"a": [b"x"], "b": tasks}) == {
        "a": {0: "x"},
        "b": {7: "y", 3: "z", 4: "v", 5: "w"},
    }
    assert ClusterSpec({"a": {2**31 - 1: "x"}}).task_indices("a") == [2**31 - 1]


@pytest.mark.parametrize(
    "cluster",
    [
        *(None, 3, "worker", ["a:1"], {"a": "b:1"}, {"a": 3}, {"a": [3]}, {"a": {0: None}}),
        *({1: ["x"]}, {"a": {None: "x"}}, {"a": {True: "x"}}, {"a": {(1,): "x"}}),
        *(ServerDef(job_name="a"), JobDef(name="a", tasks={0: "x"}), ConfigProto(), ClusterDef),
    ],
)
def test_wrong_types(cluster):
    with pytest.raises(TypeError, match=r"must be|is made from"):
        ClusterSpec(cluster)


@pytest.mark.parametrize("index", ["x", "", b"x", "1.5", 1.7, nan, inf, -1, "-1", 2**31, 2.0**40])
def test_indices_that_cannot_be(index):
    message = f"index of a task of job 'w' must be a whole number from 0 to .*, not {index!r}"
    with pytest.raises(ValueError, match=message):
        ClusterSpec({"w": {index: "a:1"}})


@pytest.mark.parametrize(
    ("cluster", "what"),
    [
        ({"w": {1: "a:1", "1": "b:1"}}, "task 1 of job 'w' is given twice"),
        ({"w": {1: "a:1", "1": "a:1"}}, "task 1 of job 'w' is given twice"),
        ({"w": ["a:1"], b"w": ["b:1"]}, "job 'w' is given twice"),
        (ClusterDef(job=[JobDef(name="w"), JobDef(name="w")]), "job 'w' is given twice"),
        (ClusterDef(job=[JobDef(name="w", tasks={-1: "a:1"})]), "must be a whole number from 0"),
    ],
)
def test_nothing_is_lost_where_two_are_one(cluster, what):
    with pytest.raises(ValueError, match=what):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    "ask",
    [
        lambda spec: spec.num_tasks("x"),
        lambda spec: spec.task_indices("x"),
        lambda spec: spec.task_address("x", 0),
        lambda spec: spec.job_tasks("x"),
    ],
)
def test_no_such_job(ask):
    with pytest.raises(ValueError, match=r"no such job: 'x'; the jobs are \['ps', 'worker'\]"):
        ask(ClusterSpec(SPARSE))


@pytest.mark.parametrize("index", [0, 2, 4, -1])
def test_no_such_task(index):
    with pytest.raises(ValueError, match=rf"has no task {index}: it has \[1, 3\]"):
        ClusterSpec(SPARSE).task_address("worker", index)


def test_copies_are_independent():
    tasks, definition = ["x"], ClusterSpec({"a": ["x"]}).as_cluster_def()
    specs = [ClusterSpec({"a": tasks}), ClusterSpec(definition)]
    specs.append(ClusterSpec(specs[0]))
    tasks.append("y")
    definition.job[0].tasks[5] = "z"
    specs[0].as_dict()["a"].append("w")
    specs[0].as_cluster_def().job[0].tasks[0] = "v"
    assert all(spec == {"a": {0: "x"}} for spec in specs)


def test_the_message_is_sorted():
    definition = ClusterSpec({"w": {3: "d", 1: "c"}, "a": ["b"]}).as_cluster_def()
    assert isinstance(definition, ClusterDef)
    assert [job.name for job in definition.job] == ["a", "w"]
    assert definition.SerializeToString(deterministic=True) == ClusterSpec(
        {"a": ["b"], "w": {1: "c", 3: "d"}}
    ).as_cluster_def().SerializeToString(deterministic=True)


def test_the_script_of_a_shared_rank_is_not_the_service():
    cluster = {"ps": ["h:0", "h:1"], "data": ["h:1"], "worker": ["h:1", "h:2"]}
    for jobs in (sorted(cluster), sorted(cluster, reverse=True)):
        spec = ClusterSpec({job: cluster[job] for job in jobs})
        assert [spec.task_of(rank) for rank in range(3)] == [
            ("ps", 0),
            ("worker", 0),
            ("worker", 1),
        ]


@pytest.mark.parametrize("address", ["host", "host:", "host:x", "host:-1", ""])
def test_addresses_without_ranks(address):
    with pytest.raises(ValueError, match="is not <host>:<rank>"):
        ClusterSpec({"a": [address]}).task_of(0)


def test_a_rank_without_a_task():
    with pytest.raises(NotFoundError, match="on rank 9"):
        ClusterSpec({"a": ["h:0"]}).task_of(9)


class ForeignSpec:
    """A cluster spec as TensorFlow's class has it."""

    def __init__(self, cluster):
        self._cluster = cluster

    def as_cluster_def(self):
        return ClusterSpec(self._cluster).as_cluster_def()

    def as_dict(self):
        return self._cluster


class OnlyDict:
    def as_dict(self):
        return SPARSE


@pytest.mark.parametrize("foreign", [ForeignSpec(SPARSE), OnlyDict()])
def test_cluster_specs_of_other_libraries(foreign):
    assert ClusterSpec(foreign) == ClusterSpec(SPARSE)
    assert normalize_cluster_spec(foreign) == ClusterSpec(SPARSE)
    server = Server(foreign, "worker", 3, start=False)
    assert server.cluster_spec == ClusterSpec(SPARSE)
    assert given_spec(None, foreign) == ClusterSpec(SPARSE)
    assert given_spec(foreign, None) == ClusterSpec(SPARSE)


def test_a_cluster_spec_of_another_library_for_a_resolver():
    resolver = SimpleClusterResolver(ForeignSpec(SPARSE), task_type="ps", task_id=0)
    assert resolver.cluster_spec() == ClusterSpec(SPARSE)
    assert UnionResolver(resolver).cluster_spec() == ClusterSpec(SPARSE)


@pytest.mark.parametrize("thing", [ForeignSpec, OnlyDict, object(), 5, ["a:1"]])
def test_what_is_no_cluster_spec(thing):
    with pytest.raises(TypeError, match="a ClusterSpec is made from"):
        ClusterSpec(thing)
    with pytest.raises(ValueError, match="a cluster spec is"):
        normalize_cluster_spec(thing)
    with pytest.raises(TypeError, match="cluster_spec must be a ClusterSpec"):
        SimpleClusterResolver(thing)


def spec_that_fails():
    class Broken:
        def as_cluster_def(self):
            raise RuntimeError("of the spec itself")

    return Broken()


def test_an_error_of_a_foreign_spec_is_told():
    with pytest.raises(RuntimeError, match="of the spec itself"):
        ClusterSpec(spec_that_fails())
