"""Readable signatures, with links: short names of types, and one signature a function."""

import re
from importlib import import_module

from generated import Generated
from public_names import MODULES, PACKAGES, module_of, public
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

log = logging.getLogger(__name__)

# Aliases of types that signatures show by name, and their modules. The directive ``aliases`` makes
# their entries.
ALIASES = {
    "Array": "strategy.variable",
    "BackendName": "mpidist.collectives.backends",
    "DeviceType": "mpidist.collectives.mesh",
    "Formula": "strategy.rules",
    "Group": "mpidist.collectives.default",
    "Handler": "mpidist.rpc.endpoint",
    "Initializer": "strategy.initializers",
    "JobTasks": "mpidist.cluster_resolver.job_layout",
    "Load": "strategy.compat.device_setter",
    "Partitioner": "strategy.protocol.partition",
    "Place": "strategy.placement",
    "ReduceOpLike": "mpidist.buffers.reduce_op",
    "Schedule": "strategy.schedules",
    "Shape": "strategy.protocol.partition",
    "TasksPerNode": "mpidist.cluster_resolver.slurm",
    "Timeout": "mpidist.work",
    "Value": "mpidist.store.store",
    "Version": "strategy.variable",
}


class Aliases(Generated):
    """The entries of aliases of types. Each line of the content is ``Name: meaning``."""

    def lines(self, _):
        """Yield the lines."""
        for line in filter(None, self.content):
            name, _, meaning = line.partition(": ")
            value = getattr(import_module(ALIASES[name]), name)
            yield from (f".. py:type:: {name}", f"   :canonical: {stringify_annotation(value)}")
            yield from ("", f"   {meaning}", "")


def _show_aliases(app, what, name, value, options, *parts):
    """Show an alias within another type as its name, too."""
    alias = re.compile(r"TypeAliasForwardRef\('~?(?:\w+\.)*(\w+)'\)")
    return tuple(part and alias.sub(r"\1", part) for part in parts)


def _forget_overloads(app):
    """Show one signature a function; its docstring tells on which argument the result depends."""
    for module in set(map(module_of, public().values())):
        if module.split(".")[0] in PACKAGES:
            analyzer = ModuleAnalyzer.for_module(module)
            analyzer.analyze()
            analyzer.overloads.clear()


def _summarize(app, what, name, value, options, lines):
    """Keep "Collective." and the sentence behind it together, as the first sentence of tables."""
    if lines:
        lines[0] = lines[0].replace("Collective. ", "Collective.\N{WORD JOINER} ", 1)


def _resolve(app, env, node, contnode):
    """Find names of other modules, and inherited members; report links to missing names."""
    owner, _, member = node["reftarget"].rpartition(".")
    bases = getattr(public().get(owner), "__mro__", ())
    places = [name for base in bases for name, value in public().items() if value is base]
    for place in places if owner else MODULES:
        if entry := env.domains.python_domain.objects.get(f"{place}.{member}"):
            where = (node["refdoc"], entry.docname, entry.node_id)
            return make_refnode(app.builder, *where, contnode)
    # Docstrings may also name objects that are not public.
    in_page = "refwarn" in node and "docstring of" not in (node.source or "docstring of")
    if in_page and node["refdomain"] == "py" and node["reftarget"].split(".")[0] in PACKAGES:
        log.warning("the reference has no %s", node["reftarget"], location=node)
    return None


def setup(app):
    """Add the directive and the handlers."""
    app.add_directive("aliases", Aliases)
    app.connect("builder-inited", _forget_overloads)
    app.connect("autodoc-process-docstring", _summarize)
    app.connect("autodoc-process-signature", _show_aliases)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
