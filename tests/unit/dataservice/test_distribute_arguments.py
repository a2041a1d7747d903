import pytest

from dataservice import Dataset, ShardingPolicy, distribute
from dataservice.client import _service
from mpidist.errors import UnimplementedError

SERVICE = "inproc://localhost:4711"


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("parallel_epochs", ShardingPolicy.OFF),
        ("distributed_epoch", ShardingPolicy.DYNAMIC),
        (ShardingPolicy.OFF, ShardingPolicy.OFF),
        (ShardingPolicy.DYNAMIC, ShardingPolicy.DYNAMIC),
    ],
)
def test_modes(mode, policy):
    assert Dataset.range(3).apply(distribute(mode, SERVICE)).node.policy is policy


def test_policies_have_tensorflows_numbers():
    names = ["OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT"]
    assert [policy.name for policy in ShardingPolicy] == names
    assert [policy.value for policy in ShardingPolicy] == list(range(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processing_mode": "parallel_epoch"}, "'parallel_epochs', 'distributed_epoch'"),
        ({"processing_mode": 1}, "unknown processing_mode 1"),
        ({"service": ""}, "service"),
        ({"service": 5}, "service"),
        ({"service": "localhost"}, "host:port"),
        ({"service": ("grpc",)}, "service"),
        ({"job_name": ""}, "job_name"),
        ({"job_name": 5}, "job_name"),
        ({"num_consumers": 2, "consumer_index": 0}, "job_name"),
        ({"num_consumers": 2, "job_name": "j"}, "both"),
        ({"consumer_index": 0, "job_name": "j"}, "both"),
        ({"num_consumers": 2, "consumer_index": 2, "job_name": "j"}, "2 of 2"),
        ({"max_outstanding_requests": 0}, "positive"),
        ({"compression": "GZIP"}, "'GZIP'"),
        ({"target_workers": "SOME"}, "'SOME'"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        distribute(**{"processing_mode": "parallel_epochs", "service": SERVICE, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"processing_mode": ShardingPolicy.FILE},
        {"processing_mode": ShardingPolicy.HINT},
        {"num_consumers": 2, "consumer_index": 0, "job_name": "j"},
        {"data_transfer_protocol": "grpc"},
        {"compression": "SNAPPY"},
        {"cross_trainer_cache": object()},
        {"target_workers": "local"},
    ],
)
def test_what_is_not_implemented_says_so(arguments):
    with pytest.raises(UnimplementedError, match="not implemented"):
        distribute(**{"processing_mode": "parallel_epochs", "service": SERVICE, **arguments})


@pytest.mark.parametrize("compression", ["AUTO", None])
@pytest.mark.parametrize("target", ["AUTO", "any"])
def test_what_changes_nothing_is_accepted(compression, target):
    distribute("parallel_epochs", SERVICE, compression=compression, target_workers=target)


def test_a_dataset_that_cannot_be_split():
    apply = distribute("distributed_epoch", SERVICE)
    for dataset in (
        Dataset.range(9).shuffle(3).take(2),
        Dataset.range(9).apply(distribute("parallel_epochs", SERVICE)),
    ):
        with pytest.raises(UnimplementedError, match="split"):
            dataset.apply(apply)


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("grpc://host-1:50", ("grpc", "host-1:50")),
        ("host:5", (None, "host:5")),
        (("mpi", "host:5"), ("mpi", "host:5")),
    ],
)
def test_forms_of_a_service(service, expected):
    assert _service(service) == expected
