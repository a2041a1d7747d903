"""Who failed first, told from the files that ranks leave."""

import json

import pytest

from mpidist.launcher import records
from mpidist.launcher.layout import Layout

PLACE = {"pid": 7, "host": "n1"}


def leave(folder, kind, rank, **facts):
    record = {"rank": rank, **PLACE, **facts}
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(record))


def leave_exit(folder, rank, time, number=None, code=None, asked=False):
    leave(folder, "exit", rank, time=time, signal=number, exit_code=code, asked=asked)


def test_nobody_failed(tmp_path):
    leave_exit(tmp_path, 0, 1.0, code=0)
    assert records.first_failure(tmp_path) is None
    assert records.ended_well(tmp_path) == [0]


def test_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    assert records.first_failure(gone) is None
    assert records.ended(gone) == records.ended_well(gone) == []


def test_the_earliest_counts(tmp_path):
    leave_exit(tmp_path, 0, 3.0, number=9)
    leave_exit(tmp_path, 1, 2.0, number=11)
    leave_exit(tmp_path, 2, 1.0, code=0)
    failure = records.first_failure(tmp_path)
    assert (failure.rank, failure.exit_code) == (1, 139)
    assert failure.reason == "killed by signal 11 (SIGSEGV)"


def test_victims_do_not_count(tmp_path):
    leave_exit(tmp_path, 0, 1.0, number=15, asked=True)
    leave_exit(tmp_path, 1, 2.0, code=3)
    failure = records.first_failure(tmp_path)
    assert (failure.rank, failure.reason, failure.exit_code) == (1, "exited with status 3", 3)


def test_a_bare_status_is_a_victims_where_another_was_killed_at_that_time(tmp_path):
    leave_exit(tmp_path, 0, 1.0, code=14)
    assert records.first_failure(tmp_path).rank == 0
    leave_exit(tmp_path, 1, 2.5, number=9)
    assert records.first_failure(tmp_path).rank == 0
    leave_exit(tmp_path, 1, 1.1, number=9)
    assert records.first_failure(tmp_path).rank == 1
    leave(tmp_path, "failure", 0, reason="ValueError: bad", exit_code=14, time=0.9, traceback="")
    assert records.first_failure(tmp_path).rank == 0


def test_the_rank_knows_better_than_its_keeper(tmp_path):
    leave(tmp_path, "failure", 1, reason="ValueError: bad", exit_code=1, time=1.0, traceback="")
    leave_exit(tmp_path, 1, 1.5, number=6)
    leave_exit(tmp_path, 0, 1.2, number=9)
    failure = records.first_failure(tmp_path)
    assert (failure.rank, failure.reason, failure.exit_code) == (1, "ValueError: bad", 1)


def test_a_failure_never_ends_with_status_zero(tmp_path):
    leave(tmp_path, "failure", 1, reason="left early", exit_code=0, time=1.0, traceback="")
    assert records.first_failure(tmp_path).exit_code == 1


@pytest.mark.parametrize(
    ("record", "layout", "name"),
    [
        ({"job": "chief", "task": 0}, Layout(2, (("worker", 2),)), "chief 0"),
        ({"job": None, "task": None}, Layout(2, (("worker", 2),)), "worker 1"),
        (None, Layout(2, (("worker", 2),)), "worker 1"),
        (None, Layout(2), "rank 1"),
    ],
)
def test_task_name(tmp_path, record, layout, name):
    if record is not None:
        leave(tmp_path, "rank", 1, **record)
    assert records.task_name(tmp_path, layout, 1) == name


def test_clear_leaves_other_files_alone(tmp_path):
    leave_exit(tmp_path, 0, 1.0, code=1)
    leave(tmp_path, "rank", 12)
    (tmp_path / "metrics-0.json").write_text("{}")
    (tmp_path / "notes-0.json").write_text("{}")
    records.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes-0.json"]


def test_signal_without_a_name():
    assert records.describe_signal(9) == "signal 9 (SIGKILL)"
    assert records.describe_signal(99) == "signal 99"
