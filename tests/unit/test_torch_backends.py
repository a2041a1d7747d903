"""Names of backends, and the functions about them that need no ranks."""

import copy
import os
import pickle
import subprocess
import sys
from typing import get_args

import pytest
from _cases import stand_in_cupy, stand_in_nccl

import mpidist as dist
from mpidist.buffers.reduce_op import NAMED, ReductionName

AVAILABLE = """
import sys, mpidist
print(mpidist.is_mpi_available(), mpidist.is_backend_available("cpu:mpi"))
assert "mpi4py.MPI" not in sys.modules
"""


def test_names_of_backends():
    mpi = dist.Backend("MPI")
    assert mpi == "mpi" == dist.Backend.MPI
    assert isinstance(mpi, str)
    assert {mpi: 1}["mpi"] == 1
    assert pickle.loads(pickle.dumps(mpi)) == copy.deepcopy(mpi) == mpi
    assert dist.Backend("GLOO") == dist.Backend.GLOO
    assert dist.Backend("Mine") == "mine"
    with pytest.raises(ValueError, match="is a string"):
        dist.Backend(None)


@pytest.mark.parametrize(("library", "expected"), [(None, "True"), ("/nonexistent.so", "False")])
def test_mpi_is_looked_for_and_not_started(library, expected):
    environment = dict(os.environ)
    if library is not None:
        environment["MPI4PY_LIBMPI"] = library
    done = subprocess.run(
        [sys.executable, "-c", AVAILABLE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [expected, expected]


def test_nccl_is_available_where_cupy_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", stand_in_cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", stand_in_nccl)
    assert dist.is_nccl_available()
    assert dist.is_backend_available("cpu:mpi,cuda:nccl")
    assert not dist.is_backend_available("cpu:gloo,cuda:nccl")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not dist.is_nccl_available()
    assert not dist.is_backend_available("cpu:mpi,cuda:nccl")
    assert not dist.is_backend_available("NCCL")


@pytest.mark.parametrize("backend", ["gloo", "ucc", "xccl", "", "mine"])
def test_backends_that_are_not_there(backend):
    assert not dist.is_gloo_available()
    assert not dist.is_backend_available(backend)


@pytest.mark.parametrize("backend", ["cpu:", "cpu:mpi,", "cpu:mpi:1", "cpu:mpi,cpu:mpi", ":"])
def test_texts_that_name_no_backends(backend):
    if backend in ("cpu:", ":"):
        assert not dist.is_backend_available(backend)
        return
    with pytest.raises(ValueError, match="each with its backend"):
        dist.is_backend_available(backend)


@pytest.mark.parametrize("device", ["xpu", "mps:0", "cuda:x", "", None, 0])
def test_devices_without_a_backend(device):
    with pytest.raises(ValueError, match="there is no backend for device"):
        dist.get_default_backend_for_device(device)


def test_the_launcher_of_torch(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "")
    assert dist.is_torchelastic_launched()


def test_the_debug_level_of_the_environment(monkeypatch):
    before = dist.get_debug_level()
    try:
        for name in ("INFO", "detail", "Off"):
            monkeypatch.setenv("MPIDIST_DEBUG", name)
            dist.set_debug_level_from_env()
            assert dist.get_debug_level().name == name.upper()
        monkeypatch.setenv("MPIDIST_DEBUG", "much")
        with pytest.raises(ValueError, match="MPIDIST_DEBUG='much' is none of info, off, detail"):
            dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel.OFF  # as before the error
        for level in ("DETAIL", 2, None):
            with pytest.raises(TypeError, match="is a DebugLevel"):
                dist.set_debug_level(level)
    finally:
        dist.set_debug_level(before)


def test_reductions_of_complex_arrays_by_name():
    assert dist.supports_complex("product")
    assert not dist.supports_complex("max")
    with pytest.raises(ValueError, match="unknown reduction 'total'"):
        dist.supports_complex("total")


def test_the_typed_names_of_reductions_are_all():
    assert sorted(get_args(ReductionName)) == sorted(NAMED)
