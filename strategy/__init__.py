"""Parameter servers: variables on ps tasks, pulled and pushed by workers."""

from strategy import initializers, optimizers, schedules
from strategy.bags import Bags
from strategy.parameter_server_strategy import ParameterServerStrategy, get_variable
from strategy.slices import IndexedSlices
from strategy.variable import Variable

__all__ = [
    "Bags",
    "IndexedSlices",
    "ParameterServerStrategy",
    "Variable",
    "get_variable",
    "initializers",
    "optimizers",
    "schedules",
]
