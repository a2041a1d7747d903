"""Arrays in the files of checkpoints, read in other parts than they were saved in."""

import itertools
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import errors
from strategy.checkpoints import checkpoint, saved
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
    """A variable in parts along an axis, or of its flattened elements, as servers have them."""
    length = VALUES.size if axis is None else SHAPE[axis]
    ends = [length * n // count for n in range(count + 1)]
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        part = Part(SHAPE, axis, start, stop) if count > 1 else whole(SHAPE)
        name = f"v/part_{number}" if count > 1 else "v"
        values = np.ascontiguousarray(part.of(VALUES)) if count > 1 else VALUES
        yield name, Origin("v", part), values


def save(folder, axis, count):
    """One file a part; and something that is not asked for in each."""
    other = shard("other", None, np.ones(999, np.float32))
    with checkpoint.Writing(str(folder), 1, count, 1) as writing:
        for path, (name, origin, values) in zip(writing.paths, parts(axis, count), strict=True):
            checkpoint.write_shards(path, [shard(name, origin, values), other])
            other = shard(f"other{name}", None, np.ones(999, np.float32))
    return writing.path


WAYS = st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 5))


@settings(deadline=None, max_examples=60)
@given(
    written=WAYS,
    read=WAYS,
    slice_bytes=st.sampled_from([4, 8, 60, 400, 1 << 20]),
    block=st.sampled_from([4, 8, 60, 400, 1 << 20]),
)
def test_parts_are_read_from_other_parts(tmp_path_factory, written, read, slice_bytes, block):
    path = save(tmp_path_factory.mktemp("saved"), *written)
    files = checkpoint.files_in(path, checkpoint.index_of(path))
    found = dict(saved.read_shards(files, {name: origin for name, origin, _ in parts(*read)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "BLOCK_BYTES", block)
        patch.setattr(saved, "SLICE_BYTES", slice_bytes)
        for name, _, values in parts(*read):
            for array, more in ((found[name].data, 0), (found[name].slots["Adam/m"], 1)):
                slices = [array.part(*one) for one in array.slices()]
                np.testing.assert_array_equal(np.concatenate(slices), values.reshape(-1) + more)
                assert {one.nbytes for one in slices[:-1]} <= {slice_bytes}


@pytest.mark.parametrize("content", [None, b"", b"1234567", b"\x08" + bytes(7) + b"{}"])
def test_damaged_files(tmp_path, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(errors.DataLossError, match="file' of a checkpoint"):
        saved.read_layouts([str(file)], {"v": Origin("v", whole(SHAPE))})


def test_a_part_that_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    part = _SavedPart(lambda path: checkpoint.write_shards(path, [shard("v", None, VALUES)]))
    assert os.listdir(tmp_path) == []  # it has no name
    pieces = [part.read(start, min(start + 50, part.nbytes)) for start in range(0, part.nbytes, 50)]
    content = np.concatenate(pieces).tobytes()
    assert VALUES.tobytes() in content
    assert len(content) == part.nbytes
    with pytest.raises(errors.DataLossError):
        part.read(part.nbytes - 1, part.nbytes + 1)
    part.close()
    with pytest.raises(errors.FailedPreconditionError, match="TMPDIR"):
        _SavedPart(lambda path: checkpoint.write_shards(path + "/absent/file", []))
