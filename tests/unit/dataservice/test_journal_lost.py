"""The dispatcher's journal when some of it is missing: it starts with all, or not at all."""

import random
import re
import shutil
from contextlib import closing

import pytest

from dataservice.dispatch.journal import Journal
from dataservice.dispatch.journal_files import _written
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    PermissionDeniedError,
)

DATABASE, LOG, COMMITS = "journal.sqlite", "journal.sqlite-wal", "commits"
PAGE_BYTES = 4096


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def commit(journal, seed):
    """As dispatchers do: some records change, some go, now and then a large one."""
    draw = random.Random(seed)
    changes = {("part", draw.randrange(30)): draw.randbytes(draw.randrange(900)) for _ in range(3)}
    journal.commit(changes | {("task", draw.randrange(30)): None, ("task", seed): b"%d" % seed})


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What is left of a process, by when it was killed, and what there was."""
    directory = tmp_path_factory.mktemp("killed")
    with closing(Journal(directory)) as journal:
        for seed in range(30):
            commit(journal, seed)
        journal._connection.execute("PRAGMA wal_checkpoint(RESTART)")
        for seed in range(30, 60):
            commit(journal, seed)
        files = {"before the log was copied": bytes_of(directory)}
        journal._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        files["after that"] = bytes_of(directory)
        held = journal.load()
    files["after the end"] = bytes_of(directory)
    return files, held


def found(directory, files):
    """What a journal of some files holds; None if it says that something is wrong."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    try:
        with closing(Journal(directory)) as journal:
            return journal.load()
    except (DataLossError, FailedPreconditionError, PermissionDeniedError):
        return None


@pytest.mark.parametrize(
    ("name", "when", "least"),
    [
        (DATABASE, "before the log was copied", 0),  # which has it all
        (DATABASE, "after the end", 150),
        (LOG, "before the log was copied", 200),
        (LOG, "after that", 0),  # the database has it all
        (COMMITS, "after that", 0),  # it is there twice
    ],
)
def test_all_or_an_error_whatever_is_cut_off_or_garbled(tmp_path, killed, name, when, least):
    files, held = killed[0][when], killed[1]
    assert found(tmp_path / "journal", files) == held
    content, draw, errors = files[name], random.Random(0), 0
    for place in draw.sample(range(len(content)), 120):
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        for damaged in (content[:place], flipped):
            now = found(tmp_path / "journal", files | {name: damaged})
            assert now in (held, None)
            errors += now is None
    assert errors >= least


def test_a_file_with_pages_of_the_last_commit_and_of_earlier_ones(tmp_path, killed):
    before, held = killed[0]["before the log was copied"], killed[1]
    old, new = before[DATABASE], killed[0]["after the end"][DATABASE]
    pages = max(len(old), len(new)) // PAGE_BYTES
    draw, errors = random.Random(0), 0
    for _ in range(60):
        fresh = [draw.random() < 0.7 for _ in range(pages)]
        mixed = b"".join(
            (new if is_new else old)[PAGE_BYTES * page : PAGE_BYTES * (page + 1)]
            for page, is_new in enumerate(fresh)
        )
        # As after a kill while the log was copied; it is copied again.
        assert found(tmp_path / "journal", before | {DATABASE: mixed}) == held
        without = {DATABASE: mixed, COMMITS: before[COMMITS]}
        now = found(tmp_path / "journal", without)
        assert now in (held, None)
        errors += now is None
    assert errors > 30


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_log_that_is_missing(tmp_path, restarts):
    for seed in range(restarts):
        with closing(Journal(tmp_path / "journal")) as journal:
            commit(journal, seed)
    with closing(Journal(tmp_path / "journal")) as journal:
        for seed in range(3):
            commit(journal, seed)
        files = bytes_of(tmp_path / "journal")
        held = journal.load()
    copy = tmp_path / "copy"
    assert found(copy, {name: files[name] for name in files if name != f"{DATABASE}-shm"}) == held
    assert found(copy, {name: files[name] for name in files if name != LOG}) is None
    numbers = f"the last 3 of {3 + restarts} commits are lost: the write-ahead log"
    match = f"{re.escape(str(copy))}: {numbers} .*is missing.*put a copy of the directory in its"
    for _ in range(2):  # it does not go on at the second attempt either
        with pytest.raises(DataLossError, match=match):
            Journal(copy)
    shutil.copy(tmp_path / "journal" / DATABASE, copy)
    with closing(Journal(copy)) as journal:
        assert journal.load() == held


def test_a_number_of_commits_that_is_missing_or_garbled(tmp_path):
    with closing(Journal(tmp_path / "journal")) as journal:
        commit(journal, 1)
        held = journal.load()
    files = bytes_of(tmp_path / "journal")
    copy, sector = tmp_path / "copy", len(files[COMMITS]) // 2
    for wrong, what in (
        (b"", "has no readable number"),
        (bytes(2 * sector), "has no readable number"),
        (None, "is missing, so lost commits"),
    ):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "journal", copy)
        (copy / COMMITS).unlink()
        if wrong is not None:
            (copy / COMMITS).write_bytes(wrong)
        for _ in range(2):
            with pytest.raises(DataLossError, match=f"{copy}: commits {what}.*; the journal is"):
                Journal(copy)
    for half in (
        files[COMMITS][:sector],
        bytes(sector) + files[COMMITS][sector:],
        files[COMMITS][:sector] + bytes(sector),
        # Whoever was killed before it was written, or lost power.
        _written(0),
        _written(0)[:sector] + files[COMMITS][sector:],
    ):
        assert found(copy, files | {COMMITS: half}) == held


def test_a_number_that_is_behind_catches_up(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        for seed in range(3):
            commit(journal, seed)
    (tmp_path / COMMITS).write_bytes(_written(1))
    with closing(Journal(tmp_path)) as journal:
        commit(journal, 3)
    assert (tmp_path / COMMITS).read_bytes() == _written(4)


def test_a_database_that_is_missing(tmp_path):
    with closing(Journal(tmp_path)) as journal:
        commit(journal, 1)
    (tmp_path / DATABASE).unlink()
    for _ in range(2):
        with pytest.raises(DataLossError, match=f"{tmp_path}: the database is missing, after 1 co"):
            Journal(tmp_path)
    (tmp_path / COMMITS).write_bytes(_written(0))  # as of one that was killed before its database
    with closing(Journal(tmp_path)) as journal:
        assert journal.load() == {}


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
        for seed in (2, 3):
            match = f"{directory}: .* was re(mov|plac)ed while this .* had it.*; put back what was"
            with pytest.raises(FailedPreconditionError, match=match):
                commit(journal, seed)
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
        (DATABASE, "removed"),
        (DATABASE, "replaced"),
        (LOG, "removed"),
        (COMMITS, "removed"),
    ],
)
def test_a_file_that_is_taken_away_from_a_dispatcher(tmp_path, name, how):
    directory = tmp_path / "journal"
    with closing(Journal(directory)) as journal:
        commit(journal, 1)
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
