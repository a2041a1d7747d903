"""The example programs, and the commands and outputs in their headers."""

import ast
import re

from _cases.pages import ROOT, check

FOLDER = ROOT / "scripts" / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
MAX_LINES = 59
BLOCK = re.compile(r"(?m)^ {4}\$ .*\n(?: {4}.*\n)*")
# Open MPI's own launcher needs these where mpidist run sets the options: for more ranks than cores,
# and for tests that run as root.
ENVIRONMENT = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def header_of(name):
    """Return the docstring of an example."""
    return ast.get_docstring(ast.parse((FOLDER / name).read_text()), clean=False) or ""


def commands_of(name):
    """Return the commands in the header of an example, each with the output shown below it."""
    text = "".join(BLOCK.findall(header_of(name)))
    parts = re.sub(r"(?m)^ {4}", "", text).split("$ ")[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def imports_torch(name):
    """Return whether an example needs torch."""
    return re.search(r"(?m)^import torch$", (FOLDER / name).read_text()) is not None


def run_commands(name, folder, monkeypatch):
    """Run the commands of an example in a folder, in order, and compare the outputs."""
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for command, shown in commands_of(name):
        check(command, shown, folder)
