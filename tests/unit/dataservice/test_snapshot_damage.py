"""Snapshots that are damaged: a DataLossError that says where, never a wrong element."""

import os
import shutil

import numpy as np
import pytest

from dataservice import Dataset
from dataservice.snapshot import metadata
from dataservice.snapshot.format import ChunkName
from dataservice.snapshot.save import save
from dataservice.snapshot.writer import StreamWriter
from mpidist.errors import DataLossError, FailedPreconditionError, NotFoundError


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / "snapshot"
    save(Dataset.range(6), path, 2, chunk_bytes=350)
    assert metadata.progress(str(path)).counts == ((2, 1), (2, 1))
    return path


def read(path):
    with iter(Dataset.load(path)) as elements:
        return list(elements)


def damaged(path, match):
    with pytest.raises(DataLossError, match=match) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("element", [np.int64(7), np.arange(9_000)])
def test_every_byte(tmp_path, element):
    Dataset.from_source([element]).save(tmp_path)
    file = tmp_path / "chunks" / "chunk_0_0_1"
    content = file.read_bytes()
    end = content.rindex(b"mpidist1") - 24  # the state, which readers do not read
    places = (
        range(end) if end < 1000 else [*range(300), *range(300, end, 997), *range(end - 40, end)]
    )
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        assert f"{str(file)!r} is damaged at byte " in damaged(tmp_path, "is damaged")
        file.write_bytes(content[:place])
        assert f"{str(file)!r} is damaged at byte " in damaged(tmp_path, "is damaged")
    file.write_bytes(content[:end])
    assert len(read(tmp_path)) == 1


def test_where_it_is(snapshot):
    file = snapshot / "chunks" / "chunk_1_0_2"
    content = bytearray(file.read_bytes())
    second = content.index(b"numpy", content.index(b"numpy") + 100)
    content[second] ^= 1
    file.write_bytes(content)
    elements = iter(Dataset.load(snapshot))
    assert [int(next(elements)) for _ in range(3)] == [0, 2, 1]
    with pytest.raises(DataLossError, match=r"at byte 204: a record has a wrong checksum"):
        next(elements)
    # Who has ignored it goes on with the next chunk.
    assert [int(element) for element in elements] == [4, 5]


@pytest.mark.parametrize("name", ["metadata", "DONE", "streams/stream_1/DONE"])
def test_facts(snapshot, name):
    file = snapshot / name
    content = file.read_bytes()
    facts = metadata.read_facts(str(snapshot), name)
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DataLossError, match=f"{name}' of a snapshot is damaged"):
            metadata.read_facts(str(snapshot), name)
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(DataLossError, match=f"{name}' of a snapshot is damaged"):
            metadata.read_facts(str(snapshot), name)
    file.write_bytes(content)
    assert metadata.read_facts(str(snapshot), name) == facts


@pytest.mark.parametrize(
    "name",
    [
        "chunk",
        "chunk_0_0",
        "chunk_0_0_1_1",
        "chunk_00_0_1",
        "chunk_-1_0_1",
        "chunk_0_0_x",
        "chunk_0_0_1.partial",
        "chunk_0_0_٣",
        "Chunk_0_0_1",
    ],
)
def test_names_that_no_chunk_has(snapshot, name):
    (snapshot / "chunks" / name).touch()
    assert repr(name) in damaged(snapshot, "is not the name of a chunk")


def test_names():
    for chunk in (ChunkName(0, 0, 0), ChunkName(12, 345, 10**17)):
        assert ChunkName.parse(str(chunk)) == chunk


def test_a_chunk_of_no_stream(snapshot):
    (snapshot / "chunks" / "chunk_2_0_1").touch()
    damaged(snapshot, "has 2 streams, so the chunk 'chunk_2_0_1'")


@pytest.mark.parametrize("name", ["chunk_0_0_2", "chunk_1_1_1"])
def test_a_missing_chunk(snapshot, name):
    (snapshot / "chunks" / name).unlink()
    _, stream, number, _ = name.split("_")
    damaged(snapshot, f"chunk {number} of stream {stream} is missing")
    (snapshot / "DONE").unlink()
    with pytest.raises(DataLossError):
        metadata.finish(str(snapshot))


def test_a_chunk_that_goes_while_it_is_read(snapshot):
    elements = iter(Dataset.load(snapshot))
    next(elements)
    (snapshot / "chunks" / "chunk_1_0_2").unlink()
    with pytest.raises(DataLossError, match="chunk 0 of stream 1 is missing"):
        list(elements)
    assert [int(element) for element in elements] == [4, 5]


def test_a_chunk_that_is_there_twice(snapshot):
    shutil.copy(snapshot / "chunks" / "chunk_0_0_2", snapshot / "chunks" / "chunk_0_0_3")
    damaged(snapshot, "has chunk 0 of stream 0 twice")


def test_a_chunk_too_many(snapshot):
    (snapshot / "chunks" / "chunk_0_2_2").touch()
    damaged(
        snapshot, r"stream 0 .* has chunks of \[2, 1, 2\] elements, but was saved with \[2, 1\]"
    )


def test_another_number_of_elements(snapshot):
    chunks = snapshot / "chunks"
    (chunks / "chunk_0_1_1").rename(chunks / "chunk_0_1_2")
    damaged(snapshot, r"has chunks of \[2, 2\] elements")
    file = snapshot / "DONE"
    file.unlink()
    metadata.write_facts(str(snapshot), "DONE", {"counts": [[2, 2], [2, 1]]})
    damaged(snapshot, "it has 1 elements, but its end says 1 and its name 2")


def test_chunks_in_each_others_place(snapshot):
    chunks = snapshot / "chunks"
    (chunks / "chunk_0_0_2").rename(chunks / "x")
    (chunks / "chunk_1_0_2").rename(chunks / "chunk_0_0_2")
    (chunks / "x").rename(chunks / "chunk_1_0_2")
    damaged(snapshot, "its header belongs to another chunk")


def test_a_chunk_of_another_snapshot(snapshot, tmp_path):
    save(Dataset.range(6), tmp_path / "other", 2, chunk_bytes=350)
    shutil.copy(tmp_path / "other" / "chunks" / "chunk_0_0_2", snapshot / "chunks" / "chunk_0_0_2")
    damaged(snapshot, "its header belongs to another chunk")


def test_a_folder_that_is_gone(snapshot):
    shutil.rmtree(snapshot / "chunks")
    damaged(snapshot, "its folder 'chunks' is missing")
    (snapshot / "metadata").unlink()
    with pytest.raises(NotFoundError):
        Dataset.load(snapshot)


def test_another_format(snapshot):
    facts = metadata.read_facts(str(snapshot), "metadata") | {"format": 2}
    metadata.write_facts(str(snapshot), "metadata", facts)
    damaged(snapshot, "has format 2, not 1")


def test_a_damaged_spec(tmp_path):
    metadata.create(str(tmp_path), 1, "a dataset", b"no pickle")
    with pytest.raises(DataLossError, match="element_spec of a snapshot of a dataset"):
        _ = Dataset.load(tmp_path, wait=True).element_spec


def lost():
    raise ImportError("no such module")


class Lost:
    def __reduce__(self):
        return lost, ()


def test_what_cannot_be_unpickled_here(tmp_path):
    metadata.create(str(tmp_path), 1, "a dataset", metadata.pack_spec(None))
    with StreamWriter(str(tmp_path), 0, 0) as writer:
        writer.append(Lost())
        writer.finish(b"")
    metadata.finish(str(tmp_path))
    with pytest.raises(FailedPreconditionError, match=r"byte 44 of .*no such module"):
        read(tmp_path)


def test_a_list_made_while_chunks_come(snapshot, monkeypatch):
    """A folder that changes may be listed with a later chunk, and without an earlier one."""
    real = os.listdir
    lists = [["chunk_0_1_1"], ["chunk_0_0_2", "chunk_1_1_1"]]
    monkeypatch.setattr(metadata.os, "listdir", lambda path: lists.pop(0) if lists else real(path))
    assert metadata.committed_chunks(str(snapshot), 2) == ((2, 1), ())
    lists = [["chunk_0_1_1"], ["chunk_0_1_1"]]
    with pytest.raises(DataLossError, match="chunk 0 of stream 0 is missing"):
        metadata.committed_chunks(str(snapshot), 2)
