"""The dispatcher's journal with torn, garbled or missing files: complete data, or an error."""

import random
import re
import shutil
from contextlib import closing

import pytest

from dataservice.dispatch.journal import Journal
from mpidist.errors import DataLossError, FailedPreconditionError


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def commit(journal, seed):
    """Commit like a dispatcher: some records change, some are removed."""
    draw = random.Random(seed)
    changes = {("part", draw.randrange(30)): draw.randbytes(draw.randrange(900)) for _ in range(3)}
    journal.commit(changes | {("task", draw.randrange(30)): None, ("task", seed): b"%d" % seed})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the files of a killed dispatcher with small and large records, and their content."""
    directory = tmp_path_factory.mktemp("whole")
    with closing(Journal(directory)) as journal:
        for seed in range(30):
            commit(journal, seed)
        large = random.Random(0).randbytes(70_000)
        journal.commit({("dataset", 1): large, ("dataset", 2): large[::-1]})
        held = journal.load()
        files = bytes_of(directory)
    assert sorted(files) == ["file-1", "file-2", "lock", "state"]
    return files, held


def found(directory, files):
    """Return the content of a journal with the given files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    with closing(Journal(directory)) as journal:
        return journal.load()


def check_cut_or_flipped(directory, whole, name, places):
    files, held = whole
    content = files[name]
    assert found(directory, files) == held
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        # Bytes 8 to 11 hold the format number, so a flipped bit there may name another version.
        kinds = (DataLossError, FailedPreconditionError) if place in range(8, 12) else DataLossError
        for damaged in (content[:place], bytes(flipped), content + content[: place + 1]):
            with pytest.raises(kinds, match=r"journal"):
                found(directory, files | {name: damaged})


@pytest.mark.parametrize("name", ["state", "file-1", "file-2"])
def test_a_file_that_is_cut_off_or_garbled(tmp_path, whole, name):
    draw, size = random.Random(0), len(whole[0][name])
    places = {0, 1, 23, 24, 25, size - 1, *range(8, 12), *draw.sample(range(size), 80)}
    check_cut_or_flipped(tmp_path / "journal", whole, name, sorted(places))


@pytest.mark.long
def test_a_file_that_is_cut_off_or_garbled_anywhere(tmp_path, whole):
    places = range(0, len(whole[0]["state"]), 3)
    check_cut_or_flipped(tmp_path / "journal", whole, "state", places)


@pytest.mark.parametrize("name", ["state", "file-1"])
def test_a_file_that_is_missing(tmp_path, whole, name):
    files, held = whole
    directory = tmp_path / "journal"
    missing = {key: content for key, content in files.items() if key != name}
    match = f"{re.escape(str(directory))}: {name} is missing.*put a copy of the directory in its"
    with pytest.raises(DataLossError, match=match):
        found(directory, missing)
    for _ in range(2):  # the second attempt is refused, too
        with pytest.raises(DataLossError, match=match), closing(Journal(directory)) as journal:
            journal.load()
    (directory / name).write_bytes(files[name])
    with closing(Journal(directory)) as journal:
        assert journal.load() == held


def test_a_file_of_another_commit(tmp_path, whole):
    """Refuse a state with the large records of another commit."""
    files, _ = whole
    mixed = files | {"file-1": files["file-2"]}
    with pytest.raises(DataLossError, match="file-1 has a wrong checksum"):
        found(tmp_path / "journal", mixed)


def test_what_to_do_about_damage(tmp_path, whole):
    directory = tmp_path / "journal"
    what_to_do = "journal is damaged; put a copy of the directory in its place, or move it away"
    state = whole[0]["state"]
    for damaged, what in (
        (state[:-1] + b"!", "state has a wrong length or checksum"),
        (b"this is no state\n" * 1000, "state is not a dispatcher's"),
        (b"", "state is truncated"),
    ):
        match = rf"in {re.escape(str(directory))}: {what}; the {what_to_do}"
        with pytest.raises(DataLossError, match=match):
            found(directory, whole[0] | {"state": damaged})


# While the dispatcher runs


def remove_directory(directory):
    shutil.rmtree(directory)


def move_directory(directory):
    directory.rename(directory.with_name("elsewhere"))


def replace_directory(directory):
    move_directory(directory)
    with closing(Journal(directory)) as journal:
        commit(journal, 1)


@pytest.mark.parametrize("take_away", [remove_directory, move_directory, replace_directory])
def test_a_directory_that_is_taken_away_from_a_dispatcher(tmp_path, take_away):
    directory = tmp_path / "journal"
    with closing(Journal(directory)) as journal:
        commit(journal, 1)
        take_away(directory)
        left = bytes_of(directory) if directory.exists() else None
        for seed in (2, 3):
            match = f"{directory}: .* was re(mov|plac)ed while this .* had it.*; put back what was"
            with pytest.raises(FailedPreconditionError, match=match):
                commit(journal, seed)
        assert left is None or bytes_of(directory) == left  # it is of another dispatcher
        if take_away is not remove_directory:
            shutil.rmtree(directory, ignore_errors=True)
            directory.with_name("elsewhere").rename(directory)
            commit(journal, 4)
            held = journal.load()
    if take_away is not remove_directory:
        with closing(Journal(directory)) as journal:
            assert journal.load() == held


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lock", "removed"),
        ("lock", "replaced"),
        ("state", "removed"),
        ("state", "replaced"),
        ("file-1", "removed"),
    ],
)
def test_a_file_that_is_taken_away_from_a_dispatcher(tmp_path, name, how):
    directory = tmp_path / "journal"
    with closing(Journal(directory)) as journal:
        commit(journal, 1)
        journal.commit({("dataset", 1): bytes(100_000)})
        (directory / name).rename(tmp_path / "kept")
        if how == "replaced":
            shutil.copy(tmp_path / "kept", directory / name)
        with pytest.raises(FailedPreconditionError, match=f"{directory}: {name} was {how} while"):
            commit(journal, 2)
        (tmp_path / "kept").rename(directory / name)
        commit(journal, 3)


def test_a_dispatcher_whose_lock_was_removed_writes_nothing_into_the_journal_of_the_next(tmp_path):
    with closing(Journal(tmp_path)) as first:
        commit(first, 1)
        (tmp_path / "lock").unlink()
        with closing(Journal(tmp_path)) as second:
            commit(second, 2)
            with pytest.raises(FailedPreconditionError, match="lock was replaced while"):
                commit(first, 3)
            commit(second, 4)
            held = second.load()
    with closing(Journal(tmp_path)) as third:
        assert third.load() == held
