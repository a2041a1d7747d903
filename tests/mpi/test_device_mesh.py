"""Device meshes: a group for each row of an array of ranks."""

import numpy as np
import pytest

import mpidist as dist
from mpidist import DeviceMesh, init_device_mesh

NAMES = ("dp", "cp", "tp")
SHAPES = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (1, 2), (2, 1), (1, 2, 1)],
    3: [(3,), (3, 1), (1, 3)],
    4: [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2)],
}


@pytest.fixture
def default(world):
    yield dist.init_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def values(rank):
    """Return the contribution of a rank to a sum."""
    return np.array([rank + 1.0, 10.0**rank])


def check_sums(mesh):
    """Compare sums over the groups of each dimension with NumPy's sums along that axis."""
    table = np.stack([values(rank) for rank in range(dist.get_world_size())])[mesh.mesh]
    place = mesh.get_coordinate()
    for axis in range(mesh.ndim):
        array = values(dist.get_rank())
        dist.all_reduce(array, group=mesh.get_group(axis))
        expected = table.sum(axis)[place[:axis] + place[axis + 1 :]]
        np.testing.assert_array_equal(array, expected)


@pytest.mark.ranks(1, 2, 3, 4)
def test_shapes(default, rank_count):
    rank = dist.get_rank()
    for shape in SHAPES[rank_count]:
        names = NAMES[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert (mesh.device_type, mesh.shape, mesh.ndim) == ("cpu", shape, len(shape))
        assert mesh.mesh_dim_names == names
        assert mesh.size() == rank_count
        np.testing.assert_array_equal(mesh.mesh, np.arange(rank_count).reshape(shape))
        place = np.unravel_index(rank, shape)
        assert mesh.get_coordinate() == place
        assert mesh.get_rank() == rank
        for axis, name in enumerate(names):
            assert mesh.size(axis) == mesh.size(name) == shape[axis]
            assert mesh.get_local_rank(axis) == mesh.get_local_rank(name) == place[axis]
            group = mesh.get_group(name)
            assert group is mesh.get_group(axis)
            assert group.rank() == place[axis]
            assert (group is default) == (shape[axis] == rank_count)
        assert mesh.get_all_groups() == [mesh.get_group(axis) for axis in range(len(shape))]
        check_sums(mesh)


@pytest.mark.ranks(1, 4)
def test_one_dimension_needs_no_name(default, rank_count):
    mesh = init_device_mesh("cuda", (rank_count,))
    assert mesh.mesh_dim_names is None
    assert mesh.get_group() is dist.GroupMember.WORLD
    assert mesh.get_local_rank() == dist.get_rank()
    assert mesh.flatten() is mesh
    with pytest.raises(KeyError, match="'dp'; the names are None"):
        mesh["dp"]


@pytest.mark.ranks(4)
def test_ranks_in_any_order(default):
    mesh = DeviceMesh("cpu", np.array([[3, 1], [0, 2]], np.int32), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    place = mesh.get_coordinate()
    assert mesh.mesh[place] == rank
    assert mesh.get_group("tp").ranks == ((3, 1) if rank in (1, 3) else (0, 2))
    assert mesh.get_group("dp").ranks == ((3, 0) if rank in (0, 3) else (1, 2))
    assert [group.rank() for group in mesh.get_all_groups()] == list(place)
    check_sums(mesh)
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    assert turned.get_group().ranks == (3, 2, 1, 0)
    assert turned.get_local_rank() == 3 - rank
    check_sums(turned)
    with pytest.raises(ValueError, match="read-only"):
        turned.mesh[0] = 1


@pytest.mark.ranks(4)
def test_parts(default):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)
    rank = dist.get_rank()
    for name in NAMES:
        part = mesh[name]
        assert part.get_group() is part.get_group(name) is mesh.get_group(name)
        assert part.mesh.tolist() == list(mesh.get_group(name).ranks)
        assert part.get_coordinate() == (mesh.get_local_rank(name),)
        assert part.mesh_dim_names == (name,)
        check_sums(part)
    assert mesh["dp"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    two = mesh["dp", "cp"]
    assert two.shape == (2, 1)
    assert two["cp"] == mesh["cp"]
    assert two.get_all_groups() == [mesh.get_group("dp"), mesh.get_group("cp")]
    assert mesh[NAMES] is mesh
    for names in ("pp", ("tp", "dp"), ("dp", "dp"), ()):
        with pytest.raises(KeyError, match="DeviceMesh"):
            mesh[names]


@pytest.mark.ranks(4)
def test_flatten(default):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)
    whole = mesh.flatten()
    assert whole.mesh_dim_names == ("dp_cp_tp",)
    assert whole.get_group() is default
    flat = mesh["dp", "cp"].flatten("data")
    rank = dist.get_rank()
    assert flat.mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert flat["data"] is flat
    assert flat.flatten("data") is flat
    check_sums(flat)


@pytest.mark.ranks(3)
def test_a_part_of_the_world(default):
    mesh = DeviceMesh("cpu", [[2], [0]], mesh_dim_names=("dp", "tp"))
    assert mesh.size() == 2
    if dist.get_rank() != 1:
        assert mesh.get_group("dp").ranks == (2, 0)
        check_sums(mesh)
        return
    assert mesh.get_coordinate() is None
    assert mesh.mesh.tolist() == [[2], [0]]
    for use in (
        lambda: mesh.get_group(0),
        lambda: mesh.get_all_groups(),
        lambda: mesh.get_local_rank("dp"),
        lambda: mesh["dp"],
        lambda: mesh.flatten(),
    ):
        with pytest.raises(ValueError, match=r"rank 1 is not in DeviceMesh\(\(dp=2, tp=1\)"):
            use()


@pytest.mark.ranks(4)
def test_from_groups(default):
    rank = dist.get_rank()
    row, _ = dist.new_subgroups(2)
    column, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    one = DeviceMesh.from_group(row, "cpu")
    assert one.mesh.tolist() == list(row.ranks)
    assert one.get_group() is row
    assert one == DeviceMesh.from_group([row], "cpu", list(row.ranks))
    ranks = [[0, 1], [2, 3]]
    mesh = DeviceMesh.from_group([column, row], "cpu", ranks, mesh_dim_names=("dp", "tp"))
    assert mesh.get_coordinate() == (rank // 2, rank % 2)
    assert mesh["tp"].get_group() is row
    check_sums(mesh)
    for arguments, text in (
        (([row, column], "cpu", ranks), "dimension 0 of"),
        (([row, column], "cpu"), "needs the mesh"),
        (([row], "cpu", ranks), "needs 2 groups, not 1"),
        ((row, "cpu", [3, 2, 1, 0]), "has ranks"),
        ((row, "tpu"), "unknown device_type"),
        ((dist.GroupMember.NON_GROUP_MEMBER, "cpu"), "not a member"),
    ):
        with pytest.raises(ValueError, match=text):
            DeviceMesh.from_group(*arguments)


@pytest.mark.ranks(2)
def test_equality(default):
    make = {"mesh_dim_names": ("dp", "tp")}
    mesh, again = (init_device_mesh("cpu", (2, 1), **make) for _ in range(2))
    assert mesh == again
    assert hash(mesh) == hash(again)
    assert repr(mesh) == "DeviceMesh((dp=2, tp=1), 'cpu', [[0], [1]])"
    others = [
        init_device_mesh("cpu", (2, 1)),
        init_device_mesh("cpu", (1, 2), **make),
        init_device_mesh("cuda", (2, 1), **make),
        DeviceMesh("cpu", [[1], [0]], **make),
        mesh["dp"],
    ]
    assert all(mesh != other for other in others)
    assert len({mesh, again, *others}) == 6
    assert mesh != "a mesh"


@pytest.mark.ranks(1, 2)
def test_a_default_group_is_made(world, rank_count):
    assert not dist.is_initialized()
    mesh = init_device_mesh("cpu", (rank_count,))
    assert mesh.get_group() is dist.GroupMember.WORLD
    check_sums(mesh)
    dist.destroy_process_group()


@pytest.mark.ranks(2, 4)
def test_groups_end_with_the_default_group(default, rank_count):
    mesh = init_device_mesh("cpu", (rank_count // 2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["tp"].flatten("t")
    dist.destroy_process_group()
    for group in (*mesh.get_all_groups(), flat.get_group()):
        with pytest.raises(ValueError, match="was destroyed"):
            group.barrier()
    dist.init_process_group()
    check_sums(init_device_mesh("cpu", (rank_count // 2, 2)))


@pytest.mark.ranks(2, 3)
def test_arguments_that_cannot_be(default, rank_count):
    size = rank_count
    names = {"mesh_dim_names": ("dp", "tp")}
    for make, error, text in (
        (lambda: init_device_mesh("cpu", (size, 2)), ValueError, f"the world has {size}"),
        (lambda: init_device_mesh("cpu", ()), ValueError, "mesh_shape"),
        (lambda: init_device_mesh("tpu", (size,)), ValueError, "unknown device_type 'tpu'"),
        (lambda: init_device_mesh("cpu", (size,), **names), ValueError, "distinct mesh_dim_names"),
        (lambda: DeviceMesh("cpu", [0, size]), ValueError, f"world of {size}"),
        (lambda: DeviceMesh("cpu", [1, 1]), ValueError, "more than once"),
        (lambda: DeviceMesh("cpu", [0.5]), TypeError, "integers"),
    ):
        with pytest.raises(error, match=text):
            make()
    for override, error in (({0: "gloo"}, ValueError), ({"x": "mpi"}, KeyError),
                            ({5: "mpi"}, IndexError), ({0: ("mpi", 1)}, ValueError)):  # fmt: skip
        with pytest.raises(error, match=r"backend|no dimension|no meaning"):
            init_device_mesh("cpu", (size,), backend_override=override)
    mesh = init_device_mesh(
        "cpu", (1, size), backend_override={0: "mpi", 1: ("mpi", None)}, **names
    )
    check_sums(mesh)
    for ask, error in (
        (lambda: mesh.get_group(), ValueError),
        (lambda: mesh.get_local_rank(), ValueError),
        (lambda: mesh.get_group("pp"), KeyError),
        (lambda: mesh.get_group(2), IndexError),
        (lambda: mesh.size("pp"), KeyError),
        (lambda: mesh.size(-3), IndexError),
    ):
        with pytest.raises(error, match="DeviceMesh"):
            ask()


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_disagree(default, rank_count):
    odd = dist.get_rank() == rank_count - 1
    whole = list(range(rank_count))
    for make in (
        lambda: DeviceMesh("cpu", whole[::-1] if odd else whole),
        lambda: DeviceMesh("cuda" if odd else "cpu", whole),
        lambda: DeviceMesh("cpu", whole, mesh_dim_names=("a" if odd else "b",)),
        lambda: init_device_mesh("cpu", (1, rank_count) if odd else (rank_count, 1)),
        lambda: init_device_mesh("cpu", (rank_count,), mesh_dim_names=("a",) if odd else None),
    ):
        with pytest.raises(ValueError, match=r"all ranks must give one mesh: rank \d gives"):
            make()
    problem = (
        "more than once" if odd else f"rank {rank_count - 1} no mesh, for rank.*more than once"
    )
    with pytest.raises(ValueError, match=problem):
        DeviceMesh("cpu", [0, 0] if odd else [0])
    check_sums(init_device_mesh("cpu", (rank_count,)))


@pytest.mark.ranks(4)
def test_many_meshes(default):
    for _ in range(20):
        mesh = init_device_mesh("cpu", (2, 2))
        check_sums(mesh)
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"group 'mesh 1/.' was destroyed"):
        mesh.get_group(1).barrier()


@pytest.mark.ranks(4)
def test_a_mesh_is_a_copy(default):
    ranks = np.arange(4)
    mesh = DeviceMesh("cuda", ranks)
    ranks[:] = 0
    assert mesh.mesh.tolist() == [0, 1, 2, 3]
    assert repr(mesh) == "DeviceMesh((4), 'cuda', [0, 1, 2, 3])"
    assert mesh.flatten("x").mesh_dim_names == ("x",)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("device_type", "ranks", "names", "error", "text"),
    [
        ("gpu", [0], None, ValueError, "unknown device_type 'gpu'; the known ones are cpu"),
        ("cuda:0", [0], None, ValueError, "unknown device_type 'cuda:0'"),
        (None, [0], None, ValueError, "unknown device_type None"),
        ("cpu", [], None, ValueError, "at least one dimension"),
        ("cpu", 0, None, ValueError, "at least one dimension"),
        ("cpu", [[0, 1], [2]], None, ValueError, "inhomogeneous"),
        ("cpu", [0.0, 1.0], None, TypeError, "as integers, not float64"),
        ("cpu", [True], None, TypeError, "as integers, not bool"),
        ("cpu", [0, 1, 0], None, ValueError, r"rank\(s\) \[0\] .* more than once"),
        ("cpu", [0, -1, 5], None, ValueError, r"rank\(s\) \[-1, 5\] .* world of 4"),
        ("cpu", [0, 1], ("a", "b"), ValueError, "1 dimension.* not \\('a', 'b'\\)"),
        ("cpu", [[0, 1]], ("a", "a"), ValueError, "2 dimension.* distinct"),
        ("cpu", [[0, 1]], (), ValueError, "2 dimension"),
        ("cpu", [0, 1], ("",), ValueError, "distinct"),
        ("cpu", [0, 1], "a", TypeError, "tuple of strings, not 'a'"),
        ("cpu", [0, 1], (1,), TypeError, "tuple of strings"),
    ],
)
def test_arguments_that_make_no_mesh(default, device_type, ranks, names, error, text):
    with pytest.raises(error, match=text):
        DeviceMesh(device_type, ranks, mesh_dim_names=names)


@pytest.mark.ranks(4)
def test_shapes_that_do_not_fit(default):
    for shape in [(2, 3), (), (0, 4), (-2, -2), (4, 2)]:
        with pytest.raises(ValueError, match=r"mesh_shape .* and the world has 4"):
            init_device_mesh("cpu", shape)
    with pytest.raises(TypeError, match="integers"):
        init_device_mesh("cpu", (2.0, 2))
