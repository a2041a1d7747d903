"""Streams with killed or superseded writers: every element is written exactly once."""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset
from dataservice.snapshot import metadata
from dataservice.snapshot.format import ChunkName
from dataservice.snapshot.writer import StreamWriter
from mpidist.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
)

SPEC = metadata.pack_spec(None)
COUNT = 40


def create(path, streams=1):
    metadata.create(str(path), streams, "a dataset", SPEC)
    return str(path)


def dataset():
    # The state of this iterator is not small, because it contains the shuffle buffer.
    return Dataset.range(COUNT).map(lambda i: np.full(3, i)).shuffle(7, seed=5)


def write(path, attempt):
    """Write the stream of one worker. The killed child processes run this function too."""
    with StreamWriter(path, 0, attempt, chunk_bytes=700) as writer, iter(dataset()) as elements:
        if writer.state is not None:
            elements.set_state(writer.state)
        if not writer.finished:
            for element in elements:
                writer.append(element)
                if writer.full:
                    writer.commit(elements.get_state())
            writer.finish(elements.get_state())
    metadata.finish(path)


# Counts the profile events in the code of the snapshot, and kills itself at the given event. If it
# survives, it prints the number of events.
CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_snapshot_writer as test
from dataservice import snapshot

last, calls = int(sys.argv[4]), 0
OWN = os.path.dirname(snapshot.__file__)

def count(frame, event, argument):
    global calls
    if frame.f_code.co_filename.startswith(OWN):
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

sys.setprofile(count)
test.write(sys.argv[2], int(sys.argv[3]))
sys.setprofile(None)
print(calls)
"""


def run_child(path, attempt, last):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, os.path.dirname(__file__), path, str(attempt), str(last)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if last >= 0:
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
    else:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory):
    path = create(tmp_path_factory.mktemp("snapshot"))
    return int(run_child(path, 0, -1).stdout)


def rows(elements):
    return [int(element[0]) for element in elements]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 40))]
)
def test_killed_twice_and_taken_up(tmp_path, all_calls, seed):
    path = create(tmp_path / "snapshot")
    chance = random.Random(seed)
    assert run_child(path, 0, chance.randrange(all_calls)).returncode == -signal.SIGKILL
    before = rows(committed(path))
    run_child(path, 1, chance.randrange(all_calls))  # attempt 1 may finish before the call
    assert rows(committed(path))[: len(before)] == before
    write(path, 2)
    assert rows(Dataset.load(path)) == rows(dataset())
    chunks = os.path.join(path, "chunks")
    assert os.listdir(os.path.join(path, "streams", "stream_0", "attempt_2")) == []
    assert sum(metadata.progress(path).counts[0]) == COUNT
    assert len(os.listdir(chunks)) > 3


def committed(path):
    """Yield the elements committed so far."""
    elements = iter(Dataset.load(path, wait=True))
    for _ in range(sum(map(sum, metadata.progress(path).counts))):
        yield next(elements)
    elements.close()


def write_four(path):
    """Return the number of elements that attempt 1 tried to write, and its errors."""
    tried = 0
    try:
        with StreamWriter(path, 0, 1) as writer:
            for tried in range(1, 5):
                writer.append(tried - 1)
                writer.commit(b"%d" % tried)
    except AbortedError as error:
        return tried, [error]
    return tried, []


@pytest.mark.parametrize("function", ["fsync", "rename", "open", "listdir"])
@pytest.mark.parametrize("number", range(4))
def test_overtaken_in_the_middle_of_a_commit(tmp_path, monkeypatch, function, number):
    """Start a later attempt before each step of the earlier attempt."""
    path = create(tmp_path / "snapshot")
    original, calls, later = getattr(os, function), [], []

    def overtake(*args, **kwargs):
        calls.append(args)
        if len(calls) == number + 1:
            later.append(StreamWriter(path, 0, 2))
        return original(*args, **kwargs)

    monkeypatch.setattr(os, function, overtake)
    tried, errors = write_four(path)
    monkeypatch.undo()
    assert all("attempt_1" in str(error) for error in errors)
    writer = later[0] if later else StreamWriter(path, 0, 2)
    assert bool(later) or not errors
    assert writer.elements == int(writer.state or b"0") <= tried
    for i in range(writer.elements, 5):
        writer.append(i)
    writer.finish(b"5")
    writer.close()
    metadata.finish(path)
    assert list(Dataset.load(path)) == [0, 1, 2, 3, 4]


@settings(max_examples=150)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "commit", "open", "close"]), st.integers(0, 4)),
        max_size=40,
    )
)
def test_attempts_in_any_order(tmp_path_factory, steps):
    path = create(tmp_path_factory.mktemp("snapshots") / "snapshot")
    writers, places = {}, {}
    for step, attempt in steps:
        writer = writers.get(attempt)
        try:
            if step == "open" and writer is None:
                writers[attempt] = writer = StreamWriter(path, 0, attempt)
                assert attempt == max(writers)
                assert writer.elements == int(writer.state or b"0")
                places[attempt] = writer.elements
            elif step == "append" and writer is not None:
                writer.append(places[attempt])
                places[attempt] += 1
            elif step == "commit" and writer is not None:
                writer.commit(b"%d" % places[attempt])
            elif step == "close" and writer is not None:
                writer.close()
        except AbortedError:
            assert max(writers) > attempt
        except FailedPreconditionError:
            assert writer is not None
            assert writer._closed
    with StreamWriter(path, 0, 9) as last:
        for i in range(last.elements, 50):
            last.append(i)
        last.finish(b"50")
    metadata.finish(path)
    assert list(Dataset.load(path)) == list(range(50))
    for writer in writers.values():
        with pytest.raises((AbortedError, FailedPreconditionError)):
            writer.finish(b"")
        writer.close()


def test_an_attempt_has_a_number_of_its_own(tmp_path):
    path = create(tmp_path / "snapshot")
    with StreamWriter(path, 0, 3):
        with pytest.raises(AlreadyExistsError, match="attempt 3 at stream 0"):
            StreamWriter(path, 0, 3)
        with pytest.raises(AbortedError, match="attempt_2"):
            StreamWriter(path, 0, 2)
    with StreamWriter(path, 0, 10) as later:
        later.append(1)
        later.finish(b"")


def test_what_an_attempt_finds(tmp_path):
    path = create(tmp_path / "snapshot", 2)
    with StreamWriter(path, 1, 0) as writer:
        assert (writer.state, writer.elements, writer.finished) == (None, 0, False)
        writer.commit(b"nothing yet")
        writer.append("a")
        writer.append("b")
        writer.commit(b"first")
        writer.append("c")
    with StreamWriter(path, 1, 1) as writer:
        assert (writer.state, writer.elements, writer.finished) == (b"first", 2, False)
        writer.append("c")
        writer.finish(b"second")
        writer.finish(b"again")
        with pytest.raises(FailedPreconditionError, match="finished"):
            writer.append("d")
    with StreamWriter(path, 1, 2) as writer:
        assert (writer.state, writer.elements, writer.finished) == (b"second", 3, True)
    with pytest.raises(FailedPreconditionError, match=r"streams \[0\]"):
        metadata.finish(path)
    with StreamWriter(path, 0, 0) as writer:
        writer.finish(b"")
    assert metadata.finish(path) == 3
    assert metadata.finish(path) == 3


def test_only_the_last_chunk_has_a_state(tmp_path):
    path = create(tmp_path / "snapshot")
    state = bytes(100_000)
    with StreamWriter(path, 0, 0) as writer:
        for i in range(5):
            writer.append(i)
            writer.commit(state)
    sizes = sorted(os.path.getsize(entry) for entry in os.scandir(os.path.join(path, "chunks")))
    assert sizes[-2] < 1000 < len(state) < sizes[-1]
    with StreamWriter(path, 0, 1) as writer:
        assert writer.state == state


def test_chunks_are_cut_by_size(tmp_path):
    path = create(tmp_path / "snapshot")
    with StreamWriter(path, 0, 0, chunk_bytes=10_000) as writer:
        full = []
        for _ in range(7):
            writer.append(bytes(3_000))
            full.append(writer.full)
            if writer.full:
                writer.commit(b"")
        writer.finish(b"")
    assert full == [False, False, False, True, False, False, False]
    assert metadata.progress(path).counts == ((4, 3),)


def generator():
    yield


def test_what_cannot_be_pickled_is_not_written(tmp_path):
    path = create(tmp_path / "snapshot")
    with StreamWriter(path, 0, 0) as writer:
        writer.append(1)
        with pytest.raises(TypeError, match="pickle"):
            writer.append(generator())
        writer.append(2)
        writer.finish(b"")
    metadata.finish(path)
    assert list(Dataset.load(path)) == [1, 2]


def test_a_write_that_fails(tmp_path, monkeypatch):
    """Check that a partly written chunk is never committed."""
    path = create(tmp_path / "snapshot")

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    with StreamWriter(path, 0, 0) as writer:
        writer.append(1)
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(FailedPreconditionError, match=r"No space left.*check the free space"):
            writer.commit(b"")
        monkeypatch.undo()
        for use in (
            lambda: writer.append(2),
            lambda: writer.commit(b""),
            lambda: writer.finish(b""),
        ):
            with pytest.raises(FailedPreconditionError, match="has failed"):
                use()
    with StreamWriter(path, 0, 1) as writer:
        assert (writer.elements, writer.state) == (0, None)


def test_what_cannot_be_written_to(tmp_path):
    with pytest.raises(NotFoundError):
        StreamWriter(str(tmp_path / "nothing"), 0, 0)
    path = create(tmp_path / "snapshot")
    for stream in (-1, 1):
        with pytest.raises(ValueError, match="1 streams"):
            StreamWriter(path, stream, 0)
    with pytest.raises(ValueError, match="from 0, not -1"):
        StreamWriter(path, 0, -1)


def test_a_damaged_state(tmp_path):
    path = create(tmp_path / "snapshot")
    with StreamWriter(path, 0, 0) as writer:
        writer.append(1)
        writer.commit(b"state")
    file = ChunkName(0, 0, 1).path(path)
    with open(file, "rb") as chunk:
        content = chunk.read()
    start = content.rindex(b"state") - 16
    for place in range(start, len(content)):
        with open(file, "wb") as chunk:
            chunk.write(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(DataLossError, match=r"chunk_0_0_1' is damaged at byte \d+"):
            StreamWriter(path, 0, 1 + place)
    for length in range(start):
        with open(file, "wb") as chunk:
            chunk.write(content[:length])
        with pytest.raises(DataLossError, match="is damaged"):
            StreamWriter(path, 0, 1000 + length)
