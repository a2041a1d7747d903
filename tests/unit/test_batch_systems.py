"""Resolvers of batch systems, on the variables and files that those make."""

import os

import pytest
from _cases import batch_systems
from _cases.batch_systems import step

from mpidist import ClusterSpec, errors
from mpidist.cluster_resolver import (
    LSFClusterResolver,
    PBSClusterResolver,
    SGEClusterResolver,
    SlurmClusterResolver,
)
from mpidist.cluster_resolver.slurm import hosts_of_tasks
from mpidist.host_list import parse_counts


@pytest.fixture(autouse=True)
def put(monkeypatch):
    return batch_systems.setter(monkeypatch)


@pytest.fixture
def gpus(monkeypatch):
    return batch_systems.gpu_counter(monkeypatch)


@pytest.mark.parametrize(
    ("counts", "distribution", "plane", "hosts"),
    [
        ("2(x2)", "block", 1, "aabb"),
        ("2(x2)", "cyclic", 1, "abab"),
        ("3,1", "block", 1, "aaab"),
        ("3,1", "cyclic:block", 1, "abaa"),
        ("1,3", "cyclic", 1, "abbb"),
        ("4,3", "plane", 2, "aabbaab"),
        ("4,3", "plane=2", 2, "aabbaab"),
        ("2(x2)", "block:cyclic,pack", 1, "aabb"),
        ("2(x2)", "", 1, "aabb"),
    ],
)
def test_layouts(counts, distribution, plane, hosts):
    assert "".join(hosts_of_tasks("ab", parse_counts(counts), distribution, plane)) == hosts


def test_layouts_that_there_are_not():
    for text in ("", "a", "2x3", "2(3)", "2,", "-1"):
        with pytest.raises(errors.InvalidArgumentError, match="tasks by node"):
            parse_counts(text)
    with pytest.raises(errors.InvalidArgumentError, match="MPIClusterResolver"):
        hosts_of_tasks(["a"], [1], "arbitrary")


@pytest.mark.usefixtures("gpus")
def test_slurm(put):
    step(put, 3, "n[1-3]", "3(x2),1")
    resolver = SlurmClusterResolver({"ps": 1, "worker": -1})
    assert resolver.cluster_spec() == ClusterSpec(
        {
            "ps": ["n1:8888"],
            "worker": ["n1:8889", "n1:8890", "n2:8888", "n2:8889", "n2:8890", "n3:8888"],
        }
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.get_task_info() == ("worker", 2)
    assert resolver.master() == "grpc://n2:8888"
    assert resolver.master("ps", 0, "mpi") == "mpi://n1:8888"
    assert resolver.num_accelerators() == {}
    step(put, 0, "n[1-3]", "3(x2),1")
    assert resolver.get_task_info() == ("ps", 0)  # it is read again


@pytest.mark.usefixtures("gpus")
def test_slurm_keeps_the_order_of_nodes(put):
    step(put, 1, "n[10,2]", "1(x2)", names=["n10", "n2"])
    resolver = SlurmClusterResolver(port_base=5000, rpc_layer=None)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["n10:5000", "n2:5000"]})
    assert resolver.master() == "n2:5000"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("rank", range(4))
def test_slurm_in_turns(put, rank):
    step(put, rank, "n[1-2]", "3,1", "cyclic")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {
        "worker": {0: "n1:8888", 1: "n2:8888", 2: "n1:8889", 3: "n1:8890"}
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)


@pytest.mark.usefixtures("gpus")
def test_slurm_with_a_host_file(put, tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n2\nn1\nn2\n")
    put(SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3, SLURM_STEP_NODELIST="n[1-2]", SLURM_LOCALID=1,
        SLURM_STEP_TASKS_PER_NODE="1,2", SLURM_DISTRIBUTION="arbitrary",
        SLURM_HOSTFILE=path)  # fmt: skip
    spec = SlurmClusterResolver().cluster_spec()
    assert spec == ClusterSpec({"worker": ["n2:8888", "n1:8888", "n2:8889"]})


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["HET", "PACK"])
def test_slurm_with_components(put, name):
    # As Slurm says it: the nodes of the job by component, those of the step sorted.
    job = {
        f"SLURM_JOB_NODELIST_{name}_GROUP_0": "n3",
        f"SLURM_JOB_NODELIST_{name}_GROUP_1": "n[1-2]",
    }
    step = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_NUM_TASKS": 4,
            "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}  # fmt: skip
    put(**job, **step, SLURM_PROCID=2, SLURM_LOCALID=1, SLURM_NODEID=1, SLURMD_NODENAME="n1")
    resolver = SlurmClusterResolver({"ps": 1, "worker": 3})
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["n3:8888"], "worker": ["n1:8888", "n1:8889", "n2:8888"]}
    )
    assert resolver.get_task_info() == ("worker", 1)
    # Its own component has one task, for which Slurm calls that cyclic.
    put(SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NODEID=0, SLURMD_NODENAME="n3",
        SLURM_DISTRIBUTION="cyclic")  # fmt: skip
    assert resolver.cluster_spec().task_address("worker", 1) == "n1:8889"
    # A step of one component of the two.
    put(SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_NUM_TASKS=2, SLURM_STEP_TASKS_PER_NODE="1(x2)",
        SLURM_PROCID=1, SLURM_NODEID=1, SLURMD_NODENAME="n2")  # fmt: skip
    assert SlurmClusterResolver().get_task_info() == ("worker", 1)
    assert resolver.task_hosts().hosts == ("n1", "n2")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("tasks", [2, [2, 2], {"n1": 2, "n2": 2}])
def test_tasks_per_node_in_place_of_slurms(put, tasks):
    step(put, 2, "n[1-2]", "2(x2)")
    put(SLURM_STEP_TASKS_PER_NODE="nonsense")
    assert SlurmClusterResolver(tasks_per_node=tasks).get_task_info() == ("worker", 2)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("tasks", ["21", 1.5, ["a", "b"], {"n1": "x"}, [1.5, 2], True])
def test_tasks_per_node_that_are_no_numbers(put, tasks):
    step(put, 2, "n[1-2]", "2(x2)")
    with pytest.raises(TypeError, match="number of tasks of a node must be a whole number, not"):
        SlurmClusterResolver(tasks_per_node=tasks).cluster_spec()


@pytest.mark.usefixtures("gpus")
def test_slurm_that_contradicts_itself(put, monkeypatch):
    step(put, 1, "n[1-2]", "2(x2)")
    for name, value, message in (
        ("SLURM_LOCALID", "0", "--distribution=block"),
        ("SLURM_NODEID", "1", "--distribution=block"),
        ("SLURM_STEP_NUM_TASKS", "5", "4 tasks together"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3)", "2 nodes, but"),
        ("SLURM_STEP_NODELIST", "n[1-", "host list"),
        ("SLURM_PROCID", "4", "4 tasks"),
        ("SLURMD_NODENAME", "n2", "should be n1"),
        ("SLURM_PROCID", "x", "not a number"),
        ("SLURM_PROCID", "\u00b2", "not a number"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x99999999)", "more than 1000000"),
        ("SLURM_DISTRIBUTION", "plane", "how many tasks a plane has"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with pytest.raises(errors.InvalidArgumentError, match=message):
                SlurmClusterResolver()
    for jobs in ({"worker": 3}, {"worker": 5}, {"ps": -1, "worker": -1}, {"worker": -2}):
        with pytest.raises(errors.InvalidArgumentError, match=r"jobs|job counts"):
            SlurmClusterResolver(jobs)
    with pytest.raises(errors.InvalidArgumentError, match="ports"):
        SlurmClusterResolver(port_base=65535).cluster_spec()
    for port in (0, -5, 65536):
        with pytest.raises(errors.InvalidArgumentError, match="is not a port"):
            SlurmClusterResolver(port_base=port)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST",
                "SLURM_STEP_TASKS_PER_NODE"]
)  # fmt: skip
def test_slurm_that_is_half_set(put, monkeypatch, missing):
    step(put, 0, "n[1-2]", "2(x2)")
    monkeypatch.delenv(missing)
    with pytest.raises(errors.FailedPreconditionError, match=f"{missing} not set.*srun"):
        SlurmClusterResolver()


@pytest.mark.usefixtures("gpus")
def test_ranks_of_mpiexec_are_not_the_steps_tasks(put):
    step(put, 1, "n[1-2]", "1(x2)")
    put(PMI_RANK=3, PMI_SIZE=4)
    with pytest.raises(errors.FailedPreconditionError, match="MPIClusterResolver"):
        SlurmClusterResolver()
    put(PMI_RANK=1, PMI_SIZE=2)  # srun's own
    assert SlurmClusterResolver().get_task_info() == ("worker", 1)


@pytest.mark.parametrize(
    ("count", "visible", "arguments", "shown"),
    [
        (4, None, {}, "2,3"),
        (4, "4,5,6,7", {}, None),  # not there: CUDA shows none
        (8, "4,5,6,7", {}, "6,7"),
        (4, None, {"gpus_per_node": 2}, "1"),
        (4, None, {"gpus_per_task": 1}, "1"),
        (3, None, {}, "1"),
        (1, None, {}, None),
        (0, None, {}, None),
        (4, "", {}, None),
        (4, None, {"gpus_per_task": 0}, None),
        (4, None, {"auto_set_gpu": False}, None),
        (2, "GPU-a,GPU-b", {}, "GPU-b"),
    ],
)
def test_slurm_and_gpus(put, gpus, monkeypatch, count, visible, arguments, shown):
    gpus(count)
    step(put, 1, "n1", "2")
    if visible is not None:
        put(CUDA_VISIBLE_DEVICES=visible)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "x")  # so that the test's end restores it
        del os.environ["CUDA_VISIBLE_DEVICES"]
    resolver = SlurmClusterResolver(**arguments)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (visible if shown is None else shown)
    if shown is not None:
        assert resolver.num_accelerators() == {"GPU": len(shown.split(","))}
        assert resolver.num_accelerators("worker", 0) == {"GPU": len(shown.split(","))}
    elif "auto_set_gpu" in arguments:
        assert resolver.num_accelerators() == {"GPU": 2}
    else:
        assert resolver.num_accelerators() == {}


def test_gpus_that_slurm_has_bound(put, gpus):
    gpus(4)
    step(put, 1, "n1", "2")
    put(SLURM_GPUS_PER_TASK=2, CUDA_VISIBLE_DEVICES="0,1")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("shown", ["0,1", "2,3", "0"])
def test_gpus_that_a_newer_slurm_has_bound(put, gpus, shown):
    """It tells tasks only how many GPUs the step has on the node."""
    gpus(4)
    step(put, 1, "n1", "2")
    put(SLURM_GPUS_ON_NODE=4, CUDA_VISIBLE_DEVICES=shown)
    for _ in range(2):
        assert SlurmClusterResolver().num_accelerators() == {"GPU": len(shown.split(","))}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_gpus_that_are_shared_are_divided_once(put, gpus):
    gpus(4)
    step(put, 1, "n1", "2")
    put(SLURM_GPUS_ON_NODE=4, CUDA_VISIBLE_DEVICES="0,1,2,3")
    for _ in range(2):
        assert SlurmClusterResolver().num_accelerators() == {"GPU": 2}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize("arguments", [{"gpus_per_node": 3}, {"gpus_per_task": 2}])
def test_more_gpus_than_there_are(put, gpus, arguments):
    gpus(2)
    step(put, 0, "n1", "2")
    with pytest.raises(RuntimeError, match="GPUs"):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("count", "kind"),
    [(-1, ValueError), ("1", TypeError), (1.5, TypeError), (True, TypeError), ([1], TypeError)],
)
@pytest.mark.parametrize("name", ["gpus_per_node", "gpus_per_task"])
def test_numbers_of_gpus_that_there_are_not(put, gpus, name, count, kind):
    gpus(4)
    step(put, 0, "n1", "2")
    with pytest.raises(kind, match=name) as caught:
        SlurmClusterResolver(**{name: count})
    assert kind is TypeError or isinstance(caught.value, errors.InvalidArgumentError)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_pbs(put, tmp_path):
    path = tmp_path / "nodes"
    path.write_text("b\nb\na\n\nb\n")
    put(PBS_NODEFILE=path)
    resolver = PBSClusterResolver({"ps": 1, "worker": 3})
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["b:8888"], "worker": ["b:8889", "a:8888", "b:8890"]}
    )
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    put(PBS_VNODENUM=2)
    assert PBSClusterResolver({"ps": 1, "worker": 3}).get_task_info() == ("worker", 1)
    put(OMPI_COMM_WORLD_RANK=0)
    assert PBSClusterResolver({"ps": 1, "worker": 3}).get_task_info() == ("ps", 0)
    put(OMPI_COMM_WORLD_RANK=4)
    with pytest.raises(errors.InvalidArgumentError, match=r"rank 4.*4 tasks"):
        PBSClusterResolver()


def test_sge(put, tmp_path):
    path = tmp_path / "pe"
    path.write_text("b 2 all.q@b <NULL>\na 1 all.q@a <NULL>\n")
    put(PE_HOSTFILE=path, PMI_RANK=2)
    resolver = SGEClusterResolver(rpc_layer="mpi")
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["b:8888", "b:8889", "a:8888"]})
    assert resolver.master() == "mpi://a:8888"
    path.write_text("b two all.q@b\n")
    with pytest.raises(errors.InvalidArgumentError, match="slots"):
        resolver.cluster_spec()


def test_lsf(put, monkeypatch):
    put(LSB_MCPU_HOSTS="b 2 a 1", LSF_PM_TASKID=3)
    resolver = LSFClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["b:8888", "b:8889", "a:8888"]})
    assert resolver.get_task_info() == ("worker", 2)
    put(LSB_MCPU_HOSTS="b 999999999")
    with pytest.raises(errors.InvalidArgumentError, match="more than 1000000 tasks"):
        resolver.cluster_spec()
    put(LSB_MCPU_HOSTS="b 2 a")
    with pytest.raises(errors.InvalidArgumentError, match="in turns"):
        resolver.cluster_spec()
    monkeypatch.delenv("LSB_MCPU_HOSTS")
    monkeypatch.delenv("LSF_PM_TASKID")
    put(LSB_HOSTS="batch1 c c d", JSM_NAMESPACE_RANK=2)
    resolver = LSFClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["c:8888", "c:8889", "d:8888"]})
    assert resolver.get_task_info() == ("worker", 2)
    whole = LSFClusterResolver(skip_first_host=False).cluster_spec()
    assert whole.num_tasks("worker") == 4
    monkeypatch.delenv("JSM_NAMESPACE_RANK")
    assert LSFClusterResolver(skip_first_host=True).task_id is None
    put(LSB_MCPU_HOSTS="", LSB_HOSTS="login login a b")
    hosts = LSFClusterResolver(skip_first_host=True).cluster_spec()
    assert hosts == ClusterSpec({"worker": ["a:8888", "b:8888"]})


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("text", ["n1, n2", "n1 n2 ", "n[1-2],", ",n1,,n2", "\tn1\tn2\n", "n[1,2]"])
def test_blanks_and_commas_in_slurms_lists(put, text):
    step(put, 1, text, "1(x2)")
    spec = SlurmClusterResolver(rpc_layer=None).cluster_spec()
    assert spec == ClusterSpec({"worker": ["n1:8888", "n2:8888"]})


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "text", ["n [1-2]", "n[1, 2]", "n1 # n2", "n1,n;2", "n1,n2:4", "\ufeffn1,n2"]
)
def test_slurms_lists_that_are_wrong(put, text):
    step(put, 1, text, "1(x2)")
    with pytest.raises(errors.InvalidArgumentError, match="host"):
        SlurmClusterResolver()


@pytest.mark.usefixtures("gpus")
def test_host_file_of_an_arbitrary_distribution(put, tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbf# comment\r\nn2 \r\n\r\n\tn1,\t# comment\r\n")
    step(put, 0, "n[1-2]", "1(x2)", names=["n2", "n1"])
    put(SLURM_DISTRIBUTION="arbitrary", SLURM_HOSTFILE=path, SLURM_NODEID=1)
    spec = SlurmClusterResolver(rpc_layer=None).cluster_spec()
    assert spec == ClusterSpec({"worker": ["n2:8888", "n1:8888"]})
    path.write_text("n2*1\nn1\n")
    with pytest.raises(errors.InvalidArgumentError, match="not a name of a host list"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("resolver", "variable", "text", "hosts"),
    [
        (PBSClusterResolver, "PBS_NODEFILE", "\ufeffb\r\n\r\n\ta # comment\r\n#c\r\n", "ba"),
        (PBSClusterResolver, "PBS_NODEFILE", "b,\na\n", None),
        (PBSClusterResolver, "PBS_NODEFILE", "b a\n", None),
        (PBSClusterResolver, "PBS_NODEFILE", "b;a\n", None),
        (PBSClusterResolver, "PBS_NODEFILE", "n[1-2]\n", None),
        (SGEClusterResolver, "PE_HOSTFILE", "\ufeffb\t1\tall.q\r\n # c 1\r\na 1 # x\r\n", "ba"),
        (SGEClusterResolver, "PE_HOSTFILE", "b, 1 all.q\n", None),
        (SGEClusterResolver, "PE_HOSTFILE", "b,1 all.q\n", None),
        (LSFClusterResolver, "LSB_HOSTS", " b\ta \n", "ba"),
        (LSFClusterResolver, "LSB_HOSTS", "b, a", None),
        (LSFClusterResolver, "LSB_HOSTS", "b,a", None),
        (LSFClusterResolver, "LSB_MCPU_HOSTS", "\tb 1  a\t1 ", "ba"),
        (LSFClusterResolver, "LSB_MCPU_HOSTS", "b 1, a 1", None),
        (LSFClusterResolver, "LSB_MCPU_HOSTS", "b, 1 a 1", None),
        (LSFClusterResolver, "LSB_MCPU_HOSTS", "b 1 # 1", None),
    ],
)
def test_forms_of_host_lists(put, tmp_path, resolver, variable, text, hosts):
    if resolver is LSFClusterResolver:
        put(**{variable: text})
    else:
        (tmp_path / "hosts").write_bytes(text.encode())
        put(**{variable: tmp_path / "hosts"})
    if hosts is None:
        with pytest.raises(errors.InvalidArgumentError, match=r"host|slots"):
            resolver().cluster_spec()
    else:
        expected = ClusterSpec({"worker": [f"{host}:8888" for host in hosts]})
        assert resolver().cluster_spec() == expected


@pytest.mark.parametrize(
    ("resolver", "variable"),
    [(PBSClusterResolver, "PBS_NODEFILE"), (SGEClusterResolver, "PE_HOSTFILE"),
     (LSFClusterResolver, "LSB_HOSTS")],
)  # fmt: skip
def test_outside_of_the_batch_system(put, tmp_path, resolver, variable):
    with pytest.raises(errors.FailedPreconditionError, match=f"{variable} not set.*job"):
        resolver()
    if resolver is not LSFClusterResolver:
        put(**{variable: tmp_path / "missing"})
        with pytest.raises(errors.FailedPreconditionError, match="cannot be read"):
            resolver()
        (tmp_path / "missing").write_bytes(b"a\xff\n")
        with pytest.raises(errors.FailedPreconditionError, match="cannot be read"):
            resolver()
        (tmp_path / "missing").write_text("# nothing\n")
        with pytest.raises(errors.FailedPreconditionError, match="no hosts"):
            resolver()
