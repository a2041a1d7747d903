"""Training with torch on the backend "mpidist": the same results as with gloo."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# Older releases take the bf16 hook on GPUs only.
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def train(model, steps=6, optimizer=None):
    """Train on data that differ between ranks. Return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_equal_on_all_ranks(tensor):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    for other in everyones:
        assert torch.equal(other, tensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_gives_the_losses_of_gloo(options):
    gloo = dist.new_group(backend="gloo")
    results = []
    for group in (None, gloo):
        model = DistributedDataParallel(make_model(), process_group=group, **options)
        results.append((train(model), weights_of(model)))
    (losses, weights), (losses_of_gloo, weights_of_gloo) = results
    assert losses == losses_of_gloo  # two ranks add two numbers: the order does not matter
    assert torch.equal(weights, weights_of_gloo)


@pytest.mark.ranks(3)
def test_ddp_accumulates_gradients():
    model = DistributedDataParallel(make_model())
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    model(torch.ones(2, 8) * dist.get_rank()).sum().backward()
    check_equal_on_all_ranks(model.module[0].weight.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "fp16",
        pytest.param("bf16", marks=pytest.mark.skipif(not NEW_ENOUGH, reason="needs torch 2.14")),
        "PowerSGD",
    ],
)
def test_communication_hooks(name):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    check_equal_on_all_ranks(weights_of(model))


@pytest.mark.ranks(2)
def test_uneven_inputs_join():
    model = DistributedDataParallel(make_model())
    with Join([model]):
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(2, 8)).sum().backward()
    check_equal_on_all_ranks(weights_of(model))


@pytest.mark.ranks(2)
def test_zero_redundancy_optimizer():
    plain = DistributedDataParallel(make_model())
    train(plain, optimizer=torch.optim.Adam(plain.parameters(), 0.01))
    sharded = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, lr=0.01)
    train(sharded, optimizer=optimizer)
    torch.testing.assert_close(weights_of(sharded), weights_of(plain))


@pytest.mark.ranks(2)
def test_fsdp_and_distributed_checkpoints(tmp_path):
    plain = DistributedDataParallel(make_model())
    losses = train(plain)
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.testing.assert_close(train(model), losses)
    whole = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(whole, weights_of(plain))

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder, 0)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=folder[0])
    loaded = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    assert torch.equal(loaded, whole)


@pytest.mark.ranks(4)
def test_dtensors_on_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(64.0).reshape(8, 8)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert tensor.to_local().shape == (4, 4)
    assert torch.equal(tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)
    product = distribute_tensor(whole, mesh, [Shard(0), Replicate()]) @ tensor
    assert torch.equal(product.full_tensor(), whole @ whole)
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["rows"].get_group())
    assert total.item() == 2


@pytest.mark.ranks(2)
def test_sampler_divides_the_data():
    sampler = DistributedSampler(TensorDataset(torch.arange(10)), shuffle=False)
    assert list(sampler) == list(range(dist.get_rank(), 10, 2))


@pytest.mark.ranks(2, timeout=120)
def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    group, size = dist.group.WORLD, dist.get_world_size()
    own = torch.full((2,), float(dist.get_rank() + 1))
    assert torch.equal(functional.all_reduce(own, "sum", group), torch.full((2,), 3.0))
    gathered = functional.all_gather_tensor(own, 0, group)
    assert torch.equal(gathered, torch.tensor([1.0, 1, 2, 2]))
    part = functional.reduce_scatter_tensor(torch.arange(2.0 * size), "sum", 0, group)
    assert torch.equal(part, size * torch.arange(2.0 * size).chunk(size)[dist.get_rank()])
    swapped = functional.all_to_all_single(gathered, None, None, group)
    assert torch.equal(swapped, own.repeat(2))
