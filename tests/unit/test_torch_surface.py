"""Names and arguments are torch.distributed's, or docs/torch.md says so; where torch is there."""

import inspect
import re
from pathlib import Path

import pytest

import mpidist
from mpidist import DeviceMesh, collectives

torch = pytest.importorskip("torch.distributed")

# What torch 2.13 has not yet, and what it has for itself alone.
NEWER = {"weights_only", "sort_ranks"}
INTERNAL = {"_ranks"}
MESH_ARGUMENTS = {"backend_override"}  # of the class; init_device_mesh has it
OURS = {name for name in collectives.__all__ if inspect.isfunction(getattr(collectives, name))}
FUNCTIONS = sorted(
    name for name in OURS if hasattr(torch, name) or hasattr(torch.distributed_c10d, name)
)


def theirs_of(name):
    return getattr(torch, name, None) or getattr(torch.distributed_c10d, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    theirs = theirs_of(name)
    have = list(inspect.signature(getattr(collectives, name)).parameters)
    want = [one for one in inspect.signature(theirs).parameters if one not in INTERNAL]
    assert set(want) <= set(have)
    assert [one for one in have if one in want] == want
    assert {one for one in have if one not in want} <= NEWER


MESH = {name for name in vars(torch.device_mesh.DeviceMesh) if not name.startswith("_")}


def test_device_mesh():
    ours = {name for name in vars(DeviceMesh) if not name.startswith("_")}
    assert ours == MESH | {"flatten"}  # torch's begins with an underscore


@pytest.mark.parametrize("name", sorted(MESH | {"__getitem__", "__init__"}))
def test_method_of_device_mesh(name):
    ours, theirs = (getattr(c, name) for c in (DeviceMesh, torch.device_mesh.DeviceMesh))
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    have, want = (
        {
            one.name: (one.kind, one.default)
            for one in inspect.signature(function).parameters.values()
            if not one.name.startswith("_") and one.name not in MESH_ARGUMENTS
        }
        for function in (ours, theirs)
    )
    if name == "__init__":  # the mesh, which only torch itself may leave out
        want["mesh"] = have["mesh"]
    assert list(have.items()) == list(want.items())


DOCUMENT = Path(__file__).parents[2] / "docs" / "torch.md"
ROW = re.compile(r"^\| (`[^|]+`) \| (.+) \|$", re.MULTILINE)


def rows(text):
    """By name in the first column of a table, what the rest of the row says."""
    return {
        name: rest
        for first, rest in ROW.findall(text)
        for name in re.findall(r"`([\w.]+)[^`]*`", first)
    }


DOCUMENTED = rows(DOCUMENT.read_text())
MISSING, EXTRA = map(
    rows, DOCUMENT.read_text().split("## What is missing")[1].split("## What is extra")
)


def is_theirs(name):
    value = getattr(torch, name, None)
    return callable(value) and (value.__module__ or "torch").startswith("torch")


PUBLIC = {name for name in vars(torch) if not name.startswith("_") and is_theirs(name)}
PUBLIC |= set(torch.distributed_c10d.__all__)


def test_public_names_were_found():
    assert {"all_reduce", "Store", "set_debug_level", "DistError", "reduce_op"} <= PUBLIC
    assert "timedelta" not in PUBLIC
    assert len(MISSING) > 50


@pytest.mark.parametrize("name", sorted(PUBLIC - set(mpidist.__all__)))
def test_what_is_missing_is_documented(name):
    assert name in DOCUMENTED


def test_what_is_documented_as_missing_is_missing():
    plain = {name for name in MISSING if "." not in name}
    assert not plain & set(mpidist.__all__)
    assert plain <= PUBLIC


def test_functions_that_torch_has_not_are_documented():
    assert len(FUNCTIONS) > 40
    assert {name for name in OURS if name not in FUNCTIONS} <= set(EXTRA)
    assert not set(EXTRA) & PUBLIC


@pytest.mark.parametrize("name", ["ProcessGroup", "Work"])
def test_methods_that_are_missing(name):
    ours, theirs = (
        {f"{name}.{one}" for one in dir(getattr(package, name)) if not one.startswith("_")}
        for package in (mpidist, torch)
    )
    said = {one for one in MISSING if one.startswith(f"{name}.")}
    assert said == theirs - ours - {"ProcessGroup.name"}  # set with each group, not in the class
    assert theirs & ours


def test_members_of_reduce_op():
    theirs = {name for name in dir(torch.ReduceOp) if not name.startswith("_")}
    for name in theirs - set(dir(mpidist.ReduceOp)):
        assert f"`{name}`" in DOCUMENTED["ReduceOp"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_differ_are_documented(name):
    have, want = (
        {one.name: str(one.default) for one in inspect.signature(function).parameters.values()}
        for function in (getattr(collectives, name), theirs_of(name))
    )
    for argument in set(have) | set(want):
        if have.get(argument) != want.get(argument):
            assert f"`{argument}`" in DOCUMENTED[name]
