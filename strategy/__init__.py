"""Parameter servers: variables on ps tasks, pulled and pushed by workers."""

from strategy import initializers, optimizers, partitioners, schedules
from strategy.bags import Bags
from strategy.parameter_server_strategy import ParameterServerStrategy, get_variable
from strategy.sharded_variable import ShardedVariable
from strategy.slices import IndexedSlices
from strategy.variable import Variable

__all__ = [
    "Bags",
    "IndexedSlices",
    "ParameterServerStrategy",
    "ShardedVariable",
    "Variable",
    "get_variable",
    "initializers",
    "optimizers",
    "partitioners",
    "schedules",
]
