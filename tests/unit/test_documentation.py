"""The text of help(), and the names in the documents."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import mpidist as dist
from mpidist.launcher import main

FUNCTIONS = [
    name for name in dist.__all__ if inspect.isfunction(getattr(dist, name)) and name[0].islower()
]
FROM_TORCH = [
    name for name in FUNCTIONS if getattr(dist, name).__module__.startswith("mpidist.collectives.")
]
ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in PAGES)]
COMMAND = re.compile(r"^(?:mpidist )?(run|top|timeline|doctor|sbatch)\b(.*)")
OF_USERS = {"program.py", "strategy.py", "train.py"}  # files of users, which pages mention


def arguments_in(text):
    """Return the names in the section of arguments, in order."""
    found = re.search(r"(?m)^Args:\n((?: .*\n|\n(?= ))*)", text + "\n")
    return re.findall(r"(?m)^    (\w+):", found.group(1)) if found else []


@pytest.mark.parametrize("name", FROM_TORCH)
def test_every_argument_of_the_functions_of_torch(name):
    """The arguments have the order of the signature."""
    function = getattr(dist, name)
    names = list(inspect.signature(function).parameters)
    assert arguments_in(inspect.getdoc(function)) == names


@pytest.mark.parametrize("name", FROM_TORCH)
def test_docstrings_lie_in_the_source(name):
    """Some tools read docstrings without importing the package."""
    function = inspect.unwrap(getattr(dist, name))
    (defined,) = ast.parse(inspect.getsource(function)).body
    assert ast.get_docstring(defined) == inspect.getdoc(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_are_told_exist(name):
    function = getattr(dist, name)
    told = arguments_in(inspect.getdoc(function))
    assert set(told) <= set(inspect.signature(function).parameters)


METHODS = [
    name
    for name in dir(dist.ProcessGroup)
    if name in FUNCTIONS and inspect.isfunction(getattr(dist.ProcessGroup, name))
]


@pytest.mark.parametrize("name", METHODS)
def test_methods_refer_to_the_functions(name):
    """The docstrings of the functions describe the arguments."""
    method = getattr(dist.ProcessGroup, name)
    assert f"See :func:`mpidist.{name}`." in inspect.getdoc(method)


def test_there_are_many():
    assert len(METHODS) >= 20
    assert len(FROM_TORCH) >= 60


def named_in(document):
    """Return every name in backticks outside of code blocks."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return sorted(set(re.findall(r"`([^`]+)`", text)))


def sources():
    """Return the text of every source file and script, by its path from the root."""
    folders = ("mpidist", "strategy", "dataservice", "scripts", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    chosen = [file for file in files if file.suffix in ("", ".py", ".proto") and file.is_file()]
    return {f"/{file.relative_to(ROOT)}": file.read_text() for file in chosen}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_options_exist(document, capsys):
    for name in named_in(document):
        if name.startswith("mpidist "):
            assert COMMAND.match(name) or name.startswith("mpidist --"), name
        found = COMMAND.match(name)
        if found is None or not (name.startswith("mpidist ") or " --" in name):
            continue
        command, words = found.groups()
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        # Options after the script belong to the script.
        own = re.split(r"\S+\.py\b", words)[0]
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", own):
            assert re.search(rf"{option}\b", text), f"{name}: {command} has no {option}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document):
    paths = sources()
    names = [name for name in named_in(document) if re.fullmatch(r"[\w/]+\.py", name)]
    folders = [name for name in named_in(document) if re.match(r"(scripts|tests)/[\w/]+$", name)]
    missing = [
        name
        for name in names
        if name not in OF_USERS and not any(path.endswith(f"/{name}") for path in paths)
    ]
    assert missing + [name for name in folders if not (ROOT / name).exists()] == []


def test_names_of_the_decisions_exist():
    """Every word of the named classes, functions, options and variables is in the sources."""
    known = set(re.findall(r"\w+", "\n".join(sources().values())))
    names = [
        name
        for name in named_in("docs/explanation/decisions.md")
        if re.fullmatch(r"[\w.]+(\(\))?", name)
    ]
    assert len(names) > 50
    assert [name for name in names if not set(re.findall(r"[^\W\d]\w+", name)) <= known] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_environment_variables_exist(document):
    code = [text for path, text in sources().items() if not path.startswith("/tests/")]
    known = set(re.findall(r"MPIDIST_\w+", "\n".join(code)))
    assert set(re.findall(r"MPIDIST_[A-Z_]+[A-Z]", (ROOT / document).read_text())) <= known
