"""Load the plugin for rank tests for all tests: the plugin also orders and selects tests."""

import gc
import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# Helpers check results with assert. The rewriting keeps these checks under python -O.
pytest.register_assert_rewrite("_cases")

from _cases import stand_in_cupy, stand_in_nccl  # noqa: E402

from mpidist.gpu import staging  # noqa: E402

# An example may be slow because the machine is busy.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

pytest_plugins = ["_ranks.plugin"]


def pytest_collection_finish():
    """Exclude the thousands of collected tests from each later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)], scope="module")
def xp_module(request):
    """Yield CuPy: a stand-in on machines without a GPU, and the real package with --gpu."""
    if request.param == "gpu":
        yield importlib.import_module("cupy")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", stand_in_cupy)
        patch.setitem(sys.modules, "cupy.cuda.nccl", stand_in_nccl)
        yield stand_in_cupy


@pytest.fixture
def xp(xp_module):
    """Return CuPy for tests that are not property tests."""
    if xp_module is stand_in_cupy:
        # Uploads of earlier tests may wait here, whose memory the stand-in no longer counts.
        staging._waiting.clear()
    return xp_module
