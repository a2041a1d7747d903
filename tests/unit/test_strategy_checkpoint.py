"""Checkpoints on disk."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpidist.checkpoints import folder
from mpidist.checkpoints.folder import Writing, checkpoints, index_of
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from strategy.checkpoints import saved
from strategy.checkpoints.parts import state_of
from strategy.protocol.layout import Layout
from strategy.protocol.partition import Origin, whole
from strategy.rules import ASSIGN
from strategy.server.shard import Shard

VALUES = {
    "scalar": np.array(7, np.int64),
    "weights/with.odd name": np.arange(12, dtype=np.float32).reshape(3, 4),
    "empty": np.zeros((0, 3), np.float64),
    "flags": np.array([True, False]),
    "half": np.array([1.5, -2.25], np.float16),
    "brain": np.array([1.5, -2.25], ml_dtypes.bfloat16),
    "bytes": np.arange(5, dtype=np.uint8),
    **{
        f"{kind}{bits}": np.ones(3, f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (16, 32)
    },
}


def owned(name, value):
    layout = Layout(value.shape, value.dtype)
    memory = np.zeros(64 + layout.data_bytes, np.uint8)
    shard = Shard(name, memory, layout, 0, 64, lambda: None)
    shard.apply("assign", ASSIGN, {}, [value.reshape(-1)])
    return shard


def wanted(names):
    """Return the origins of the named variables. Other code compares their shapes."""
    return {name: Origin(name, whole(np.shape(VALUES.get(name, np.ones(2))))) for name in names}


def write(directory, step, shards=(), keep=3, servers=1):
    with Writing(str(directory), step, servers, keep) as writing:
        for number, path in enumerate(writing.paths):
            state_of(list(shards)[number::servers]).write(path)
    return writing.path


def files_in(path):
    return folder.files_in(path, index_of(path), "ps")


def names(directory):
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("servers", [1, 2, 10])
def test_round_trip(tmp_path, servers):
    shards = [owned(name, value) for name, value in VALUES.items()]
    shards[1].slots = {"Adam/m": np.full(12, 0.5, np.float32), "Adam/v": np.arange(12.0)}
    shards[1].steps = {"Adam": 3, "assign": 1}
    path = write(tmp_path, 7, shards, servers=servers)
    files = files_in(path)
    assert len(files) == servers
    found = dict(saved.read_shards(files, wanted(VALUES)))
    assert set(found) == set(VALUES)
    for name, value in VALUES.items():
        assert found[name].data.dtype == value.dtype
        np.testing.assert_array_equal(found[name].data.read(), value.reshape(-1))
    weights = found["weights/with.odd name"]
    assert weights.steps == {"Adam": 3, "assign": 1}
    assert set(weights.slots) == {"Adam/m", "Adam/v"}
    np.testing.assert_array_equal(weights.slots["Adam/v"].read(), np.arange(12.0))
    assert found["scalar"].slots == {}


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        folder = write(tmp_path, 1, [owned("scalar", VALUES["scalar"])])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(folder).iterdir()}
    assert set(modes.values()) == {0o640}, modes


def test_only_what_is_asked_for(tmp_path):
    path = write(tmp_path, 1, [owned(name, value) for name, value in VALUES.items()])
    for read in (saved.read_shards, saved.read_layouts):
        assert set(dict(read(files_in(path), wanted(["flags", "unknown", "flag"])))) == {"flags"}


@pytest.mark.parametrize("servers", [1, 3])
def test_layouts_without_the_data(tmp_path, servers):
    shards = [owned(name, value) for name, value in VALUES.items()]
    shards[1].slots = {"Adam/m": np.full(12, 0.5, np.float32)}
    path = write(tmp_path, 7, shards, servers=servers)
    found = saved.read_layouts(files_in(path), wanted(VALUES))
    assert set(found) == set(VALUES)
    for name, value in VALUES.items():
        saved.check_fits(name, *found[name], Origin(name, whole(value.shape)), value.dtype)


def test_the_index(tmp_path):
    path = write(tmp_path, 12, servers=2)
    with open(os.path.join(path, "index.json")) as file:
        index = json.load(file)
    assert (index["format"], index["step"]) == (1, 12)
    assert sorted([*index["files"], "index.json"]) == names(path)


@pytest.mark.parametrize("keep_bytes", [0, 4, 20, -1])
def test_a_file_cut_short(tmp_path, keep_bytes):
    path = write(tmp_path, 1, [owned(name, value) for name, value in VALUES.items()])
    (file,) = files_in(path)
    with open(file, "rb") as whole:
        content = whole.read()
    with open(file, "wb") as cut:
        cut.write(content[:keep_bytes])
    for read in (saved.read_shards, saved.read_layouts):
        with pytest.raises(DataLossError, match="restore an older one"):
            dict(read([file], wanted(VALUES)))


def test_a_file_that_is_missing(tmp_path):
    files = files_in(write(tmp_path, 1, [owned("a", np.ones(2))], servers=2))
    os.unlink(files[1])
    for read in (saved.read_shards, saved.read_layouts):
        with pytest.raises(DataLossError, match="ps-1-of-2"):
            dict(read(files, wanted(["a"])))


@pytest.mark.parametrize("index", ["{", "\ufffe", "[]", "3", '{"format": 2}', "{}"])
def test_a_damaged_index(tmp_path, index):
    path = write(tmp_path, 1)
    with open(os.path.join(path, "index.json"), "w", encoding="utf-16") as file:
        file.write(index)
    with pytest.raises(DataLossError):
        files_in(path)
    with open(os.path.join(path, "index.json"), "w") as file:
        file.write(index)
    with pytest.raises(DataLossError):
        files_in(path)


@pytest.mark.parametrize(
    "files",
    ["", ', "files": 5', ', "files": []', ', "files": [7]', ', "files": "ps-0-of-1.safetensors"']
    + [f', "files": ["{name}"]' for name in ("../x", "/x", "a/ps-0-of-1.safetensors", "x", "")]
    + [', "files": ["ps-0-of-2.safetensors", "rank-1-of-2.safetensors"]'],
)
def test_a_foreign_index(tmp_path, files):
    path = write(tmp_path, 1)
    with open(os.path.join(path, "index.json"), "w") as file:
        file.write(f'{{"format": 1{files}}}')
    with pytest.raises(DataLossError, match=r"step-1' is damaged .*; restore an older one"):
        files_in(path)


def test_an_index_without_an_end():
    with pytest.raises(DataLossError, match="restore an older one"):
        folder.files_in("step-1", b"[" * 200_000, "ps")


@pytest.mark.parametrize("name", ["absent", "folder", "file"])
def test_what_is_no_checkpoint(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}")
    with pytest.raises(NotFoundError, match=f"{name}' is not a checkpoint"):
        files_in(str(tmp_path / name))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(FailedPreconditionError, match="every process that writes a part must"):
        state_of([owned("a", np.ones(2))]).write(str(tmp_path / "absent" / "file"))


def test_nothing_appears_before_the_end_and_nothing_is_left_by_an_error(tmp_path):
    def fail():
        with Writing(str(tmp_path / "new"), 5, 1, 3) as writing:
            assert os.path.dirname(writing.paths[0]) != writing.path
            assert not os.path.exists(writing.path)
            assert checkpoints(str(tmp_path / "new")) == []
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path / "new") == []


@pytest.mark.parametrize("where", ["file", "file/below", "link", "link/below"])
def test_a_folder_that_cannot_be_made(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/else")
    with pytest.raises(FailedPreconditionError, match=rf"{where}/step-5': .* must be room for it"):
        write(tmp_path / where, 5)
    assert names(tmp_path) == ["file", "link"]


def failing(monkeypatch, name, number):
    """Make the call with this number of a function of ``os`` fail, as on a full disk."""
    call, calls = getattr(os, name), []

    def fails(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*arguments, **options)

    monkeypatch.setattr(folder.os, name, fails)


# The fsync calls are for an extra file, a server's file, and the index. The rename calls try the
# final name, move the earlier checkpoint away, and set the final name. mkdir makes the folder.
CALLS = [
    (name, n) for name, numbers in (("fsync", 3), ("rename", 3)) for n in range(1, numbers + 1)
]


@pytest.mark.parametrize(("name", "number"), [*CALLS, ("mkdir", 2)])
def test_a_full_disk_takes_nothing_away_and_leaves_nothing_behind(
    tmp_path, monkeypatch, name, number
):
    def save():
        with Writing(str(tmp_path), 4, 1, 3, ["extra"]) as writing:
            writing.add("extra", b"state")
            state_of([owned("a", np.full(2, 9.0))]).write(writing.paths[0])

    write(tmp_path, 3)
    path = write(tmp_path, 4, [owned("a", np.ones(2))])
    failing(monkeypatch, name, number)
    with pytest.raises(FailedPreconditionError, match=r"step-4.*No space left.*must be room"):
        save()
    monkeypatch.undo()
    (last,) = (one for one in checkpoints(str(tmp_path)) if "step-4" in one)
    assert names(tmp_path) == ["step-3", os.path.basename(last)]
    found = dict(saved.read_shards(files_in(last), wanted(["a"])))
    np.testing.assert_array_equal(found["a"].data.read(), [1, 1])
    save()
    assert checkpoints(str(tmp_path)) == [str(tmp_path / "step-3"), path]


def test_old_ones_that_cannot_be_removed_do_not_matter(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, step, keep=2)
    failing(monkeypatch, "rename", 2)
    write(tmp_path, 3, keep=2)
    monkeypatch.undo()
    write(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_more_files(tmp_path):
    with Writing(str(tmp_path), 5, 1, 3) as writing:
        writing.add("data.json", {"epoch": [1, 2]})
    with open(os.path.join(writing.path, "data.json")) as file:
        assert json.load(file) == {"epoch": [1, 2]}


BAD_NAMES = ("", ".", "..", "/x", "../x.json", "a/b", "a/", "a\\b", "a\0b", "index.json")


@pytest.mark.parametrize("name", [*BAD_NAMES, "ps-1-of-2.safetensors"])
def test_names_that_more_files_cannot_have(tmp_path, name):
    with pytest.raises(ValueError, match=r"give .* name"):
        Writing(str(tmp_path / "new"), 5, 2, 3, ["good.json", name])
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["a.b", "...", "ps-2-of-2.safetensors", "index.jsonl", "ä b"])
def test_names_that_more_files_can_have(tmp_path, name):
    with Writing(str(tmp_path), 5, 2, 3, [name]) as writing:
        writing.add(name, 1)
    assert name in names(writing.path)


def test_what_killed_jobs_left_is_ignored_and_removed(tmp_path):
    write(tmp_path, 2)
    for left in ("step-9.partial-4711", "step-2.partial-4711-old", "step-x", "xstep-3", "step-4.0"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "file").write_text("")
    assert checkpoints(str(tmp_path)) == [str(tmp_path / "step-2")]
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-2", "step-3", "step-4.0", "step-x", "xstep-3"]


def partial_of(directory, process, host):
    """Make a checkpoint that another process is writing or has left unfinished."""
    path = directory / f"step-9.partial-0a-by-{process}-on-{host}"
    path.mkdir()
    (path / "file").write_text("")
    return path


def test_what_others_write_now_stays(tmp_path):
    host = socket.gethostname()
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = partial_of(tmp_path, os.getpid(), host)
    partial_of(tmp_path, ended.pid, host)
    elsewhere = [partial_of(tmp_path, ended.pid, f"{host}-{n}") for n in range(3)]
    long_ago = time.time() - 2 * 3600
    for path in (elsewhere[0], elsewhere[0] / "file", elsewhere[1], elsewhere[2] / "file"):
        os.utime(path, (long_ago, long_ago))
    write(tmp_path, 3)
    assert names(tmp_path) == sorted(["step-3", mine.name, elsewhere[1].name, elsewhere[2].name])


def test_two_that_are_written_at_once(tmp_path):
    with Writing(str(tmp_path), 4, 1, 3) as first:
        with Writing(str(tmp_path), 4, 1, 3) as second:
            state_of([owned("a", np.ones(2))]).write(second.paths[0])
        state_of([owned("a", np.full(2, 2.0))]).write(first.paths[0])
    assert names(tmp_path) == ["step-4"]
    found = dict(saved.read_shards(files_in(first.path), wanted(["a"])))
    np.testing.assert_array_equal(found["a"].data.read(), [2, 2])


def test_one_that_is_put_back_while_another_takes_its_place(tmp_path, monkeypatch):
    """Another job saves in this folder and takes the writer for a killed process."""
    path = write(tmp_path, 4)
    rename, calls = os.rename, []

    def renamed(source, target):
        rename(source, target)
        if ".old-" in target and len(calls) < 3:
            calls.append(target)
            folder._tidy(str(tmp_path))
            assert names(tmp_path)[0] == "step-4"

    monkeypatch.setattr(folder.os, "rename", renamed)
    before = index_of(path)
    write(tmp_path, 4)
    assert len(calls) == 3
    assert names(tmp_path) == ["step-4"]
    assert index_of(path) not in (None, before)


# Kills saves at successive points. Each save replaces an earlier checkpoint of the same step.
KILLED = """
import os, sys
from mpidist.checkpoints.folder import Writing

def save(folder, content):
    with Writing(folder, 4, 1, 3, ["content"]) as writing:
        writing.add("ps-0-of-1.safetensors", b"")
        writing.add("content", content)

EVENTS = {"open", "os.listdir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}

def killed(folder, point):
    left = iter(range(point))
    def hook(event, _):
        if event in EVENTS and next(left, None) is None:
            os._exit(1)
    sys.addaudithook(hook)
    save(folder, b"new")
    os._exit(0)

for point in range(1000):
    folder = f"{sys.argv[1]}/{point}"
    save(folder, b"old")
    child = os.fork()
    if not child:
        killed(folder, point)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_save_killed_at_any_point_leaves_one_of_the_two(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    found = {}
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    for place in folders:
        (last,) = checkpoints(str(place))
        assert len(files_in(last)) == 1
        with open(os.path.join(last, "content")) as file:
            content = file.read()
        found.setdefault((os.path.basename(last).partition("-")[2][:5], content), 0)
        write(place, 5)
        assert names(place) == ["step-4", "step-5"]
        assert (place / "step-4" / "content").read_text() == content
        write(place, 4)
        assert names(place) == ["step-4", "step-5"]
        assert not (place / "step-4" / "content").exists()
    assert list(found) == [("4", "old"), ("4.old", "old"), ("4", "new")]
    assert len(folders) > 10


def test_they_are_in_the_order_in_which_they_were_saved(tmp_path):
    for step in (10, 9, 100, 2, 9):
        write(tmp_path, step, keep=10)
    assert checkpoints(str(tmp_path)) == [str(tmp_path / f"step-{n}") for n in (10, 100, 2, 9)]
    assert checkpoints(str(tmp_path / "absent")) == []


@pytest.mark.parametrize("index", ["", "[]", "{", "{}", '{"saved_ns": "x"}'])
def test_those_that_do_not_say_when_come_first_by_their_steps(tmp_path, index):
    for step in (100, 9, 1):
        write(tmp_path, step, keep=10)
    for step in (100, 9):
        (tmp_path / f"step-{step}" / "index.json").write_text(index)
    assert checkpoints(str(tmp_path)) == [str(tmp_path / f"step-{n}") for n in (9, 100, 1)]


def test_a_clock_that_was_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.time, "time_ns", lambda: 1 << 62)
    write(tmp_path, 5)
    monkeypatch.undo()
    write(tmp_path, 3)
    assert checkpoints(str(tmp_path)) == [str(tmp_path / f"step-{n}") for n in (5, 3)]


def test_a_training_that_begins_anew_keeps_what_it_has_saved(tmp_path):
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    for step in (1, 2, 3, 4):
        path = write(tmp_path, step)
        assert checkpoints(str(tmp_path))[-1] == path
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


def test_the_one_just_saved_stays(tmp_path, monkeypatch):
    put = folder._put_in_place

    def overtaken(partial, path):
        monkeypatch.undo()
        put(partial, path)
        write(tmp_path, 9)  # by another job

    monkeypatch.setattr(folder, "_put_in_place", overtaken)
    assert os.path.isdir(write(tmp_path, 3, keep=1))
    assert names(tmp_path) == ["step-3", "step-9"]


def test_a_folder_of_checkpoints_is_none(tmp_path):
    write(tmp_path, 3)
    write(tmp_path, 1)
    with pytest.raises(NotFoundError, match=r"is not a checkpoint.*holds step-3, step-1: latest"):
        folder.files_in(str(tmp_path), None, "ps")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep(tmp_path, keep):
    for step in range(1, 12):
        write(tmp_path, step, keep=keep)
        assert names(tmp_path) == sorted(
            f"step-{n}" for n in range(max(1, step - keep + 1), step + 1)
        )


@pytest.mark.parametrize("keep", [0, -1])
def test_to_keep_none(tmp_path, keep):
    with pytest.raises(ValueError, match="at least 1"):
        Writing(str(tmp_path), 1, 1, keep)


def test_the_same_step_twice(tmp_path):
    write(tmp_path, 4, [owned("a", np.ones(2))])
    path = write(tmp_path, 4, [owned("a", np.full(2, 9.0))])
    assert names(tmp_path) == ["step-4"]
    found = dict(saved.read_shards(files_in(path), wanted(["a"])))
    np.testing.assert_array_equal(found["a"].data.read(), [9, 9])


def test_values_that_do_not_fit():
    program = Origin("a", whole((2, 3))), np.dtype(np.float32)
    saved.check_fits("a", (2, 3), "float32", *program)
    for other in (((3, 2), "float32"), ((2, 3), "float64"), ((6,), "float32"), ((2, 3), "F8_E4M3")):
        with pytest.raises(InvalidArgumentError, match=r"'a' as .* and the program as float32"):
            saved.check_fits("a", *other, *program)
