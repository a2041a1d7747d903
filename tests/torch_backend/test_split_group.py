"""torch.distributed.split_group, on a machine that only claims to have a GPU."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mpidist.torch import MpidistProcessGroup

DEVICE = torch.device("cuda:0")


@pytest.fixture
def accelerator(monkeypatch):
    """Let torch find a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )


@pytest.fixture
def device_group(accelerator):
    """Make torch's default group with the device of this rank."""
    dist.init_process_group("mpidist", device_id=DEVICE, timeout=timedelta(seconds=20))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_split(device_group):
    rank = dist.get_rank()
    assert device_group.bound_device_id == DEVICE
    part = dist.split_group(split_ranks=[[0, 2], [1]], group_desc="halves")
    assert dist.get_process_group_ranks(part) == ([1] if rank == 1 else [0, 2])
    assert (part.group_desc, part.bound_device_id) == ("halves", DEVICE)
    assert part.group.timeout == 1800
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=part)
    assert tensor.tolist() == ([1, 1] if rank == 1 else [2, 2])
    assert type(part) is type(device_group)
    store = part.get_group_store()
    store.set(f"key {rank}", "value")
    assert store.get(f"key {1 if rank == 1 else 2 - rank}") == b"value"
    dist.destroy_process_group(part)


@pytest.mark.ranks(3)
def test_split_of_a_part_and_ranks_outside(device_group):
    rank = dist.get_rank()
    part = dist.split_group(split_ranks=[[1, 2]], timeout=timedelta(seconds=7))
    if rank == 0:
        assert part in (None, dist.GroupMember.NON_GROUP_MEMBER)
    else:
        assert part.group.timeout == 7
        again = dist.split_group(part, [[0], [1]])  # ranks in the part
        assert dist.get_process_group_ranks(again) == [rank]
        dist.barrier(again)
    dist.barrier()


@pytest.mark.ranks(2)
def test_options_are_refused(device_group):
    with pytest.raises(ValueError, match="no options"):
        dist.split_group(split_ranks=[[0, 1]], pg_options=object())


@pytest.mark.ranks(3)
def test_new_groups_beside(device_group):
    # With a device, torch asks the default group whether new groups are splits of it.
    rank = dist.get_rank()
    for backend in ("mpidist", "gloo"):
        group = dist.new_group([0, 2], backend=backend)
        if rank != 1:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
    dist.barrier()


@pytest.mark.ranks(2)
def test_no_split_source_for_nccl(device_group):
    # torch would give this group to NCCL's constructor, which refuses it.
    assert dist.distributed_c10d._get_split_source(device_group) is None
    assert device_group._get_backend(torch.device("cuda")).supports_splitting


@pytest.mark.ranks(2)
def test_device_mesh_splits_the_default_group(device_group, monkeypatch):
    rank, split, calls = dist.get_rank(), MpidistProcessGroup.split_group, []

    def count(*args, **named):
        calls.append(args)
        return split(*args, **named)

    monkeypatch.setattr(MpidistProcessGroup, "split_group", count)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor, group=mesh.get_group("inner"))
    assert tensor.item() == 1
    assert dist.get_world_size(mesh.get_group("outer")) == 1
    assert calls


@pytest.mark.ranks(2)
def test_group_with_another_backend_is_not_split(accelerator):
    dist.init_process_group("cuda:mpidist,cpu:gloo", device_id=DEVICE)
    assert dist.group.WORLD.bound_device_id is None
    with pytest.raises(RuntimeError, match="not safe to split"):
        dist.split_group(split_ranks=[[0], [1]])
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group()
