"""List the public names of torch.distributed and the arguments of its functions.

The output is the module torch_names. Its docstring has the command that creates it.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from types import BuiltinFunctionType, FunctionType

HEADER = '''"""The public names of torch.distributed {version}, and the arguments of its functions.

Made with torch {version} by::

    python -m tests._cases.list_torch_names > tests/_cases/torch_names.py
    ruff format tests/_cases/torch_names.py

ARGUMENTS has the name and the default of each argument of a function, in their order; it is None
for functions of C++, whose arguments cannot be inspected. METHODS has the same of DeviceMesh, with
None for properties. MEMBERS has the public attributes of other classes, but for those of str.
"""
'''
CLASSES = ("Backend", "ProcessGroup", "ReduceOp", "Work")
# Compared by type(): the deprecated object reduce_op warns when isinstance() looks at it.
FUNCTIONS = (FunctionType, BuiltinFunctionType)
SPECIAL = ("__init__", "__getitem__")


def facts():
    """Return the constants of the module torch_names, by name."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    def is_public(name):
        value = getattr(dist, name)
        return (
            not name.startswith("_")
            and callable(value)
            and (value.__module__ or "torch").startswith("torch")
        )

    names = {name for name in vars(dist) if is_public(name)} | set(distributed_c10d.__all__)
    values = {name: getattr(dist, name, None) or getattr(distributed_c10d, name) for name in names}
    functions = {name: value for name, value in sorted(values.items()) if type(value) in FUNCTIONS}
    mesh = device_mesh.DeviceMesh
    methods = [name for name in vars(mesh) if not name.startswith("_")]
    return {
        "NAMES": sorted(names),
        "ARGUMENTS": {name: arguments(value) for name, value in functions.items()},
        "METHODS": {name: arguments(getattr(mesh, name)) for name in sorted([*methods, *SPECIAL])},
        "MEMBERS": {name: members(getattr(dist, name)) for name in CLASSES},
    }


def members(kind):
    """Return the public attributes of a class, without the attributes of a base class str."""
    inherited = dir(str) if issubclass(kind, str) else ()
    return sorted(one for one in dir(kind) if not one.startswith("_") and one not in inherited)


def installed():
    """Return the installed version of torch, without its build tag."""
    return version("torch").partition("+")[0]


def arguments(value):
    """Return name and default of each argument, or None for a property or a function of C++."""
    if isinstance(value, property):
        return None
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return None
    return {one.name: "" if one.default is one.empty else str(one.default) for one in parameters}


def main():
    """Print the module torch_names."""
    print(HEADER.format(version=installed()))
    print(f"VERSION = {installed()!r}")
    for name, value in facts().items():
        print(f"{name} = {value!r}")


if __name__ == "__main__":
    main()
