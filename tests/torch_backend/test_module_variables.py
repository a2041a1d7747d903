"""Parameters of torch modules on parameter servers."""

import numpy as np
import pytest
import torch
from _cases.clusters import on_cluster

from mpidist.errors import InvalidArgumentError
from strategy import ParameterServerStrategy, optimizers, partitioners, variable_scope
from strategy.torch import ModuleVariables

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def local(request):
    """Give each test on one rank variables of its own."""
    if request.node.get_closest_marker("ranks"):
        yield
    else:
        with ParameterServerStrategy().scope():
            yield


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def backward(model, seed):
    torch.manual_seed(seed)
    model.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()


def test_steps_equal_those_of_torch():
    model, expected = make_model(), make_model()
    variables = ModuleVariables(model)
    ours, theirs = optimizers.SGD(0.1), torch.optim.SGD(expected.parameters(), 0.1)
    for step in range(5):
        variables.pull()
        backward(model, step)
        variables.push(ours)
        backward(expected, step)
        theirs.step()
    variables.pull()
    torch.testing.assert_close(weights_of(model), weights_of(expected))
    assert list(variables.variables) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    model = torch.nn.Linear(2, 1, bias=False).to(dtype)
    begin = model.weight.detach().clone()
    variables = ModuleVariables(model)
    model.weight.grad = torch.ones(1, 2, dtype=dtype)
    variables.push(optimizers.SGD(0.5))
    variables.pull()
    torch.testing.assert_close(model.weight.detach(), begin - 0.5)


def test_strided_parameter():
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    begin = model.weight.detach().clone()
    variables = ModuleVariables(model)
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    variables.push(optimizers.SGD(1.0))
    variables.pull()
    torch.testing.assert_close(model.weight.detach(), begin - model.weight.grad)


def test_expanded_parameter_makes_no_variables():
    model = torch.nn.Linear(2, 3)
    model.bias = torch.nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="'bias' share memory"):
        ModuleVariables(model)
    model.bias = torch.nn.Parameter(torch.ones(1).expand(3).clone())
    ModuleVariables(model)  # a variable of the failed call would be in the way


def test_shared_frozen_and_unused_parameters():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("a", "b", "frozen")})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    variables = ModuleVariables(model)
    assert set(variables.variables) == {"a.weight", "a.bias", "b.bias"} | {
        "frozen.weight",
        "frozen.bias",
    }
    assert not variables.variables["frozen.bias"].trainable
    unused, changed = model["b"].bias.detach().clone(), model["a"].weight.detach().clone()
    model["a"](torch.ones(1, 2)).sum().backward()
    variables.push(optimizers.SGD(1.0))
    variables.variables["frozen.bias"].assign([7.0, 7.0])
    variables.pull()
    assert torch.equal(model["b"].bias, unused)
    assert torch.equal(model["b"].weight, changed - 1)
    assert not torch.equal(model["frozen"].bias, torch.full((2,), 7.0))
    variables.pull(frozen=True)
    assert torch.equal(model["frozen"].bias, torch.full((2,), 7.0))


def test_replaced_and_cast_parameters():
    model = make_model()
    variables = ModuleVariables(model)
    model.double()
    with pytest.raises(ValueError, match=r"'0\.weight' is now of torch\.float64"):
        variables.pull()
    model.float()
    model[0].weight = torch.nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' has been replaced"):
        variables.push(optimizers.SGD(0.1))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradient_that_requires_grad():
    model = torch.nn.Linear(2, 1, bias=False)
    variables = ModuleVariables(model)
    begin = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward(create_graph=True)
    variables.push(optimizers.SGD(1.0))
    variables.pull()
    assert torch.equal(model.weight.detach(), begin - 1)


def test_frozen_module():
    model = make_model().requires_grad_(False)
    begin = weights_of(model).clone()
    variables = ModuleVariables(model)
    variables.pull()
    assert torch.equal(weights_of(model), begin)


def test_sparse_gradient_changes_its_rows_only():
    model = torch.nn.Embedding(10, 2, sparse=True)
    begin = model.weight.detach().clone()
    variables = ModuleVariables(model)
    model(torch.tensor([3, 1, 3])).sum().backward()
    variables.push(optimizers.Adagrad(0.1))
    variables.pull()
    changed = (model.weight != begin).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 3]


def test_pull_between_forward_and_backward():
    model = make_model()
    variables = ModuleVariables(model)
    loss = model(torch.ones(1, 3)).sum()
    variables.pull()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_modules():
    with pytest.raises(ValueError, match="Tanh has no parameters"):
        ModuleVariables(torch.nn.Tanh())
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        ModuleVariables(torch.nn.LazyLinear(2))
    with pytest.raises(ValueError, match="no gradient to apply"):
        ModuleVariables(make_model()).push(optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="complex64"):
        ModuleVariables(torch.nn.Linear(2, 2, dtype=torch.complex64))


def test_two_modules_of_equal_names():
    with variable_scope("one"):
        one = ModuleVariables(make_model())
    two = ModuleVariables(make_model())
    assert one.variables["0.weight"].name == "one/0.weight"
    assert two.variables["0.weight"].name == "0.weight"
    with pytest.raises(ValueError, match=r"'0\.weight' exists already"):
        ModuleVariables(make_model())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_workers_share_the_parameters(world, mode):
    """Two workers begin with different weights, and train on different halves of a batch."""

    def train(strategy, workers):
        rank = strategy.worker_index
        model = make_model(seed=rank)
        with strategy.scope():
            variables = ModuleVariables(model)
        begin = weights_of(model)
        workers.barrier()
        for step in range(4):
            variables.pull()
            backward(model, 10 * step + (rank if mode == "sync" else 0))
            variables.push(optimizers.SGD(0.1))
            workers.barrier()
        strategy.finish()
        workers.barrier()
        variables.pull()
        return begin.numpy(), weights_of(model).numpy()

    partitioner = partitioners.FixedShardsPartitioner(2)
    mine = on_cluster(world, 2, train, mode=mode, variable_partitioner=partitioner)
    everyones = [found for found in world.allgather(mine) if found is not None]
    (begin, end), (other_begin, other_end) = everyones
    assert np.array_equal(begin, other_begin)
    assert np.array_equal(end, other_end)
    if mode == "sync":
        expected = make_model()
        torch.nn.utils.vector_to_parameters(torch.from_numpy(begin), expected.parameters())
        optimizer = torch.optim.SGD(expected.parameters(), 0.1)
        for step in range(4):
            gradients = []
            for rank in (0, 1):
                backward(expected, 10 * step + rank)
                gradients.append([p.grad.clone() for p in expected.parameters()])
            for p, *both in zip(expected.parameters(), *gradients, strict=True):
                p.grad = torch.stack(both).mean(0)
            optimizer.step()
        np.testing.assert_allclose(end, weights_of(expected).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(3)
def test_workers_with_different_modules(world):
    def train(strategy, workers):
        if strategy.worker_index:
            workers.barrier()
        with strategy.scope():
            try:
                ModuleVariables(torch.nn.Linear(2, 2 + strategy.worker_index))
            except InvalidArgumentError as error:
                found = error.message
            else:
                found = ""
        if not strategy.worker_index:
            workers.barrier()
        return strategy.worker_index, found

    worker, message = on_cluster(world, 1, train) or (None, "")
    assert worker != 1 or "worker 1 creates variable 'weight' as" in message
