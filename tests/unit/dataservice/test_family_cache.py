"""Trainers that share a cache: each element is made once, and trainers read the cached elements."""

import itertools

import numpy as np
import pytest
from _cases.data_readers import MADE, counted, numbers, read, reading

from dataservice import (
    CrossTrainerCache,
    Dataset,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, UnimplementedError

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
MANY = 1_000_000


def endless():
    return Dataset.range(MANY).repeat()


def cached(target, trainer, dataset=None, policy=OFF, **options):
    cache = CrossTrainerCache(trainer)
    apply = distribute(policy, target, "job", cross_trainer_cache=cache, **options)
    return (endless() if dataset is None else dataset).apply(apply)


def in_order(got):
    """Return whether numbers ascend, with or without gaps."""
    return all(a < b for a, b in itertools.pairwise(got))


@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
@pytest.mark.parametrize("trainers", [2, 5])
def test_trainers_get_the_same(make_service, policy, trainers):
    target = make_service(1).target
    datasets = [cached(target, f"trainer {i}", policy=policy) for i in range(trainers)]
    with reading(*datasets) as readers:
        for reader in readers:
            assert numbers(read(reader, 5000)) == list(range(5000))


@pytest.mark.parametrize("workers", [1, 3])
def test_each_element_is_made_once(make_service, workers):
    MADE.clear()
    target = make_service(workers).target
    dataset = endless().map(counted)
    options = {"policy": DYNAMIC, "max_outstanding_requests": 2}
    with reading(*(cached(target, str(i), dataset, **options) for i in range(4))) as readers:
        got = [numbers(read(reader, 100)) for reader in readers]
    assert len(set(MADE)) == len(MADE)
    assert set(MADE) >= {number for each in got for number in each}
    # Workers make no more than the used and the requested elements.
    assert len(MADE) < 100 * workers + 20


@pytest.mark.parametrize("ids", [["a", "a"], ["a", "b", "a"], ["a", "a", "a"]])
def test_readers_with_the_same_id_share_its_stream(make_service, ids):
    target = make_service(1).target
    datasets = [cached(target, name, max_outstanding_requests=1) for name in ids]
    with reading(*datasets) as readers:
        got = [numbers(next(reader) for reader in readers) for _ in range(100)]
    for name in set(ids):
        own = [n for each in got for n, owner in zip(each, ids, strict=True) if owner == name]
        assert len(set(own)) == len(own)
        # Elements that the other reader has requested in advance belong to that reader.
        assert set(range(max(own) - 3)) <= set(own)


def test_twenty_readers_in_lock_step(make_service):
    target = make_service(1).target
    datasets = [cached(target, str(i), max_outstanding_requests=4) for i in range(20)]
    with reading(*datasets) as readers:
        for number in range(300):
            assert [int(next(reader)) for reader in readers] == [number] * 20


def test_several_workers_in_lock_step(make_service):
    target = make_service(3).target
    with reading(*(cached(target, str(i), policy=DYNAMIC) for i in range(3))) as readers:
        got = [set(numbers(read(reader, 6_000))) for reader in readers]
    assert all(len(each) == 6_000 for each in got)
    assert len(got[0] & got[1] & got[2]) > 0


@pytest.mark.parametrize("kept", [1, 100, 800, 8000])
def test_a_slow_reader_skips_but_gets_its_number(make_service, kept):
    service = make_service(0)
    service.add_worker(cross_trainer_cache_size_bytes=kept)
    datasets = [
        cached(service.target, name, max_outstanding_requests=2) for name in ("fast", "slow")
    ]
    with reading(*datasets) as (fast, slow):
        before = numbers(read(slow, 5))
        ahead = numbers(read(fast, 3000))
        # The leading reader loses no element.
        assert ahead == list(range(ahead[0], ahead[0] + 3000))
        after = numbers(read(slow, 500))
    assert in_order(before + after)
    assert after[20] > 3000 - kept // 8 - 20


@pytest.mark.parametrize("kept", [1, 8, 100])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_a_small_cache_only_degrades(make_service, kept, size):
    service = make_service(0)
    service.add_worker(cross_trainer_cache_size_bytes=kept)
    dataset = endless().map(lambda x: np.full(size, x))
    with reading(*(cached(service.target, name, dataset) for name in "ab")) as readers:
        got = [[], []]
        for _ in range(60):
            for numbers_of, reader in zip(got, readers, strict=True):
                numbers_of.append(int(next(reader)[0]))
    assert all(map(in_order, got))


def test_a_reader_that_comes_late_begins_with_what_is_kept(make_service):
    service = make_service(0)
    service.add_worker(cross_trainer_cache_size_bytes=80)
    with reading(cached(service.target, "first"), cached(service.target, "late")) as (first, late):
        read(first, 1000)
        assert int(next(late)) > 900
    everything = make_service(1).target
    with reading(cached(everything, "first"), cached(everything, "late")) as (first, late):
        read(first, 1000)
        assert int(next(late)) == 0


def test_a_reader_that_comes_again_goes_on(make_service):
    target = make_service(1).target
    with reading(cached(target, "a")) as [keeps_the_job]:
        next(keeps_the_job)
        with reading(cached(target, "b", max_outstanding_requests=1)) as [reader]:
            assert numbers(read(reader, 100)) == list(range(100))
        with reading(cached(target, "b", max_outstanding_requests=1)) as [reader]:
            assert 100 <= int(next(reader)) <= 102


def test_jobs_have_caches_of_their_own(make_service):
    target = make_service(1).target
    other = endless().apply(
        distribute(OFF, target, "other", cross_trainer_cache=CrossTrainerCache("a"))
    )
    with reading(cached(target, "a"), other) as readers:
        assert [numbers(read(reader, 10)) for reader in readers] == [list(range(10))] * 2


def test_a_registered_dataset(make_service):
    target = make_service(1).target
    name = register_dataset(target, endless())
    datasets = [
        from_dataset_id(OFF, target, name, None, "job", cross_trainer_cache=CrossTrainerCache(id))
        for id in "ab"
    ]
    with reading(*datasets) as readers:
        assert [numbers(read(reader, 10)) for reader in readers] == [list(range(10))] * 2


@pytest.mark.parametrize("policy", [OFF, DYNAMIC, DATA])
def test_nested_elements(make_service, policy):
    target = make_service(1, worker_addresses=["localhost"]).target
    dataset = endless().map(lambda x: {"x": x, "pair": (x + 1, np.full(3, x))}).batch(2)
    with reading(*(cached(target, id, dataset, policy) for id in "ab")) as readers:
        for reader in readers:
            for number in range(0, 20, 2):
                element = next(reader)
                assert element["x"].tolist() == [number, number + 1]
                assert element["pair"][1].tolist() == [[number] * 3, [number + 1] * 3]


# Losses


@pytest.mark.parametrize("same_port", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_that_is_restarted(make_service, same_port, times):
    service = make_service(1)
    datasets = [cached(service.target, id, max_outstanding_requests=8) for id in "ab"]
    with reading(*datasets) as readers:
        for _ in range(times):
            for reader in readers:
                assert in_order(numbers(read(reader, 50)))
            service.restart_worker(0, same_port)
            for reader in readers:
                # The cached elements are lost. The new worker starts at the last checkpoint,
                # behind the elements that the readers hold.
                got = numbers(read(reader, 100))
                gaps = [b - a for a, b in itertools.pairwise(got) if b - a != 1]
                assert len(gaps) <= 1
                assert sum(gaps) <= 0


@pytest.mark.parametrize("lost", [0, 1])
def test_others_go_on_with_the_part_of_a_lost_worker(make_service, lost):
    service = make_service(2)
    dataset = endless().map(lambda x: x)
    datasets = [cached(service.target, id, dataset, policy=DYNAMIC) for id in "ab"]
    with reading(*datasets) as readers:
        for reader in readers:
            read(reader, 100)
        service.workers[lost].stop()
        for reader in readers:
            assert len(read(reader, 4_000)) == 4_000


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("policy", [OFF, DYNAMIC])
def test_a_dispatcher_that_is_restarted_changes_nothing(make_service, tmp_path, restarts, policy):
    service = make_service(1, work_dir=str(tmp_path), fault_tolerant_mode=True)
    datasets = [cached(service.target, id, policy=policy) for id in "ab"]
    with reading(*datasets) as readers:
        got = [numbers(read(reader, 100)) for reader in readers]
        for _ in range(restarts):
            service.restart_dispatcher()
            for numbers_of, reader in zip(got, readers, strict=True):
                numbers_of += numbers(read(reader, 1500))
        with reading(cached(service.target, "c", policy=policy)) as [late]:
            got.append(numbers(read(late, 100 + 1500 * restarts)))
    assert got == [list(range(100 + 1500 * restarts))] * 3


# Unsupported options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"job_name": None}, "needs a job_name"),
        ({"num_consumers": 2, "consumer_index": 0}, "does not go with num_consumers"),
        ({"deterministic": True, "processing_mode": DYNAMIC}, "does not go with num_consumers"),
        ({"num_shards": 2}, "num_shards needs"),
        ({"cross_trainer_cache": "trainer"}, "must be a CrossTrainerCache"),
    ],
)
def test_what_does_not_go_together(options, message):
    arguments = {
        "processing_mode": OFF,
        "service": "inproc://localhost:4711",
        "job_name": "job",
        "cross_trainer_cache": CrossTrainerCache("a"),
    }
    with pytest.raises(ValueError, match=message):
        distribute(**arguments | options)


@pytest.mark.parametrize("dataset", [Dataset.range(9), Dataset.range(9).repeat(3).batch(2)])
def test_a_dataset_that_is_known_to_end(make_service, dataset):
    with pytest.raises(FailedPreconditionError, match=r"cross_trainer_cache need.*elements"):
        cached(make_service(0).target, "a", dataset)


def test_a_dataset_that_turns_out_to_end(make_service):
    dataset = Dataset.range(20).filter(lambda x: x % 2)
    with (
        reading(cached(make_service(1).target, "a", dataset)) as [reader],
        pytest.raises(FailedPreconditionError, match="infinite dataset"),
    ):
        read(reader, 20)


@pytest.mark.parametrize("other", ["none", "policy", "consumers"])
def test_consumers_must_agree(make_service, other):
    target = make_service(1).target
    others = {
        "none": lambda: endless().apply(distribute(OFF, target, "job")),
        "policy": lambda: cached(target, "b", policy=DYNAMIC),
        "consumers": lambda: endless().apply(distribute(OFF, target, "job", 0, 1)),
    }
    with reading(cached(target, "a")) as [first]:
        next(first)
        with (
            reading(others[other]()) as [second],
            pytest.raises(InvalidArgumentError, match=r"different parameters.*CROSS_TRAINER"),
        ):
            next(second)


def test_there_is_no_state(make_service):
    with (
        reading(cached(make_service(1).target, "a")) as [reader],
        pytest.raises(UnimplementedError, match="share elements in no fixed order"),
    ):
        reader.get_state()
