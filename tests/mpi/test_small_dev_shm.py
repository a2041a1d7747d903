"""Jobs on a /dev/shm that is small, or full: variables are shared nevertheless."""

import os
import subprocess

import pytest
from _cases.jobs import run_job

TRAIN = """
    import logging, os, sys
    logging.basicConfig()
    import numpy as np
    import mpidist
    from mpidist.cluster_resolver import MPIClusterResolver
    from strategy import ParameterServerStrategy, get_variable, optimizers
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    job, index = resolver.task_type, resolver.task_id

    def fill():
        if os.environ.get("FILL") and (job, index) == ("worker", 0):
            with open("/dev/shm/filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * 4096)
                except OSError:
                    print("filled", flush=True)
        mpidist.barrier()

    mpidist.init_process_group()
    if os.environ.get("FILL") == "before":
        fill()
    with mpidist.Server(resolver.cluster_spec(), job, index) as server:
        if os.environ.get("FILL") == "after":
            fill()
        if job == "ps":
            server.join()
        else:
            group = server.job_group("worker")
            try:
                strategy = ParameterServerStrategy(transport=os.environ.get("TRANSPORT", "auto"))
                with strategy.scope():
                    small = get_variable("small", 1000, "float64", 1.0)
                    elements = int(os.environ["LARGE"])
                    large = get_variable("large", elements, "float64", 1.0)
            except mpidist.errors.OpError as error:
                print("refused:", type(error).__name__, error, flush=True)
                group.barrier()
                sys.exit(0)
            for _ in range(3):
                grads = [(np.ones(v.shape), v) for v in (small, large)]
                optimizers.SGD(1.0).apply_gradients(grads)
            large.read_value()
            group.barrier()
            expected = 1 - 3.0 * strategy.num_workers
            good = all((v.read_value() == expected).all() for v in (small, large))
            where = large.remotes[0].shared is not None
            print("good" if good else "wrong", "shared" if where else "messages", flush=True)
            group.barrier()
"""


def private_shm(size):
    """Run what follows with a /dev/shm of its own, of a size; skips where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a /dev/shm of another size")
    line = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", line, "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a process mount a /dev/shm of its own")
    return words


def train_with(tmp_path, size, large=2 << 20, **env):
    """Train two variables, one of 8 KB and a large one of some elements of 8 B."""
    env["LARGE"] = str(large)
    return run_job(
        tmp_path, ["--ps", "1", "--worker", "2"], TRAIN, env=env, inside=private_shm(size)
    )


def check_shared(ended):
    assert ended.status == 0, ended.err
    assert ended.out.count("good shared") == 2


def test_a_small_dev_shm(tmp_path):
    check_shared(train_with(tmp_path, "4m"))


@pytest.mark.long
@pytest.mark.parametrize("size", ["8m", "16m", "17m", "24m", "40m", "64m"])
def test_small_ones_of_many_sizes(tmp_path, size):
    check_shared(train_with(tmp_path, size, large=8 << 20))


def test_a_dev_shm_too_small_for_the_library(tmp_path):
    """It starts without, or a rank says what is missing before it would be killed."""
    ended = train_with(tmp_path, "1m")
    shown = ended.out + ended.err
    assert "signal" not in shown.lower()
    assert ended.out.count("good") == 2 or "MPICH needs 3264 KiB for the 3 rank(s)" in ended.err


@pytest.mark.parametrize("fill", [pytest.param("before", marks=pytest.mark.long), "after"])
def test_a_dev_shm_that_is_full(tmp_path, fill):
    ended = train_with(tmp_path, "200m", FILL=fill, TRANSPORT="shared")
    check_shared(ended)
    assert ended.out.count("filled") == 1


@pytest.mark.parametrize("option", ["nr_inodes=1", "ro"])
def test_a_dev_shm_without_room_for_the_launcher(tmp_path, option):
    ended = train_with(tmp_path, f"20m,{option}")
    assert ended.status == 1
    assert "Traceback" not in ended.err
    assert "mpidist run: MPI keeps files of the job in /dev/shm" in ended.err
    assert "have it writable" in ended.err
