"""The pods of Kubernetes, as its API and the MPI operator's files tell them."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from _cases import batch_systems
from _cases.batch_systems import Client
from _cases.standard_input import input_of_this_process

from mpidist import ClusterSpec, errors
from mpidist.cluster_resolver import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    MPIJobClusterResolver,
)


@pytest.fixture(autouse=True)
def put(monkeypatch):
    return batch_systems.setter(monkeypatch)


def test_mpi_job(put, tmp_path):
    hosts = tmp_path / "hostfile"
    hosts.write_text("job-worker-0.job slots=2\njob-worker-1.job:1\njob-worker-2.job\n")
    script = tmp_path / "discover"
    put(OMPI_COMM_WORLD_RANK=3)
    resolver = MPIJobClusterResolver(hostfile=str(hosts), discover_script=str(script))
    names = [f"job-worker-{n}.job:{8888 + m}" for n, m in ((0, 0), (0, 1), (1, 0), (2, 0))]
    assert resolver.cluster_spec() == ClusterSpec({"worker": names})
    assert resolver.get_task_info() == ("worker", 3)
    script.write_text("#!/bin/sh\necho job-worker-0.job:4\n")
    script.chmod(0o755)
    assert set(resolver.task_hosts().hosts) == {"job-worker-0.job"}  # those that run now
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(errors.FailedPreconditionError, match="does not list"):
        resolver.cluster_spec()
    script.unlink()
    hosts.write_text("a slots=x\n")
    with pytest.raises(errors.InvalidArgumentError, match="slots="):
        resolver.cluster_spec()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("\ufeffa slots=1\r\nb:1\r\n", "ab"),
        ("# comment\n\ta\tslots=1 # comment\n\n b \n", "ab"),
        ("a slots = 1\nb :1\n", "ab"),
        ("a slots=1 max_slots=4\nb\n", "ab"),
        ("a,\nb\n", "ab"),
        ("a b\n", None),
        ("a:1,b:1\n", None),
        ("a;b\n", None),
        ("-a\n", None),
        ("a slots=\n", None),
    ],
)
@pytest.mark.parametrize("by_script", [False, True])
def test_forms_of_lines_of_an_mpi_job(put, tmp_path, text, hosts, by_script):
    path, script = tmp_path / "hosts", tmp_path / "discover"
    path.write_bytes(text.encode())
    if by_script:
        script.write_text(f"#!/bin/sh\ncat {path}\n")
        script.chmod(0o755)
    put(OMPI_COMM_WORLD_RANK=0)
    make = partial(MPIJobClusterResolver, hostfile=str(path), discover_script=str(script))
    if hosts is None:
        with pytest.raises(errors.InvalidArgumentError, match=r"slots=|host"):
            make().cluster_spec()
    else:
        expected = ClusterSpec({"worker": [f"{host}:8888" for host in hosts]})
        assert make().cluster_spec() == expected


def test_the_script_of_an_mpi_job_leaves_standard_input(put, tmp_path):
    script, hosts = tmp_path / "discover", tmp_path / "input"
    script.write_text("#!/bin/sh\ncat > /dev/null\necho a:1\n")
    script.chmod(0o755)
    hosts.write_text("text for the user's program\n")
    put(OMPI_COMM_WORLD_RANK=0)
    with input_of_this_process(hosts) as position:
        resolver = MPIJobClusterResolver(hostfile="none", discover_script=str(script))
        assert resolver.cluster_spec() == ClusterSpec({"worker": ["a:8888"]})
        assert position() == 0


def test_pods_of_one_node_are_told_apart():
    class Near(Client):
        def list_pod_for_all_namespaces(self, label_selector):
            found = super().list_pod_for_all_namespaces(label_selector)
            for number, pod in enumerate(found.items):
                pod.status.pod_ip = f"172.16.0.{number}"
            return found

    pods = [(f"worker-{n}", "Running", host) for n, host in enumerate(["10.0.0.5"] * 2)]
    resolver = KubernetesClusterResolver(override_client=Near(job_name_tensorflow=pods))
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["172.16.0.0:8470", "172.16.0.1:8470"]}
    )


def test_kubernetes():
    pods = [(f"worker-{n}", "Running", f"10.0.0.{n}") for n in (10, 2, 1)]
    client = Client(job_name_tensorflow=pods, role_ps=[("ps-0", "Running", "10.0.1.1")])
    resolver = KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.10:8470"]}
    )
    assert resolver.master() == ""
    assert resolver.master("worker", 2) == "grpc://10.0.0.10:8470"
    both = KubernetesClusterResolver(
        {"ps": "role=ps", "worker": ["job-name=tensorflow"]}, 99, "mpi", client,
        KubernetesExecutableLocation.OFF_CLUSTER, task_type="ps", task_id=0,
    )  # fmt: skip
    assert both.cluster_spec().jobs == ["ps", "worker"]
    assert both.master() == "mpi://10.0.1.1:99"
    client.pods["role_ps"].append(("ps-1", "Pending", None))
    with pytest.raises(RuntimeError, match=r"ps-1.*Pending"):
        both.cluster_spec()


def test_kubernetes_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match=r"mpidist\[kubernetes\]"):
        KubernetesClusterResolver()


@pytest.mark.parametrize(
    ("location", "host", "loaded"),
    [
        (None, None, "kube"),
        (None, "10.0.0.1", "incluster"),
        (KubernetesExecutableLocation.WITHIN_CLUSTER, None, "incluster"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "10.0.0.1", "kube"),
    ],
)
def test_where_kubernetes_is_asked_from(put, monkeypatch, location, host, loaded):
    client = Client(job_name_tensorflow=[("worker-0", "Running", "10.0.0.7")])
    done = []
    config = {f"load_{n}_config": lambda n=n: done.append(n) for n in ("kube", "incluster")}
    package = SimpleNamespace(client=SimpleNamespace(CoreV1Api=lambda: client),
                              config=SimpleNamespace(**config))  # fmt: skip
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if host is not None:
        put(KUBERNETES_SERVICE_HOST=host)
    resolver = KubernetesClusterResolver(executable_location=location)
    assert done == [loaded]
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.7:8470"]})
    KubernetesClusterResolver(override_client=client, executable_location=location)
    assert done == [loaded]  # whoever gives a client has configured it


def test_locations_that_kubernetes_does_not_have():
    members = {one.name: one.value for one in KubernetesExecutableLocation}
    assert members == {"WITHIN_CLUSTER": 0, "OFF_CLUSTER": 1}
    for wrong in (2, 0, "OFF_CLUSTER"):
        with pytest.raises(ValueError, match="executable_location"):
            KubernetesClusterResolver(None, 8470, "grpc", Client(), wrong)
    with pytest.raises(TypeError, match="positional"):
        KubernetesClusterResolver(None, 8470, "grpc", Client(), None, "worker", 0)
