"""mpidist.Checkpoints with tensors."""

import pytest
from _cases.jobs import run_job

SCRIPT = """
    import os

    import torch
    import mpidist as dist

    dist.init_process_group()
    rank = dist.get_rank()
    saved = os.path.join(os.path.dirname(os.path.abspath(__file__)), "saved")
    tensors = {"w": torch.full((3,), float(rank)), "b": torch.ones(2, 2, dtype=torch.bfloat16).T}
    with dist.Checkpoints(saved, tensors, every=EVERY) as checkpoints:
        for _ in range(5):
            tensors["w"] += 1
            checkpoints.step()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert dist.Checkpoints(saved, tensors).restore() == 5
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
"""


@pytest.mark.parametrize("every", [None, 2])
def test_tensors_are_restored_in_place(tmp_path, every):
    ended = run_job(tmp_path, ["-n", "2"], SCRIPT.replace("EVERY", repr(every)))
    assert ended.status == 0, ended.err
