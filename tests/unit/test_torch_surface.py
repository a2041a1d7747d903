"""Names and arguments are those of torch.distributed, or docs/torch.md gives the reason."""

import inspect
import re
from pathlib import Path

import pytest
from _cases import list_torch_names, torch_names

import mpidist
from mpidist import DeviceMesh

# An argument that torch keeps for itself.
INTERNAL = {"_ranks"}
# Arguments of ours that can be given by keyword alone.
OURS_BY_KEYWORD = {"init_process_group": {"hooks"}}
MESH_ARGUMENTS = {"backend_override"}  # of the class; init_device_mesh has it
# Functions of the package that torch has as private ones, or as none.
EXTRA_FUNCTIONS = {"coalescing_manager", "new_cartesian_group", "set_timeout"}
OURS = {
    name
    for name in mpidist.__all__
    if inspect.isfunction(function := getattr(mpidist, name))
    and function.__module__.startswith("mpidist.collectives.")
}
FUNCTIONS = sorted(OURS & set(torch_names.ARGUMENTS))
# Functions of C++ have arguments, too, but do not tell them.
INSPECTED = [name for name in FUNCTIONS if torch_names.ARGUMENTS[name] is not None]
DOCUMENT = Path(__file__).parents[2] / "docs" / "torch.md"
ROW = re.compile(r"^\| (`[^|]+`) \| (.+) \|$", re.MULTILINE)


def rows(text):
    """By name in the first column of a table, the text of the other columns."""
    return {
        name: rest
        for first, rest in ROW.findall(text)
        for name in re.findall(r"`([\w.]+)[^`]*`", first)
    }


DOCUMENTED = rows(DOCUMENT.read_text())
MISSING, EXTRA = map(
    rows, DOCUMENT.read_text().split("## What is missing")[1].split("## What is extra")
)


def test_the_stored_names_are_those_of_torch():
    pytest.importorskip("torch.distributed")
    if list_torch_names.installed() != torch_names.VERSION:
        pytest.skip(f"this is torch {list_torch_names.installed()}, not {torch_names.VERSION}")
    facts = list_torch_names.facts()
    assert facts == {name: getattr(torch_names, name) for name in facts}


def test_the_stored_names_are_many():
    assert len(torch_names.NAMES) >= 100
    assert len(FUNCTIONS) > 50
    assert len(MISSING) > 50
    assert {"all_reduce", "Store", "set_debug_level", "reduce_op"} <= set(torch_names.NAMES)


@pytest.mark.parametrize("name", torch_names.NAMES)
def test_each_name_is_there_or_left_out_for_a_reason(name):
    if name in mpidist.__all__:
        assert hasattr(mpidist, name)
        assert name not in MISSING
    else:
        assert len(MISSING[name]) > 10


def test_names_that_are_documented_as_missing_are_torchs():
    assert {name for name in MISSING if "." not in name} <= set(torch_names.NAMES)


@pytest.mark.parametrize("name", INSPECTED)
def test_arguments_and_their_order(name):
    have = [
        argument
        for argument in inspect.signature(getattr(mpidist, name)).parameters
        if argument not in OURS_BY_KEYWORD.get(name, ())
    ]
    assert have == [one for one in torch_names.ARGUMENTS[name] if one not in INTERNAL]


@pytest.mark.parametrize("name", INSPECTED)
def test_defaults_that_differ_are_documented(name):
    have = {
        one.name: "" if one.default is one.empty else str(one.default)
        for one in inspect.signature(getattr(mpidist, name)).parameters.values()
    }
    for argument, default in torch_names.ARGUMENTS[name].items():
        if have.get(argument) != default:
            assert f"`{argument}`" in DOCUMENTED[name], argument


@pytest.mark.parametrize("name", OURS_BY_KEYWORD)
def test_arguments_of_ours_are_documented(name):
    parameters = inspect.signature(getattr(mpidist, name)).parameters
    for argument in OURS_BY_KEYWORD[name]:
        assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"`{argument}`" in DOCUMENTED[name]


def test_functions_of_cpp():
    """Their arguments, as torch's type stubs have them."""
    named = {
        name: list(inspect.signature(getattr(mpidist, name)).parameters)
        for name in FUNCTIONS
        if name not in INSPECTED
    }
    assert named == {
        "get_debug_level": [],
        "set_debug_level": ["level"],
        "set_debug_level_from_env": [],
    }


def test_functions_that_torch_has_not_are_documented():
    assert OURS - set(FUNCTIONS) == EXTRA_FUNCTIONS
    assert set(EXTRA) >= EXTRA_FUNCTIONS
    assert not set(EXTRA) & set(torch_names.NAMES)


def test_device_mesh():
    ours = {name for name in vars(DeviceMesh) if not name.startswith("_")}
    theirs = {name for name in torch_names.METHODS if not name.startswith("_")}
    assert ours == theirs | {"flatten"}  # torch's begins with an underscore


@pytest.mark.parametrize("name", torch_names.METHODS)
def test_method_of_device_mesh(name):
    ours, want = getattr(DeviceMesh, name), torch_names.METHODS[name]
    if want is None:
        assert isinstance(ours, property)
        return
    have = {
        one.name: "" if one.default is one.empty else str(one.default)
        for one in inspect.signature(ours).parameters.values()
    }
    want = {
        argument: default
        for argument, default in want.items()
        if not argument.startswith("_") and argument not in MESH_ARGUMENTS
    }
    if name == "__init__":  # the mesh, which only torch itself may leave out
        want["mesh"] = have["mesh"]
    assert list(have.items()) == list(want.items())


@pytest.mark.parametrize("name", torch_names.MEMBERS)
def test_members_that_are_missing(name):
    ours, theirs = set(dir(getattr(mpidist, name))), set(torch_names.MEMBERS[name])
    said = {one for one in MISSING if one.startswith(f"{name}.")}
    # The name of a ProcessGroup is set with each group, and is not in the class.
    assert said == {f"{name}.{one}" for one in theirs - ours} - {"ProcessGroup.name"}
    assert theirs & ours
