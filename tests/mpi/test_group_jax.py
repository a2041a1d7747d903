"""Arrays of JAX in the place of NumPy's, where JAX is installed."""

import numpy as np
import pytest

from mpidist import ProcessGroup

jax = pytest.importorskip("jax")


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["float32", "int32", "bfloat16", "float16", "bool"])
def test_jax_arrays_are_given(group, name):
    parts = [np.random.default_rng(rank).integers(0, 2, (4, 6)) for rank in group.ranks]
    own = jax.numpy.asarray(parts[group.rank()], dtype=name)
    gathered = [np.zeros(own.shape, own.dtype) for _ in group.ranks]
    group.all_gather(gathered, own)
    if group.rank() == 0:
        group.send(own, 1)
    else:
        group.recv(gathered[0], 0)
    for array, part in zip(gathered, parts, strict=True):
        np.testing.assert_array_equal(array.astype(np.float64), part)


@pytest.mark.ranks(2)
def test_jax_arrays_take_no_result(group):
    array = jax.numpy.ones(3)
    for use in (
        lambda: group.all_reduce(array),
        lambda: group.broadcast(array, 1 - group.rank()),
        lambda: group.irecv(array, 1 - group.rank()),
        lambda: group.all_gather_into_tensor(jax.numpy.ones(6), array),
    ):
        with pytest.raises(ValueError, match="read-only; pass a writable copy"):
            use()
    assert array.tolist() == [1, 1, 1]
