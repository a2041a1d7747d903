"""Fields, defaults and rules of the servers' configurations, in both call styles."""

import inspect
from dataclasses import fields

import pytest

from dataservice import (
    CrossTrainerCache,
    Dataset,
    DispatcherConfig,
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)
from mpidist.errors import FailedPreconditionError, UnavailableError

SERVICE = "inproc://localhost:4711"


def parameters(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    }


# Names, their order, and their defaults

NEEDED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (DispatchServer, {"port": 0, "protocol": None, "start": True}),
        (
            WorkerServer,
            {"port": 0, "dispatcher_address": None, "worker_address": None}
            | {"protocol": None, "start": True},
        ),
        (
            distribute,
            {
                "processing_mode": NEEDED,
                "service": NEEDED,
                "job_name": None,
                "consumer_index": None,
                "num_consumers": None,
                "max_outstanding_requests": None,
                "data_transfer_protocol": None,
                "compression": "AUTO",
                "cross_trainer_cache": None,
                "target_workers": "AUTO",
            },
        ),
        (
            register_dataset,
            {"service": NEEDED, "dataset": NEEDED, "compression": "AUTO", "dataset_id": None},
        ),
        (
            from_dataset_id,
            {
                "processing_mode": NEEDED,
                "service": NEEDED,
                "dataset_id": NEEDED,
                "element_spec": None,
                "job_name": None,
                "consumer_index": None,
                "num_consumers": None,
                "max_outstanding_requests": None,
                "data_transfer_protocol": None,
                "cross_trainer_cache": None,
                "target_workers": "AUTO",
            },
        ),
    ],
)
def test_positional_arguments_are_tensorflows(function, expected):
    assert list(parameters(function).items()) == list(expected.items())


def test_fields_of_configurations():
    assert [(field.name, field.default) for field in fields(DispatcherConfig)][:8] == [
        ("port", 0),
        ("protocol", None),
        ("work_dir", None),
        ("fault_tolerant_mode", False),
        ("worker_addresses", None),
        ("job_gc_check_interval_ms", None),
        ("job_gc_timeout_ms", None),
        ("worker_timeout_ms", None),
    ]
    names = [field.name for field in fields(WorkerConfig)]
    assert names[:6] == [
        "dispatcher_address",
        "worker_address",
        "port",
        "protocol",
        "heartbeat_interval_ms",
        "dispatcher_timeout_ms",
    ]
    config = WorkerConfig("localhost:1")
    assert (config.port, config.heartbeat_interval_ms, config.worker_tags) == (0, None, ())


@pytest.mark.parametrize("config", [DispatcherConfig(), WorkerConfig("localhost:1")])
def test_configurations_cannot_be_changed(config):
    with pytest.raises(AttributeError):
        config.port = 5


# Servers


@pytest.mark.parametrize(
    "make",
    [
        lambda start: DispatchServer(0, None, start),
        lambda start: DispatchServer(DispatcherConfig(), start),
        lambda start: DispatchServer(DispatcherConfig(), start=start),
        lambda start: DispatchServer(config=DispatcherConfig(), start=start),
        lambda start: DispatchServer(start=start),
    ],
)
@pytest.mark.parametrize("started", [True, False])
def test_a_dispatcher_starts_when_it_is_told(make, started):
    with_target = make(started)
    if started:
        assert with_target.target.startswith("inproc://localhost:")
    else:
        with pytest.raises(FailedPreconditionError, match="before it is started"):
            _ = with_target.target
    with_target.stop()


@pytest.mark.parametrize(
    "make",
    [
        lambda address, start: WorkerServer(0, address, None, None, start),
        lambda address, start: WorkerServer(WorkerConfig(address), start),
        lambda address, start: WorkerServer(config=WorkerConfig(address), start=start),
    ],
)
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("scheme", [True, False])
def test_a_worker_starts_when_it_is_told(make, started, scheme):
    with DispatchServer() as dispatcher:
        target = dispatcher.target if scheme else dispatcher.target.split("://")[1]
        worker = make(target, started)
        if not started:
            with pytest.raises(FailedPreconditionError, match="has not been started"):
                worker.join()
            worker.start()
        dataset = Dataset.range(3).apply(distribute("parallel_epochs", dispatcher.target))
        assert list(dataset) == [0, 1, 2]
        worker.stop()
        worker.join()


@pytest.mark.parametrize("port", [-1, "5050", 5.5, None, True])
def test_wrong_ports(port):
    for make in (
        lambda: DispatchServer(port),
        lambda: DispatchServer(DispatcherConfig(port=port)),
        lambda: WorkerServer(port, "localhost:1"),
        lambda: WorkerServer(WorkerConfig("localhost:1", port=port)),
    ):
        with pytest.raises(ValueError, match="port must be"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DispatchServer(config=WorkerConfig("localhost:1")),
        lambda: WorkerServer(config=DispatcherConfig()),
        lambda: DispatchServer(config={"port": 5}),
        lambda: WorkerServer(config=5),
    ],
)
def test_configurations_of_another_kind(make):
    with pytest.raises(TypeError, match=r"config must be a (Dispatcher|Worker)Config, not"):
        make()


DISPATCHER, WORKER = DispatcherConfig(), WorkerConfig("localhost:1")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: DispatchServer(port=5050, config=DISPATCHER), "port"),
        (lambda: DispatchServer(5050, config=DispatcherConfig(port=5051)), "port"),
        (lambda: DispatchServer(protocol="tcp", config=DISPATCHER), "protocol"),
        (lambda: DispatchServer(5050, "tcp", config=DISPATCHER), "port and protocol"),
        (lambda: DispatchServer(DISPATCHER, protocol="tcp"), "protocol"),
        (lambda: DispatchServer(DISPATCHER, config=DispatcherConfig(port=5050)), "config"),
        (lambda: WorkerServer(port=5050, config=WORKER), "port"),
        (lambda: WorkerServer(dispatcher_address="h:1", config=WORKER), "dispatcher_address"),
        (lambda: WorkerServer(worker_address="h:1", config=WORKER), "worker_address"),
        (lambda: WorkerServer(protocol="tcp", config=WORKER), "protocol"),
        (lambda: WorkerServer(WORKER, "h:1"), "dispatcher_address"),
        (lambda: WorkerServer(WORKER, worker_address="h:1", start=False), "worker_address"),
        (lambda: WorkerServer(WORKER, config=WORKER), "config"),
    ],
)
def test_an_argument_beside_a_configuration_that_has_it(make, names):
    with pytest.raises(ValueError, match=f"^{names} would be ignored beside"):
        make()


@pytest.mark.parametrize("address", [None, "", 5])
def test_a_worker_without_a_dispatcher(address):
    for make in (lambda: WorkerConfig(address), lambda: WorkerServer(dispatcher_address=address)):
        with pytest.raises(ValueError, match="needs the dispatcher_address"):
            make()


def test_a_dispatcher_that_is_not_there():
    config = WorkerConfig("localhost:4899", dispatcher_timeout_ms=50)
    with pytest.raises(UnavailableError, match=r"no dispatcher answers at .*4899"):
        WorkerServer(config)


@pytest.mark.parametrize(
    "name", ["job_gc_check_interval_ms", "job_gc_timeout_ms", "worker_timeout_ms"]
)
@pytest.mark.parametrize("value", [0, -2, "5", 1.5, True])
def test_times_of_a_dispatcher(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        DispatcherConfig(**{name: value})


@pytest.mark.parametrize("name", ["heartbeat_interval_ms", "dispatcher_timeout_ms"])
@pytest.mark.parametrize("value", [0, -1, "5", 1.5])
def test_times_of_a_worker(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        WorkerConfig("localhost:1", **{name: value})


@pytest.mark.parametrize("tags", ["COLOCATED", [""], ["a", ""], [5], None, 5])
def test_wrong_tags(tags):
    with pytest.raises(ValueError, match="worker_tags must be a list of tags"):
        WorkerConfig("localhost:1", worker_tags=tags)


def test_fault_tolerance_needs_a_folder():
    with pytest.raises(ValueError, match="fault_tolerant_mode needs a work_dir"):
        DispatcherConfig(fault_tolerant_mode=True)


# distribute


def test_policies():
    names = ["OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT"]
    assert [(policy.name, int(policy)) for policy in ShardingPolicy] == [
        (name, number) for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"processing_mode": mode}, "unknown processing_mode")
            for mode in ("", "off", None, 0, True, ["x"])
        ),
        *(
            ({"service": service}, "service must")
            for service in ("", None, 5, b"a:1", "a", "a:b", "grpc://", ("grpc", ""), ("grpc", 5))
        ),
        *(({"job_name": name}, "job_name must") for name in ("", 5, b"j")),
        ({"consumer_index": 0}, "both"),
        ({"num_consumers": 1}, "both"),
        ({"consumer_index": 0, "num_consumers": 1}, "needs a job_name"),
        *(
            ({"job_name": "j", "consumer_index": index, "num_consumers": count}, "must be")
            for index, count in ((0, 0), (-1, 2), (2, 2), ("0", 2), (0, "2"), (0, True), (0.0, 2))
        ),
        *(
            ({"max_outstanding_requests": limit}, "max_outstanding_requests")
            for limit in (0, -2, "5", 1.5, True)
        ),
        *(({"data_transfer_protocol": name}, "leave it out") for name in ("carrier", 5)),
        *(({"compression": name}, "compression must be") for name in ("", "GZIP", "auto", 5)),
        *(({"target_workers": name}, "target_workers must be") for name in ("", "HERE", None)),
        *(({"start_timeout_s": limit}, "start_timeout_s") for limit in (0, -1, None, "1")),
        *(({"delivery": name}, "delivery must be") for name in ("", "once", None)),
        *(
            ({"num_shards": n, "deterministic": True}, "num_shards must be")
            for n in (0, -1, "3", True)
        ),
        (
            {
                "processing_mode": "distributed_epoch",
                "deterministic": True,
                "delivery": "at_most_once",
            },
            "'at_most_once' does not go with",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    given = {"processing_mode": "parallel_epochs", "service": SERVICE, **arguments}
    with pytest.raises(ValueError, match=message):
        distribute(**given)
    with pytest.raises(ValueError, match=message):
        from_dataset_id(**given, dataset_id="1")


@pytest.mark.parametrize("trainer_id", ["", None, 5])
def test_trainers_have_an_id(trainer_id):
    with pytest.raises(ValueError, match="needs a trainer_id"):
        CrossTrainerCache(trainer_id)


@pytest.mark.parametrize("target", ["AUTO", "auto", "ANY", "Any", "LOCAL", "local"])
def test_target_workers_in_any_case(make_service, target):
    service = make_service(1)
    apply = distribute("parallel_epochs", service.target, target_workers=target)
    assert list(Dataset.range(3).apply(apply)) == [0, 1, 2]


@pytest.mark.parametrize("form", ["target", "pair", "no scheme"])
@pytest.mark.parametrize("limit", [None, -1, 1, 7])
def test_forms_that_are_right(make_service, form, limit):
    target = make_service(1).target
    protocol, address = target.split("://")
    service = {"target": target, "pair": (protocol, address), "no scheme": address}[form]
    apply = distribute(ShardingPolicy.OFF, service, max_outstanding_requests=limit)
    assert list(Dataset.range(9).apply(apply)) == list(range(9))


def test_a_scheme_that_there_is_not():
    remote = Dataset.range(3).apply(distribute("parallel_epochs", "http://localhost:1"))
    with pytest.raises(ValueError, match="unknown protocol 'http'"):
        list(remote)
