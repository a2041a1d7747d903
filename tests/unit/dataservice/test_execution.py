"""The threads and helper processes that all iterators of a process share."""

import itertools
import os
import select
import signal
import threading
import time

import pytest

from dataservice import Dataset, distribute
from dataservice.dataset.base import Context, Scope

LIMIT_S = 20


def values(dataset):
    return [int(element) for element in dataset]


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name == f"dataservice-{name}"]


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until(lambda: not threads("map") and not threads("prefetch"))


class Counter:
    """A function that counts its concurrent calls."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, x):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(2e-3)
        with self._lock:
            self.now -= 1
        return x


# The number of threads does not grow with the number of iterators


def test_passes_share_the_threads_of_map_and_prefetch():
    dataset = Dataset.range(10_000).map(lambda x: x, num_parallel_calls=4).prefetch(2)
    passes = [iter(dataset) for _ in range(40)]
    for number in range(30):
        assert {int(next(elements)) for elements in passes} == {number}
    assert len(threads("map")) <= 4
    assert len(threads("prefetch")) <= 8
    for elements in passes:
        elements.close()


def test_tasks_of_a_worker_share_the_threads_of_map_and_prefetch(make_service):
    service = make_service(1)
    dataset = (
        Dataset.range(1600)
        .map(lambda x: (time.sleep(1e-3), x)[1], num_parallel_calls=4)
        .prefetch(2)
        .apply(distribute("distributed_epoch", service.target, deterministic=True, num_shards=16))
    )
    with iter(dataset) as elements:
        assert len(values(itertools.islice(elements, 400))) == 400
        assert len(threads("map")) <= 4
        assert len(threads("prefetch")) <= 8
        assert len(values(elements)) == 1200


def test_passes_share_processes():
    dataset = Dataset.range(40).map(lambda x: os.getpid(), 2, processes=True)
    other = Dataset.range(40).map(lambda x: os.getpid() + 0, 3, processes=True)
    passes = [iter(each) for each in [dataset] * 6 + [other] * 6]
    pids = {int(next(elements)) for elements in itertools.chain(*[passes] * 10)}
    assert len(pids) <= 3
    for elements in passes:
        elements.close()


def test_a_helper_process_forgets_the_oldest_functions():
    datasets = [Dataset.range(3).map(lambda x, n=n: x + n, 1, processes=True) for n in range(20)]
    with iter(Dataset.range(9).map(abs, 1, processes=True)) as held:
        next(held)
        for n, dataset in enumerate(datasets + datasets[::-1]):
            n = min(n, 39 - n)
            assert values(dataset) == [n, n + 1, n + 2]


# The number of concurrent calls


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_more_calls_run_than_are_asked_for(passes, deterministic):
    counters = [Counter() for _ in range(passes)]
    found = []

    def read(counter):
        found.append(sorted(values(Dataset.range(40).map(counter, 3, deterministic))))

    readers = [threading.Thread(target=read, args=[counter]) for counter in counters]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(LIMIT_S)
    assert found == [list(range(40))] * passes
    assert all(1 <= counter.most <= 3 for counter in counters)
    assert passes > 1 or counters[0].most == 3


def test_the_pool_grows_to_the_largest_number():
    few = iter(Dataset.range(9).map(abs, 2))
    next(few)
    meeting = threading.Barrier(6)
    assert values(Dataset.range(12).map(lambda x: (meeting.wait(LIMIT_S), x)[1], 6)) == list(
        range(12)
    )
    few.close()


# No deadlock in a bounded pool


def test_functions_that_read_datasets_with_parallel_calls():
    def inner(x):
        return int(x) + sum(values(Dataset.range(4).map(abs, 2).prefetch(1)))

    def outer(x):
        return int(x) + sum(values(Dataset.range(5).map(inner, 2).prefetch(2)))

    dataset = Dataset.range(12).map(outer, 2).prefetch(1)
    assert values(dataset) == [x + 10 + 5 * 6 for x in range(12)]


def test_more_stages_than_threads():
    dataset = Dataset.range(50)
    for _ in range(20):
        dataset = dataset.map(lambda x: x + 1, num_parallel_calls=2).prefetch(1)
    assert values(dataset) == list(range(20, 70))


def test_a_pass_goes_on_while_functions_of_others_hang():
    released = threading.Event()

    def hang(x):
        released.wait(LIMIT_S)
        return x

    stuck = [iter(Dataset.range(9).map(hang, 2)) for _ in range(3)]
    stuck += [iter(Dataset.range(9).map(hang).prefetch(1)) for _ in range(12)]
    readers = [threading.Thread(target=next, args=[elements]) for elements in stuck]
    for reader in readers:
        reader.start()
    assert values(Dataset.range(20).map(abs, 2).prefetch(2)) == list(range(20))
    released.set()
    for reader, elements in zip(readers, stuck, strict=True):
        reader.join(LIMIT_S)
        elements.close()


def test_functions_that_hang_in_a_closed_pass_occupy_no_thread():
    released, meeting = threading.Event(), threading.Barrier(4)
    held = iter(Dataset.range(9).map(abs, 4))  # keeps the pool alive
    next(held)
    hanging = iter(Dataset.range(9).map(lambda x: x and released.wait(LIMIT_S), 4))
    next(hanging)
    hanging.close()
    assert values(Dataset.range(4).map(lambda x: (meeting.wait(LIMIT_S), x)[1], 4)) == [0, 1, 2, 3]
    released.set()
    held.close()


# Cancellation


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_consumer_that_waits_sees_the_end_of_its_scope(deterministic):
    released, scope, rest = threading.Event(), Scope(), []
    node = Dataset.range(9).map(lambda x: (released.wait(LIMIT_S), x)[1], 2, deterministic).node
    elements = node.iterate(Context((0,), scope=scope))
    reader = threading.Thread(target=lambda: rest.extend(elements))
    reader.start()
    wait_until(lambda: threads("map"))
    scope.close()
    reader.join(LIMIT_S)
    assert not reader.is_alive()
    assert rest == []
    released.set()


def test_closing_waits_for_the_element_that_is_being_made():
    began, released, made = threading.Event(), threading.Event(), []

    def make(x):
        began.set()
        released.wait(LIMIT_S)
        made.append(x)
        return x

    elements = iter(Dataset.range(9).map(make).prefetch(1))
    reader = threading.Thread(target=lambda: list(elements))
    reader.start()
    assert began.wait(LIMIT_S)
    threading.Timer(0.1, released.set).start()
    elements.close()
    assert made == [0]
    reader.join(LIMIT_S)
    assert not reader.is_alive()


# States


def test_a_state_that_is_taken_while_elements_are_made():
    dataset = Dataset.range(300).map(lambda x: (time.sleep(1e-4), x)[1]).prefetch(3)
    elements = iter(dataset)
    for place in range(0, 300, 20):
        again = iter(dataset)
        again.set_state(elements.get_state())
        assert values(itertools.islice(again, 20)) == list(range(place, place + 20))
        again.close()
        assert values(itertools.islice(elements, 20)) == list(range(place, place + 20))
    elements.close()


def in_child(function):
    """Return the result of a function in a forked child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(function()).encode())
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        ready, _, _ = select.select([answer], [], [], 20)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return answer.read() if ready else "nothing within 20 s"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_fork_has_threads_of_its_own():
    begun, go = threading.Event(), threading.Event()

    def held(i):
        begun.set()
        assert go.wait(20)
        return i

    def fresh():
        return sum(int(i) for i in Dataset.range(50).map(abs, 2).prefetch(2))

    with iter(Dataset.range(9).map(abs, 4).prefetch(2)) as others:
        next(others)
        elements = iter(Dataset.range(9).map(held, 2))
        taking = threading.Thread(target=next, args=(elements,), daemon=True)
        taking.start()
        assert begun.wait(20)
        try:
            assert in_child(fresh) == str(sum(range(50)))
            assert in_child(lambda: next(elements)) == "FailedPreconditionError"
        finally:
            go.set()
            taking.join(20)
        assert [int(i) for i in elements] == list(range(1, 9))
