"""The functions have the names and arguments of torch.distributed's, where torch is installed."""

import inspect

import pytest

from mpidist import collectives

torch = pytest.importorskip("torch.distributed")

# What torch 2.13 has not yet, and what it has for itself alone.
NEWER = {"weights_only", "sort_ranks", "set_timeout"}
INTERNAL = {"_ranks"}
FUNCTIONS = [
    name
    for name in collectives.__all__
    if inspect.isfunction(getattr(collectives, name)) and name not in NEWER
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    theirs = getattr(torch, name, None) or getattr(torch.distributed_c10d, name)
    have = list(inspect.signature(getattr(collectives, name)).parameters)
    want = [one for one in inspect.signature(theirs).parameters if one not in INTERNAL]
    assert set(want) <= set(have)
    assert [one for one in have if one in want] == want
    assert {one for one in have if one not in want} <= NEWER
