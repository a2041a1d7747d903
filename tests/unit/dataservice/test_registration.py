"""Datasets that are registered and read by their id, and the specification's examples."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataservice import (
    SHARD_HINT,
    Dataset,
    DispatcherConfig,
    DispatchServer,
    ShardingPolicy,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)
from dataservice.dataset.spec import ArraySpec
from dataservice.dispatch import dispatcher as dispatcher_module
from mpidist.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)

OFF = "parallel_epochs"
MODES = [OFF, "distributed_epoch"]


def number(shape=()):
    return ArraySpec(shape, np.int64)


def values(dataset):
    return [int(element) for element in dataset]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", [None, "mine", "1000"])
def test_what_is_registered_can_be_read(make_service, mode, given):
    target = make_service(1).target
    name = register_dataset(target, Dataset.range(10), dataset_id=given)
    assert isinstance(name, str)
    assert given in (None, name)
    for _ in range(2):
        assert values(from_dataset_id(mode, target, name)) == list(range(10))


def test_the_state_at_the_end_of_what_was_registered(make_service):
    target = make_service(1).target
    name = register_dataset(target, Dataset.range(10))
    with iter(from_dataset_id(OFF, target, name)) as elements:
        assert len(list(elements)) == 10
        state = elements.get_state()
        elements.set_state(state)
        assert list(elements) == []


def test_equal_datasets_are_one(make_service):
    target = make_service(0).target
    first = register_dataset(target, Dataset.range(10))
    assert register_dataset(target, Dataset.range(10)) == first
    assert register_dataset(target, Dataset.range(11)) != first


def test_another_id_is_another_dataset(make_service):
    target = make_service(1).target
    for name in ("a", "b"):
        assert register_dataset(target, Dataset.range(3), dataset_id=name) == name
        assert values(from_dataset_id(OFF, target, name)) == [0, 1, 2]


def test_an_id_belongs_to_a_structure(make_service):
    target = make_service(1).target
    register_dataset(target, Dataset.range(3), dataset_id="d")
    # As long as elements are alike, the first dataset stays.
    assert register_dataset(target, Dataset.range(5), dataset_id="d") == "d"
    assert values(from_dataset_id(OFF, target, "d")) == [0, 1, 2]
    for other in (Dataset.range(4).batch(2), Dataset.range(3).map(float)):
        with pytest.raises(InvalidArgumentError, match="same ID must have the same structure"):
            register_dataset(target, other, dataset_id="d")


@pytest.mark.parametrize("name", ["", 5, b"d", True])
def test_wrong_ids(name):
    with pytest.raises(ValueError, match="dataset_id must be"):
        register_dataset("localhost:1", Dataset.range(3), dataset_id=name)


def test_an_id_that_there_is_not(make_service):
    with pytest.raises(NotFoundError, match="no dataset 'd' is registered"):
        from_dataset_id(OFF, make_service(1).target, "d")


@pytest.mark.parametrize("compression", ["GZIP", "", 0])
def test_wrong_compressions(compression):
    with pytest.raises(ValueError, match="compression must be"):
        register_dataset("localhost:1", Dataset.range(3), compression)


@pytest.mark.parametrize("behind", [lambda ds: ds, lambda ds: ds.batch(2).map(lambda x: x + 1)])
def test_what_cannot_be_sent_is_named(make_service, behind):
    lock = threading.Lock()
    locked = Dataset.range(9).filter(lambda x: x > 1).map(lambda x: (lock, x)[1])
    both = Dataset.range(9).map(lambda x: x)
    dataset = behind(Dataset.zip((both, locked)).map(lambda x, y: x + y))
    service = make_service(1)
    said = (
        r"^range\(0, 9, 1\)\.filter\(\S*\)\.map\(\S*\) cannot be sent .*cannot pickle '_thread.lock"
    )
    with pytest.raises(TypeError, match=said):
        list(dataset.apply(distribute(OFF, service.target)))


def test_no_dispatcher():
    with pytest.raises(UnavailableError, match="no dispatcher answers"):
        from_dataset_id(OFF, "inproc://localhost:4898", "d", start_timeout_s=0.05)


def test_what_cannot_be_split_is_refused_by_its_id_too(make_service):
    target = make_service(1).target
    name = register_dataset(target, Dataset.range(9).shuffle(9, seed=1).cache())
    with pytest.raises(UnimplementedError, match="cannot be split"):
        from_dataset_id(ShardingPolicy.DYNAMIC, target, name)
    assert sorted(values(from_dataset_id(OFF, target, name))) == list(range(9))


def test_names_of_jobs_belong_to_the_id(make_service):
    target = make_service(1).target
    names = [register_dataset(target, Dataset.range(n)) for n in (3, 4)]
    read = [from_dataset_id("distributed_epoch", target, name, job_name="j") for name in names]
    assert [values(dataset) for dataset in read] == [[0, 1, 2], [0, 1, 2, 3]]
    late = from_dataset_id("distributed_epoch", target, names[0], job_name="j")
    assert set(values(late)) <= {0, 1, 2}


def test_consumers_of_an_id_share_a_job(make_service):
    target = make_service(1).target
    name = register_dataset(target, Dataset.range(100))

    def read(_):
        return values(from_dataset_id(OFF, target, name, None, "j"))

    with ThreadPoolExecutor(3) as pool:
        found = [element for own in pool.map(read, range(3)) for element in own]
    assert sorted(found) == list(range(100))


# element_spec

SHAPES = {
    "number": (Dataset.range(4), number()),
    "dict": (Dataset.from_tensor_slices({"x": np.zeros((3, 2))}), {"x": ArraySpec((2,), float)}),
    "tuple": (Dataset.zip(Dataset.range(2), Dataset.range(2)), (number(), number())),
    "batch": (Dataset.range(5).batch(2), number((None,))),
    "text": (Dataset.from_tensor_slices(["a", "bcd"]), ArraySpec((), "U1")),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("told", [True, False])
def test_what_elements_are_like_is_known(make_service, name, told):
    dataset, spec = SHAPES[name]
    target = make_service(1).target
    found = register_dataset(target, dataset, dataset_id=None if told else "d")
    remote = from_dataset_id(OFF, target, found, element_spec=spec if told else None)
    assert remote.element_spec == (spec if told else dataset.element_spec)
    assert len(list(remote)) == len(list(dataset))


def test_what_elements_are_like_is_not_known(make_service):
    target = make_service(1).target
    empty = Dataset.range(3).filter(lambda x: x > 3).map(lambda x: x)
    remote = from_dataset_id(OFF, target, register_dataset(target, empty))
    with pytest.raises(ValueError, match="is not known"):
        _ = remote.element_spec
    assert values(remote) == []


WRONG = [
    ("number", ArraySpec((), np.int32)),
    ("number", number((1,))),
    ("number", (number(),)),
    ("number", {"x": number()}),
    ("dict", {"y": ArraySpec((2,), float)}),
    ("dict", {"x": ArraySpec((3,), float)}),
    ("dict", ArraySpec((2,), float)),
    ("tuple", (number(), number(), number())),
    ("tuple", (number(), ArraySpec((), float))),
    ("batch", number((3,))),
    ("batch", number((None, None))),
    ("text", number()),
]


@pytest.mark.parametrize(("name", "spec"), WRONG)
@pytest.mark.parametrize("mode", MODES)
def test_elements_that_are_not_what_was_said(make_service, name, spec, mode):
    target = make_service(1).target
    found = register_dataset(target, SHAPES[name][0])
    with iter(from_dataset_id(mode, target, found, element_spec=spec)) as elements:
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="but its element_spec is"):
                next(elements)


# The specification


def test_example_of_the_cluster(capsys):
    dispatcher = DispatchServer(port=0)
    dispatcher_address = dispatcher.target.split("://")[1]
    worker = WorkerServer(port=0, dispatcher_address=dispatcher_address)
    dataset = Dataset.range(10)
    dataset = dataset.apply(distribute(processing_mode=OFF, service=dispatcher.target))
    print(list(dataset.as_numpy_iterator()))
    shown = capsys.readouterr().out
    assert re.findall(r"\d+(?=[),\]])", shown) == [str(i) for i in range(10)]
    worker.stop()
    dispatcher.stop()


@pytest.mark.parametrize("make", [lambda: DispatchServer(port=5051), lambda: DispatchServer(5052)])
def test_example_of_join(make):
    dispatcher = make()
    joining = threading.Thread(target=dispatcher.join)
    joining.start()
    assert dispatcher.target.endswith((":5051", ":5052"))
    assert joining.is_alive()
    dispatcher.stop()
    joining.join(10)
    assert not joining.is_alive()


def test_example_of_the_target():
    dispatcher = DispatchServer(port=0)
    dataset = Dataset.range(10)
    dataset = dataset.apply(distribute(processing_mode=OFF, service=dispatcher.target))
    assert re.fullmatch(r"\w+://localhost:\d+", dispatcher.target)
    dispatcher.stop()


def test_example_of_start():
    dispatcher = DispatchServer(port=0, start=False)
    dispatcher.start()
    assert dispatcher.target
    dispatcher.stop()


@pytest.mark.parametrize("protocol", ["grpc", "grpc+local"])
def test_protocols_of_the_specification(protocol):
    with (
        DispatchServer(DispatcherConfig(protocol=protocol)) as dispatcher,
        WorkerServer(0, dispatcher.target.split("://")[1], protocol=protocol),
    ):
        assert dispatcher.target.startswith(f"{protocol}://")
        for service in (dispatcher.target, tuple(dispatcher.target.split("://"))):
            assert values(Dataset.range(3).apply(distribute(OFF, service))) == [0, 1, 2]


def test_a_dataset_without_an_id_of_its_own_is_described_too(make_service):
    service = make_service(1)
    dataset = Dataset.range(5).map(lambda x: {"a": x})
    apply = distribute("parallel_epochs", service.target)
    assert len(list(dataset.apply(apply))) == 5  # registers it without a description
    name = register_dataset(service.target, dataset)
    assert from_dataset_id("parallel_epochs", service.target, name).element_spec == (
        dataset.element_spec
    )


def test_a_dataset_with_a_hint_is_described_by_a_part(make_service):
    service = make_service(1)
    dataset = Dataset.range(5).shard(SHARD_HINT, SHARD_HINT).map(lambda x: {"a": x})
    name = register_dataset(service.target, dataset, dataset_id="hinted")
    spec = from_dataset_id("parallel_epochs", service.target, name).element_spec
    assert spec == Dataset.range(5).map(lambda x: {"a": x}).element_spec


def test_whoever_waits_for_what_cannot_be_written_is_told(tmp_path, monkeypatch, caplog):
    config = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher:
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher_module, "record_of", lambda value, parcels: 1 / 0)
            with pytest.raises(UnknownError, match="ZeroDivisionError"):
                register_dataset(dispatcher.target, Dataset.range(3))
        assert "the dispatcher's journal cannot be written" in caplog.text
        # What could not be written then is written with what comes next.
        name = register_dataset(dispatcher.target, Dataset.range(4))
    with DispatchServer(config) as dispatcher, WorkerServer(dispatcher_address=dispatcher.target):
        again = from_dataset_id(OFF, dispatcher.target, name)
        assert list(again) == [0, 1, 2, 3]
