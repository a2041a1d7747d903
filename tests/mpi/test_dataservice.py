"""The data service between ranks: a dispatcher on rank 0, a worker on every rank."""

import logging
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from dataservice import Dataset, DispatchServer, WorkerServer, distribute
from mpidist import open_endpoint
from mpidist.config import Config
from mpidist.errors import AlreadyExistsError, UnavailableError, UnknownError

pytestmark = pytest.mark.ranks(2, 3)


@contextmanager
def service(world, workers=None):
    """Start a service with workers on the given ranks (default: all). Return its target."""
    open_endpoint().close()  # the first use of mpidist is collective
    dispatcher = DispatchServer() if world.rank == 0 else None
    target = world.bcast(dispatcher.target if dispatcher else None)
    here = workers is None or world.rank in workers
    worker = WorkerServer(dispatcher_address=target.split("://")[1]) if here else None
    world.Barrier()
    try:
        yield target
    finally:
        world.Barrier()
        if worker:
            worker.stop()
        world.Barrier()
        if dispatcher:
            dispatcher.stop()


def gather(world, elements):
    """Return the elements of all ranks, on all ranks."""
    return [element for part in world.allgather(list(elements)) for element in part]


def test_the_target_is_a_rank(world):
    with service(world) as target:
        scheme, address = target.split("://")
        assert scheme == "mpi"
        assert int(address.rpartition(":")[2]) % world.size == 0


def test_one_worker_keeps_the_order(world):
    with service(world, workers=[world.size - 1]) as target:
        dataset = Dataset.range(500).map(lambda i: 2 * i)
        dataset = dataset.apply(distribute("parallel_epochs", target))
        results = world.allgather([int(i) for i in dataset])
    assert results == [list(range(0, 1000, 2))] * world.size


def test_parallel_epochs_give_a_copy_a_worker(world):
    with service(world) as target:
        dataset = Dataset.range(50).apply(distribute("parallel_epochs", target))
        results = world.allgather(Counter(int(i) for i in dataset))
    assert results == [dict.fromkeys(range(50), world.size)] * world.size


def test_ranks_share_each_distributed_epoch(world):
    with service(world) as target:
        dataset = Dataset.range(300).map(lambda i: i)
        dataset = dataset.apply(distribute("distributed_epoch", target, job_name="epochs"))
        epochs = [gather(world, (int(i) for i in dataset)) for _ in range(4)]
        repeated = gather(world, (int(i) for i in dataset.repeat(3)))
    assert all(sorted(epoch) == list(range(300)) for epoch in epochs)
    assert Counter(repeated) == dict.fromkeys(range(300), 3)


@pytest.mark.parametrize("nbytes", [100, 10_000, 100_000, 3_000_000])
def test_batches_arrive_intact(world, nbytes):
    rows = np.random.default_rng(1).integers(0, 256, (12, nbytes), np.uint8)
    with service(world) as target:
        dataset = Dataset.from_tensor_slices({"row": rows, "index": np.arange(12)}).batch(2)
        dataset = dataset.apply(distribute("distributed_epoch", target))
        seen = []
        for batch in dataset:
            np.testing.assert_array_equal(batch["row"], rows[batch["index"]])
            seen += batch["index"].tolist()
        results = world.allgather(sorted(seen))
    assert results == [list(range(12))] * world.size


def test_errors_of_functions_name_the_worker(world):
    def fail_at_three(i):
        if i == 3:
            raise KeyError("three")
        return i

    with service(world, workers=[world.size - 1]) as target:
        dataset = Dataset.range(9).map(fail_at_three).apply(distribute("parallel_epochs", target))
        elements = iter(dataset)
        before = [int(next(elements)) for _ in range(3)]
        try:
            next(elements)
            notes = ["nothing was raised"]
        except KeyError as error:
            notes = error.__notes__
        results = world.allgather((before, "raised in data worker mpi://" in "\n".join(notes)))
    assert results == [([0, 1, 2], True)] * world.size


def test_a_function_that_exits_ends_neither_the_worker_nor_the_trainer(world):
    def exit_at_three(i):
        if i == 3:
            raise SystemExit(3)
        return i

    worker = world.size - 1
    with service(world, workers=[worker]) as target:
        dataset = Dataset.range(9).map(exit_at_three).apply(distribute("parallel_epochs", target))
        try:
            said = str(list(dataset))
        except UnknownError as error:
            said = str(error)
        healthy = Dataset.range(9).apply(distribute("parallel_epochs", target))
        results = world.allgather((said, [int(i) for i in healthy]))
    for said, elements in results:
        assert "SystemExit: 3 (raised in data worker mpi://" in said
        assert "dataset range(0, 9, 1).map(" in said
        assert elements == list(range(9))


RELEASED = threading.Event()


def wait_at_one(i):
    assert i != 1 or RELEASED.wait(30)
    return i


class Reports(logging.Handler):
    """A handler that keeps reports of long waits, and notifies rank 1 at the first report."""

    def __init__(self, world):
        super().__init__()
        self._world = world
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            self._world.send(None, 1)


def test_a_consumer_says_what_it_has_waited_for(world, monkeypatch):
    reports = Reports(world)
    logger = logging.getLogger("dataservice.calls")
    logger.addHandler(reports)
    with service(world, workers=[1]) as target:
        if world.rank == 0:
            elements = iter(
                Dataset.range(2).map(wait_at_one).apply(distribute("parallel_epochs", target))
            )
            assert next(elements) == 0
            monkeypatch.setattr("dataservice.calls.config", Config(stall_s=0.05))
            assert next(elements) == 1
            elements.close()
        if world.rank == 1:
            world.recv(source=0)
            RELEASED.set()
        world.Barrier()
    logger.removeHandler(reports)
    if world.rank == 0:
        (text,) = reports.texts
        assert f"of the dispatcher {target.split('://')[1]}." in text
        assert "s for elements from the data workers mpi://" in text


def test_an_iterator_closed_early_leaves_the_service_usable(world):
    with service(world) as target:
        endless = Dataset.range(9).repeat().apply(distribute("parallel_epochs", target))
        for _ in range(3):
            with iter(endless) as elements:
                next(elements)
        dataset = Dataset.range(20).apply(distribute("distributed_epoch", target))
        results = world.allgather(sorted(int(i) for i in dataset))
    assert results == [list(range(20))] * world.size


def test_a_dispatcher_that_is_stopped_is_missed_although_its_rank_answers_nobody(world):
    open_endpoint().close()
    dispatcher = DispatchServer() if world.rank == 0 else None
    target = world.bcast(dispatcher.target if dispatcher else None)
    worker = WorkerServer(dispatcher_address=target) if world.rank else None
    world.Barrier()
    said = f"the dispatcher at {target} is gone"
    others = world.Create_group(world.Get_group().Excl([0])) if worker else None
    if worker:
        endless = Dataset.range(3).repeat().apply(distribute("parallel_epochs", target))
        elements = iter(endless)
        next(elements)
        world.Barrier()
        try:
            said = f"{len(list(elements))} elements"
        except UnavailableError as error:
            said = str(error)
        others.Barrier()  # a stopping worker would be missed, too
        others.Free()
        worker.stop()
    else:
        world.Barrier()
        dispatcher.stop()
    # Rank 0 waits here, in MPI, until the others have heard.
    said = world.allgather(said)
    # A worker reports the loss, or the consumer finds it. Its text may lack the protocol.
    missed = f"{target.partition('://')[2]} is gone"
    assert [text for text in said if missed not in text] == []


def test_ports_belong_to_ranks(world):
    with service(world):
        other = 1000 * world.size + (world.rank + 1) % world.size
        with pytest.raises(AlreadyExistsError, match="belongs to rank"):
            DispatchServer(port=other)
        with DispatchServer(port=1000 * world.size + world.rank) as dispatcher:
            assert dispatcher.target.endswith(f":{1000 * world.size + world.rank}")
