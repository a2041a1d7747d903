"""Parameter-server training: workers pull variables from ps tasks and push gradients."""

from strategy import initializers, optimizers, partitioners, schedules
from strategy.aggregation import VariableAggregation, VariableSynchronization
from strategy.ahead import to_host_ahead
from strategy.bags import Bags
from strategy.device_setter import (
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    byte_size_load_fn,
    replica_device_setter,
)
from strategy.inputs import InputContext, InputOptions, ValueContext
from strategy.parameter_server_strategy import ParameterServerStrategy
from strategy.reading import read_values
from strategy.reductions import PerReplica
from strategy.replicas import ReplicaContext, get_replica_context, in_cross_replica_context
from strategy.replicated import Strategy
from strategy.scopes import AUTO_REUSE, get_variable_scope, variable_scope
from strategy.sharded_variable import ShardedVariable
from strategy.slices import IndexedSlices
from strategy.variable import Variable
from strategy.variable_creation import get_variable

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
