"""Distributed training for array programs on the MPI that a cluster already has.

The functions have the names and arguments of torch.distributed. Arrays may be NumPy arrays, torch
tensors, CuPy arrays, and all other arrays with DLPack::

    import numpy as np
    import mpidist as dist

    dist.init_process_group()  # needs no arguments under mpirun
    array = np.full(3, dist.get_rank(), "float32")
    dist.all_reduce(array, "mean")

Start the script with ``mpidist run -n 4 script.py``, mpiexec or srun. ``ClusterSpec`` and
``Server`` give ranks the tasks of jobs, as in TensorFlow. ``mpidist.cluster_resolver`` finds the
cluster, ``mpidist.torch`` is a backend of torch.distributed, and ``mpidist.errors`` has the errors.
The packages ``strategy`` (parameter servers) and ``dataservice`` (input pipelines) are built on
this one. The documentation is in the folder ``docs`` of the repository.
"""

import typing

__version__ = "0.2.0"

if typing.TYPE_CHECKING:
    from mpidist import cluster_resolver as cluster_resolver
    from mpidist.public import *  # noqa: F403
else:
    # The names are imported when the first one is used: commands use none, and start in a third of
    # the time without NumPy. Names that a program has set before stay as they are.
    def __getattr__(name):
        from importlib import import_module

        hint = ""
        if name == "cluster_resolver":
            return import_module("mpidist.cluster_resolver")
        if not name.startswith("_") or name == "__all__":
            try:
                public = vars(import_module("mpidist.public"))
            except AttributeError as error:  # which would be taken for the lack of the name
                raise ImportError(f"mpidist cannot be imported: {error!r}") from error
            names = ["__all__", *public["__all__"]] if "__all__" in public else []
            for each in names:
                globals().setdefault(each, public[each])
            if name in globals():
                return globals()[name]
            from mpidist.errors import did_you_mean

            hint = did_you_mean(name, names)
            if name.endswith("Resolver"):
                hint = "; resolvers are in mpidist.cluster_resolver"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__():
        # Public names and Python's own: neither private names nor submodules that were imported.
        public = __getattr__("__all__")
        own = [name for name in globals() if name.startswith("__") and name.endswith("__")]
        return sorted({*public, *own})
