"""Checkpoints that are read where only what is needed of them has been carried."""

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import errors
from strategy.checkpoints import carried, checkpoint, saved
from strategy.checkpoints.carried import Mirror, SavedPart, head_of, pieces_of, tensors_in
from strategy.rules.rule import ASSIGN
from strategy.server.owned_shard import OwnedShard
from strategy.shared.parts import Origin, Part, whole
from strategy.shared.shard import Layout

SHAPE = (6, 5, 7)
VALUES = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def shard(name, origin, values):
    layout = Layout(values.shape, values.dtype)
    memory = np.zeros(128 + layout.data_bytes, np.uint8)
    made = OwnedShard(name, memory, layout, 0, 128, lambda: None, origin=origin)
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


def all_of(stored):
    out = np.empty(stored.size, stored.dtype)
    stored.fill(out)
    return out


def carry_heads(path, names):
    mirror = Mirror(names, path)
    for number, name in enumerate(names):
        length, size = head_of(os.path.join(path, name))
        for start, piece in pieces_of(os.path.join(path, name), 0, length):
            mirror.put(number, size, start, piece)
    return mirror


WAYS = st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 5))


@settings(deadline=None, max_examples=60)
@given(
    written=WAYS,
    read=WAYS,
    piece=st.sampled_from([1, 100, 1 << 20]),
    block=st.sampled_from([4, 8, 60, 400, 1 << 20]),
)
def test_what_is_needed_is_enough(tmp_path_factory, written, read, piece, block):
    path = save(tmp_path_factory.mktemp("saved"), *written)
    names = checkpoint.names_in(path, checkpoint.index_of(path))
    mirror = carry_heads(path, names)
    wanted = {name: origin for name, origin, _ in parts(*read)}
    places = [tensors_in(one) for one in mirror.paths]
    needed = [
        (mirror.paths.index(one), *places[mirror.paths.index(one)][tensor])
        for one, tensor in dict.fromkeys(saved.needed_tensors(mirror.paths, wanted))
    ]
    assert sum(stop - start for _, start, stop in needed) == 2 * VALUES.nbytes  # and no "other"
    assert mirror.missing(needed) == needed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carried, "PIECE_BYTES", piece)
        for file, first, last in needed:
            real = os.path.join(path, names[file])
            for start, data in pieces_of(real, first, last):
                mirror.put(file, os.path.getsize(real), start, data)
    assert mirror.missing(needed) == []
    found = dict(saved.read_shards(mirror.paths, wanted))
    for name, _, values in parts(*read):
        slot = found[name].slots["Adam/m"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(carried, "BLOCK_BYTES", block)
            np.testing.assert_array_equal(all_of(slot), values.reshape(-1) + 1)
            blocks = [one.copy() for one in found[name].data.blocks()]
        np.testing.assert_array_equal(np.concatenate(blocks), values.reshape(-1))
        assert {one.nbytes for one in blocks[:-1]} <= {block}
    mirror.close()


def test_nothing_of_a_mirror_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(carried.tempfile, "tempdir", str(tmp_path))
    path = save(tmp_path / "saved", 0, 2)
    mirror = carry_heads(path, checkpoint.names_in(path, checkpoint.index_of(path)))
    part = SavedPart(lambda to: checkpoint.write_shards(to, []))
    assert os.listdir(tmp_path) == ["saved"]
    mirror.close()
    part.close()


def test_messages_name_files_as_they_are_called_where_they_come_from(tmp_path):
    path = save(tmp_path, 0, 2)
    names = checkpoint.names_in(path, checkpoint.index_of(path))
    mirror = carry_heads(path, names)
    mirror.put(1, 20, 0, np.zeros(8, np.uint8))
    with pytest.raises(errors.DataLossError) as info:
        saved.read_layouts(mirror.paths, {"v": Origin("v", whole(SHAPE))})
    text = mirror.in_words(info.value.message)
    assert repr(os.path.join(path, names[1])) in text
    assert "/proc" not in text
    mirror.close()


@pytest.mark.parametrize("content", [None, b"", b"1234567"])
def test_heads_of_damaged_files(tmp_path, content):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(errors.DataLossError, match="file' of a checkpoint"):
        head_of(str(file))


def test_a_part_that_is_fetched():
    part = SavedPart(lambda path: checkpoint.write_shards(path, [shard("v", None, VALUES)]))
    pieces = [part.read(start, min(start + 50, part.nbytes)) for start in range(0, part.nbytes, 50)]
    content = np.concatenate(pieces).tobytes()
    assert VALUES.tobytes() in content
    assert len(content) == part.nbytes
    with pytest.raises(errors.DataLossError):
        part.read(part.nbytes - 1, part.nbytes + 1)
    part.close()


def test_no_room_for_what_is_carried(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    mirror = Mirror(["file"], str(tmp_path))
    monkeypatch.setattr(carried.os, "pwrite", full)
    with pytest.raises(errors.FailedPreconditionError, match=r"No space left.*TMPDIR"):
        mirror.put(0, 10, 0, np.zeros(10, np.uint8))
    with pytest.raises(errors.FailedPreconditionError, match="TMPDIR"):
        SavedPart(lambda path: checkpoint.write_shards(path + "/absent/file", []))
    mirror.close()
