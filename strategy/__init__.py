"""Parameter-server training: workers pull variables from ps tasks and push gradients.

A worker makes a strategy and variables, and applies gradients that any library has computed::

    strategy = ParameterServerStrategy(MPIClusterResolver(jobs={"ps": 1, "worker": -1}))
    with strategy.scope():
        w = get_variable("w", shape=(2,), initializer="zeros")
    optimizer = optimizers.Adam(0.05)
    gradient = compute_gradient(w.read_value())  # your function
    optimizer.apply_gradients([(gradient, w)])

The names are those of TensorFlow's parameter-server training. There are also the modules
``optimizers``, ``initializers``, ``partitioners`` and ``schedules``, and ``strategy.torch`` for
modules of torch. docs/tutorials/parameter_servers.md has complete programs.
"""

from strategy import initializers, optimizers, partitioners, schedules
from strategy.array_like import IndexedSlices
from strategy.bags import Bags
from strategy.base import Strategy
from strategy.compat.device_setter import (
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    byte_size_load_fn,
    replica_device_setter,
)
from strategy.parameter_server_strategy import ParameterServerStrategy
from strategy.replicas.context import ReplicaContext, get_replica_context, in_cross_replica_context
from strategy.replicas.gpu import to_host_ahead
from strategy.replicas.input import InputContext, InputOptions, ValueContext
from strategy.replicas.reduce import PerReplica
from strategy.scopes import AUTO_REUSE, get_variable, get_variable_scope, variable_scope
from strategy.variable import (
    ShardedVariable,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    read_values,
)

__all__ = [
    "AUTO_REUSE",
    "Bags",
    "GreedyLoadBalancingStrategy",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "ParameterServerStrategy",
    "PerReplica",
    "RandomStrategy",
    "ReplicaContext",
    "ShardedVariable",
    "Strategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "byte_size_load_fn",
    "get_replica_context",
    "get_variable",
    "get_variable_scope",
    "in_cross_replica_context",
    "initializers",
    "optimizers",
    "partitioners",
    "read_values",
    "replica_device_setter",
    "schedules",
    "to_host_ahead",
    "variable_scope",
]
