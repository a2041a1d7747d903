"""Backends, debug levels and breakpoints, as in torch.distributed."""

import subprocess
import sys

import numpy as np
import pytest

import mpidist as dist

DIRECT = "cpu:mpi,cuda:nccl"
JOB_S = 60
STOPS = """
import os, sys
import mpidist as dist

dist.init_process_group(timeout=1)
secret = 41
for turn in range(2):
    dist.breakpoint(skip=1)
assert os.path.exists(sys.argv[1]), "the debugger has not been left yet"
os.write(1, f"rank {dist.get_rank()} goes on\\n".encode())
"""


@pytest.fixture
def level():
    """Put the debug level back that there was."""
    before = dist.get_debug_level()
    yield before
    dist.set_debug_level(before)


@pytest.fixture
def default():
    yield dist.init_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("asked", "name", "config"),
    [
        ("mpi", "mpi", "cpu:mpi,cuda:mpi"),
        ("CPU:MPI", "mpi", "cpu:mpi,cuda:mpi"),
        (DIRECT, DIRECT, DIRECT),
        (None, "mpi", "cpu:mpi,cuda:mpi"),
    ],
)
def test_the_backend_of_a_group(world, asked, name, config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    dist.init_process_group(asked)
    half = dist.new_group([world.rank])
    for group in (None, half):
        assert dist.get_backend(group) == name
        assert type(dist.get_backend(group)) is dist.Backend
        assert dist.get_backend_config(group) == config
    for ask in (dist.get_backend, dist.get_backend_config):
        with pytest.raises(ValueError, match="not a member"):
            ask(dist.GroupMember.NON_GROUP_MEMBER)
    # A group made with the name of another's backend, as scripts do.
    assert dist.get_backend(dist.new_group(backend=dist.get_backend())) == name
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        dist.get_backend_config()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "CPU"])
def test_the_default_backend_of_a_device_makes_a_group(world, device):
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend)
    array = np.ones(3)
    dist.all_reduce(array)
    assert dist.get_backend() == backend
    assert array.tolist() == [2.0] * 3
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_mpi_is_available(default):
    assert dist.is_mpi_available()
    assert dist.is_backend_available("MPI")
    assert dist.is_backend_available("cpu:mpi,cuda:mpi")


@pytest.mark.ranks(2)
def test_groups_are_counted(world):
    assert dist.get_pg_count() == 0
    dist.init_process_group()
    assert dist.get_pg_count() == 1
    pair, alone = dist.new_group(), dist.new_group([0])
    assert dist.get_pg_count() == (3 if world.rank == 0 else 2)
    dist.destroy_process_group(pair)
    if world.rank == 0:
        dist.destroy_process_group(alone)
    assert dist.get_pg_count() == 1
    dist.destroy_process_group()
    assert dist.get_pg_count() == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", dist.ReduceOp)
def test_reductions_of_complex_arrays(default, op):
    array = np.array([1 + 2j, 3 - 1j])
    taken = op(2) if op is dist.ReduceOp.PREMUL_SUM else op
    if dist.supports_complex(taken):
        dist.all_reduce(array, taken)
    else:
        with pytest.raises(TypeError):
            dist.all_reduce(array, taken)
    dist.barrier()
    assert dist.supports_complex(op) == dist.supports_complex(op.name.lower())
    expected = {"SUM": 2 + 4j, "AVG": 1 + 2j, "PRODUCT": -3 + 4j, "PREMUL_SUM": 4 + 8j}
    assert array[0] == expected.get(op.name, 1 + 2j)
    assert dist.supports_complex(op) == (op.name in expected)


@pytest.mark.ranks(2)
def test_a_debug_level_holds_for_groups_made_later(default, level):
    array, kinds = np.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    mine = kinds[dist.get_rank()]
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    watched = dist.new_group()
    with pytest.raises(ValueError, match="MAX"):
        dist.all_reduce(array, mine, group=watched)
    for relaxed in (dist.DebugLevel.OFF, dist.DebugLevel.INFO):
        dist.set_debug_level(relaxed)
        assert dist.get_debug_level() == relaxed
        made = dist.new_group()
        for _ in range(100):
            dist.barrier(made)
        dist.all_reduce(array.copy(), mine, group=made)  # not compared at once
        if relaxed is dist.DebugLevel.OFF:
            dist.destroy_process_group(made)
        else:
            with pytest.raises(ValueError, match="have called different collectives"):
                dist.destroy_process_group(made)
    assert array.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_the_first_rank_of_a_group_decides_its_level(default, level):
    if dist.get_rank() == 0:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    made, op = dist.new_group(), ("sum", "max")[dist.get_rank()]
    with pytest.raises(ValueError, match="MAX"):
        dist.all_reduce(np.ones(1), op, made)


def breaks(tmp_path, commands, *words):
    """Run the script that stops, with commands for the debugger."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    return subprocess.run(
        [sys.executable, "-m", "mpidist", "run", "-n", "2", *words, script, tmp_path / "left"],
        input=commands,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )


def test_one_rank_stops_and_the_others_wait(tmp_path):
    """Beyond their time limit of 1 s."""
    leave = f"open({str(tmp_path / 'left')!r}, 'w').close()"
    commands = f"up\np secret + 1\nimport time; time.sleep(1.5); {leave}\nc\n"
    done = breaks(tmp_path, commands, "--stdin")
    assert done.returncode == 0, done.stderr
    assert "rank 0 has stopped" in done.stdout
    assert "42" in done.stdout
    assert done.stdout.count("has stopped") == 1
    assert {"rank 0 goes on", "rank 1 goes on"} <= {
        line.rpartition("(Pdb) ")[2] for line in done.stdout.splitlines()
    }
    assert done.stderr.count("call 1 of breakpoint is skipped") == 2


def test_a_debugger_without_input_says_where_to_get_it(tmp_path):
    done = breaks(tmp_path, "c\n")
    assert done.returncode != 0
    assert "standard input of rank 0 has ended: mpidist run --stdin gives" in done.stdout


@pytest.mark.ranks(2)
def test_a_breakpoint_of_a_rank_that_is_not_there(default):
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 2"):
            dist.breakpoint(rank)
    dist.barrier()
