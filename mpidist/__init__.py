"""Distributed training for array programs on the MPI a cluster already has."""

import typing

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from mpidist.public import *  # noqa: F403
else:
    # The names are imported when the first is used: commands use none, and start in a third of the
    # time without NumPy.
    def __getattr__(name):
        from importlib import import_module

        if not name.startswith("_") or name == "__all__":
            public = vars(import_module("mpidist.public"))
            names = ["__all__", *public["__all__"]] if "__all__" in public else []
            globals().update((each, public[each]) for each in names)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
