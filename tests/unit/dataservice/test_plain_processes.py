"""Unusual elements, functions, servers and addresses, between processes over TCP."""

import os
import resource
import socket
import sys
import threading
import time
from contextlib import ExitStack

import cloudpickle
import numpy as np
import pytest
from _cases.data_cluster import DataCluster, Reader
from _cases.endpoints import wait_until
from _cases.slurm_keeper import descendants

from dataservice import (
    Dataset,
    DispatcherConfig,
    DispatchServer,
    WorkerServer,
    distribute,
    service_status,
)
from mpidist.errors import AlreadyExistsError, UnavailableError

MODES = ["parallel_epochs", "distributed_epoch"]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
# Much longer than the documented limits, because the machine may be busy.
LIMIT_S = 60.0
LARGE = 3 << 30


@pytest.fixture
def make_cluster():
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(DataCluster(*args, **more))


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(1)


def works(cluster, copies=1):
    """Check that the service still delivers another dataset."""
    dataset = Dataset.range(50).apply(distribute("parallel_epochs", cluster.target))
    assert sorted(dataset) == sorted(list(range(50)) * copies)


# Elements


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, 1])
def test_elements_of_no_bytes(cluster, mode, limit):
    def nothing(i):
        return np.empty((0, 3), np.float32), np.empty(0, "V0"), b"", "", {}, ()

    apply = distribute(mode, cluster.target, max_outstanding_requests=limit)
    elements = list(Dataset.range(300).map(nothing).apply(apply))
    assert len(elements) == 300
    for matrix, void, *rest in elements:
        assert (matrix.shape, matrix.dtype) == ((0, 3), np.float32)
        assert (void.shape, void.dtype.itemsize) == ((0,), 0)
        assert rest == [b"", "", {}, ()]


@pytest.mark.parametrize("mode", MODES)
def test_ragged_elements(cluster, mode):
    def ragged(i):
        size = int(i) * 1000 % 70_001  # large arrays travel beside the pickle, small arrays in it
        return {"x": np.full(size, i), "y": (i,) * (size % 7), "z": None if i % 2 else "odd"}

    elements = list(Dataset.range(100).map(ragged).apply(distribute(mode, cluster.target)))
    for element, local in zip(elements, Dataset.range(100).map(ragged), strict=True):
        np.testing.assert_array_equal(element["x"], local["x"])
        assert (element["y"], element["z"]) == (local["y"], local["z"])


@pytest.mark.long
def test_an_element_of_three_gigabytes(cluster):
    places = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, LARGE - 1]

    def large(i):
        array = np.zeros(LARGE, np.uint8)
        array[places] = range(1, 7)
        return array

    (element,) = Dataset.range(1).map(large).apply(distribute("parallel_epochs", cluster.target))
    assert element.nbytes == LARGE
    assert element[places].tolist() == list(range(1, 7))
    assert np.count_nonzero(element) == 6
    works(cluster)


class Poisoned:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def test_elements_that_cannot_be_unpickled(cluster):
    dataset = Dataset.range(3).map(lambda i: Poisoned() if i == 1 else i)
    apply = distribute("parallel_epochs", cluster.target, max_outstanding_requests=1)
    with iter(dataset.apply(apply)) as elements:
        assert next(elements) == 0
        with pytest.raises(ValueError, match="not a number"):
            next(elements)
    works(cluster)


# Functions


def hang_at_one(i):
    while i == 1:
        time.sleep(1e6)
    return i


@pytest.mark.parametrize("mode", MODES)
def test_functions_that_hang_hold_up_neither_close_nor_stop(cluster, mode):
    elements = iter(Dataset.range(3).map(hang_at_one).apply(distribute(mode, cluster.target)))
    assert next(elements) == 0
    elements.close()
    assert list(elements) == []
    works(cluster)
    cluster.stop_worker(0)
    cluster.stop_dispatcher()


def test_closing_while_another_thread_waits_for_what_hangs(cluster):
    apply = distribute("parallel_epochs", cluster.target)
    elements = iter(Dataset.range(3).map(hang_at_one).apply(apply))
    rest = []
    reading = threading.Thread(target=lambda: rest.extend(elements))
    reading.start()
    wait_until(lambda: rest == [0])
    elements.close()
    reading.join(LIMIT_S)
    assert not reading.is_alive()
    assert rest == [0]


def test_processes_in_which_a_function_hangs_end_with_their_iteration(cluster):
    dataset = Dataset.range(8).map(hang_at_one, num_parallel_calls=2, processes=True)
    elements = iter(dataset.apply(distribute("parallel_epochs", cluster.target)))
    assert next(elements) == 0
    assert descendants(cluster.workers[0].pid)
    elements.close()
    wait_until(lambda: not descendants(cluster.workers[0].pid))
    works(cluster)


def test_a_function_that_uses_up_all_descriptors(cluster):
    kept = []

    def leak(i):
        if not kept:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 20_000))
        while i == 1:
            kept.append(os.open("/dev/null", os.O_RDONLY))
        return i

    apply = distribute("parallel_epochs", cluster.target)
    with pytest.raises(OSError, match="Too many open files"):
        list(Dataset.range(3).map(leak).apply(apply))
    cluster.workers[0].run(lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, 20_000)))
    works(cluster)


def test_a_function_that_uses_up_all_memory(cluster):
    kept = []

    def leak(i):
        while i == 1:
            kept.append(np.zeros(1 << 28, np.uint8))
        return i

    room = cluster.workers[0].run(lambda _: resource.getrlimit(resource.RLIMIT_AS))

    def limit(_, soft):
        resource.setrlimit(resource.RLIMIT_AS, (soft, room[1]))

    cluster.workers[0].run(limit, 8 << 30)
    apply = distribute("parallel_epochs", cluster.target)
    with pytest.raises(MemoryError):
        list(Dataset.range(3).map(leak).apply(apply))
    cluster.workers[0].run(limit, room[0])
    works(cluster)


def test_what_functions_hold_goes_with_their_datasets(cluster):
    """Release data of functions with their datasets.

    All of the data would be 1,920 MiB. A worker keeps 8 datasets (256 MiB) for further reads.
    """

    def hold(i, kept=[]):  # noqa: B006
        kept.append(np.ones(1 << 20))
        return i

    apply = distribute("parallel_epochs", cluster.target)
    before = cluster.workers[0].resident()
    for first in range(60):
        elements = list(Dataset.range(first, first + 4).map(hold).apply(apply))
        assert elements == list(range(first, first + 4))
    works(cluster)
    assert cluster.workers[0].resident() - before < 480 << 20


# Servers and addresses


@pytest.fixture
def silent_port():
    """Serve a port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def rude_port():
    """Serve a port that answers in another protocol and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        over = threading.Event()

        def answer():
            while not over.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        over.set()
        thread.join()


@pytest.mark.parametrize("who", ["silent_port", "rude_port"])
def test_a_dispatcher_that_is_something_else(request, cluster, who):
    target = f"tcp://localhost:{request.getfixturevalue(who)}"
    apply = distribute("parallel_epochs", target, start_timeout_s=0.5)
    with pytest.raises(UnavailableError, match=f"no dispatcher answers at {target[6:]}"):
        list(Dataset.range(3).apply(apply))


def test_a_worker_in_place_of_a_dispatcher(cluster):
    target = f"tcp://localhost:{cluster.workers[0].port}"
    apply = distribute("parallel_epochs", target, start_timeout_s=0.5)
    with pytest.raises(UnavailableError, match=f"dispatcher .*{target[6:]}"):
        list(Dataset.range(3).apply(apply))
    works(cluster)


@pytest.mark.parametrize("protocol", [None, "grpc"])
def test_processes_that_name_no_transport_of_ours(make_cluster, protocol):
    """Use TCP if a process names no transport of mpidist."""
    cluster = make_cluster(1, dispatcher={"protocol": "grpc"}, worker={"protocol": protocol})
    address = cluster.target.removeprefix("tcp://")
    with WorkerServer(dispatcher_address=address, protocol=protocol):
        for service in (address, f"grpc://{address}", f"grpc+verbs://{address}"):
            dataset = Dataset.range(9).apply(distribute("parallel_epochs", service))
            assert sorted(dataset) == sorted(2 * list(range(9)))
        assert len(service_status(address).workers) == 2


def test_no_dispatcher_then_one_then_no_workers_then_one(cluster):
    cluster.stop_worker(0)
    cluster.kill_dispatcher()
    apply = distribute("distributed_epoch", cluster.target, start_timeout_s=0.5)
    dataset = Dataset.range(20).apply(apply)
    with pytest.raises(UnavailableError, match=r"no dispatcher answers at \S+ \(tried for 0.5 s"):
        list(dataset)
    cluster.restart_dispatcher()
    assert not service_status(cluster.target).workers  # now the dispatcher is reached
    with pytest.raises(UnavailableError, match=r"no data worker has registered .* within 0.5 s"):
        list(dataset)
    cluster.restart_worker(0)
    patient = distribute("distributed_epoch", cluster.target)
    assert list(Dataset.range(20).apply(patient)) == list(range(20))


def test_a_port_in_use_is_refused_and_its_owner_goes_on(cluster, silent_port):
    elements = iter(Dataset.range(100).apply(distribute("parallel_epochs", cluster.target)))
    taken = [cluster.dispatcher.port, cluster.workers[0].port, silent_port]
    for port in taken:
        config = DispatcherConfig(port=port, protocol="tcp")
        with pytest.raises(AlreadyExistsError, match=r"Address already in use.*another port"):
            DispatchServer(config)
        with pytest.raises(AlreadyExistsError, match="choose another port"):
            cluster.add_worker(port=port)
    assert list(elements) == list(range(100))
    works(cluster)


def test_a_consumer_that_is_killed_is_forgotten(make_cluster):
    # The dispatcher holds heartbeats for a second. A consumer sends nothing during that second.
    cluster = make_cluster(1, dispatcher={"client_timeout_ms": 3000})
    reader = Reader(
        cluster.add_process("consumer"),
        Dataset.range(3).repeat().apply(distribute("parallel_epochs", cluster.target)),
    )
    assert reader.take(2) == [0, 1]
    assert cluster.num_tasks_on_workers() == 1
    reader.process.end()
    wait_until(lambda: cluster.num_tasks_on_workers() == 0)
    works(cluster)


@pytest.mark.parametrize("journal", [True, False])
def test_a_worker_that_is_killed_while_nobody_reads_is_missed(make_cluster, tmp_path, journal):
    """Detect the killed worker long before its heartbeat timeout."""
    cluster = make_cluster(
        2,
        work_dir=tmp_path,
        fault_tolerant=journal,
        dispatcher={"worker_timeout_ms": 3_600_000},
    )
    if journal:  # the journal does not record the processes of workers
        cluster.kill_dispatcher()
        cluster.restart_dispatcher()
    silent, heard = {}, set()

    def all_are_heard():
        for worker in service_status(cluster.target).workers:
            if worker.silent_s < silent.get(worker.address, 0):
                heard.add(worker.address)
            silent[worker.address] = worker.silent_s
        return len(heard) == 2

    wait_until(all_are_heard)
    cluster.kill_worker(0)
    wait_until(lambda: len(service_status(cluster.target).workers) == 1)
    works(cluster)
