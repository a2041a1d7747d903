"""The dispatcher's journal when its files are torn or garbled."""

import random
import re
import shutil
from contextlib import closing

import pytest

from dataservice.dispatch.journal import Journal
from dataservice.dispatch.journal_files import _written
from mpidist.errors import DataLossError, FailedPreconditionError, PermissionDeniedError

FRAME_BYTES = 24 + 4096  # of the write-ahead log, after 32 bytes


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """What a killed process has left: the files' bytes, and the log's size after each commit."""
    directory = tmp_path_factory.mktemp("torn")
    sizes, states = [0], [{}]
    with closing(Journal(directory)) as journal:
        log = directory / "journal.sqlite-wal"
        for number in range(1, 6):
            journal.commit({("a", 1): b"%d" % number, ("b", number): bytes(number * 900)})
            sizes.append(log.stat().st_size)
            states.append(journal.load())
        left = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert sizes[-1] == len(left["journal.sqlite-wal"])
    return left, sizes, states


def recovered(directory, left, log, commits):
    """What a journal holds that starts with a log of some bytes."""
    for name, content in (left | {"journal.sqlite-wal": log, "commits": commits}).items():
        (directory / name).write_bytes(content)
    with closing(Journal(directory)) as journal:
        return journal.load()


def check_torn(directory, torn, places):
    """The whole commits before each place are there, and nothing else.

    If it was not a kill that tore the log, but something that came later, that is an error.
    """
    left, sizes, states = torn
    log = left["journal.sqlite-wal"]
    for place in places:
        whole = max(i for i, size in enumerate(sizes) if size <= place)
        flipped = bytearray(log)
        if place < len(log):
            flipped[place] ^= 1 << place % 8
        for garbled in (log[:place], flipped) if place < len(log) else (log,):
            assert recovered(directory, left, garbled, _written(whole)) == states[whole]
            if whole < len(states) - 1:
                with pytest.raises(
                    DataLossError, match=f"the last {5 - whole} of 5 commits are lost"
                ):
                    recovered(directory, left, garbled, left["commits"])


def test_a_log_that_is_torn_or_garbled(tmp_path, torn):
    end = torn[1][-1]
    edges = [
        32 + FRAME_BYTES * n + d for n in range(end // FRAME_BYTES + 1) for d in (-1, 0, 1, 24)
    ]
    places = {0, 1, 31, end, *edges, *random.Random(0).sample(range(end), 200)}
    check_torn(tmp_path, torn, [place for place in sorted(places) if place <= end])


@pytest.mark.long
def test_a_log_that_is_torn_or_garbled_anywhere(tmp_path, torn):
    check_torn(tmp_path, torn, range(0, torn[1][-1] + 1, 7))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a journal's file, of several pages, and what it holds."""
    directory = tmp_path_factory.mktemp("whole")
    with closing(Journal(directory)) as journal:
        journal.commit({(k, key): k.encode() * 200 for k in "ab" for key in range(100)})
        journal.commit({("b", key): None for key in range(40)})
        held = journal.load()
    return [(directory / name).read_bytes() for name in ("journal.sqlite", "commits")], held


def check_damaged(directory, whole, content, error):
    """Whether damage is found; if not, it was where nothing is kept."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "journal.sqlite").write_bytes(content)
    (directory / "commits").write_bytes(whole[0][1])
    try:
        with closing(Journal(directory)) as journal:
            assert journal.load() == whole[1]
            journal.commit({("c", 1): b""})
    except error:
        return True
    return False


# Of the file's header: whether SQLite may write to it, the version, the program.
HEADER = {18: PermissionDeniedError} | dict.fromkeys(
    [*range(60, 64), *range(68, 72)], FailedPreconditionError
)


def check_flips(directory, whole, bits):
    found = 0
    for bit in bits:
        place = bit // 8
        flipped = bytearray(whole[0][0])
        flipped[place] ^= 1 << bit % 8
        error = HEADER.get(place, DataLossError)
        found += check_damaged(directory, whole, flipped, error)
    return found


def test_a_file_that_is_damaged(tmp_path, whole):
    content = whole[0][0]
    bits = {*range(0, 8 * 100, 3), *random.Random(0).sample(range(8 * len(content)), 200)}
    assert check_flips(tmp_path / "journal", whole, sorted(bits)) > 250
    for size in (0, 1, 99, 100, 512, 4095, 4096, 8192, len(content) - 1):
        assert check_damaged(tmp_path / "journal", whole, content[:size], DataLossError)
    for start in range(0, len(content), 4096):  # a page that was not written
        if start // 4096 != 1:  # which tells who the parents of others are, for when they move
            blank = content[:start] + bytes(4096) + content[start + 4096 :]
            assert check_damaged(tmp_path / "journal", whole, blank, DataLossError)


@pytest.mark.long
def test_a_file_that_is_damaged_anywhere(tmp_path, whole):
    check_flips(tmp_path / "journal", whole, range(0, 8 * len(whole[0][0]), 31))


def test_what_to_do_about_damage(tmp_path, whole):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(whole[0][0].replace(b"a" * 200, b"a" * 199 + b"!"))
    (tmp_path / "commits").write_bytes(whole[0][1])
    what_to_do = "journal is damaged; put a copy of the directory in its place, or move it away"
    with closing(Journal(tmp_path)) as journal:
        match = rf"in {re.escape(str(tmp_path))}: a \d+ has a wrong checksum; the {what_to_do}"
        with pytest.raises(DataLossError, match=match):
            journal.load()
    path.write_text("this is no database\n" * 1000)
    with pytest.raises(DataLossError, match=f"not a database .SQLITE_NOTADB.; the {what_to_do}"):
        Journal(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataLossError, match=f"journal.sqlite is truncated; the {what_to_do}"):
        Journal(tmp_path)
    path.rename(tmp_path / "journal.sqlite-wal")
    with pytest.raises(DataLossError, match=f"missing, but its .* log is there; the {what_to_do}"):
        Journal(tmp_path)
