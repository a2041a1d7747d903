"""Parameters of torch modules as variables. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpidist import Work
from strategy.array_like import IndexedSlices
from strategy.optimizers import Optimizer
from strategy.scopes import get_variable
from strategy.variable import Variable, read_values


class ModuleVariables:
    """The parameters of a torch module as variables on the ps tasks.

    Each parameter becomes a variable with its name, shape, dtype and value. A parameter that two
    layers share becomes one variable. The first worker that creates a variable sets its value. The
    constructor then pulls all variables, so that all workers begin with equal parameters, as
    DistributedDataParallel does. Buffers, such as the running means of BatchNorm, do not become
    variables: each worker keeps its own.

    Create the object within ``strategy.scope()``. Outside a scope, the variables live in this
    process. Modules with equal names of parameters need a :func:`strategy.variable_scope` each.
    Cast the module, move it, and replace parameters before you create the object.

    Args:
        module: The module. Its parameters may be on the CPU or on a GPU.

    Attributes:
        module: The module.
        variables: The variable of each parameter, by the name of the parameter.

    Raises:
        ValueError: The module has no parameters, a lazy layer has not set the shape of its
            parameters, or elements of a parameter share memory. Or there is a variable with the
            name of a parameter.
        TypeError: The dtype of a parameter is not bfloat16, float16, float32, float64, bool or an
            integer.
        InvalidArgumentError: Another worker created a variable of this name with another shape or
            dtype.

    Example:
        >>> import torch
        >>> from strategy import optimizers
        >>> from strategy.torch import ModuleVariables
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.data.zero_()
        tensor([[0., 0.]])
        >>> variables = ModuleVariables(model)
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> work = variables.push(optimizers.SGD(0.5))
        >>> variables.pull()
        >>> model.weight
        Parameter containing:
        tensor([[-0.5000, -1.0000]], requires_grad=True)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = dict(module.named_parameters())
        if not named:
            raise ValueError(f"{type(module).__name__} has no parameters to make variables of")
        for name, parameter in named.items():
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {name!r} has no shape yet: run the module on one batch first"
                )
            if any(
                length > 1 and not step
                for length, step in zip(parameter.shape, parameter.stride(), strict=True)
            ):
                raise ValueError(
                    f"elements of parameter {name!r} share memory, as those of an expanded tensor: "
                    "make the parameter of a clone()"
                )
        self.module = module
        self.variables: dict[str, Variable] = {
            name: get_variable(
                name, initializer=parameter.detach(), trainable=parameter.requires_grad
            )
            for name, parameter in named.items()
        }
        self._pairs = list(zip(named.values(), self.variables.values(), strict=True))
        self._dtypes = [parameter.dtype for parameter in named.values()]
        self._pull(self._pairs)

    def pull(self, *, frozen: bool = False) -> None:
        """Pull the variables into the parameters.

        Call it before the forward pass, and before you evaluate or save the module.

        Args:
            frozen: Whether to pull frozen parameters, too, as after ``strategy.restore``. A
                parameter is frozen if its ``requires_grad`` is False.

        Raises:
            ValueError: The module has other parameters than before, or parameters of another dtype.
        """
        self._check_parameters()
        self._pull([pair for pair in self._pairs if frozen or pair[0].requires_grad])

    def push(self, optimizer: Optimizer) -> Work:
        """Push the gradients of the parameters. The ps tasks apply them.

        Parameters without a gradient are left out. In mode ``"sync"`` all workers must push
        gradients of the same parameters. A sparse gradient, as of
        ``torch.nn.Embedding(sparse=True)``, is pushed as :class:`IndexedSlices`, which all
        optimizers but Lamb and Adafactor take. The gradients stay as they are: call
        ``module.zero_grad()`` before the next backward pass.

        Args:
            optimizer: An optimizer of :mod:`strategy.optimizers`.

        Returns:
            A Work that ends when the ps tasks have applied the gradients; see
            :meth:`strategy.optimizers.Optimizer.apply_gradients`.

        Raises:
            ValueError: No parameter has a gradient, or the module has other parameters than before.
                For other errors see :meth:`strategy.optimizers.Optimizer.apply_gradients`.
        """
        self._check_parameters()
        return optimizer.apply_gradients(
            [(_gradient(parameter), variable) for parameter, variable in self._pairs]
        )

    def _check_parameters(self) -> None:
        present = {id(parameter) for parameter in self.module.parameters()}
        checked = zip(self.variables, self._pairs, self._dtypes, strict=True)
        for name, (parameter, _), dtype in checked:
            if id(parameter) not in present:
                raise ValueError(
                    f"parameter {name!r} has been replaced: make ModuleVariables after that"
                )
            if parameter.dtype is not dtype:
                raise ValueError(
                    f"parameter {name!r} is now of {parameter.dtype}, and its variable of {dtype}: "
                    "cast the module before you make ModuleVariables"
                )

    def _pull(self, pairs: Sequence[tuple[Any, Variable]]) -> None:
        tensors = [parameter.detach() for parameter, _ in pairs]
        places = [
            tensor
            if tensor.is_contiguous()
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for tensor in tensors
        ]
        read_values([variable for _, variable in pairs], places)
        for tensor, place in zip(tensors, places, strict=True):
            if place is not tensor:
                tensor.copy_(place)
        # A pull between the forward and the backward pass would give wrong gradients. With a new
        # version number of its parameters, autograd raises an error.
        torch.autograd.graph.increment_version([parameter for parameter, _ in pairs])


def _gradient(parameter: torch.nn.Parameter) -> Any:
    """Return the gradient of a parameter, in a form for ``apply_gradients``."""
    if parameter.grad is None:
        return None
    gradient = parameter.grad.detach()
    if not gradient.is_sparse:
        return gradient
    rows = gradient.coalesce()
    return IndexedSlices(rows.values(), rows.indices()[0])
