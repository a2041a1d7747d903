"""What help() says of the functions of torch.distributed."""

import inspect
import re

import pytest

import mpidist as dist

FUNCTIONS = [
    name for name in dist.__all__ if inspect.isfunction(getattr(dist, name)) and name[0].islower()
]
OF_METHODS = [name for name in FUNCTIONS if hasattr(dist.ProcessGroup, name)]


def arguments_in(text):
    """Names in the section of arguments, in order."""
    found = re.search(r"(?m)^Args:\n((?: .*\n|\n(?= ))*)", text + "\n")
    return re.findall(r"(?m)^    (\w+):", found.group(1)) if found else []


@pytest.mark.parametrize("name", OF_METHODS)
def test_every_argument_of_what_is_a_method(name):
    function = getattr(dist, name)
    text = inspect.getdoc(function)
    names = list(inspect.signature(function).parameters)
    assert sorted(arguments_in(text)) == sorted(names), text
    assert "``array``" not in text
    assert text.count("Args:") == 1
    summary = inspect.getdoc(getattr(dist.ProcessGroup, name)).split("\n")[0]
    assert text.split()[:2] == summary.split()[:2]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_are_told_exist(name):
    function = getattr(dist, name)
    told = arguments_in(inspect.getdoc(function))
    assert set(told) <= set(inspect.signature(function).parameters)


def test_there_are_many():
    assert len(OF_METHODS) >= 24
