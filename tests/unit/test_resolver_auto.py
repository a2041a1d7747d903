"""Resolvers that ``auto`` chooses by the launch environment of the process."""

import json
import socket

import pytest
from _cases import batch_systems
from _cases.batch_systems import step

from mpidist import ClusterSpec, errors
from mpidist.cluster_resolver import (
    LSFClusterResolver,
    MPIClusterResolver,
    PBSClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    auto,
)


@pytest.fixture(autouse=True)
def put(monkeypatch):
    return batch_systems.setter(monkeypatch)


@pytest.fixture
def gpus(monkeypatch):
    return batch_systems.gpu_counter(monkeypatch)


PARTS = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NODELIST": "n[1-2]",
         "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
BODY = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_JOB_ID": 7,
        "SLURM_NTASKS": 4, "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
SHELL = {**BODY, "SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_TASKS": 1,
         "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": 1}  # fmt: skip


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_PROCID": 3}, "SLURM_STEP_NUM_TASKS, .* not set"),
        ({**BODY, "SLURM_PROCID": "x"}, "SLURM_STEP_NUM_TASKS, .* not set"),
        ({**PARTS, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": "abc"}, "'abc'"),
        ({**PARTS, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": ""}, "NUM_TASKS not set"),
        ({**PARTS, "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": None}, "NUM_TASKS not set"),
        ({**PARTS, "SLURM_PROCID": 0, "SLURM_STEP_NODELIST": None}, "NODELIST not set"),
        ({**PARTS, "SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 1}, "2 tasks together"),
        ({**SHELL, "SLURM_PROCID": None}, "SLURM_PROCID not set"),
        (PARTS, "SLURM_PROCID not set"),
        ({"SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": 0}, "NODELIST, .* not set"),
        ({"PBS_VNODENUM": 1}, "PBS_NODEFILE not set"),
        ({"PBS_VNODENUM": "x", "PBS_NODEFILE": "NODES"}, "PBS_VNODENUM='x' is not a number"),
        ({"PBS_VNODENUM": "", "PBS_NODEFILE": "NODES"}, "PBS_VNODENUM='' is not a number"),
        ({"PBS_VNODENUM": 2, "PBS_NODEFILE": "NODES"}, "rank 2, but PBS_NODEFILE names 2"),
        ({"LSF_PM_TASKID": "x", "LSB_HOSTS": "a b"}, "LSF_PM_TASKID='x' is not a number"),
        ({"LSF_PM_TASKID": 0, "LSB_HOSTS": "a b"}, "LSF_PM_TASKID is 0"),
        ({"JSM_NAMESPACE_RANK": "x", "LSB_HOSTS": "a b"}, "JSM_NAMESPACE_RANK='x'"),
        ({"LSF_PM_TASKID": 1}, "LSB_HOSTS not set"),
    ],
)
def test_auto_where_variables_are_half_set(put, tmp_path, variables, message):
    nodes = tmp_path / "nodes"
    nodes.write_text("a\nb\n")
    given = {n: nodes if v == "NODES" else v for n, v in variables.items() if v is not None}
    put(**given)
    with pytest.raises(errors.OpError, match=message) as caught:
        auto()
    assert isinstance(caught.value, errors.FailedPreconditionError | errors.InvalidArgumentError)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "variables",
    [
        BODY,
        SHELL,
        {**BODY, "SLURM_STEP_ID": "batch"},
        {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4},  # the shell of salloc
        {**BODY, "PMI_RANK": 0, "PMI_SIZE": 1, "MPI_LOCALNRANKS": 1},  # mpiexec -n 1 in the job
        {**SHELL, "OMPI_COMM_WORLD_SIZE": 1, "OMPI_COMM_WORLD_RANK": 0},
        {**BODY, **PARTS, "OMPI_COMM_WORLD_SIZE": 1, "OMPI_COMM_WORLD_RANK": 0},  # mpirun -n 1
        {"LSB_HOSTS": "a b"},
        {"PBS_NODEFILE": "nodes", "PBS_VNODENUM": 0, "PBS_TASKNUM": 1},  # Torque's
    ],
)
def test_auto_in_a_process_that_is_alone_in_its_job(put, variables):
    put(**variables)
    resolver = auto({"ps": 1, "worker": -1})
    assert isinstance(resolver, MPIClusterResolver)
    assert [resolver.cluster_spec().num_tasks(job) for job in ("ps", "worker")] == [1, 1]


def test_auto_in_an_evaluator(put):
    cluster = {"ps": ["a:1"], "worker": ["b:1"]}
    put(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))
    resolver = auto()
    assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)
    cluster["evaluator"] = ["c:1"]
    put(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 1}}))
    with pytest.raises(ValueError, match="evaluator"):
        auto()


@pytest.mark.usefixtures("gpus")
def test_auto(put, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "mpidist")
    resolver = auto({"ps": 1, "worker": 1})
    assert isinstance(resolver, MPIClusterResolver)
    host = f"{socket.gethostname()}:0"
    assert resolver.cluster_spec() == ClusterSpec({"ps": [host], "worker": [host]})
    assert "one process" in caplog.text
    nodes = tmp_path / "nodes"
    nodes.write_text("a\nb\n")
    put(PBS_NODEFILE=nodes)  # the body of a job is a single process
    assert isinstance(auto(), MPIClusterResolver)
    put(PBS_VNODENUM=1)
    assert isinstance(auto(), PBSClusterResolver)
    monkeypatch.delenv("PBS_VNODENUM")
    put(LSB_HOSTS="a b", LSF_PM_TASKID=1)
    assert isinstance(auto(), LSFClusterResolver)
    put(SLURM_PROCID=0, SLURM_NODEID=0, SLURM_LOCALID=0)
    assert isinstance(auto(), LSFClusterResolver)
    step(put, 1, "n[1-2]", "1(x2)")
    assert auto({"ps": 1, "worker": -1}).get_task_info() == ("worker", 0)
    assert "srun started it as one of 2 tasks" in caplog.text
    put(TF_CONFIG="{}")
    assert isinstance(auto(), SlurmClusterResolver)
    for task, error in (("", errors.FailedPreconditionError), ('"index": 5', ValueError)):
        cluster = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"%s}}'
        put(TF_CONFIG=cluster % (task and ", " + task))
        with pytest.raises(error, match="task"):
            auto()
    put(TF_CONFIG='{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    assert isinstance(auto({"worker": 2}), TFConfigClusterResolver)
    assert "TF_CONFIG replaces the script's jobs" in caplog.text
