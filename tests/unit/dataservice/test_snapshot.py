"""Dataset.save and Dataset.load."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from _cases.dealt import all_indices, context_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from dataservice import Dataset, distribute
from dataservice.dataset import UNKNOWN_CARDINALITY
from dataservice.dataset.base import Context, Scope
from dataservice.dataset.spec import ArraySpec
from dataservice.payload import CODECS
from dataservice.snapshot import metadata
from dataservice.snapshot.save import save
from dataservice.snapshot.writer import StreamWriter
from mpidist.config import Config
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
    UnknownError,
)

ARRAYS = nps.arrays(
    st.one_of(
        nps.integer_dtypes(endianness="?"),
        nps.floating_dtypes(endianness="?"),
        nps.complex_number_dtypes(),
        nps.boolean_dtypes(),
        nps.unicode_string_dtypes(max_len=5),
        nps.datetime64_dtypes(endianness="="),  # NumPy pickles other byte orders as native
    ),
    nps.array_shapes(min_dims=0, max_dims=3, min_side=0),
)
LEAVES = st.one_of(ARRAYS, st.text(), st.binary(), st.none(), st.integers())
ELEMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=5,
)


def same(one, other):
    if isinstance(one, np.generic):  # NumPy has two names for some types of one dtype
        assert isinstance(other, np.generic)
    else:
        assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


def numbers(elements):
    return [int(element) for element in elements]


def unfinished(path, streams=1):
    spec = metadata.pack_spec(ArraySpec((), np.int64))
    return metadata.create(str(path), streams, "a dataset", spec)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    elements=st.lists(ELEMENTS, max_size=8),
    shards=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_round_trip(tmp_path_factory, elements, shards, chunk_bytes):
    path = tmp_path_factory.mktemp("snapshot")
    dataset = Dataset.from_source(elements)
    save(dataset, path, shards, chunk_bytes=chunk_bytes)
    elements = list(dataset)
    loaded = Dataset.load(path)
    assert loaded.cardinality() == len(elements)
    found = list(loaded)
    if shards > 1:  # the chunks of a shard are read in sequence
        order = [
            number
            for _, number in sorted(
                (chunk_number, index)
                for index, chunk_number in enumerate(places(path, len(elements), shards))
            )
        ]
        elements = [elements[number] for number in order]
    same(tuple(found), tuple(elements))


def places(path, count, shards):
    """Return the chunk and shard of each element."""
    result = [(0, 0)] * count
    for shard, chunks in enumerate(metadata.progress(str(path)).counts):
        mine = iter(range(shard, count, shards))
        for number, elements in enumerate(chunks):
            for _ in range(elements):
                result[next(mine)] = (number, shard)
    return result


def test_large_arrays_are_aligned_and_can_be_written(tmp_path):
    one = {"a": np.arange(50_001, dtype=np.int8), "b": np.arange(9_999, dtype=np.complex128)}
    Dataset.from_source([one, one]).save(tmp_path)
    for element in Dataset.load(tmp_path):
        same(element, one)
        assert all(array.flags.aligned and array.flags.writeable for array in element.values())


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_records(tmp_path, codec, size):
    pytest.importorskip("cramjam")
    spec = metadata.pack_spec(None)
    metadata.create(str(tmp_path), 1, "a dataset", spec, codec)
    with StreamWriter(str(tmp_path), 0, 0) as writer:
        writer.append(np.zeros(size))
        writer.finish(b"")
    metadata.finish(str(tmp_path))
    (element,) = Dataset.load(tmp_path)
    same(element, np.zeros(size))
    element += 1
    assert metadata.read(str(tmp_path)).compression == codec


def test_an_unknown_compression(tmp_path):
    metadata.create(str(tmp_path), 1, "a dataset", metadata.pack_spec(None), "ZIP")
    with pytest.raises(UnimplementedError, match="'ZIP'"):
        StreamWriter(str(tmp_path), 0, 0)
    with pytest.raises(UnimplementedError, match="'ZIP'"):
        Dataset.load(tmp_path, wait=True)


def test_the_spec_and_the_length(tmp_path):
    dataset = Dataset.from_tensor_slices({"x": np.zeros((7, 2), np.float32)}).batch(3)
    dataset.save(tmp_path)
    loaded = Dataset.load(tmp_path)
    assert loaded.element_spec == dataset.element_spec
    assert len(loaded) == 3
    assert loaded.node.summary() == f"load({str(tmp_path)!r}, wait=False)"


def test_an_empty_dataset(tmp_path):
    Dataset.range(3).filter(lambda i: False).map(lambda i: i).save(tmp_path, num_shards=2)
    loaded = Dataset.load(tmp_path)
    assert (list(loaded), len(loaded)) == ([], 0)
    with pytest.raises(ValueError, match="has no element"):
        _ = loaded.element_spec


def test_a_place_that_is_taken(tmp_path):
    def saved_to(path):
        with pytest.raises(AlreadyExistsError, match=str(tmp_path)) as caught:
            Dataset.range(3).save(path)
        return str(caught.value)

    Dataset.range(3).save(tmp_path / "done")
    unfinished(tmp_path / "open")
    unfinished(tmp_path / "failed")
    metadata.fail(str(tmp_path / "failed"), ValueError())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "a snapshot (DONE)" in saved_to(tmp_path / "done")
    assert "a snapshot at" in saved_to(tmp_path / "open")
    assert "a snapshot (ERROR)" in saved_to(tmp_path / "failed")
    assert "no snapshot" in saved_to(tmp_path / "other")
    assert "no snapshot" in saved_to(tmp_path / "other" / "file")
    assert list(Dataset.load(tmp_path / "done")) == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == ["done", "failed", "open", "other"]


def test_a_place_that_cannot_be_written():
    with pytest.raises(FailedPreconditionError, match=r"cannot write the snapshot '/proc"):
        Dataset.range(3).save("/proc/snapshot")


def test_no_shards(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        Dataset.range(3).save(tmp_path / "x", num_shards=0)


def test_what_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFoundError, match="wait=True"):
            Dataset.load(path)
    unfinished(tmp_path)
    with pytest.raises(FailedPreconditionError, match="not complete"):
        Dataset.load(tmp_path)
    waiting = Dataset.load(tmp_path, wait=True)
    assert waiting.cardinality() == UNKNOWN_CARDINALITY
    assert waiting.element_spec == ArraySpec((), np.int64)
    with pytest.raises(UnimplementedError, match="still being saved"):
        waiting.node.source_length()
    assert Dataset.load(tmp_path / "later", wait=True).cardinality() == UNKNOWN_CARDINALITY


def broken(i):
    if i == 3:
        raise KeyError("no such thing")
    return i


def test_a_save_that_fails(tmp_path):
    with pytest.raises(KeyError):
        save(Dataset.range(9).map(broken), tmp_path, chunk_bytes=1)
    for wait in (False, True):
        with pytest.raises(UnknownError, match="KeyError: 'no such thing'"):
            Dataset.load(tmp_path, wait)


def test_an_error_of_the_tree_keeps_its_class(tmp_path):
    unfinished(tmp_path)
    elements = iter(Dataset.load(tmp_path, wait=True))
    with StreamWriter(str(tmp_path), 0, 0) as writer:
        writer.append(np.int64(5))
        writer.commit(b"")
    assert next(elements) == 5
    metadata.fail(str(tmp_path), InvalidArgumentError("too long"))
    with pytest.raises(InvalidArgumentError, match=r"has failed: too long$") as caught:
        next(elements)
    with pytest.raises(InvalidArgumentError) as again:
        next(elements)
    assert again.value is caught.value


SAVER = """
import sys
from dataservice import Dataset
from dataservice.snapshot.save import save

def given(i):
    sys.stdin.readline()
    return i

save(Dataset.range(int(sys.argv[2])).map(given), sys.argv[1], 2, chunk_bytes=1)
"""


def test_reading_while_another_process_saves(tmp_path):
    path = tmp_path / "snapshot"
    waiting = Dataset.load(path, wait=True)
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, path, "20"], stdin=subprocess.PIPE, text=True
    )
    with saver:

        def step():
            saver.stdin.write("\n")
            saver.stdin.flush()

        step()  # for the element_spec
        elements = iter(waiting)
        found = []
        for _ in range(20):
            step()  # each element is written only after the previous one was read
            found.append(int(next(elements)))
        assert next(elements, None) is None
        assert next(elements, None) is None
        assert saver.wait(30) == 0
    assert found == list(range(20))
    assert sorted(numbers(waiting)) == found
    assert len(Dataset.load(path)) == 20


class Reports(logging.Handler):
    def __init__(self, then):
        super().__init__()
        self.texts = []
        self.then = then

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.then()


def test_a_wait_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("dataservice.calls.config", Config(stall_s=0.01))
    path = tmp_path / "snapshot"
    reports = Reports(lambda: Dataset.range(3).save(path))
    logging.getLogger("dataservice.calls").addHandler(reports)
    try:
        assert numbers(Dataset.load(path, wait=True)) == [0, 1, 2]
    finally:
        logging.getLogger("dataservice.calls").removeHandler(reports)
    (text,) = reports.texts
    assert text.startswith(f"the load of the snapshot {str(path)!r} has waited ")
    assert "for its beginning: check that a process saves the snapshot" in text


def test_a_wait_that_is_given_up(tmp_path):
    scope = Scope()
    elements = Dataset.load(tmp_path, wait=True).node.iterate(Context((0,), scope=scope))
    found = []
    reader_thread = threading.Thread(target=lambda: found.append(next(elements, "over")))
    reader_thread.start()
    scope.close()
    reader_thread.join()
    assert found == ["over"]
    elements.close()


def test_a_snapshot_that_is_removed_while_it_is_read(tmp_path):
    path = tmp_path / "snapshot"
    unfinished(path)
    with StreamWriter(str(path), 0, 0) as writer:
        writer.append(1)
        writer.commit(b"")
    elements = iter(Dataset.load(path, wait=True))
    assert next(elements) == 1
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError):
        next(elements)
    elements.close()


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_states(tmp_path, wait, shards):
    save(Dataset.range(20), tmp_path, shards, chunk_bytes=400)
    loaded = Dataset.load(tmp_path, wait)
    everything = numbers(loaded)
    assert sorted(everything) == list(range(20))
    for count in range(22):
        with iter(loaded) as elements:
            first = [int(next(elements)) for _ in range(min(count, 20))]
            if count == 21:
                assert next(elements, None) is None
            state = elements.get_state()
        assert len(state) < 600
        with iter(loaded) as later:
            later.set_state(state)
            assert first + numbers(later) == everything


def test_a_state_of_a_save_that_goes_on(tmp_path):
    unfinished(tmp_path, 2)
    loaded = Dataset.load(tmp_path, wait=True)
    one, two = (StreamWriter(str(tmp_path), stream, 0) for stream in range(2))
    two.append(np.int64(7))
    two.append(np.int64(8))
    two.commit(b"")
    elements = iter(loaded)
    untouched = iter(loaded).get_state()
    assert next(elements) == 7
    state = elements.get_state()
    elements.close()
    one.append(np.int64(1))
    for writer in (one, two):
        writer.finish(b"")
        writer.close()
    metadata.finish(str(tmp_path))
    later = iter(loaded)
    later.set_state(state)
    assert numbers(later) == [8, 1]
    afresh = iter(loaded)
    afresh.set_state(untouched)
    assert numbers(afresh) == [1, 7, 8]


def test_a_state_of_another_snapshot(tmp_path):
    Dataset.range(5).save(tmp_path / "a")
    elements = iter(Dataset.load(tmp_path / "a"))
    next(elements)
    state = elements.get_state()
    elements.close()
    (tmp_path / "a").rename(tmp_path / "b")
    Dataset.range(5).save(tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="another snapshot"):
        iter(Dataset.load(tmp_path / "a")).set_state(state)


def test_workers_share_the_chunks(tmp_path):
    save(Dataset.range(40), tmp_path, 2, chunk_bytes=500)
    node = Dataset.load(tmp_path).node
    assert node.source_length() > 6
    found = []
    for part in range(3):
        context = partial(context_of, node, all_indices(node)[part::3])
        with node.iterate(context()) as elements:
            mine = numbers(elements)
        for place in range(len(mine) + 1):
            with node.iterate(context()) as elements:
                first = [int(next(elements)) for _ in range(place)]
                state = elements.get_state()
            with node.iterate(context()) as later:
                later.set_state(state)
                assert first + numbers(later) == mine
        found += mine
    assert sorted(found) == list(range(40))


def test_workers_of_a_service_share_the_chunks(tmp_path, make_service):
    save(Dataset.range(60), tmp_path, 3, chunk_bytes=500)
    target = make_service(2).target
    loaded = Dataset.load(tmp_path).map(lambda i: i * 2)
    found = numbers(loaded.apply(distribute("distributed_epoch", target)))
    assert sorted(found) == list(range(0, 120, 2))


def test_the_node_travels(tmp_path):
    Dataset.range(5).save(tmp_path)
    loaded = Dataset.load(tmp_path)
    again = dataclasses.replace(loaded.node)
    assert numbers(again.iterate(Context((0,)))) == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "DONE").read_text())["facts"] == {"counts": [[5]]}
