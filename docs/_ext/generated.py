"""Write parts of the reference from the code, so that the pages cannot become stale.

Each directive makes reStructuredText, also in a page of Markdown.
"""

import argparse
import dataclasses
import inspect
import os
import re
from importlib import import_module
from unittest import mock

from docutils.parsers.rst import directives
from public_names import PACKAGES, module_of, parsers, public
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from mpidist import config

log = logging.getLogger(__name__)


class Generated(SphinxDirective):
    """Base of directives whose ``lines`` are reStructuredText."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Return the nodes."""
        lines = ["```{eval-rst}", *self.lines(" ".join(self.arguments)), "```"]
        return self.parse_text_to_nodes("\n".join(lines))


class Names(Generated):
    """The entries of the names of a module, after a table; with ``:table:`` the table alone."""

    option_spec = {"table": directives.flag, "exclude-members": directives.unchanged}  # noqa: RUF012

    def lines(self, module):
        """Yield the lines; the content of the directive has the names."""
        names = " ".join(self.content).split()
        yield from (f".. currentmodule:: {module}", "")
        if len(names) > 1:
            yield from (".. autosummary::", "   :nosignatures:", "")
            yield from (*(f"   {name}" for name in names), "")
        for name in () if "table" in self.options else names:
            value = getattr(import_module(module), name)
            if not inspect.isclass(value):
                yield from (f".. autofunction:: {name}", "")
                continue
            yield f".. auto{'exception' if issubclass(value, BaseException) else 'class'}:: {name}"
            foreign = [b for b in value.__mro__ if module_of(b).split(".")[0] not in PACKAGES]
            bases = foreign + [base for base in value.__mro__[1:] if base in public().values()]
            yield f"   :inherited-members: {','.join(base.__name__ for base in bases)}"
            yield from ("   :members:", *(f"   :{k}: {v}" for k, v in self.options.items()), "")


class Command(Generated):
    """The usage, the arguments and the options of a command."""

    def lines(self, prog):
        """Yield the lines."""
        parser = parsers()[prog]
        with mock.patch.dict(os.environ, COLUMNS="88"):
            usage = parser.format_usage().removeprefix("usage: ").replace("\n    ", "\n")
        yield from (".. code-block:: text", "", f"   {usage}", "", _rst(parser.description), "")
        yield from (f".. program:: {prog}", "")
        for action in parser._actions:
            name = action.dest + (" ..." if action.nargs == argparse.REMAINDER else "")
            if action.option_strings:
                value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
                name = ", ".join(each + value for each in action.option_strings)
            if action.help and action.dest != "help":
                text = parser._get_formatter()._expand_help(action)
                yield from (f".. option:: {name}", "", f"   {_rst(text)}", "")
        yield _rst(parser.epilog)


def _rst(text):
    """Return the text of a help message with its options as literals."""
    text = re.sub(r"[*`|_\\]", r"\\\g<0>", text or "")
    return re.sub(r"(?<![\w-])(--?[a-z][\w=-]*|(?!https?:)\b[a-z]+://(?!\w))", r"``\g<0>``", text)


class Settings(Generated):
    """The table of environment variables, from the docstring of mpidist.config."""

    def lines(self, _):
        """Return the lines."""
        table = inspect.getdoc(config).partition("\n\n")[2]
        fields = {f"MPIDIST_{field.name.upper()}" for field in dataclasses.fields(config.Config)}
        if fields ^ set(re.findall(r"^``(\w+)``", table, re.MULTILINE)):
            log.warning("the table in the docstring of mpidist.config is not that of its settings")
        return table.splitlines()


def setup(app):
    """Add the directives."""
    for directive in (Names, Command, Settings):
        app.add_directive(directive.__name__.lower(), directive)
    return {"parallel_read_safe": True}
