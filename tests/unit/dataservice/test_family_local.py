"""Workers in the consumer's process, on its host, and elsewhere: the pairs that may communicate."""

import threading
import time
from collections import Counter

import pytest
from _cases.endpoints import wait_until

from dataservice import Dataset, ShardingPolicy, distribute
from dataservice.calls import process_name
from dataservice.read import distributed
from dataservice.work import worker
from mpidist.config import Config
from mpidist.errors import InvalidArgumentError, UnavailableError

OFF, DYNAMIC = MODES = ["parallel_epochs", "distributed_epoch"]
TARGETS = ["AUTO", "ANY", "LOCAL"]
HERE = process_name()
SAME_HOST = f"{HERE.partition('/')[0]}/1-other"
OTHER_HOST = "elsewhere/1-other"


@pytest.fixture
def add_worker(monkeypatch):
    """Provide ``add_worker(service, process, **config)``. The worker reports the given process."""

    def add(service, process=HERE, **config):
        monkeypatch.setattr(worker, "process_name", lambda: process)
        return service.add_worker(**config)

    return add


@pytest.fixture
def make_cluster(make_service, add_worker):
    """Provide ``make_cluster(local, remote)``: workers in this process and on another host."""

    def make(local, remote, **config):
        service = make_service(0)
        for process, count in ((HERE, local), (OTHER_HOST, remote)):
            for _ in range(count):
                add_worker(service, process, **config)
        return service

    return make


def makers(dataset):
    """Count the elements of each task."""
    return Counter(str(task) for task in dataset)


def who(i):
    return threading.current_thread().name


def values(dataset):
    return [int(element) for element in dataset]


def tasks(service):
    return sum(len(worker._worker._tasks) for worker in service.workers)


def running(service):
    """Return the number of running tasks."""
    tasks = [one for worker in service.workers for one in worker._worker._tasks.values()]
    return sum(one.thread.is_alive() for one in tasks)


def apply_of(service, mode, target="AUTO", **terms):
    return distribute(mode, service.target, target_workers=target, **terms)


# Worker selection


@pytest.mark.parametrize("local", [0, 1, 3])
@pytest.mark.parametrize("remote", [0, 1, 3])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [None, "j"])
def test_workers_that_are_read_from(make_cluster, local, remote, target, name):
    service = make_cluster(local, remote)
    readable = local if target == "LOCAL" else local + remote
    dataset = Dataset.range(12).map(who)
    # start_timeout_s also limits every call.
    limit = {} if readable else {"start_timeout_s": 1.0}
    remote = dataset.apply(apply_of(service, OFF, target, job_name=name, **limit))
    if readable:
        assert sorted(makers(remote).values()) == [12] * readable
    else:
        error = InvalidArgumentError if target == "LOCAL" else UnavailableError
        with pytest.raises(error, match=r"needs a WorkerServer in the consumer|no data worker"):
            list(remote)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("local", [1, 3])
@pytest.mark.parametrize("remote", [0, 2])
def test_a_distributed_epoch_on_any_of_them(make_cluster, target, local, remote):
    service = make_cluster(local, remote)
    for _ in range(2):
        dataset = Dataset.range(100).repeat(2).apply(apply_of(service, DYNAMIC, target))
        assert Counter(values(dataset)) == dict.fromkeys(range(100), 2)


@pytest.mark.parametrize("mode", MODES)
def test_no_local_worker(make_cluster, mode):
    service = make_cluster(0, 2)
    remote = Dataset.range(9).apply(apply_of(service, mode, "LOCAL"))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="needs a WorkerServer in the consumer's"):
            list(remote)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["AUTO", "LOCAL"])
def test_consumers_of_a_name_on_local_workers(make_cluster, mode, target):
    service = make_cluster(2, 0)
    apply = apply_of(service, mode, target, job_name="j", max_outstanding_requests=1)
    one, two = (iter(Dataset.range(50).apply(apply)) for _ in range(2))
    found = [int(next(one)), int(next(two)), *values(one), *values(two)]
    assert Counter(found) == dict.fromkeys(range(50), 2 if mode == OFF else 1)


@pytest.mark.parametrize("first", TARGETS)
@pytest.mark.parametrize("second", TARGETS)
def test_a_name_has_one_target(make_cluster, first, second):
    service = make_cluster(1, 1)
    values(Dataset.range(5).apply(apply_of(service, DYNAMIC, first, job_name="j")))
    other = Dataset.range(5).apply(apply_of(service, DYNAMIC, second, job_name="j"))
    if first == second:
        values(other)
    else:
        with pytest.raises(InvalidArgumentError, match="different parameters"):
            values(other)


@pytest.mark.parametrize("target", TARGETS)
def test_a_local_worker_of_another_dispatcher_is_none_of_ours(make_cluster, target):
    make_cluster(1, 0)
    service = make_cluster(0, 1)
    remote = Dataset.range(5).apply(apply_of(service, OFF, target))
    if target == "LOCAL":
        with pytest.raises(InvalidArgumentError, match="in the consumer's own process"):
            list(remote)
    else:
        assert values(remote) == list(range(5))


@pytest.mark.parametrize(
    "terms",
    [
        {"job_name": "j", "num_consumers": 1, "consumer_index": 0},
        {"deterministic": True},
    ],
)
def test_what_does_not_go_with_local(terms):
    with pytest.raises(ValueError, match="'LOCAL' does not go with"):
        distribute(DYNAMIC, "localhost:1", target_workers="LOCAL", **terms)


# Workers and consumers that start and stop


@pytest.mark.parametrize("mode", MODES)
def test_tasks_on_local_workers_end_with_the_iterator(make_cluster, mode):
    service = make_cluster(2, 1)
    for _ in range(3):
        with iter(Dataset.range(5).repeat().apply(apply_of(service, mode, "LOCAL"))) as elements:
            next(elements)
            # A pending request of the previous pass may make a worker begin a task that is unknown
            # to the dispatcher. This task ends at once, and the next heartbeat removes it.
            wait_until(lambda: 1 <= running(service) <= tasks(service) <= 2)
            assert not service.workers[-1]._worker._tasks
        wait_until(lambda: tasks(service) == 0)
        assert list(elements) == []


def test_a_local_worker_that_comes_later(make_cluster, add_worker):
    service = make_cluster(1, 0)
    with iter(Dataset.range(5).repeat().map(who).apply(apply_of(service, OFF, "LOCAL"))) as found:
        seen = {next(found)}
        add_worker(service)
        while len(seen) < 2:
            seen.add(next(found))
        add_worker(service, OTHER_HOST)
        assert {next(found) for _ in range(50)} <= seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_local_worker_that_is_lost_loses_nothing(make_cluster, mode, target):
    service = make_cluster(2, 0)
    apply = apply_of(service, mode, target, max_outstanding_requests=1)
    with iter(Dataset.range(200).apply(apply)) as elements:
        found = [int(next(elements)) for _ in range(5)]
        service.workers[0].stop()
        found += values(elements)
    assert Counter(found) == dict.fromkeys(range(200), 2 if mode == OFF else 1)


@pytest.mark.parametrize("what", ["worker", "dispatcher", "both"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_new_iteration_after_a_restart(make_service, tmp_path, what, target):
    service = make_service(1, work_dir=str(tmp_path), fault_tolerant_mode=True)
    remote = Dataset.range(20).apply(apply_of(service, DYNAMIC, target))
    assert values(remote) == list(range(20))
    if what != "worker":
        service.restart_dispatcher()
    if what != "dispatcher":
        service.restart_worker(0)
    assert values(remote) == list(range(20))


def test_only_local_workers_are_left_to_local_readers(make_cluster):
    service = make_cluster(1, 1)
    apply = apply_of(service, DYNAMIC, "LOCAL", start_timeout_s=0.2)
    with iter(Dataset.range(5).repeat().apply(apply)) as elements:
        next(elements)
        service.workers[0].stop()
        with pytest.raises(UnavailableError, match="no data worker"):
            list(elements)


# Tags


@pytest.mark.parametrize(
    "process", [HERE, SAME_HOST, OTHER_HOST], ids=["here", "same host", "other host"]
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tags", [(), ("COLOCATED",), ("other",), ("other", "COLOCATED")])
def test_colocated_workers_are_for_their_own_host(make_service, add_worker, process, target, tags):
    service = make_service(0)
    add_worker(service)  # readable with every target
    add_worker(service, process, worker_tags=tags)
    second = {
        "LOCAL": process == HERE,
        "ANY": True,
        "AUTO": process != OTHER_HOST or "COLOCATED" not in tags,
    }[target]
    remote = Dataset.range(7).map(who).apply(apply_of(service, OFF, target))
    assert sorted(makers(remote).values()) == [7] * (1 + second)
    remote = Dataset.range(70).apply(apply_of(service, DYNAMIC, target))
    assert sorted(values(remote)) == list(range(70))


@pytest.mark.parametrize("target", ["AUTO", "ANY"])
@pytest.mark.parametrize("tagged", [1, 2])
def test_only_colocated_workers_elsewhere(make_cluster, target, tagged):
    service = make_cluster(0, tagged, worker_tags=["COLOCATED"])
    apply = apply_of(service, OFF, target, start_timeout_s=0.2)
    remote = Dataset.range(7).map(who).apply(apply)
    if target == "ANY":
        assert sorted(makers(remote).values()) == [7] * tagged
    else:
        with pytest.raises(UnavailableError, match="no data worker"):
            list(remote)


@pytest.mark.parametrize("target", ["AUTO", "LOCAL"])
@pytest.mark.parametrize("mode", MODES)
def test_who_alone_could_read_from_a_worker_leaves(make_cluster, monkeypatch, target, mode):
    service = make_cluster(1, 1, worker_tags=["COLOCATED"])
    # An excluded consumer waits longer than start_timeout_s, as long as other consumers read.
    terms = {"job_name": "j", "max_outstanding_requests": 1, "start_timeout_s": 0.2}
    apply = apply_of(service, mode, target, **terms)
    registry = service.dispatcher._dispatcher._registry

    def begin(process):
        monkeypatch.setattr(distributed, "process_name", lambda: process)
        return iter(Dataset.range(60).apply(apply))

    there, there_found = begin(OTHER_HOST), []
    there_found.append(int(next(there)))
    (iteration,) = registry.jobs.iterations.values()
    if mode == DYNAMIC:  # until its worker has the whole source
        wait_until(lambda: iteration.next_index >= 60)
    here, here_found = begin(HERE), []
    reader = threading.Thread(target=lambda: here_found.extend(values(here)), daemon=True)
    reader.start()
    wait_until(lambda: len(iteration.clients) == 2)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.5)
    there_found += [int(next(there)) for _ in range(3)]
    there.close()
    reader.join(20)
    found = Counter(there_found + here_found)
    assert set(found) == set(range(60))
    if mode == DYNAMIC:
        assert max(found.values()) == 1


def test_who_waits_for_what_others_read_says_so(make_cluster, monkeypatch, caplog):
    monkeypatch.setattr("dataservice.calls.config", Config(stall_s=0.3))
    service = make_cluster(0, 1, worker_tags=["COLOCATED"])
    apply = apply_of(service, DYNAMIC, job_name="j", start_timeout_s=0.2)

    def begin(process):
        monkeypatch.setattr(distributed, "process_name", lambda: process)
        return iter(Dataset.range(9).apply(apply))

    there = begin(OTHER_HOST)
    first = int(next(there))
    here, found = begin(HERE), []
    reader = threading.Thread(target=lambda: found.extend(values(here)), daemon=True)
    reader.start()
    wait_until(lambda: "its share of 1 parts of the dataset" in caplog.text)
    assert [first, *values(there)] == list(range(9))
    reader.join(20)
    assert not reader.is_alive()
    assert found == []


@pytest.mark.parametrize("for_all", [True, False])
def test_what_every_consumer_reads_stays_with_workers_that_all_may_read(
    make_cluster, add_worker, monkeypatch, for_all
):
    service = make_cluster(1, 1, worker_tags=["COLOCATED"])
    if for_all:
        add_worker(service)
    terms = {"job_name": "j", "num_consumers": 2, "deterministic": True, "num_shards": 4}
    found = []

    def begin(process, index):
        monkeypatch.setattr(distributed, "process_name", lambda: process)
        patience_s = 0.5 if index else 60.0  # the first one does not leave
        apply = apply_of(
            service, DYNAMIC, consumer_index=index, start_timeout_s=patience_s, **terms
        )
        return iter(Dataset.range(40).apply(apply))

    with begin(HERE, 0) as here, begin(OTHER_HOST, 1) as there:
        found.append(int(next(here)))  # alone, from any worker
        if for_all:
            assert sorted([*found, *values(there), *values(here)]) == list(range(40))
            return
        with pytest.raises(UnavailableError, match="no data worker that all 2 consumers may read"):
            next(there)


@pytest.mark.parametrize("policy", [ShardingPolicy.OFF, ShardingPolicy.DYNAMIC])
@pytest.mark.parametrize("tags", [["COLOCATED"], ("COLOCATED", "COLOCATED"), ["a", "b"], []])
def test_forms_of_tags(make_cluster, policy, tags):
    service = make_cluster(1, 0, worker_tags=tags)
    assert values(Dataset.range(9).apply(apply_of(service, policy))) == list(range(9))
