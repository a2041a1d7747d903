"""Jobs that use the backend as scripts do: launch, rendezvous, errors and ends."""

import json
import re
import subprocess
import sys

import pytest
import torch
from _cases.jobs import run_job, run_ranks

# Neither imports mpidist nor knows an address.
UNEDITED = """\
    import json, os
    import torch
    import torch.distributed as dist

    dist.init_process_group({backend!r})
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    ranks = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if dist.get_rank() == 0:
        print(json.dumps([tensor.tolist(), ranks, dist.get_backend()]))
    dist.destroy_process_group()
"""
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@pytest.mark.parametrize("start", ["mpidist run", "mpiexec"])
@pytest.mark.parametrize(
    "backend",
    [
        "mpidist",
        "gloo",
        pytest.param("mpi", marks=pytest.mark.skipif(not NEW_ENOUGH, reason="needs torch 2.14")),
    ],
)
def test_unedited_script(start, backend, tmp_path):
    source = UNEDITED.format(backend=backend)
    if start == "mpiexec":
        job = run_ranks(tmp_path, 2, source, timeout_s=60)
    else:
        job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status == 0, job.err
    values, ranks, used = json.loads(job.out.splitlines()[-1])
    assert (values, ranks, used) == ([2.0] * 3, ["0", "2", "0", "2"], backend)


def test_a_second_rendezvous_has_no_entries_of_the_first(tmp_path):
    source = """\
        import time, torch, torch.distributed as dist
        from datetime import timedelta
        for number in range(3):
            dist.init_process_group("gloo", timeout=timedelta(seconds=20))
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            rank = dist.get_rank()
            dist.destroy_process_group()
            if rank:
                time.sleep(0.5)  # gloo on rank 0 looks for the address of rank 1 before it is there
        print(tensor.item())
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert (job.status, job.out.split()) == (0, ["2.0", "2.0"]), job.err


def test_plain_process(tmp_path):
    source = """\
        import torch, torch.distributed as dist, mpidist.torch
        dist.init_process_group("mpidist")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        print(tensor.tolist(), dist.get_world_size())
    """
    job = run_job(tmp_path, ["-n", "1"], source, timeout_s=60)
    assert (job.status, job.out.strip()) == (0, "[1.0, 1.0] 1"), job.err


def test_uncaught_exception_shows_its_traceback(tmp_path):
    source = """\
        import torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        if dist.get_rank() == 1:
            raise RuntimeError("a mistake of rank 1")
        dist.barrier()
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status == 1
    assert 'script.py", line 4' in job.err
    assert "rank 1" in job.err.splitlines()[-1]
    assert "a mistake of rank 1" in job.err.splitlines()[-1]


def test_killed_rank_ends_the_job(tmp_path):
    source = """\
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(2))
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status != 0
    assert "rank 1" in job.err.splitlines()[-1]
    assert "SIGKILL" in job.err.splitlines()[-1]


def test_rank_that_leaves_is_named(tmp_path):
    source = """\
        import torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        dist.barrier()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status != 0
    assert "waits for rank 1, whose script has ended" in job.err


def test_addresses_of_torchrun_are_not_needed(tmp_path):
    variables = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29511"}  # an address of no host
    job = run_job(
        tmp_path, ["-n", "2"], UNEDITED.format(backend="mpidist"), timeout_s=60, env=variables
    )
    assert job.status == 0, job.err


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_variables_that_contradict_mpi(variable, tmp_path):
    source = """\
        import torch.distributed as dist, mpidist.torch
        dist.init_process_group("mpidist")
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60, env={variable: "7"})
    assert job.status == 1
    assert f"the environment variable {variable}=7 contradicts MPI" in job.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("rank=own, world_size=3", r"world_size=3 contradicts MPI, which has rank \d of 2"),
        ("rank=1 - own, world_size=2", r"rank=(\d) contradicts MPI, which has rank (?!\1)\d of 2"),
    ],
)
def test_arguments_that_contradict_mpi(arguments, text, tmp_path):
    source = f"""\
        import os
        import torch.distributed as dist, mpidist.torch
        own = int(os.environ["RANK"])
        dist.init_process_group("mpidist", {arguments})
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status == 1
    assert re.search(text, job.err), job.err


def test_torchs_debug_level_compares_every_call(tmp_path):
    source = """\
        import torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        for number in range(150):
            op = dist.ReduceOp.MAX if number == 140 and dist.get_rank() else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(2), op)
    """
    variables = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60, env=variables)
    assert job.status == 1
    assert "different collectives as collective number 141" in job.err


def test_backward_has_the_time_limit_of_its_group(tmp_path):
    source = """\
        import time, torch, torch.distributed as dist
        from datetime import timedelta
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("mpidist", timeout=timedelta(seconds=1))
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        if dist.get_rank() == 1:
            time.sleep(30)
        model(torch.ones(2, 4)).sum().backward()
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=25)
    assert job.status == 1
    assert "has not completed within 1 s" in job.err


def test_a_given_store_that_contradicts_mpi(tmp_path):
    source = """\
        import torch.distributed as dist
        dist.init_process_group("mpidist", store=dist.HashStore(), rank=0, world_size=2)
    """
    job = run_job(tmp_path, ["-n", "1"], source, timeout_s=60)
    assert job.status == 1
    assert "torch has rank 0 of 2, but MPI has rank 0 of 1" in job.err


def test_torchrun_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import torch\ntorch.distributed.init_process_group("mpidist")\n')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 1
    assert "torchrun has started 2 processes, and each is an MPI job of one rank" in ended.stderr


def test_forked_child_is_refused(tmp_path):
    source = """\
        import os, torch, torch.distributed as dist
        dist.init_process_group("mpidist")
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        dist.barrier()
    """
    job = run_job(tmp_path, ["-n", "2"], source, timeout_s=60)
    assert job.status == 0, job.err
    assert job.out.count("forkserver") == 2


def test_gloo_among_child_processes_of_a_rank(tmp_path):
    source = """\
        import os
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def child(rank, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), WORLD_SIZE="2")
            dist.init_process_group("gloo")
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            os.write(1, f"{tensor.item()}\\n".encode())  # whole, beside the other child
            dist.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            mp.spawn(child, (port,), nprocs=2)
    """
    job = run_job(tmp_path, ["-n", "1"], source, timeout_s=90)
    assert job.status == 0, job.err
    assert job.out.split() == ["2.0", "2.0"]


def test_groups_in_different_orders(tmp_path):
    source = """\
        from datetime import timedelta
        import torch.distributed as dist
        dist.init_process_group("mpidist")
        rank = dist.get_rank()
        orders = {0: [[0, 1], [2, 0]], 1: [[1, 2], [0, 1]], 2: [[2, 0], [1, 2]]}
        for ranks in orders[rank]:
            dist.new_group(
                ranks, timeout=timedelta(seconds=2), use_local_synchronization=True
            )
    """
    job = run_job(tmp_path, ["-n", "3"], source, timeout_s=60, env={"MPIDIST_STALL_S": "1"})
    assert job.status != 0
    assert "has waited for 2 s, and the time limit of the group is 2 s" in job.err
    assert "make all groups in the same order on all ranks" in job.err.splitlines()[-1]
