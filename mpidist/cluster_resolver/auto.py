"""Choice of the resolver from the way this process was started."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.batch_systems import LSFClusterResolver, PBSClusterResolver
from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.slurm import SlurmClusterResolver, is_step_of_several
from mpidist.cluster_resolver.tf_config import VARIABLE, TFConfigClusterResolver
from mpidist.config import config
from mpidist.mpi import launched
from mpidist.mpi.launch_env import launcher_of

logger = logging.getLogger(__name__)


def auto(jobs: Mapping[str, int] | None = None) -> ClusterResolver:
    """Return the resolver for the way this process was started, and log the reason.

    The first of these that applies:

    1. the layout of ``mpidist run``;
    2. TF_CONFIG;
    3. the ranks of an MPI launcher, or of srun with a PMI that MPI uses;
    4. the tasks of srun, pbsdsh, blaunch or jsrun;
    5. one process, with task 0 of every job in it.

    Under Grid Engine and in an MPIJob, an MPI launcher starts the tasks.

    Args:
        jobs: Number of tasks of each job, by rank, -1 for the remaining ranks; by default all are
            workers. TF_CONFIG and the layout of ``mpidist run`` override it.

    Returns:
        A resolver with the task of this process.

    Raises:
        OpError: The variables of the launcher contradict each other, or the jobs do not match them.
            The subclass and the message are the resolver's.
    """
    resolver, reason = _first_that_fits(jobs)
    logger.info("cluster by %s: %s", type(resolver).__name__, reason)
    return resolver


def _first_that_fits(jobs: Mapping[str, int] | None) -> tuple[ClusterResolver, str]:
    env = os.environ
    if config.jobs is not None:
        return MPIClusterResolver(jobs), f"mpidist run gave the layout {config.jobs}"
    described = TFConfigClusterResolver()
    if described.cluster_spec():
        if jobs is not None:
            logger.info("%s replaces the script's jobs %s", VARIABLE, dict(jobs))
        described.check_task()
        return described, f"{VARIABLE} is set"
    if launched():
        return MPIClusterResolver(jobs), f"{launcher_of(env)} started this process as a rank of MPI"
    if is_step_of_several():
        tasks = env.get("SLURM_STEP_NUM_TASKS")
        return SlurmClusterResolver(jobs), f"srun started it as one of {tasks} tasks"
    # Torque also sets PBS_VNODENUM in the body of a batch script, which is task 0 of the job.
    body = env.get("PBS_VNODENUM") == "0" and env.get("PBS_TASKNUM") == "1"
    if "PBS_VNODENUM" in env and not body:
        return PBSClusterResolver(jobs), "pbsdsh started it"
    for name in ("JSM_NAMESPACE_RANK", "LSF_PM_TASKID"):
        if name in env:
            return LSFClusterResolver(jobs), f"{name} is set"
    return MPIClusterResolver(jobs), "it is one process"
