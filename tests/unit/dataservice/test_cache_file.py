"""The file of a cache after incomplete passes."""

import gc
import os
import signal
import subprocess
import sys

import pytest

from dataservice import Dataset, distribute
from mpidist.errors import DataLossError, FailedPreconditionError


def values(dataset):
    return [int(element) for element in dataset]


def run(script, path):
    """Return the exit status of a process that begins a pass over a cache."""
    beginning = f"""
import os, signal, sys
from dataservice import Dataset
elements = iter(Dataset.range(5).cache({str(path)!r}))
next(elements)
"""
    command = [sys.executable, "-c", beginning + script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not ended.stderr
    return ended.returncode


def test_a_pass_that_is_left_leaves_nothing(tmp_path, recwarn):
    dataset = Dataset.range(5).cache(tmp_path / "kept")
    for _ in dataset:
        assert len(os.listdir(tmp_path)) == 1
        break
    gc.collect()
    assert os.listdir(tmp_path) == []
    for _ in dataset.prefetch(2):
        break
    assert values(dataset) == [0, 1, 2, 3, 4]
    gc.collect()
    assert not recwarn.list


def fail_at_two(x):
    if x == 2:
        raise ZeroDivisionError
    return x


def test_a_pass_that_fails_leaves_nothing(tmp_path):
    dataset = Dataset.range(5).map(fail_at_two).cache(tmp_path / "kept")
    with iter(dataset) as elements, pytest.raises(ZeroDivisionError):
        list(elements)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise SystemExit(0)", ""])
def test_a_process_that_ends_leaves_nothing(tmp_path, ends):
    assert run(ends, tmp_path / "kept") == 0
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_leaves_goes_with_the_next_pass(tmp_path):
    path = tmp_path / "kept"
    assert run("os.kill(os.getpid(), signal.SIGKILL)", path) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    others = ["kept.part-0001.npz", "kept.part-1-deadbeef.txt", "not kept.part-1-deadbeef"]
    for name in others:
        (tmp_path / name).touch()
    with iter(Dataset.range(5).cache(path)) as elements:
        next(elements)
        assert left not in os.listdir(tmp_path)
        assert run("os.kill(os.getpid(), signal.SIGKILL)", path) == -signal.SIGKILL
        assert len(os.listdir(tmp_path)) == 2 + len(others)
        list(elements)
    assert sorted(os.listdir(tmp_path)) == sorted(["kept", *others])


def test_a_process_that_was_forked_does_not_end_the_pass(tmp_path):
    status = run(
        """
import gc
if not (child := os.fork()):
    del elements
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
sys.exit(3 + len(list(elements)))
""",
        tmp_path / "kept",
    )
    assert status == 7
    assert os.listdir(tmp_path) == ["kept"]
    # The forked process has not written its copy of the buffer.
    assert values(Dataset.range(5).cache(tmp_path / "kept")) == [0, 1, 2, 3, 4]


def test_who_writes_at_once_is_left_alone(tmp_path):
    dataset = Dataset.range(5).cache(tmp_path / "kept")
    with iter(dataset) as one, iter(dataset) as other:
        assert next(one) == next(other) == 0
        assert values(one) == values(other) == [1, 2, 3, 4]
    assert os.listdir(tmp_path) == ["kept"]
    assert values(dataset) == [0, 1, 2, 3, 4]


def test_a_pass_whose_file_was_taken_for_abandoned_comes_to_its_end(tmp_path):
    dataset = Dataset.range(3).cache(tmp_path / "kept")
    with iter(dataset) as elements:
        next(elements)
        (part,) = os.listdir(tmp_path)
        (tmp_path / part).unlink()
        assert values(elements) == [1, 2]
    assert os.listdir(tmp_path) == []
    assert values(dataset) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["kept"]


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def test_every_damaged_byte_is_found(tmp_path):
    path = tmp_path / "kept"
    dataset = Dataset.from_source([{"a": 1}, "b", (2, 3.5)]).cache(path)
    list(dataset)
    content = path.read_bytes()
    for damaged in (
        *(flipped(content, place) for place in range(len(content))),
        *(content[:length] for length in range(len(content))),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataLossError, match=str(path)) as caught:
            list(dataset)
        assert "emove it" in str(caught.value)
    path.write_bytes(content)
    assert len(list(dataset)) == 3


def test_a_damaged_element_does_not_hide_the_others(tmp_path):
    path = tmp_path / "kept"
    dataset = Dataset.from_source([b"first", b"second", b"third"]).cache(path)
    list(dataset)
    content = path.read_bytes()
    # In the pickle of the element, and anywhere before.
    for place in range(content.index(b"first") + len("first"), content.index(b"second") + 1):
        path.write_bytes(flipped(content, place))
        found = [bytes(element) for element in dataset.ignore_errors()]
        assert found in ([b"first", b"third"], [b"second", b"third"])
    assert found == [b"first", b"third"]


def test_a_write_that_fails(tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    path = tmp_path / "kept"
    dataset = Dataset.range(3).cache(path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with (
        iter(dataset) as elements,
        pytest.raises(FailedPreconditionError, match=rf"the cache '{path}'.*No space left"),
    ):
        list(elements)
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    assert values(dataset) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["kept"]


def test_a_cache_of_files_whose_names_are_not_utf_8(tmp_path):
    file = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with open(file, "w") as opened:
        opened.write("1\n2\n")
    dataset = Dataset.from_files([file], "text").cache(tmp_path / "kept")
    assert values(dataset) == values(dataset) == [1, 2]


def test_a_snapshot_is_no_cache(tmp_path):
    dataset = Dataset.range(3)
    dataset.save(tmp_path / "saved")
    (chunk,) = (tmp_path / "saved" / "chunks").iterdir()
    chunk.rename(tmp_path / "kept")
    with pytest.raises(DataLossError, match="is not a cache"):
        list(dataset.cache(tmp_path / "kept"))
    with pytest.raises(DataLossError, match="is a folder"):
        list(dataset.cache(tmp_path / "saved"))


def test_a_relative_name_is_of_the_folder_where_the_dataset_was_described(
    make_service, tmp_path, monkeypatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    dataset = (
        Dataset.range(3).cache("kept").apply(distribute("parallel_epochs", make_service(1).target))
    )
    monkeypatch.chdir(there)
    assert values(dataset) == [0, 1, 2]
    assert os.listdir(here) == ["kept"]
    assert os.listdir(there) == []
    assert repr(Dataset.range(3).cache("")) == "<Dataset range(0, 3, 1).cache('')>"
