"""GPUs that a process finds and may use."""

import sys
from types import SimpleNamespace

import pytest
from _cases import batch_systems

from mpidist.cluster_resolver import MPIClusterResolver, accelerators


@pytest.fixture(autouse=True)
def _no_batch_system(monkeypatch):
    batch_systems.setter(monkeypatch)


@pytest.fixture
def gpus(monkeypatch):
    return batch_systems.gpu_counter(monkeypatch)


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "0 1 2 3"), ("", ""), ("2,0", "2 0"), ("1,9,2", "1"), ("-1", ""), ("0,-1,2", "0"),
     ("1,1", "1"), ("--1", "--1"), ("1,²", "1 ²"),
     (" 3 , 1 ", "3 1"), ("GPU-8a,MIG-2", "GPU-8a MIG-2")],
)  # fmt: skip
def test_visible_gpus(gpus, visible, names):
    gpus(4)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert accelerators.visible_gpus(env) == names.split()


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that fakes pynvml with a GPU count (None: no driver) and logs calls."""
    called = []

    def nvml(count):
        def init():
            called.append("init")
            if count is None:
                raise NVMLError("no driver")

        module = SimpleNamespace(
            NVMLError=NVMLError,
            nvmlInit=init,
            nvmlDeviceGetCount=lambda: count,
            nvmlShutdown=lambda: called.append("shutdown"),
        )
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return called

    return nvml


def test_gpus_by_nvml(nvml, monkeypatch):
    monkeypatch.setattr(accelerators, "_DRIVER_FOLDER", "/nowhere")
    called = nvml(3)
    assert accelerators.visible_gpus({}) == ["0", "1", "2"]
    assert called == ["init", "shutdown"]
    assert MPIClusterResolver().num_accelerators() == {"GPU": 3}
    nvml(None)
    assert accelerators.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == []
    assert MPIClusterResolver().num_accelerators() == {}


def test_gpus_by_what_the_driver_shows(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    monkeypatch.setattr(accelerators, "_DRIVER_FOLDER", str(tmp_path / "gpus"))
    assert accelerators.visible_gpus({}) == []
    for name in ("0000:3b:00.0", "0000:af:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert accelerators.visible_gpus({}) == ["0", "1"]
