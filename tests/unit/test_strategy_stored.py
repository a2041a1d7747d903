"""Arrays in checkpoint files, read in other parts than the saved parts."""

import itertools
import json
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from mpidist import errors
from mpidist.checkpoints import folder
from strategy.checkpoints import saved
from strategy.checkpoints.parts import state_of
from strategy.protocol.layout import Layout
from strategy.protocol.partition import Origin, Part, whole
from strategy.rules import ASSIGN
from strategy.server.checkpoints import _SavedPart
from strategy.server.shard import Shard

SHAPE = (6, 5, 7)
VALUES = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def shard(name, origin, values):
    layout = Layout(values.shape, values.dtype)
    memory = np.zeros(128 + layout.data_bytes, np.uint8)
    made = Shard(name, memory, layout, 0, 128, lambda: None, origin=origin)
    made.apply("assign", ASSIGN, {}, [values.reshape(-1)])
    made.slots = {"Adam/m": values.reshape(-1) + 1}
    return made


def parts(axis, count):
    """Yield a variable's parts along an axis, or of its flattened elements, as on servers."""
    length = VALUES.size if axis is None else SHAPE[axis]
    ends = [length * n // count for n in range(count + 1)]
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        part = Part(SHAPE, axis, start, stop) if count > 1 else whole(SHAPE)
        name = f"v/part_{number}" if count > 1 else "v"
        values = np.ascontiguousarray(part.of(VALUES)) if count > 1 else VALUES
        yield name, Origin("v", part), values


def save_parts(place, axis, count):
    """Save each part to its own file. Each file also holds a variable that is not requested."""
    other = shard("other", None, np.ones(999, np.float32))
    with folder.Writing(str(place), 1, count, 1) as writing:
        for path, (name, origin, values) in zip(writing.paths, parts(axis, count), strict=True):
            state_of([shard(name, origin, values), other]).write(path)
            other = shard(f"other{name}", None, np.ones(999, np.float32))
    return writing.path


WAYS = st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 5))


@settings(deadline=None, max_examples=60)
@given(written=WAYS, read=WAYS)
def test_parts_are_read_from_other_parts(tmp_path_factory, written, read):
    path = save_parts(tmp_path_factory.mktemp("saved"), *written)
    files = folder.files_in(path, folder.index_of(path), "ps")
    found = dict(saved.read_shards(files, {name: origin for name, origin, _ in parts(*read)}))
    for name, _, values in parts(*read):
        for stored, more in ((found[name].data, 0), (found[name].slots["Adam/m"], 1)):
            array = stored.read()
            assert (array.dtype, array.flags.c_contiguous) == (stored.dtype, True)
            np.testing.assert_array_equal(array, values.reshape(-1) + more)


def described(**entry):
    """Return a file of one tensor with three floats, and other entries in its description."""
    tensor = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | entry
    text = json.dumps({"__metadata__": {"steps": '{"v": {}}'}, "v:data": tensor}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(12)


def test_a_file_that_is_not_damaged(tmp_path):
    (tmp_path / "file").write_bytes(described())
    found = saved.read_layouts([str(tmp_path / "file")], {"v": Origin("v", whole((3,)))})
    assert found == {"v": ((3,), "float32")}


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"1234567",
        b"\x08" + bytes(7) + b"{}",
        b"\xff" * 8 + b"{}",
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{}",
        described()[:-1],
        described(shape=[4]),
        described(dtype="F64"),
        described(data_offsets=[4, 16]),
        described(data_offsets=[-4, 8]),
        described(data_offsets=[0]),
        save({"v:data": VALUES}),  # a file of another program
        save({"v:data": VALUES}, {"steps": "{"}),
    ],
)
def test_damaged_files(tmp_path, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(errors.DataLossError, match="file' of a checkpoint"):
        saved.read_layouts([str(file)], {"v": Origin("v", whole(SHAPE))})


def test_a_part_that_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    part = _SavedPart(lambda path: state_of([shard("v", None, VALUES)]).write(path))
    assert os.listdir(tmp_path) == []  # the file has no name
    pieces = [part.read(start, min(start + 50, part.nbytes)) for start in range(0, part.nbytes, 50)]
    content = np.concatenate(pieces).tobytes()
    assert VALUES.tobytes() in content
    assert len(content) == part.nbytes
    with pytest.raises(errors.DataLossError):
        part.read(part.nbytes - 1, part.nbytes + 1)
    part.close()
    with pytest.raises(errors.FailedPreconditionError, match="TMPDIR"):
        _SavedPart(lambda path: state_of([]).write(path + "/absent/file"))
