"""Workers with GPUs and parameter servers, on ranks; the main job there."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from _cases.clusters import on_cluster, spec_of
from safetensors.numpy import load_file

import mpidist
from strategy import (
    IndexedSlices,
    ParameterServerStrategy,
    get_replica_context,
    get_variable,
    optimizers,
)

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "train_digits.py"
SIZES = [5, 4096, (1 << 18) + 5]  # staged from 4096 on

# The main job with the stand-in for CuPy.
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_variables_on_a_gpu_of_a_server_are_those_of_its_host(world, xp, transport, mode):
    def gradient(worker, step, size):
        return np.random.default_rng([worker, step]).normal(size=size).astype("f4")

    def train(strategy, workers):
        with strategy.scope():
            made = [
                get_variable(f"{dtype} {size}", size, dtype, 1.0)
                for size in SIZES
                for dtype in ("f4", "f2")
            ]
        adam, me = optimizers.Adam(0.1), strategy.worker_index
        for step in range(3):
            whole = [(gradient(me, step, v.shape), v) for v in made]
            rows = [
                (IndexedSlices(grad[:: 2 + me], np.arange(0, len(grad), 2 + me)), v)
                for grad, v in whole
            ]
            for turn in range(strategy.num_workers):
                if mode == "sync" or turn == me:
                    for pairs in (whole, rows, whole[::2] + rows[1::2]):
                        adam.apply_gradients(pairs).wait()
                workers.barrier()
            if me == 0:
                for v in made:
                    v.assign_add(v.numpy() * 0.5)
            workers.barrier()
        return [v.numpy() for v in made], {v.device for v in made}

    (host, devices), (there, devices_there) = (
        on_cluster(world, 1, train, transport, mode=mode, parameter_devices=names) or (None, None)
        for names in (None, ["/job:ps/task:0/device:GPU:0"])
    )
    if host is not None:
        assert devices == {"/job:ps/task:0/device:CPU:0"}
        assert devices_there == {"/job:ps/task:0/device:GPU:0"}
        for one, other in zip(host, there, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.ranks(2)
def test_readers_of_a_variable_on_a_gpu_see_whole_versions(world, xp):
    """Read in one process while the GPU of another process writes."""

    def train(strategy, workers):
        size = 3 * (1 << 18) + 5
        with strategy.scope():
            weight = get_variable("weight", size, initializer="zeros", dtype="f4")
        sgd, ones = optimizers.SGD(1.0, momentum=1e-30), np.ones(size, "f4")
        (remote,) = weight.remotes
        seen, torn, over = [], [], threading.Event()

        def read():
            out = np.empty(size, "f4")
            while not over.is_set():
                if remote.shared.try_read(out) is not None:
                    seen.append(out[0])
                    torn.extend([seen[-1]] * bool(out.min() != out.max()))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for _ in range(10):
            sgd.apply_gradients([(-ones, weight)]).wait()
        over.set()
        reader.join(30)
        assert not reader.is_alive()
        assert not torn
        assert seen == sorted(seen)
        return weight.numpy()

    value = on_cluster(world, 1, train, "shared", parameter_devices=["/job:ps/task:0/device:GPU:0"])
    if value is not None:
        np.testing.assert_array_equal(value, np.full(value.size, 10))


@pytest.mark.ranks(2)
def test_a_gpu_that_a_server_does_not_have(world, xp):
    count = xp.cuda.runtime.getDeviceCount()
    spec = spec_of(world, 1)
    job, task = spec.task_of(world.rank)
    with mpidist.Server(spec, job, task) as server:
        if job == "ps":
            server.join()
            return
        name = f"/job:ps/task:0/device:GPU:{count}"
        with pytest.raises(mpidist.errors.InvalidArgumentError, match=f"ps 0 sees {count} GPUs"):
            ParameterServerStrategy(spec, parameter_devices=[name])


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
