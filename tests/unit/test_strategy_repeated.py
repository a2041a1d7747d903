"""Pushes that arrive twice are applied once."""

import random
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import errors
from strategy import optimizers
from strategy.proto import parameter_server_pb2 as pb


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def repeat(connection, chosen):
    """Have pushes sent again, some at once and some later; gives the answers to both."""
    start, earlier, pairs = connection.start, [], []

    def again(method, message, *arguments, **options):
        work = start(method, message, *arguments, **options)
        if method == "Push":
            copy = pb.PushRequest.FromString(message.SerializeToString())
            earlier.append((work, copy, arguments))
            for first, old, old_arguments in earlier[-8:]:
                if chosen():
                    pairs.append((first, start(method, old, *old_arguments, **options)))
        return work

    connection.start = again
    return pairs


@pytest.mark.parametrize("servers", [1, 2])
def test_repeated_pushes_give_no_double_update(make, servers):
    random.seed(servers)
    strategy = make(servers=servers).worker(0)
    made = [variable(strategy, name, 50) for name in "abc"]
    pairs = [
        repeat(connection, lambda: random.random() < 0.3) for connection in strategy._connections
    ]
    optimizer, works = optimizers.SGD(1.0), []
    for step in range(60):
        works.append(optimizer.apply_gradients([(np.full(50, step + 1.0), v) for v in made]))
        if step % 7 == 0:
            made[0].scatter_add([3], 1)
    for work in works:
        work.wait()
    expected = np.full(50, -float(sum(range(1, 61))))
    for v in made[1:]:
        np.testing.assert_array_equal(v, expected)
    expected[3] += 9
    np.testing.assert_array_equal(made[0], expected)
    assert int(strategy.global_step) == 60
    answers = [pair for own in pairs for pair in own]
    assert len(answers) > 50
    for first, second in answers:
        assert first.result().body == second.result().body


def test_a_repeated_push_that_failed_fails_again(make):
    strategy = make().worker(0)
    v = variable(strategy, "v", 3)
    (connection,) = strategy._connections
    pairs = repeat(connection, lambda: True)

    def fail(*_):
        raise RuntimeError("not today")

    with pytest.raises(errors.InvalidArgumentError, match="not today"):
        optimizers.Function(fail).apply_gradients([(np.ones(3), v)]).wait()
    with pytest.raises(errors.InvalidArgumentError, match="not today"):
        pairs[-1][1].wait()


def test_a_push_from_long_ago(make):
    strategy = make().worker(0)
    v = variable(strategy, "v", 3)
    (connection,) = strategy._connections
    for _ in range(40):
        v.assign_add(1)
    old = pb.PushRequest(connection=connection.number, sequence=2)
    with pytest.raises(errors.InternalError, match=r"got push 2 of connection 0.* again, long"):
        connection.call("Push", old)
    early = pb.PushRequest(connection=connection.number, sequence=1000)
    with pytest.raises(errors.InternalError, match=r"got push 1000 .* and expected"):
        connection.call("Push", early)
    np.testing.assert_array_equal(v, np.full(3, 40.0))
