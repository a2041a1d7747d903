"""Variables in parts, on servers that are threads of this process."""

import json
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster, variable
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mpidist import errors
from strategy import IndexedSlices, ShardedVariable, get_variable, optimizers
from strategy.client import changes
from strategy.client.connection import push_all
from strategy.gradients import gradient_changes
from strategy.partitioners import FixedShardsPartitioner, FlatPartitioner, fixed_size_partitioner

PARTITIONERS = {
    "whole": None,
    "rows": fixed_size_partitioner(3),
    "columns": fixed_size_partitioner(2, axis=1),
    "flat": FlatPartitioner(3),
}
SHAPE = (7, 4, 2)


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def sharded(strategy, name, initializer, kind="rows", dtype=np.float64, shape=SHAPE):
    with strategy.scope():
        return get_variable(name, shape, dtype, initializer, partitioner=PARTITIONERS[kind])


def numbers(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


DIVIDED = [kind for kind in PARTITIONERS if kind != "whole"]


@pytest.fixture(params=[(kind, near) for kind in DIVIDED for near in (True, False)], ids=str)
def pair(request, make):
    """Return a variable in parts, a whole variable of the same values, and their strategy."""
    kind, near = request.param
    strategy = make(servers=2, near=near).worker(0)
    value = numbers()
    return sharded(strategy, "v", value, kind), variable(strategy, "w", SHAPE, value), strategy


def test_it_acts_as_a_whole_one(pair):
    v, w, _ = pair
    assert isinstance(v, ShardedVariable)
    assert (v.shape, v.dtype, len(v)) == (SHAPE, np.float64, 7)
    connections = {id(remote.connection) for remote in v.remotes}
    assert len(connections) == 2
    for change in (
        lambda u: u.assign(numbers(seed=1)),
        lambda u: u.assign_add(np.asfortranarray(numbers(seed=2))),
        lambda u: u.assign_sub(2),
        lambda u: u.scatter_update([6, 0, 6], numbers((3, 4, 2), 3)),
        lambda u: u.scatter_add([5, 1, 5, 2], numbers((4, 4, 2), 4)),
        lambda u: u.scatter_mul(IndexedSlices(numbers((2, 4, 2), 5), [3, 4])),
        lambda u: u.scatter_max([0, 3], 0.5),
        lambda u: u.scatter_sub([], np.empty((0, 4, 2))),
    ):
        versions, version = change(v), change(w)
        assert versions == (version,) * len(v.parts)
        np.testing.assert_array_equal(v, w)
    out = np.empty(SHAPE)
    assert v.read_value(out) is out
    np.testing.assert_array_equal(out, w)
    np.testing.assert_array_equal(v.read_value(consistent=False), out)
    np.testing.assert_array_equal(v + v * 2, 3 * out)
    np.testing.assert_array_equal(v[2:, 1], out[2:, 1])
    assert v.version == (w.version,) * len(v.parts)
    assert repr(v) == f"<Variable 'v' float64[7, 4, 2] in {len(v.parts)} parts>"


@pytest.mark.parametrize("ids", [[0], [6, 3, 0, 3], [], [[2, 5], [5, 1]], range(7)], ids=str)
def test_rows_come_in_the_order_of_the_request(pair, ids):
    v, w, _ = pair
    ids = np.array(ids, np.int64)
    np.testing.assert_array_equal(v.gather(ids), w.read_value()[ids])
    out = np.empty((*ids.shape, *SHAPE[1:]))
    assert v.sparse_read(ids, out) is out
    np.testing.assert_array_equal(out, w.read_value()[ids])


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: optimizers.SGD(0.1, momentum=0.9),
        lambda: optimizers.Adam(0.1),
        lambda: optimizers.Adagrad(0.1),
    ],
    ids=["SGD", "Adam", "Adagrad"],
)
def test_optimizers_do_the_same(pair, make_optimizer):
    v, w, strategy = pair
    for number in range(4):
        grad = numbers(seed=number)
        if number == 2:
            grad = IndexedSlices(grad[:4], [5, 0, 6, 5])
        for u in (v, w):
            optimizer = make_optimizer()
            applied = optimizer.apply_gradients([(grad, u)]).result()
            expected = number + 2
            assert applied.versions == ((expected,) * len(v.parts) if u is v else expected,)
            assert applied.staleness == (0,)
    np.testing.assert_array_equal(v, w)
    assert int(strategy.global_step) == 8


def test_the_norm_is_of_all_parts(pair):
    v, w, _ = pair
    for u in (v, w):
        optimizers.SGD(0.1, global_clipnorm=0.5).apply_gradients([(numbers(seed=1), u)]).wait()
    np.testing.assert_allclose(v, w, rtol=1e-14)


def test_half_precision(make):
    strategy = make(servers=2).worker(0)
    v = sharded(strategy, "v", 1, "flat", ml_dtypes.bfloat16)
    optimizers.SGD(1e-3).apply_gradients([(np.ones(SHAPE, np.float32), v)]).wait()
    optimizers.SGD(1e-3).apply_gradients([(np.ones(SHAPE, np.float32), v)]).wait()
    np.testing.assert_array_equal(v, np.full(SHAPE, 1 - 2e-3, ml_dtypes.bfloat16))


def test_variables_of_two_workers_and_staleness(make):
    cluster = make(servers=3)
    strategies = [cluster.worker(i, variable_partitioner=FixedShardsPartitioner(3)) for i in (0, 1)]
    one, two = (variable(s, "v", (6, 2)) for s in strategies)
    assert len({id(remote.connection) for remote in one.remotes}) == 3
    two.read_value()
    one.assign_add(1)
    one.assign_add(1)
    applied = optimizers.SGD(1.0).apply_gradients([(np.ones((6, 2)), two)]).result()
    assert applied.staleness == (2,)
    np.testing.assert_array_equal(one, np.ones((6, 2)))


def test_scalars_and_single_parts_are_not_divided(make):
    strategy = make(servers=2).worker(0, variable_partitioner=FixedShardsPartitioner(4))
    for name, shape in (("a", ()), ("b", (1, 5)), ("c", (0, 2))):
        v = variable(strategy, name, shape)
        assert not isinstance(v, ShardedVariable)
        assert v.assign(np.ones(shape)) == 2


def test_more_servers_than_rows(make):
    strategy = make(servers=4).worker(0, variable_partitioner=FixedShardsPartitioner(4))
    v = variable(strategy, "v", (2, 3), np.arange(6.0).reshape(2, 3))
    assert [remote.layout.shape for remote in v.remotes] == [(1, 3)] * 2
    np.testing.assert_array_equal(v, np.arange(6).reshape(2, 3))


def test_initializers_are_asked_for_parts(make):
    asked = []

    def by_parts(shape, dtype, partition_shape, partition_offset):
        asked.append((shape, partition_shape, partition_offset))
        return np.full(partition_shape, partition_offset[0], dtype)

    def of_the_whole(shape, dtype):
        asked.append(shape)
        return np.arange(10, dtype=dtype).reshape(shape)

    strategy = make().worker(0)
    v = sharded(strategy, "v", by_parts, shape=(5, 2))
    assert asked == [((5, 2), (2, 2), (0, 0)), ((5, 2), (2, 2), (2, 0)), ((5, 2), (1, 2), (4, 0))]
    np.testing.assert_array_equal(v[:, 0], [0, 0, 2, 2, 4])
    asked.clear()
    w = sharded(strategy, "w", of_the_whole, shape=(5, 2))
    assert asked == [(5, 2)]
    np.testing.assert_array_equal(w, np.arange(10).reshape(5, 2))
    large = sharded(strategy, "large", "glorot_uniform", shape=(3000, 20)).read_value()
    limit = np.sqrt(6 / 3020)
    assert 0.95 * limit < np.abs(large).max() <= limit
    assert len(np.unique(large)) == large.size


def test_a_failing_initializer_leaves_nothing_behind(make):
    strategies = [(cluster := make(servers=2)).worker(0), cluster.worker(1)]

    def fail(shape, dtype, partition_shape, partition_offset):
        if partition_offset[0]:
            raise RuntimeError("not today")
        return np.zeros(partition_shape)

    with pytest.raises(RuntimeError, match="not today"):
        sharded(strategies[0], "v", fail)
    made = [sharded(strategy, "v", 3) for strategy in (strategies[1], strategies[0])]
    after = [variable(strategy, "after", 5) for strategy in strategies]
    np.testing.assert_array_equal(made[0].read_value()[3:], np.full((4, 4, 2), 3))
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(after[0], after[1])


def test_names_that_are_taken(make):
    strategy = make().worker(0)
    sharded(strategy, "v", 0)
    for name in ("v", "v/part_1"):
        with pytest.raises(ValueError, match=f"variable '{name}' exists already"):
            variable(strategy, name, 3)
    variable(strategy, "w/part_1", 3)
    with pytest.raises(ValueError, match="variable 'w/part_1' exists already"):
        sharded(strategy, "w", 0)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "kinds", [("rows", "columns"), ("flat", "rows"), ("rows", "whole"), ("whole", "flat")], ids=str
)
def test_the_first_worker_decides_about_parts(make, servers, kinds):
    cluster = make(servers=servers)
    first, second = (sharded(cluster.worker(index), "v", 0, kinds[index]) for index in range(2))
    assert [one.name for one in first.remotes] == [one.name for one in second.remotes]
    first.assign_add(np.arange(np.prod(SHAPE), dtype=np.float64).reshape(SHAPE))
    np.testing.assert_array_equal(second.read_value(), first.read_value())
    second.assign_add(np.ones(SHAPE))
    np.testing.assert_array_equal(first.read_value(), second.read_value())


def test_wrong_arguments(pair):
    v, _, _ = pair
    with pytest.raises(ValueError, match=r"variable 'v' has shape \(3,\)"):
        v.assign(np.ones(3))
    with pytest.raises(TypeError, match="variable 'v' has dtype complex128"):
        v.assign_add(np.ones(SHAPE, complex))
    with pytest.raises(IndexError, match="variable 'v' has rows 0 to 6, and none 7"):
        v.gather([7])
    with pytest.raises(IndexError, match="and none -1"):
        v.scatter_add([-1], 1)
    with pytest.raises(ValueError, match="out must be a writable C-contiguous"):
        v.read_value(np.empty(SHAPE[::-1]))
    with pytest.raises(TypeError, match="assign_add"):
        v += 1
    np.testing.assert_array_equal(v, numbers())


@pytest.mark.parametrize("then", PARTITIONERS)
@pytest.mark.parametrize("first", PARTITIONERS)
def test_a_checkpoint_is_restored_in_other_parts(make, tmp_path, first, then):
    def program(servers, kind, value):
        strategy = make(servers=servers).worker(0)
        partitioner = PARTITIONERS[kind]
        with strategy.scope():
            v = get_variable("v", SHAPE, np.float64, value, partitioner=partitioner)
            counts = get_variable("counts", 5, np.int64, np.arange(5))
        return strategy, v, counts

    def step(v, seed):
        return optimizers.Adam(0.1).apply_gradients([(numbers(seed=seed), v)]).wait()

    strategy, v, _ = program(2, first, numbers())
    step(v, 1)
    step(v, 2)
    path = strategy.save(str(tmp_path))
    saved = v.read_value()
    step(v, 3)
    other, w, counts = program(3, then, 0)
    assert other.restore(path) == 2
    np.testing.assert_array_equal(w, saved)
    np.testing.assert_array_equal(counts, np.arange(5))
    step(w, 3)
    np.testing.assert_array_equal(w, v)


def test_a_checkpoint_without_all_parts(make, tmp_path):
    strategy = make(servers=2).worker(0)
    sharded(strategy, "v", numbers())
    path = strategy.save(str(tmp_path))
    index = tmp_path / "step-0" / "index.json"
    index.write_text(index.read_text().replace('"ps-1-of-2.safetensors"', "").replace(", ]", "]"))
    with pytest.raises(errors.DataLossError, match="does not have all parts of variable 'v'"):
        strategy.restore(path)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("rows", "rows"),
        ("rows", "columns"),
        ("whole", "whole"),
        ("whole", "rows"),
        ("flat", "flat"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_slots_of_rows_and_columns(make, tmp_path, caplog, dtype, first, then):
    """Adafactor continues with its slots in the same parts, and starts anew in other parts."""
    optimizer = optimizers.Adafactor(0.1)

    def program(kind):
        strategy = make(servers=2).worker(0)
        small = variable(strategy, "small", (2, 3), "ones", dtype)
        return strategy, sharded(strategy, "large", numbers().astype(dtype), kind, dtype), small

    def step(made, seed):
        pairs = [(numbers(v.shape, seed).astype(dtype), v) for v in made]
        optimizer.apply_gradients(pairs).wait()

    strategy, *made = program(first)
    for seed in range(3):
        step(made, seed)
    path = strategy.save(str(tmp_path))
    other, *again = program(then)
    assert other.restore(path) == 3
    for v, w in zip(made, again, strict=True):
        np.testing.assert_array_equal(w, v)
    anew = [record.message for record in caplog.records if "begins anew" in record.message]
    assert all("'Adafactor' begins anew for 'large" in message for message in anew)
    assert bool(anew) == (then != first)
    step(made, 3)
    step(again, 3)
    np.testing.assert_array_equal(again[1], made[1])
    is_equal = (again[0].numpy() == made[0].numpy()).all()
    assert is_equal == (then == first)
    assert np.isfinite(again[0].numpy().astype(float)).all()


@pytest.mark.parametrize("then", PARTITIONERS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_slots_that_only_some_parts_have(make, tmp_path, caplog, dtype, then):
    """The first push was interrupted after it reached one server and not the other."""
    strategy = make(servers=2).worker(0)
    v = sharded(strategy, "v", 1, "rows", dtype)
    optimizer = optimizers.Adagrad(0.5, initial_accumulator_value=0.25)
    push_all(
        gradient_changes(lambda c: c.rule_of(optimizer), 0.5, np.ones(SHAPE, dtype), v)[:1]
    ).wait()
    path = strategy.save(str(tmp_path))
    first = v.parts[0].stop
    del strategy
    other = make(servers=2).worker(0)
    w = sharded(other, "v", 0, then, dtype)
    other.restore(path)
    np.testing.assert_array_equal(w, v)
    optimizer.apply_gradients([(np.ones(SHAPE, dtype), w)]).wait()
    wide = v.read_value().astype(np.float64)
    # The optimizer continues in the part that is as it was saved, and starts anew in the others.
    squares = 2.25 if then == "rows" else 1.25
    wide[:first] = 1 - 0.5 / np.sqrt(1.25) - 0.5 / np.sqrt(squares)
    wide[first:] = 1 - 0.5 / np.sqrt(1.25)
    assert "'Adagrad' begins anew for 'v" in caplog.text
    tolerance = 1e-6 if dtype is np.float32 else 1e-2
    # The values are differences of numbers near 1, so their rounding errors are absolute.
    np.testing.assert_allclose(w.read_value().astype(np.float64), wide, atol=tolerance)


@pytest.mark.parametrize("damage", ["gap", "overlap", "dtype", "slot dtype", "slot size"])
def test_parts_that_do_not_belong_together(make, tmp_path, damage):
    strategy = make(servers=2).worker(0)
    v = sharded(strategy, "v", numbers())
    optimizers.Adam(0.1).apply_gradients([(numbers(), v)]).wait()
    path = strategy.save(str(tmp_path))
    file = f"{path}/ps-1-of-2.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="numpy") as opened:
        facts = {key: json.loads(value) for key, value in opened.metadata().items()}
    name = min(facts["parts"])
    part = facts["parts"][name]["part"]
    if damage == "gap":
        part["start"], part["stop"] = part["start"] + 1, part["stop"] + 1
    elif damage == "overlap":
        part["start"], part["stop"] = part["start"] - 1, part["stop"] - 1
    elif damage == "dtype":
        tensors[f"{name}:data"] = tensors[f"{name}:data"].astype(np.float32)
    elif damage == "slot dtype":
        tensors[f"{name}:slot:Adam/m"] = tensors[f"{name}:slot:Adam/m"].astype(np.int16)
    else:
        tensors[f"{name}:slot:Adam/m"] = tensors[f"{name}:slot:Adam/m"][1:]
    save_file(tensors, file, metadata={key: json.dumps(fact) for key, fact in facts.items()})
    with pytest.raises(errors.DataLossError, match="restore an older one"):
        strategy.restore(path)


def test_what_nobody_wants_may_be_incomplete(make, tmp_path):
    strategy = make(servers=2).worker(0)
    sharded(strategy, "v", numbers())
    path = strategy.save(str(tmp_path))
    index = tmp_path / "step-0" / "index.json"
    index.write_text(index.read_text().replace('"ps-1-of-2.safetensors"', "").replace(", ]", "]"))
    other = make().worker(0)
    assert other.restore(path) == 0


@pytest.mark.parametrize("partitioner", [3, "rows"])
def test_what_is_no_partitioner(make, partitioner):
    strategy = make().worker(0)
    with strategy.scope(), pytest.raises(TypeError, match="not a function of shape and dtype"):
        get_variable("v", 3, initializer=0, partitioner=partitioner)
    with pytest.raises(TypeError, match=r"variable_partitioner is .* not a function"):
        make().worker(0, variable_partitioner=partitioner)


def test_gradients_of_flat_parts_are_copied_once(make):
    strategy = make().worker(0)
    with strategy.scope():
        v = get_variable("v", (100, 100), partitioner=FlatPartitioner(16), initializer=0.0)
    changes = v.changes(np.ones((100, 100)).T, lambda _: 0)
    assert len({id(change.data.base) for change in changes}) == 1


def test_a_push_that_could_not_be_made_leaves_the_connection_whole(make, monkeypatch):
    strategy = make().worker(0)
    v = variable(strategy, "v", 3)

    def interrupted(changes):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(changes, "_joined", interrupted)
    with pytest.raises(KeyboardInterrupt):
        v.assign_add(1)
    assert v.assign_add(2) == 2
    applied = optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]).result()
    assert applied.staleness == (0,)
    np.testing.assert_array_equal(v, np.ones(3))


def test_a_checkpoint_of_another_shape(make, tmp_path):
    strategy = make().worker(0)
    sharded(strategy, "v", 0)
    path = strategy.save(str(tmp_path))
    other = make().worker(0)
    sharded(other, "v", 1, shape=(7, 4, 3))
    with pytest.raises(errors.InvalidArgumentError, match=r"float64\[7, 4, 2\].*\[7, 4, 3\]"):
        other.restore(path)
    np.testing.assert_array_equal(other.creator.by_name["v"], np.ones((7, 4, 3)))
