import inspect
import pickle

import pytest

from dataservice import CrossTrainerCache, Dataset, ShardingPolicy, distribute
from dataservice.options import JobOptions, service_of
from mpidist.errors import FailedPreconditionError, UnimplementedError

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
    assert Dataset.range(3).apply(distribute(mode, SERVICE)).node.terms.job.policy == policy


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
        ({"delivery": "twice"}, "'at_least_once'"),
        ({"data_transfer_protocol": "pigeon"}, "'pigeon'"),
        ({"num_shards": 2}, "num_shards needs"),
        ({"deterministic": True}, "distributed_epoch"),
        ({"cross_trainer_cache": "t", "job_name": "j"}, "must be a CrossTrainerCache"),
        ({"cross_trainer_cache": CrossTrainerCache("t")}, "needs a job_name"),
        (
            {
                "cross_trainer_cache": CrossTrainerCache("t"),
                "job_name": "j",
                "num_consumers": 1,
                "consumer_index": 0,
            },
            "does not go with num_consumers",
        ),
        (
            {
                "target_workers": "local",
                "job_name": "j",
                "num_consumers": 1,
                "consumer_index": 0,
            },
            "'LOCAL' does not go",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        distribute(**{"processing_mode": "parallel_epochs", "service": SERVICE, **arguments})


def test_options_are_the_arguments_of_distribute():
    """Client functions pass them by their places."""
    ours, given = (inspect.signature(each).parameters for each in (JobOptions, distribute))
    assert list(ours) == list(given)
    assert all(ours[name].default == given[name].default for name in given)


def test_options_travel_with_a_dataset():
    options = JobOptions("distributed_epoch", SERVICE, "j", max_outstanding_requests=-1)
    again = pickle.loads(pickle.dumps(options))
    assert (again, again.job, again.max_outstanding) == (options, options.job, None)


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
    assert service_of(service) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_consumers": 1, "consumer_index": 0, "job_name": "j"},
        {"cross_trainer_cache": CrossTrainerCache("t"), "job_name": "j"},
    ],
)
def test_what_needs_a_dataset_without_end(arguments):
    apply = distribute("parallel_epochs", SERVICE, **arguments)
    with pytest.raises(FailedPreconditionError, match=r"range\(0, 9, 1\) has 9 elements"):
        Dataset.range(9).apply(apply)
    Dataset.range(9).repeat().apply(apply)


def test_a_job_with_an_order_needs_to_know_its_consumers():
    with pytest.raises(ValueError, match="needs num_consumers"):
        distribute("distributed_epoch", SERVICE, "job", deterministic=True)


def test_a_trainer_needs_an_id():
    with pytest.raises(ValueError, match="trainer_id"):
        CrossTrainerCache("")
