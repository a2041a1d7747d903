"""CuPy without a device: host arrays work, and GPU features report the problem."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# CuPy without a driver: the import works, and everything else fails.
NO_DEVICE = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})
from _cases import stand_in_cupy as cupy

def fail(*_):
    raise cupy.CUDARuntimeError(35)

for name in ("getDeviceCount", "getDevice", "memcpyAsync", "pointerGetAttributes"):
    setattr(cupy.cuda.runtime, name, fail)
cupy.failure.append(35)
sys.modules["cupy"] = cupy
"""
HOST = """
import sys
import numpy as np
import mpidist
from dataservice import Dataset
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

group = mpidist.init_process_group()
array = np.ones(3)
group.all_reduce(array)
assert (array == group.size()).all()
gathered = [None] * group.size()
group.all_gather_object(gathered, {"array": array})
resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        strategy = ParameterServerStrategy(resolver, **GIVEN)
        with strategy.scope():
            weight = get_variable("weight", 4, initializer="ones", dtype="f4")

        def step(batch):
            optimizers.SGD(0.5).apply_gradients([(np.ones(4, "f4"), weight)]).wait()

        for batch in Dataset.range(4).batch(2):
            strategy.run(step, (batch,))
        print("trained to", weight.numpy(), flush=True)
assert "cupy" not in sys.modules
"""
TOLD = ("can use no GPU (cudaError35): look at nvidia-smi", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def run(tmp_path):
    """Provide a runner of Python commands with a CuPy that finds no device."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "cupy.py").write_text(NO_DEVICE)
    paths = [str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]

    def run(*words):
        return subprocess.run(
            [sys.executable, *map(str, words)], cwd=tmp_path, text=True, capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            timeout=60, check=False,
        )  # fmt: skip

    return run


def script(folder, source, **given):
    path = folder / "script.py"
    path.write_text(source.replace("GIVEN", repr(given)))
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_arrays_know_nothing_of_cupy(run, tmp_path, ranks):
    done = run("-m", "mpidist", "run", "-n", ranks, script(tmp_path, HOST))
    assert done.returncode == 0, done.stderr
    assert "trained to [0. 0. 0. 0.]" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_strategy_with_gpus_says_that_there_are_none(run, tmp_path, ranks):
    job = script(tmp_path, HOST, num_gpus_per_worker=1)
    done = run("-m", "mpidist", "run", "-n", ranks, job)
    assert done.returncode == 1
    (reason,) = [line for line in done.stderr.splitlines() if "failed first" in line]
    assert all(text in reason for text in TOLD), reason
    assert "this process of rank " in reason


def test_a_dataset_for_a_gpu(run, tmp_path):
    source = """
from dataservice import Dataset
for element in Dataset.range(4).prefetch_to_device("GPU:0"):
    pass
"""
    done = run(script(tmp_path, source))
    assert done.returncode == 1
    assert all(text in done.stderr.splitlines()[-1] for text in TOLD), done.stderr


def test_the_main_job_on_a_gpu(run, tmp_path):
    done = run(ROOT / "scripts" / "train_digits.py", "--gpus", 1, "--quiet", "--output-dir", "out")
    assert done.returncode == 1
    assert all(text in done.stderr for text in TOLD), done.stderr


def test_the_doctor(run):
    done = run("-m", "mpidist", "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert findings["CuPy"]["verdict"] == "warning"
    assert findings["CuPy"]["fact"] == "no GPU can be used: cudaError35"
    assert "nvidia-smi" in findings["CuPy"]["remedy"]
    assert findings["two ranks"]["verdict"] == "ok"
    assert not findings["GPU memory"]["remedy"]
