"""Tensors of torch in the place of NumPy's arrays, where torch is installed."""

import numpy as np
import pytest

from mpidist import ProcessGroup

torch = pytest.importorskip("torch")

DTYPES = ("float32", "float64", "int64", "bool", "float16", "bfloat16")
LAYOUTS = ("contiguous", "strided", "turned", "scalar", "empty")


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def values_of(rank, name, shape=(4, 6)):
    """Small integers, which every dtype has exactly, as float64."""
    rng = np.random.default_rng(100 + rank)
    return rng.integers(0, 2 if name == "bool" else 9, shape).astype(np.float64)


class Tensors:
    """Makes tensors of a dtype in a memory layout, and cuts what NumPy expects likewise."""

    def __init__(self, name, layout):
        self.name, self.layout = name, layout

    def make(self, values):
        tensor = torch.tensor(values, dtype=getattr(torch, self.name))
        if self.layout == "strided":
            wide = torch.ones(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
            wide[:, ::2] = tensor
            return wide[:, ::2]
        if self.layout == "turned":
            return tensor.t().contiguous().t()
        return {"scalar": tensor[0, 0].clone(), "empty": tensor[:0]}.get(self.layout, tensor)

    def zeros(self, shape=(4, 6)):
        return self.make(np.zeros(shape))

    def check(self, tensor, values):
        expected = {"scalar": values[0, 0], "empty": values[:0]}.get(self.layout, values)
        assert tensor.dtype == getattr(torch, self.name)
        np.testing.assert_array_equal(tensor.double().numpy(), expected)
        base = tensor._base
        if self.layout == "strided":
            assert base is not None
            assert bool((base[:, 1::2] == 1).all())  # the memory between the elements


@pytest.fixture(params=[(name, layout) for name in DTYPES for layout in LAYOUTS], ids=str)
def tensors(request):
    return Tensors(*request.param)


@pytest.mark.ranks(2)
def test_all_reduce(group, tensors):
    parts = [values_of(rank, tensors.name) for rank in group.ranks]
    results = {}
    ops = {"sum": np.sum, "max": np.max, "min": np.min}
    for op in ops:
        tensor = results[op] = tensors.make(parts[group.rank()])
        address = tensor.data_ptr()
        group.all_reduce(tensor, op)
        assert tensor.data_ptr() == address
    if tensors.name == "bool":
        ops["sum"] = np.max
    for op, reduce in ops.items():
        tensors.check(results[op], reduce(parts, axis=0))


@pytest.mark.ranks(2)
def test_broadcast_and_all_gather(group, tensors):
    parts = [values_of(rank, tensors.name) for rank in group.ranks]
    copied = tensors.make(parts[group.rank()])
    group.broadcast(copied, 1)
    gathered = [tensors.zeros() for _ in group.ranks]
    own = tensors.make(parts[group.rank()])
    group.all_gather(gathered, own)
    work = group.all_reduce(tensors.zeros(), async_op=True)
    work.wait()
    tensors.check(copied, parts[1])
    tensors.check(own, parts[group.rank()])
    for tensor, part in zip(gathered, parts, strict=True):
        tensors.check(tensor, part)


@pytest.mark.ranks(2)
def test_reduce_scatter(group, tensors):
    parts = [
        [values_of(10 * rank + to, tensors.name) for to in group.ranks] for rank in group.ranks
    ]
    result = tensors.zeros()
    group.reduce_scatter(result, [tensors.make(part) for part in parts[group.rank()]])
    expected = sum(mine[group.rank()] for mine in parts)
    tensors.check(result, expected.clip(max=1) if tensors.name == "bool" else expected)


@pytest.mark.ranks(2)
def test_all_to_all_single(group, tensors):
    if tensors.layout == "scalar":
        pytest.skip("a scalar has no rows")
    parts = [values_of(rank, tensors.name) for rank in group.ranks]
    result = tensors.zeros()
    group.all_to_all_single(result, tensors.make(parts[group.rank()]))
    half = slice(2 * group.rank(), 2 * group.rank() + 2)
    tensors.check(result, np.concatenate([part[half] for part in parts]))


@pytest.mark.ranks(2)
def test_messages(group, tensors):
    values = values_of(0, tensors.name)
    if group.rank() == 0:
        group.send(tensors.make(values), 1)
        return
    result = tensors.zeros()
    group.recv(result, 0)
    tensors.check(result, values)


@pytest.mark.ranks(2)
def test_torch_and_numpy_meet(group):
    """One rank gives a tensor, the other an array of the same dtype."""
    import ml_dtypes

    for name in DTYPES:
        values = values_of(0, name)
        if group.rank():
            other = np.zeros(values.shape, getattr(ml_dtypes, name, None) or name)
            group.broadcast(other, 0)
            np.testing.assert_array_equal(other.astype(float), values)
        else:
            group.broadcast(torch.tensor(values, dtype=getattr(torch, name)), 0)


def odd_tensors():
    """Tensors that are no plain host memory: what each is, the error, and its words."""
    halves = torch.ones(3, dtype=torch.complex64)
    return {
        "leaf": (torch.ones(3, requires_grad=True), ValueError, r"use tensor\.detach\(\)"),
        "parameter": (torch.nn.Parameter(torch.ones(3)), ValueError, r"use tensor\.detach\(\)"),
        "result": (2 * torch.ones(3, requires_grad=True), ValueError, r"tensor\.detach\(\)"),
        "half": (torch.ones(3, dtype=torch.bfloat16, requires_grad=True), ValueError, "detach"),
        "conjugate": (halves.conj(), ValueError, r"use tensor\.resolve_conj\(\)"),
        "negative": (halves.conj().imag, ValueError, r"resolve_neg\(\)"),
        "sparse": (torch.eye(3).to_sparse(), TypeError, r"not dense .*tensor\.to_dense\(\)"),
        "meta": (torch.ones(3, device="meta"), TypeError, "meta tensor has no memory; use"),
        "packed": (
            torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            TypeError,
            "float4_e2m1fn_x2 has no NumPy array",
        ),
    }


@pytest.mark.ranks(2)
def test_expanded_tensors_take_no_result(group):
    expanded = torch.ones(2, 1).expand(2, 3)
    with pytest.raises(ValueError, match="as in an expanded or sliding view; pass a copy"):
        group.all_reduce(expanded)
    output = [torch.zeros(2, 3) for _ in range(2)]
    group.all_gather(output, expanded)  # to be read, it will do
    assert all(torch.equal(tensor, torch.ones(2, 3)) for tensor in output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["leaf", "parameter", "result", "half", "conjugate", "negative",
                                  "sparse", "meta", "packed"])  # fmt: skip
def test_what_is_no_plain_memory(group, what):
    tensor, error, text = odd_tensors()[what]
    peer = 1 - group.rank()
    for use in (
        lambda: group.all_reduce(tensor),
        lambda: group.broadcast(tensor, 0),
        lambda: group.all_gather([np.zeros(3)] * 2, tensor),
        lambda: group.all_to_all_single(np.zeros(3), tensor),
        lambda: group.send(tensor, peer),
        lambda: group.irecv(tensor, peer),
    ):
        with pytest.raises(error, match=text):
            use()
    assert group.comm.allreduce(1) == 2


@pytest.mark.ranks(2)
def test_a_detached_leaf(group):
    leaf = torch.ones(3, requires_grad=True)
    group.all_reduce(leaf.detach())
    assert leaf.requires_grad
    assert leaf.tolist() == [2, 2, 2]
    (leaf * leaf).sum().backward()
    group.all_reduce(leaf.grad, "avg")
    assert leaf.grad.tolist() == [4, 4, 4]


@pytest.mark.ranks(2)
def test_bits_of_every_size(group):
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "complex64", "uint16", "int8"):
        dtype = getattr(torch, name)
        for tensor in (torch.tensor(float(group.rank())), torch.eye(4)[:, ::2] * group.rank()):
            sent = tensor.to(dtype)
            group.broadcast(sent, 1)
            expected = torch.ones(()) if tensor.ndim == 0 else torch.eye(4)[:, ::2]
            assert torch.equal(sent.to(torch.complex128), expected.to(torch.complex128))
