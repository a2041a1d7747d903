"""Train with DistributedDataParallel on MPI: the backend "mpidist" of torch.distributed.

Each rank trains on a part of the handwritten digits. DistributedDataParallel averages the gradients
by our all_reduce while autograd computes the next ones. Needs the extras torch and demo.

    $ mpidist run -n 2 scripts/examples/torch_ddp.py
    2 ranks, accuracy above 0.9: True
    $ python scripts/examples/torch_ddp.py
    1 ranks, accuracy above 0.9: True
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpidist.torch  # noqa: F401  # registers the backend, also in a plain process

dist.init_process_group("mpidist")
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])

loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(15):
    loader.sampler.set_epoch(epoch)  # another order
    for batch, expected in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch), expected).backward()
        optimizer.step()

# Each rank tests every n-th image.
own = slice(dist.get_rank(), None, dist.get_world_size())
right = (network(test[0][own]).argmax(1) == test[1][own]).sum()
dist.all_reduce(right)
if dist.get_rank() == 0:
    accuracy = right.item() / len(test[1])
    print(f"{dist.get_world_size()} ranks, accuracy above 0.9: {accuracy > 0.9}")
dist.destroy_process_group()
