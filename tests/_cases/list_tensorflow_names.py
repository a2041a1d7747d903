"""List the public names of TensorFlow, with the arguments of functions and the members of classes.

The output is the module tensorflow_names, which says how it was made.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types

HEADER = '''"""Public names of TensorFlow {version}: arguments of functions, and members of classes.

Made with TensorFlow {version} by::

    python -m tests._cases.list_tensorflow_names > tests/_cases/tensorflow_names.py
    ruff format tests/_cases/tensorflow_names.py

NAMES has the arguments of each function and class, in their order; None for values, enums,
messages, and classes that programs do not create themselves. An argument is ``=`` and its default,
or empty without a default. ``*`` marks arguments by keyword alone, ``*args`` and ``**kwargs``.
MEMBERS has the same for the public methods of classes, with None for attributes.
"""
'''
MODULES = (
    "distribute",
    "distribute.cluster_resolver",
    "distribute.coordinator",
    "distribute.experimental",
    "distribute.experimental.partitioners",
    "distribute.experimental.rpc",
    "data",
    "data.experimental",
    "data.experimental.service",
    "keras.initializers",
    "keras.optimizers",
    "keras.optimizers.schedules",
)
SINGLE = (
    "IndexedSlices",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "config.experimental.ClusterDeviceFilters",
    "train.Checkpoint",
    "train.CheckpointManager",
    "train.ClusterDef",
    "train.ClusterSpec",
    "train.JobDef",
    "train.ServerDef",
    "train.latest_checkpoint",
    "compat.v1.AUTO_REUSE",
    "compat.v1.fixed_size_partitioner",
    "compat.v1.get_variable",
    "compat.v1.get_variable_scope",
    "compat.v1.min_max_variable_partitioner",
    "compat.v1.train.replica_device_setter",
    "compat.v1.variable_axis_size_partitioner",
    "compat.v1.variable_scope",
)
CLASSES = (
    "Variable",
    "config.experimental.ClusterDeviceFilters",
    "data.Dataset",
    "data.Options",
    "data.ThreadingOptions",
    "data.experimental.service.CrossTrainerCache",
    "data.experimental.service.DispatchServer",
    "data.experimental.service.DispatcherConfig",
    "data.experimental.service.ShardingPolicy",
    "data.experimental.service.WorkerConfig",
    "data.experimental.service.WorkerServer",
    "distribute.InputContext",
    "distribute.InputOptions",
    "distribute.ReduceOp",
    "distribute.ReplicaContext",
    "distribute.Server",
    "distribute.Strategy",
    "distribute.StrategyExtended",
    "distribute.cluster_resolver.ClusterResolver",
    "distribute.cluster_resolver.KubernetesClusterResolver",
    "distribute.cluster_resolver.KubernetesExecutableLocation",
    "distribute.cluster_resolver.SimpleClusterResolver",
    "distribute.cluster_resolver.SlurmClusterResolver",
    "distribute.cluster_resolver.TFConfigClusterResolver",
    "distribute.cluster_resolver.UnionResolver",
    "distribute.coordinator.ClusterCoordinator",
    "distribute.coordinator.RemoteValue",
    "distribute.experimental.ValueContext",
    "keras.optimizers.Optimizer",
    "train.ClusterDef",
    "train.ClusterSpec",
    "train.JobDef",
    "train.ServerDef",
)
MADE_ELSEWHERE = {
    "Variable",
    "data.Dataset",
    "distribute.DistributedValues",
    "distribute.ReplicaContext",
    "distribute.Strategy",
    "distribute.StrategyExtended",
    "keras.optimizers.Optimizer",
}
"""The classes with objects that other calls create."""


def facts():
    """Return the constants of the module tensorflow_names, by name."""
    import tensorflow as tf

    def value_of(name):
        return functools.reduce(getattr, name.split("."), tf)

    names = [f"{module}.{name}" for module in MODULES for name in public(value_of(module))]
    return {
        "NAMES": {
            f"tf.{name}": None if name in MADE_ELSEWHERE else arguments(value_of(name))
            for name in sorted({*names, *SINGLE})
        },
        "MEMBERS": {f"tf.{name}": members(value_of(name)) for name in CLASSES},
    }


def public(module):
    """Return the public names of a module, without its submodules."""
    found = {name: value for name, value in inspect.getmembers(module) if name[0] != "_"}
    return [name for name, value in found.items() if not isinstance(value, types.ModuleType)]


def members(kind):
    """Return the arguments of the public methods of a class; None for attributes and fields."""
    if hasattr(kind, "DESCRIPTOR"):
        return dict.fromkeys(field.name for field in kind.DESCRIPTOR.fields)
    inherited = {name for base in (int, tuple) if issubclass(kind, base) for name in dir(base)}
    names = [name for name in dir(kind) if name[0] != "_" and name not in inherited]
    return {
        name: arguments(getattr(kind, name), inspect.getattr_static(kind, name)) for name in names
    }


def arguments(value, static=None):
    """Return the arguments of a function, method or class; None for other values."""
    enums = isinstance(value, enum.Enum | enum.EnumType)
    if not callable(value) or enums or hasattr(value, "DESCRIPTOR"):
        return None
    return described(inspect.signature(value), skipped=inspect.isfunction(static))


def described(signature, skipped=0):
    """Return the arguments of a signature without the first ones, such as self."""
    return {one.name: text_of(one) for one in [*signature.parameters.values()][skipped:]}


def text_of(parameter):
    """Return the kind and the default of an argument, in the form that HEADER describes."""
    stars = {
        parameter.VAR_POSITIONAL: "*",
        parameter.VAR_KEYWORD: "**",
        parameter.KEYWORD_ONLY: "*",
    }
    default = parameter.default
    name = getattr(default, "name", None) or getattr(default, "__name__", None) or repr(default)
    return stars.get(parameter.kind, "") + ("" if default is parameter.empty else f"={name}")


def installed():
    """Return the version of TensorFlow that is installed."""
    import tensorflow as tf

    return tf.__version__


def main():
    """Print the module."""
    print(HEADER.format(version=installed()))
    print(f"VERSION = {installed()!r}")
    for name, value in facts().items():
        print(f"{name} = {value!r}")


if __name__ == "__main__":
    main()
