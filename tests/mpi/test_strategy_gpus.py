"""Workers with GPUs and parameter servers, on ranks; the main job there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _cases.clusters import on_cluster
from safetensors.numpy import load_file

from strategy import get_replica_context, get_variable, optimizers

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "train_digits.py"
SIZES = [5, 4096, (1 << 18) + 5]  # staged from 4096 on

# The main job where CuPy is the stand-in.
ON_STAND_IN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
sys.argv[0] = {str(SCRIPT)!r}
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
@pytest.mark.parametrize("size", SIZES)
def test_steps_are_those_of_the_cpu(world, xp, transport, size):
    gpus = min(2, xp.cuda.runtime.getDeviceCount())

    def gradient(worker, replica, step):
        rng = np.random.default_rng([worker, replica, step])
        return rng.normal(size=size).astype("f4")

    def train(strategy, workers):
        with strategy.scope():
            weight = get_variable("weight", size, initializer="ones", dtype="f4")
        adam = optimizers.Adam(0.1)
        on_gpu = bool(strategy.gpus)

        def step(number):
            replica = get_replica_context().replica_id_in_sync_group
            value = weight.read_value()
            assert isinstance(value, xp.ndarray) == on_gpu
            grad = gradient(strategy.worker_index, replica, number)
            if on_gpu:
                grad = xp.asarray(grad)
            adam.apply_gradients([(value * 0.5 + grad, weight)]).wait()

        for number in range(4):
            strategy.run(step, (number,))
            workers.barrier()
        return weight.numpy()

    results = [
        on_cluster(world, 1, train, transport, mode="sync", **options)
        for options in ({"num_replicas_per_worker": gpus}, {"num_gpus_per_worker": gpus})
    ]
    if results[0] is not None:
        np.testing.assert_array_equal(*results)


def test_the_main_job_on_a_gpu_is_the_one_on_the_cpu(tmp_path):
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}

    def weights(gpus):
        folder = tmp_path / gpus
        words = ["--mode", "sync", "--epochs", "2", "--quiet", "--output-dir", str(folder)]
        command = [sys.executable, "-c", ON_STAND_IN, "--gpus", gpus, *words]
        subprocess.run(command, check=True, timeout=120, env=environ, cwd=ROOT)
        (file,) = sorted(folder.glob("checkpoints/step-*/*.safetensors"))[-1:]
        return load_file(file)

    on_cpu, on_gpu = weights("0"), weights("1")
    assert on_cpu.keys() == on_gpu.keys()
    for name, value in on_cpu.items():
        np.testing.assert_array_equal(on_gpu[name], value, err_msg=name)
