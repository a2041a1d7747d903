"""Errors that consumers receive after failures, in one process."""

import importlib
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from _cases.endpoints import wait_until

from dataservice import Dataset, distribute, from_dataset_id, register_dataset
from dataservice.dispatch import journal
from dataservice.proto import dataservice_pb2 as pb
from mpidist import open_endpoint
from mpidist.errors import InvalidArgumentError, UnavailableError, UnknownError

MODES = ["parallel_epochs", "distributed_epoch"]


def values(dataset):
    return [int(element) for element in dataset]


def task_threads():
    return [t for t in threading.enumerate() if t.name.startswith("dataservice-task")]


@pytest.mark.parametrize("mode", MODES)
def test_errors_of_functions_arrive_as_they_were(make_service, mode):
    service = make_service(1)

    def fail_at_five(i):
        if i == 5:
            raise KeyError("five")
        return i

    elements = iter(Dataset.range(10).map(fail_at_five).apply(distribute(mode, service.target)))
    assert [int(next(elements)) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(KeyError, match="five") as caught:
            next(elements)
        notes = "\n".join(caught.value.__notes__)
        assert "raised in data worker inproc://localhost:" in notes
        assert "in fail_at_five" in notes


def test_a_module_that_workers_do_not_have(make_service, tmp_path, monkeypatch):
    """Report a module that the worker lacks.

    The worker runs in this process, so the test removes the module after the registration.
    """
    (tmp_path / "only_of_the_script.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_of_the_script")
    service = make_service(1)
    dataset = Dataset.range(3).map(module.double)
    number = register_dataset(service.target, dataset)
    monkeypatch.undo()
    del sys.modules["only_of_the_script"]
    elements = iter(from_dataset_id("parallel_epochs", service.target, number))
    with pytest.raises(ModuleNotFoundError, match=r"'only_of_the_script': .* PYTHONPATH of the"):
        next(elements)


def exits(i):
    raise SystemExit(f"at {i}")


def is_interrupted(i):
    raise KeyboardInterrupt(f"at {i}")


@pytest.mark.parametrize("function", [exits, is_interrupted])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_function_that_ends_the_script_ends_only_the_iteration(
    make_service, function, mode, ahead
):
    service = make_service(1)

    def at_two(i):
        return function(i) if i == 2 else i

    dataset = Dataset.range(5).map(at_two)
    dataset = dataset.prefetch(2) if ahead else dataset
    elements = iter(dataset.apply(distribute(mode, service.target)))
    assert [int(next(elements)) for _ in range(2)] == [0, 1]
    with pytest.raises(UnknownError) as caught:
        next(elements)
    worker = f"data worker inproc://localhost:{service.workers[0]._endpoint.address.port}"
    kind = "SystemExit" if function is exits else "KeyboardInterrupt"
    assert f"{kind}: at 2 (raised in {worker}, task" in str(caught.value)
    assert f"dataset {dataset.node.summary()};" in str(caught.value)
    assert f"in {function.__name__}" in "\n".join(caught.value.__notes__)
    healthy = Dataset.range(5).apply(distribute(mode, service.target))
    assert values(healthy) == list(range(5))


class ExitsWhenPickled:
    def __reduce__(self):
        raise SystemExit(5)


def test_an_element_that_exits_when_pickled_ends_only_the_iteration(make_service):
    service = make_service(1)
    dataset = Dataset.range(3).map(lambda i: ExitsWhenPickled())
    with pytest.raises(UnknownError, match=r"SystemExit: 5 \(raised in data worker"):
        list(dataset.apply(distribute("parallel_epochs", service.target)))
    healthy = Dataset.range(5).apply(distribute("parallel_epochs", service.target))
    assert values(healthy) == list(range(5))


def test_elements_that_cannot_be_pickled(make_service):
    service = make_service(1)
    dataset = Dataset.range(3).map(lambda i: threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle"):
        list(dataset.apply(distribute("parallel_epochs", service.target)))


def test_datasets_that_cannot_be_pickled(make_service):
    service = make_service(1)
    lock = threading.Lock()
    dataset = Dataset.range(3).map(lambda i: (lock, i)[1])
    with pytest.raises(TypeError, match="cannot pickle"):
        list(dataset.apply(distribute("parallel_epochs", service.target)))


def test_no_dispatcher():
    dataset = Dataset.range(3).apply(
        distribute("parallel_epochs", "inproc://localhost:4711", start_timeout_s=0.05)
    )
    with pytest.raises(UnavailableError, match=r"no dispatcher answers at localhost:4711.*0\.05 s"):
        list(dataset)


def test_no_workers(make_service):
    service = make_service(0)
    apply = distribute("parallel_epochs", service.target, start_timeout_s=0.1)
    with pytest.raises(UnavailableError, match=r"no data worker has registered .* within 0\.1 s"):
        list(Dataset.range(3).apply(apply))


def test_workers_and_dispatcher_may_come_later(make_service):
    service = make_service(0)
    elements = iter(Dataset.range(3).apply(distribute("parallel_epochs", service.target)))
    service.add_worker()
    assert [int(element) for element in elements] == [0, 1, 2]


def test_another_worker_goes_on_with_the_work_of_one_that_is_stopped(make_service):
    service = make_service(2)
    dataset = Dataset.range(30_000).apply(distribute("parallel_epochs", service.target))
    elements = iter(dataset)
    first = int(next(elements))
    service.workers[0].stop()
    assert Counter([first, *map(int, elements)]) == dict.fromkeys(range(30_000), 2)
    # The next iteration uses the other worker alone.
    again = Dataset.range(100).apply(distribute("parallel_epochs", service.target))
    assert values(again) == list(range(100))


def test_a_dispatcher_that_is_stopped_is_missed(make_service):
    service = make_service(1)
    elements = iter(Dataset.range(3).repeat().apply(distribute("parallel_epochs", service.target)))
    next(elements)
    service.dispatcher.stop()
    with pytest.raises(UnavailableError, match=r"the dispatcher at localhost:\d+ is gone"):
        for _ in elements:
            pass


def test_a_dispatcher_that_is_stopped_leaves_no_tasks(make_service):
    service = make_service(2)
    elements = iter(Dataset.range(3).repeat().apply(distribute("parallel_epochs", service.target)))
    next(elements)
    service.dispatcher.stop()
    with pytest.raises(UnavailableError, match=r"the dispatcher at \S+ is gone"):
        list(elements)
    wait_until(lambda: not task_threads())


def test_the_end_of_an_earlier_dispatcher_means_nothing(make_service):
    service = make_service(1)
    worker = service.workers[0]
    stale = pb.WorkerRequest(worker_id=worker._worker._worker_id + 1)
    with open_endpoint("inproc") as endpoint:
        endpoint.notify(
            worker._endpoint.address, "data_worker/DispatcherStopped", stale.SerializeToString()
        )
    dataset = Dataset.range(3).apply(distribute("parallel_epochs", service.target))
    assert values(dataset) == [0, 1, 2]


def test_a_dataset_that_the_journal_cannot_take_is_refused_alone(
    make_service, tmp_path, monkeypatch
):
    monkeypatch.setattr(journal, "_LARGEST_RECORD_BYTES", 3 << 20)
    service = make_service(1, work_dir=str(tmp_path), fault_tolerant_mode=True)
    apply = distribute("distributed_epoch", service.target)
    large = Dataset.from_tensor_slices(np.zeros((4, 100_000))).apply(apply)
    with pytest.raises(InvalidArgumentError, match=r"float64.* has .* more than the 3145728"):
        list(large)
    assert sorted(int(i) for i in Dataset.range(5).apply(apply)) == list(range(5))
