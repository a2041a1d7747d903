"""Train a torch module with its parameters on parameter servers. Needs the extra torch.

Each step pulls the variables into the parameters of the module and pushes the gradients that
autograd has computed. The ps task applies Adam.

    $ mpidist run --ps 1 --worker 2 scripts/examples/torch_ps.py
    XOR is learned: [0, 1, 1, 0]
    $ python scripts/examples/torch_ps.py
    XOR is learned: [0, 1, 1, 0]
"""

import torch
from torch import nn

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, optimizers
from strategy.torch import ModuleVariables

POINTS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
LABELS = torch.tensor([[0.0], [1.0], [1.0], [0.0]])


def train(strategy: ParameterServerStrategy, server: mpidist.Server) -> None:
    """Train on one worker."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the ranks share the cores
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    with strategy.scope():  # the first worker that gets here sets the initial values
        variables = ModuleVariables(model)
    optimizer = optimizers.Adam(0.02)
    for _ in range(300):
        variables.pull()
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(POINTS), LABELS).backward()
        variables.push(optimizer)
    strategy.finish()  # returns when the ps task has applied all pushes of this worker
    server.job_group("worker").barrier()
    variables.pull()
    if strategy.is_chief:
        print("XOR is learned:", (model(POINTS) > 0).int().flatten().tolist())


resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        train(ParameterServerStrategy(resolver), server)
