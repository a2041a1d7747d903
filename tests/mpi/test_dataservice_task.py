"""The job ``data`` of a cluster, run by mpidist.Server."""

import pytest
from _cases.jobs import run_ranks

from dataservice import Dataset, distribute
from mpidist import Server
from mpidist.cluster_resolver import MPIClusterResolver


@pytest.mark.ranks(3, own_launch=True)
@pytest.mark.parametrize("data_tasks", [1, 2])
def test_trainers_share_the_epochs_of_the_data_job(world, data_tasks):
    resolver = MPIClusterResolver(jobs={"data": data_tasks, "worker": -1})
    spec = resolver.cluster_spec()
    elements = []
    with Server(spec, job_name=resolver.task_type, task_index=resolver.task_id) as server:
        if resolver.task_type == "data":
            server.join()
        else:
            apply = distribute("distributed_epoch", resolver.master("data", 0), job_name="train")
            dataset = Dataset.range(400).shuffle(50, seed=1).batch(8).apply(apply)
            elements = [[int(i) for batch in dataset for i in batch] for _ in range(3)]
    results = world.allgather(elements)
    for epoch in zip(*results[data_tasks:], strict=True):
        assert sorted(i for part in epoch for i in part) == list(range(400))


# Without the stop() that servers are given at exit.
DISPATCHER = "Dispatcher(endpoint, DispatcherConfig())"
WORKER = "DataWorker(endpoint, dispatcher, own, WorkerConfig(dispatcher)).registration.wait()"


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [(DISPATCHER, WORKER, "of the loss of mpi:"), (WORKER, DISPATCHER, "the dispatcher at ")],
    ids=["worker", "dispatcher"],
)
def test_a_service_whose_script_has_ended_is_missed_soon(tmp_path, first, second, error):
    source = f"""
        from dataservice import Dataset, DispatcherConfig, WorkerConfig, distribute
        from dataservice.dispatch.dispatcher import Dispatcher
        from dataservice.work.worker import DataWorker
        from mpidist import errors, open_endpoint
        from mpidist.mpi import world
        comm = world().comm
        endpoint = open_endpoint("mpi", comm.rank)
        endpoint.serve_in_thread()
        own = str(endpoint.address)
        dispatcher = comm.bcast(own, root={int(second is DISPATCHER)})
        if comm.rank == 0:
            {first}
            comm.Barrier()
            dataset = Dataset.range(3).repeat().apply(distribute("parallel_epochs", dispatcher))
            elements = iter(dataset)
            next(elements)
            comm.Barrier()
            try:
                list(elements)
            except errors.UnavailableError as error:
                print(error)
        else:
            {second}
            comm.Barrier()
            comm.Barrier()
    """
    ended = run_ranks(tmp_path, 2, source)
    assert ended.status == 0, ended.err
    assert error in ended.out
    # Whichever is noticed first: the endpoint's last answer, that the script has left, or that the
    # dispatcher has noticed.
    reasons = ("the script there has ended", "was closed", "the dispatcher has given it up")
    assert any(reason in ended.out for reason in reasons), ended.out
