"""The error tree."""

import copy
import pickle

import pytest

import mpidist
from dataservice.options import ShardingPolicy
from mpidist import errors
from mpidist.errors import OpError, from_code
from mpidist.launcher import main
from strategy import ParameterServerStrategy


def make_mode(mode):
    ParameterServerStrategy(cluster_spec={}, mode=mode)


# google.rpc.Code, and the builtin that each error also is.
CODES = {
    "CancelledError": (1, RuntimeError),
    "UnknownError": (2, RuntimeError),
    "InvalidArgumentError": (3, ValueError),
    "DeadlineExceededError": (4, TimeoutError),
    "NotFoundError": (5, LookupError),
    "AlreadyExistsError": (6, RuntimeError),
    "PermissionDeniedError": (7, PermissionError),
    "ResourceExhaustedError": (8, MemoryError),
    "FailedPreconditionError": (9, RuntimeError),
    "AbortedError": (10, RuntimeError),
    "OutOfRangeError": (11, IndexError),
    "UnimplementedError": (12, NotImplementedError),
    "InternalError": (13, RuntimeError),
    "UnavailableError": (14, ConnectionError),
    "DataLossError": (15, RuntimeError),
    "UnauthenticatedError": (16, PermissionError),
}
PARENTS = {
    "Error": RuntimeError,
    "DistBackendError": errors.Error,
    "GroupBrokenError": errors.DistBackendError,
    "DistNetworkError": errors.Error,
    "DistStoreError": errors.Error,
    "QueueEmptyError": errors.DistStoreError,
    "OpError": errors.Error,
} | dict.fromkeys(CODES, OpError)
NAMES = list(PARENTS)


def test_the_tree_has_no_other_leaves():
    classes = {
        name: thing
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, BaseException)
    }
    assert set(classes) == {*NAMES, "DistError"}
    assert errors.DistError is errors.Error is mpidist.Error


@pytest.mark.parametrize("name", NAMES)
def test_parents(name):
    assert PARENTS[name] in getattr(errors, name).__bases__


@pytest.mark.parametrize(("name", "code", "builtin"), [(n, *v) for n, v in CODES.items()])
def test_codes_and_builtins(name, code, builtin):
    cls = getattr(errors, name)
    assert cls.code == code
    with pytest.raises(builtin, match="so it is"):
        raise from_code(code, "so it is")
    error = from_code(code, "so it is")
    assert type(error) is cls
    assert error.message == str(error) == "so it is"


@pytest.mark.parametrize("code", [0, 17, -1, 999])
def test_codes_that_there_are_not(code):
    assert type(from_code(code, "x")) is errors.UnknownError


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message", ["", "what: where [Errno 2] % {}\nand more"])
def test_they_can_be_copied_and_sent(name, message):
    error = getattr(errors, name)(message)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error) == message
        assert again.args == error.args == (message,)
        if isinstance(error, OpError):
            assert (again.message, again.code) == (message, error.code)


def test_without_a_message():
    assert errors.NotFoundError().message == str(errors.NotFoundError()) == ""


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: mpidist.all_redcue, "all_reduce"),
        (lambda: mpidist.ReduceOp.of("summ"), "SUM"),
        (lambda: mpidist.ClusterSpec({"worker": ["a:1"]}).num_tasks("wroker"), "worker"),
        (lambda: ShardingPolicy.of("parallel-epochs"), "parallel_epochs"),
        (lambda: make_mode("sinc"), "sync"),
    ],
)
def test_a_misspelt_name_gets_the_right_one(call, hint):
    with pytest.raises((ValueError, AttributeError), match=rf"did you mean '{hint}'\?"):
        call()


def test_a_misspelt_option_gets_the_right_one(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--worke", "2", "train.py"])
    assert "--worke (did you mean '--worker'?)" in capsys.readouterr().err
