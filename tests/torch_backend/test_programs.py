"""Programs in the style of torch's documentation: the same losses as with gloo, bit for bit."""

import pytest
from _cases.jobs import run_job, run_ranks

BEGIN = """\
import os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group(os.environ["BACKEND"])
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert (rank, size) == (dist.get_rank(), dist.get_world_size())
torch.manual_seed(0)
inputs, targets = torch.randn(64, 16), torch.randn(64, 4)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
losses = []
"""
END = """
if rank == size - 1:
    print(*(float(loss).hex() for loss in losses))
dist.destroy_process_group()
"""
PROGRAMS = {
    "ddp": """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=1)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
""",
    "fsdp": """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

def shard(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def train(model, optimizer, steps):
    for step in steps:
        rows = slice((step * size + rank) * 4, (step * size + rank + 1) * 4)
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

model, optimizer = shard(model)
train(model, optimizer, range(4))
weights, state = get_state_dict(model, optimizer)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, src=0)
dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder[0]).result()
train(model, optimizer, range(4, 6))

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model, optimizer = shard(model)
weights, state = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
train(model, optimizer, range(4, 6))
assert losses[4:6] == losses[6:8], losses
""",
    "tensor parallel": """
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)

mesh = init_device_mesh("cpu", (size,))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(6):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
""",
    "pipeline": """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

part = model[:2] if rank == 0 else model[2:]
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(inputs)
    else:
        found = []
        schedule.step(target=targets, losses=found)
        losses.append(torch.stack(found).mean().detach())
    optimizer.step()
""",
    "compiled collectives": """
from torch.distributed._functional_collectives import all_reduce

@torch.compile(backend="aot_eager")
def step(weight, x, y):
    loss = (x @ weight - y).square().mean()
    return loss, all_reduce(2 * x.T @ (x @ weight - y) / y.numel(), "sum", dist.group.WORLD)

weight, own = torch.zeros(16, 4), slice(rank, None, size)
for _ in range(6):
    loss, gradient = step(weight, inputs[own], targets[own])
    weight = weight - 0.1 * gradient
    losses.append(loss)
""",
}
LIMIT_S = 100


def losses_of(ended):
    assert ended.status == 0, ended.err
    losses = [float.fromhex(word) for word in ended.out.split()]
    assert len(losses) >= 6
    assert len(set(losses)) > 4
    return losses


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, tmp_path):
    source = BEGIN + PROGRAMS[name] + END
    env = {"BACKEND": "mpidist"}
    ours = losses_of(run_job(tmp_path, ["-n", "2"], source, timeout_s=LIMIT_S, env=env))
    env = {"BACKEND": "gloo"}
    theirs = losses_of(run_job(tmp_path, ["-n", "2"], source, timeout_s=LIMIT_S, env=env))
    assert ours == theirs


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_program_under_mpiexec(name, tmp_path):
    source, env = BEGIN + PROGRAMS[name] + END, {"BACKEND": "mpidist"}
    losses_of(run_ranks(tmp_path, 2, source, timeout_s=LIMIT_S, env=env))
