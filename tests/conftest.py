"""Loads the plugin for rank tests, for all tests: it also orders and selects them."""

import gc
import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# Helpers assert what they await: python -O must not take that away.
pytest.register_assert_rewrite("_cases")

from _cases import stand_in_cupy, stand_in_nccl  # noqa: E402

# An example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

pytest_plugins = ["_ranks.plugin"]


def pytest_collection_finish():
    """Keep the thousands of tests out of what the garbage collector looks at in each of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)], scope="module")
def xp_module(request):
    """CuPy: a stand-in on machines without a GPU, and with --gpu the true one."""
    if request.param == "gpu":
        yield importlib.import_module("cupy")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", stand_in_cupy)
        patch.setitem(sys.modules, "cupy.cuda.nccl", stand_in_nccl)
        yield stand_in_cupy


@pytest.fixture
def xp(xp_module):
    """The same, for tests that are no properties."""
    return xp_module
