"""The public names and the commands, which the reference must show.

A name, or an option of a command, that no page shows is a warning, and ``scripts/docs`` makes
warnings errors.
"""

import argparse
import inspect
from functools import cache
from importlib import import_module

from sphinx.util import logging

from dataservice.__main__ import _parser as dataservice_parser
from mpidist import launcher

log = logging.getLogger(__name__)
PACKAGES = ("mpidist", "strategy", "dataservice")
MODULES = (
    *("mpidist", "mpidist.cluster", "mpidist.cluster_resolver", "mpidist.errors", "dataservice"),
    *("dataservice.torch", "strategy", "strategy.initializers", "strategy.optimizers"),
    *("strategy.partitioners", "strategy.schedules", "strategy.torch"),
)
# The functions of these modules are for the packages themselves.
OF_CLASSES = {"mpidist.errors", "strategy.schedules"}
INTERNAL = {
    *("mpidist.cluster.ClusterSpec", "mpidist.cluster.Server"),  # they are names of mpidist
    "strategy.initializers.InitialValue",
}


@cache
def public():
    """Return the objects that the reference must show, by their full names."""
    names = {}
    for name in MODULES:
        module = import_module(name)
        defined = [key for key, value in vars(module).items() if module_of(value) == name]
        for each in getattr(module, "__all__", defined):
            value = getattr(module, each)
            is_internal = name in OF_CLASSES and not inspect.isclass(value)
            if not (is_internal or each.startswith("_") or f"{name}.{each}" in INTERNAL):
                names[f"{name}.{each}"] = value
    return names


def module_of(value):
    """Return the name of the module that defines a class or a function."""
    return getattr(value, "__module__", None) or ""


def parsers():
    """Return the parser of each command, by the words that begin its command line."""
    commands = argparse.ArgumentParser("mpidist").add_subparsers()
    for name in launcher._COMMANDS:
        import_module(f"mpidist.launcher.{name}").add_parser(commands)
    service = dataservice_parser()
    roles = service._subparsers._group_actions[0].choices
    return {each.prog: each for each in (service, *commands.choices.values(), *roles.values())}


def _check(app, env):
    """Report public names and options of commands that no page shows."""
    python, options = env.domains.python_domain, env.domains.standard_domain.progoptions
    shown = {*python.objects, *python.modules, *(f"{prog} {name}" for prog, name in options)}
    wanted = set(public())
    for prog, parser in parsers().items():
        names = {name for action in parser._actions for name in action.option_strings}
        wanted |= {f"{prog.replace(' ', '-')} {name}" for name in names - {"-h", "--help"}}
    for name in sorted(wanted - shown):
        log.warning("no page of the reference shows %s", name)


def setup(app):
    """Add the check."""
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True}
