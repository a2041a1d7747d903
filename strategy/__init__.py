"""Parameter servers: variables on ps tasks, pulled and pushed by workers."""

from strategy import initializers, optimizers
from strategy.parameter_server_strategy import ParameterServerStrategy, get_variable
from strategy.variable import Variable

__all__ = [
    "ParameterServerStrategy",
    "Variable",
    "get_variable",
    "initializers",
    "optimizers",
]
