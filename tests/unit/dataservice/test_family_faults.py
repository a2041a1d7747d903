"""Servers that stop, start again, come late and leave early, in the middle of iterations.

Where servers are processes and are killed, see test_chaos.py.
"""

import gc
import threading
import time
import weakref
from collections import Counter

import pytest
from _cases.data_readers import numbers, read, reading

from dataservice import Dataset, DispatchServer, WorkerServer, distribute, service_status
from dataservice.calls import RpcClient
from dataservice.read.fetcher import Fetcher
from mpidist.errors import UnavailableError

OFF, DYNAMIC = "parallel_epochs", "distributed_epoch"
READINGS = {
    "copies": (OFF, {}),
    "own": (DYNAMIC, {}),
    "shared": (DYNAMIC, {"job_name": "job"}),
    "ordered": (DYNAMIC, {"deterministic": True, "num_shards": 4}),
}
LENGTH = 300


def make(service, reading_as, dataset=None, **further):
    mode, arguments = READINGS[reading_as]
    dataset = Dataset.range(LENGTH) if dataset is None else dataset
    # Held back, so that what follows happens in the middle.
    return dataset.apply(
        distribute(mode, service.target, max_outstanding_requests=8, **arguments, **further)
    )


def check(found, reading_as, workers, epochs=1):
    """Every element once, or once for each worker's copy; in order where that is promised."""
    copies = workers if reading_as == "copies" else 1
    assert Counter(found) == dict.fromkeys(range(LENGTH), copies * epochs)
    if reading_as == "ordered":
        assert found == list(range(LENGTH)) * epochs


@pytest.fixture
def durable(make_service, tmp_path):
    def start(workers):
        return make_service(workers, work_dir=str(tmp_path), fault_tolerant_mode=True)

    return start


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("reading_as", READINGS)
@pytest.mark.parametrize("taken", [0, 1, 100, LENGTH])
def test_a_dispatcher_is_restarted(durable, reading_as, taken, workers):
    service = durable(workers)
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, taken)
        service.restart_dispatcher()
        check(numbers([*first, *elements]), reading_as, workers)


@pytest.mark.parametrize("reading_as", READINGS)
def test_a_dispatcher_is_restarted_between_iterations(durable, reading_as):
    service = durable(2)
    dataset = make(service, reading_as)
    for _ in range(3):
        check(numbers(dataset), reading_as, 2)
        service.restart_dispatcher()


@pytest.mark.parametrize("reading_as", READINGS)
def test_a_dispatcher_is_restarted_again_and_again(durable, reading_as):
    service = durable(2)
    with reading(make(service, reading_as)) as (elements,):
        found = []
        for _ in range(5):
            found += read(elements, 20)
            service.restart_dispatcher()
        check(numbers([*found, *elements]), reading_as, 2)


@pytest.fixture
def lose_answer(monkeypatch):
    """``lose_answer(method, meanwhile)``: the first answer to it does not come."""
    finish, lost = RpcClient.finish, []

    def lose(method, meanwhile):
        def finish_or_lose(caller, work, stall=None):
            reply = finish(caller, work, stall)
            if work.name.split()[0] == f"dispatcher/{method}" and not lost:
                lost.append(method)
                meanwhile()
                raise UnavailableError("the answer is lost")
            return reply

        monkeypatch.setattr(RpcClient, "finish", finish_or_lose)
        return lost

    return lose


@pytest.mark.parametrize("reading_as", READINGS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_dispatcher_is_lost_as_it_takes_a_consumer_in(
    durable, lose_answer, reading_as, restarted
):
    service = durable(2)
    lost = lose_answer(
        "GetOrCreateIteration", service.restart_dispatcher if restarted else lambda: None
    )
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, 1)
        assert lost
        (job,) = service_status(service.target).jobs
        assert len(job.consumers) == 1
        check(numbers([*first, *elements]), reading_as, 2)


def test_a_dispatcher_is_restarted_as_a_state_is_taken(durable, lose_answer):
    service = durable(2)
    with reading(make(service, "ordered")) as (elements,):
        first = read(elements, 20)
        lost = lose_answer("GetState", service.restart_dispatcher)
        state = elements.get_state()
        assert lost
    with reading(make(service, "ordered")) as (elements,):
        elements.set_state(state)
        check(numbers([*first, *elements]), "ordered", 2)


@pytest.mark.parametrize("taken", [10, LENGTH - 1, LENGTH, LENGTH + 10])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_dispatcher_is_restarted_while_the_source_repeats(durable, taken, where):
    service = durable(1)
    if where == "before":
        dataset = make(service, "own", Dataset.range(LENGTH).repeat(3))
    else:
        dataset = make(service, "own").repeat(3)
    with reading(dataset) as (elements,):
        first = read(elements, taken)
        service.restart_dispatcher()
        check(numbers([*first, *elements]), "own", 1, epochs=3)


@pytest.mark.parametrize("reading_as", READINGS)
@pytest.mark.parametrize("same_port", [True, False])
def test_the_dispatcher_and_a_worker_are_restarted(durable, reading_as, same_port):
    service = durable(2)
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, 50)
        service.restart_dispatcher()
        service.restart_worker(0, same_port)
        found = numbers([*first, *elements])
    if reading_as == "copies" and not same_port:
        # To the dispatcher it is a new worker, which brings a copy of its own.
        assert Counter(found) in (Counter(dict.fromkeys(range(LENGTH), n)) for n in (2, 3))
    else:
        check(found, reading_as, 2)


@pytest.mark.parametrize("reading_as", READINGS)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_is_restarted(make_service, reading_as, workers):
    service = make_service(workers)
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, 50)
        service.restart_worker(0)
        check(numbers([*first, *elements]), reading_as, workers)


@pytest.mark.parametrize("reading_as", READINGS)
def test_all_workers_are_restarted_one_after_the_other(make_service, reading_as):
    service = make_service(3)
    with reading(make(service, reading_as)) as (elements,):
        found = []
        for number in (0, 1, 2, 0, 1, 2):
            found += read(elements, 20)
            service.restart_worker(number)
        check(numbers([*found, *elements]), reading_as, 3)


@pytest.mark.parametrize("reading_as", READINGS)
def test_a_worker_comes_in_the_middle(make_service, reading_as):
    service = make_service(1)
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, 50)
        service.add_worker()
        # A new worker brings a copy of its own.
        check(numbers([*first, *elements]), reading_as, 2)


@pytest.mark.parametrize("reading_as", READINGS)
def test_all_workers_but_one_leave_an_endless_stream(make_service, reading_as):
    service = make_service(5)
    dataset = make(service, reading_as, Dataset.range(LENGTH).repeat())
    with reading(dataset) as (elements,):
        read(elements, 100)
        for worker in service.workers[:4]:
            worker.stop()
            read(elements, 100)
        found = numbers(read(elements, 10 * LENGTH))
    assert set(found) == set(range(LENGTH))


@pytest.mark.parametrize("reading_as", READINGS)
def test_the_only_worker_leaves_and_another_one_comes(make_service, reading_as):
    service = make_service(1)
    with reading(make(service, reading_as)) as (elements,):
        first = read(elements, 50)
        service.workers[0].stop()
        threading.Timer(0.2, service.add_worker).start()
        found = numbers([*first, *elements])
    if reading_as == "copies":
        assert Counter(found) in (
            Counter(range(LENGTH)),
            Counter(dict.fromkeys(range(LENGTH), 2)),  # one of the worker that is lost, and its own
        )
    else:
        check(found, reading_as, 1)


@pytest.mark.parametrize("reading_as", READINGS)
def test_servers_come_after_the_consumer(reading_as):
    mode, arguments = READINGS[reading_as]
    target = "inproc://localhost:4841"
    dataset = Dataset.range(LENGTH).apply(distribute(mode, target, **arguments))
    found = []
    reader = threading.Thread(target=lambda: found.extend(numbers(dataset)))
    reader.start()
    with DispatchServer(port=4841, protocol="inproc"), WorkerServer(dispatcher_address=target):
        reader.join(30)
        check(found, reading_as, 1)


@pytest.mark.parametrize("consumers", [2, 3])
def test_consumers_of_one_job_while_workers_come_and_go(make_service, consumers):
    service = make_service(2)
    found = [[] for _ in range(consumers)]
    begun = threading.Barrier(consumers + 1)

    def consume(mine):
        with reading(make(service, "shared")) as (elements,):
            mine += read(elements, 5)
            begun.wait(30)
            mine += elements

    readers = [threading.Thread(target=consume, args=[mine]) for mine in found]
    for reader in readers:
        reader.start()
    begun.wait(30)
    service.restart_worker(0)
    service.add_worker()
    service.workers[1].stop()
    for reader in readers:
        reader.join(60)
    check(numbers(element for mine in found for element in mine), "shared", 3)


@pytest.mark.parametrize("reading_as", READINGS)
def test_an_iterator_that_raised_and_is_dropped_is_collected(make_service, reading_as):
    service, dropped = make_service(1), []

    def use():
        elements = iter(make(service, reading_as, Dataset.range(9).map(lambda x: 1 // int(x - 3))))
        dropped.append(weakref.ref(elements._elements))
        with pytest.raises(ZeroDivisionError):
            list(elements)

    use()
    deadline = time.monotonic() + 20
    while dropped[0]() is not None:  # a thread may be about to end
        assert time.monotonic() < deadline
        gc.collect()


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("reading_as", READINGS)
def test_who_comes_to_the_end_waits_until_the_consumer_has_left(
    make_service, monkeypatch, reading_as, how
):
    leaving, may_leave, leave = threading.Event(), threading.Event(), Fetcher._leave

    def slowly(fetcher):
        leaving.set()
        assert may_leave.wait(20)
        leave(fetcher)

    monkeypatch.setattr(Fetcher, "_leave", slowly)
    dataset = make(make_service(1), reading_as)

    def use():
        elements = iter(dataset)
        assert len(list(elements)) == LENGTH
        if how == "close":
            elements.close()

    user = threading.Thread(target=use)
    user.start()
    assert leaving.wait(20)
    user.join(0.1)
    assert user.is_alive()
    may_leave.set()
    user.join(20)
    assert not user.is_alive()
