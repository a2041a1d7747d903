"""Environment variables of batch systems, for tests of resolvers."""

from __future__ import annotations

import os
from types import SimpleNamespace

from mpidist.cluster_resolver import accelerators
from mpidist.cluster_resolver.slurm import hosts_of_tasks
from mpidist.host_list import parse_counts

PREFIXES = ("SLURM_", "PBS_", "LSB_", "LSF_", "JSM_", "PE_", "OMPI_", "PMI_", "PMIX_", "TF_CONFIG",
            "CUDA_", "MPI_LOCAL", "MPIDIST_JOBS")  # fmt: skip


def setter(monkeypatch):
    """Remove all variables of batch systems. Return a function that sets variables by name."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return put


def gpu_counter(monkeypatch):
    """Simulate a machine without GPUs. Return a function that sets the number of GPUs."""

    def gpus(count):
        monkeypatch.setattr(accelerators, "_count_gpus", lambda: count)

    gpus(0)
    return gpus


def step(put, rank, nodes, counts, distribution=None, **more):
    """Set the variables of srun for a task, for a given distribution of the tasks."""
    numbers = parse_counts(counts)
    names = more.pop("names", None) or [f"n{n + 1}" for n in range(len(numbers))]
    hosts = hosts_of_tasks(names, numbers, distribution or "block", int(more.get("plane", 1)))
    if "plane" in more:
        more["SLURM_DIST_PLANESIZE"] = more.pop("plane")
    if distribution:
        more["SLURM_DISTRIBUTION"] = distribution
    put(
        SLURM_PROCID=rank,
        SLURM_STEP_NUM_TASKS=len(hosts),
        SLURM_STEP_NODELIST=nodes,
        SLURM_STEP_TASKS_PER_NODE=counts,
        SLURM_LOCALID=hosts[:rank].count(hosts[rank]),
        SLURM_NODEID=names.index(hosts[rank]),
        **more,
    )


class Client:
    """A stand-in for the Kubernetes API with the method that the resolver calls."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector, _request_timeout=None):
        return SimpleNamespace(items=[
            SimpleNamespace(metadata=SimpleNamespace(name=name),
                            status=SimpleNamespace(phase=phase, host_ip=ip))
            for name, phase, ip in self.pods[label_selector.replace("=", "_").replace("-", "_")]
        ])  # fmt: skip
