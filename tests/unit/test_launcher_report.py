"""The report on a job that has ended, from the records that ranks leave."""

import json

import pytest

from mpidist.launcher import report, run_folder
from mpidist.launcher.job import Result
from mpidist.launcher.layout import Layout

INTERRUPTED, TIMED_OUT = (15, False), (0, True)


def ended(folder, status, hosts=(), ending=(0, False), had_failed=False):
    result = Result(status, *ending, had_failed, 0, 0)
    return report.report(folder, Layout(2), result, hosts, 5.0)


def leave(folder, kind, rank, **facts):
    record = {"rank": rank, "pid": 7, "host": "n1", "time": 1.0, **facts}
    (folder / f"{kind}-{rank}.json").write_text(json.dumps(record))


def leave_exit(folder, rank, code):
    leave(folder, "exit", rank, signal=None, exit_code=code, terminated=False)


def leave_end(folder, rank, time, number=None, code=None, terminated=False):
    facts = {"signal": number, "exit_code": code, "terminated": terminated}
    leave(folder, "exit", rank, time=time, **facts)


@pytest.fixture
def unknown(monkeypatch):
    def without_address(hosts):
        return {host: "not known" for host in hosts if host.startswith("no")}

    monkeypatch.setattr(report, "without_address", without_address)


@pytest.mark.parametrize(("launcher", "status"), [(0, 0), (3, 3)])
@pytest.mark.usefixtures("unknown")
def test_without_the_folder_the_status_of_the_launcher_counts(tmp_path, launcher, status):
    assert ended(tmp_path / "gone", launcher)[0] == status


@pytest.mark.usefixtures("unknown")
def test_hosts_without_an_address(tmp_path):
    status, (line,) = ended(tmp_path, 255, hosts=["a", "nowhere", "b", "no"])
    assert status == 255
    assert line == (
        "the launcher ended with status 255; hosts without an address here: nowhere (not known), "
        "no (not known); correct --hosts or --hostfile, or give them one in DNS or /etc/hosts"
    )
    for hosts in (["a", "b"], []):
        assert "look for a message of MPI above" in ended(tmp_path, 255, hosts=hosts)[1][0]
    leave_exit(tmp_path, 0, 0)  # the host was found
    assert "after rank 0 had left" in ended(tmp_path, 255, hosts=["no"])[1][0]
    leave_exit(tmp_path, 1, 3)
    assert "rank 1" in ended(tmp_path, 255, hosts=["no"])[1][0]


def test_the_waits_of_ranks_that_were_interrupted(tmp_path):
    ending = INTERRUPTED
    waits = [{"what": "recv from rank 1 of group 'world'", "since": 88.0}]
    leave(tmp_path, "state", 0, waits=waits, time=100.0)
    leave(tmp_path, "state", 1, waits=[], time=100.0)
    _, lines = ended(tmp_path, 143, ending=ending)
    assert lines[0] == "rank 0 was waiting for 12 s: recv from rank 1 of group 'world'"
    assert len(lines) == 2
    leave(tmp_path, "state", 1, waits=waits * 9, time=100.0)
    _, lines = ended(tmp_path, 143, ending=ending)
    assert len(lines) == 10
    assert lines[8] == "and 2 more such waits"


@pytest.mark.parametrize("ending", [INTERRUPTED, TIMED_OUT])
def test_a_failure_before_the_job_was_ended_is_the_reason(tmp_path, ending):
    leave(tmp_path, "failure", 1, reason="ValueError: bad", exit_code=4)
    assert "ValueError" not in ended(tmp_path, 143, ending=ending)[1][-1]
    status, lines = ended(tmp_path, 143, ending=ending, had_failed=True)
    assert status == 4
    assert lines[-1] == "rank 1 (pid 7 on n1) failed first: ValueError: bad; all 2 ranks were ended"


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", "\xff", None])
def test_files_that_are_no_records(tmp_path, capsys, text):
    """A warning comes once, and the other records count."""
    leave_exit(tmp_path, 0, 3)
    foreign = tmp_path / "exit-1.json"
    if text is None:
        foreign.mkdir()
    else:
        foreign.write_bytes(text.encode("latin-1"))
    for _ in range(3):
        assert report.first_failure(tmp_path)["rank"] == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mpidist run: the record {foreign} is ignored: ")


def test_a_folder_that_cannot_be_read(tmp_path, capsys):
    folder = tmp_path / "file"
    folder.touch()
    for _ in range(2):
        assert report.first_failure(folder) is None
    assert capsys.readouterr().err.count("the run folder cannot be read") == 1


def test_no_failure(tmp_path):
    leave_end(tmp_path, 0, 1.0, code=0)
    assert report.first_failure(tmp_path) is None
    assert report.successful_ranks(tmp_path) == [0]


def test_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    assert report.first_failure(gone) is None
    assert report.successful_ranks(gone) == []


def test_the_earliest_counts(tmp_path):
    leave_end(tmp_path, 0, 3.0, number=9)
    leave_end(tmp_path, 1, 2.0, number=11)
    leave_end(tmp_path, 2, 1.0, code=0)
    failure = report.first_failure(tmp_path)
    assert (failure["rank"], failure["exit_code"]) == (1, 139)
    assert failure["reason"] == "killed by signal 11 (SIGSEGV)"


def test_terminated_ranks_do_not_count(tmp_path):
    leave_end(tmp_path, 0, 1.0, number=15, terminated=True)
    leave_end(tmp_path, 1, 2.0, code=3)
    failure = report.first_failure(tmp_path)
    assert (failure["rank"], failure["reason"], failure["exit_code"]) == (
        1,
        "exited with status 3",
        3,
    )


def test_a_bare_status_is_a_victims_where_another_was_killed_at_that_time(tmp_path):
    leave_end(tmp_path, 0, 1.0, code=14)
    assert report.first_failure(tmp_path)["rank"] == 0
    leave_end(tmp_path, 1, 2.5, number=9)
    assert report.first_failure(tmp_path)["rank"] == 0
    leave_end(tmp_path, 1, 1.1, number=9)
    assert report.first_failure(tmp_path)["rank"] == 1
    leave(tmp_path, "failure", 0, reason="ValueError: bad", exit_code=14, time=0.9, traceback="")
    assert report.first_failure(tmp_path)["rank"] == 0


def test_equal_failures_of_other_ranks_are_counted(tmp_path):
    for rank, trace in enumerate(("line 3", "line 3", "line 4", "line 3")):
        facts = {"pid": 7, "host": "h", "reason": "E: no", "exit_code": 1, "time": 10.0 + rank}
        leave(tmp_path, "failure", rank, **facts, traceback=trace)
    status, lines = ended(tmp_path, 1)
    assert status == 1
    assert "rank 0 (pid 7 on h) failed first: E: no; 2 more ranks: the same; " in lines[-1]


def test_the_reason_of_the_rank_goes_before_its_status(tmp_path):
    leave(tmp_path, "failure", 1, reason="ValueError: bad", exit_code=1, time=1.0, traceback="")
    leave_end(tmp_path, 1, 1.5, number=6)
    leave_end(tmp_path, 0, 1.2, number=9)
    failure = report.first_failure(tmp_path)
    assert (failure["rank"], failure["reason"], failure["exit_code"]) == (1, "ValueError: bad", 1)


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
    assert report.task_name(tmp_path, layout, 1) == name


def test_clear_leaves_other_files_alone(tmp_path):
    leave_end(tmp_path, 0, 1.0, code=1)
    leave(tmp_path, "rank", 12)
    (tmp_path / "state-0.json").write_text("{}")
    (tmp_path / "notes-0.json").write_text("{}")
    for name in ("job.json", "look.json", "stall.json", "operations-0.ring", "stacks-1.txt"):
        (tmp_path / name).touch()
    run_folder.clear_records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes-0.json"]


def test_signal_without_a_name():
    assert report.describe_signal(9) == "signal 9 (SIGKILL)"
    assert report.describe_signal(99) == "signal 99"
