"""``mpidist doctor --hang``: the report says why a job hangs. See ``_cases/hangs.py``."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from _cases.hanging_jobs import ANSWER_S, ask, check_answer, holds, output_of, report_of, running
from _cases.hangs import ERRORS, GROUP, HANGS, HEALTHY, TURNS
from _cases.jobs import run_job

LAST_LINES = 30
MOST_LINES = 40
HEALTHY_JOBS = 10
QUESTIONS = 2  # to a job that goes on


@pytest.mark.parametrize("name", HANGS)
def test_the_report_names_the_cause_the_ranks_and_the_line(tmp_path, name):
    check_answer(tmp_path, HANGS[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_a_job_that_goes_on_is_not_stuck(tmp_path, name):
    case = HEALTHY[name]
    with running(tmp_path, case):
        for _ in range(QUESTIONS):
            report, status = report_of(tmp_path)
            # The partners of a call of mpi4py are not known.
            assert report["verdict"] in ("moving", "slow", *["unknown"] * ("mpi4py" in name))
            assert (report["cause"], report["ranks"]) in [answer[1:] for answer in case.answers()]
            assert status == 0
    assert [word for word in case.words if word not in report["text"]] == []


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_that_ends_the_job_is_named(tmp_path, name):
    case = ERRORS[name]
    words = (*case.layout, "--run-dir", str(tmp_path / "run"))
    ended = run_job(tmp_path, words, case.program)
    assert ended.status != 0
    last = ended.err.splitlines()[-LAST_LINES:]
    assert " failed first: " in last[-1]
    assert [word for word in case.words if word not in "\n".join(last)] == [], ended.err
    report, status = report_of(tmp_path)
    assert (report["verdict"], report["cause"], status) == ("ended", "failed", 0)
    text = " ".join([report["text"], *(stack["doing"] for stack in report["stacks"])])
    assert [word for word in case.words if word not in text] == []
    assert "signal 15" not in report["text"]  # by which the launcher ends the other ranks
    if case.failed is not None:
        assert report["ranks"] == [case.failed]


def test_a_job_that_the_limit_of_waits_has_ended(tmp_path):
    program = f"""\
{GROUP}
group.recv(array, 0) if RANK == 1 else group.all_reduce(array)
"""
    words = ("-n", "2", "--env", "MPIDIST_STALL_ABORT_S=1", "--run-dir", str(tmp_path / "run"))
    ended = run_job(tmp_path, words, program)
    assert "the limit set by MPIDIST_STALL_ABORT_S" in ended.err.splitlines()[-1]
    report, status = report_of(tmp_path)
    assert (report["verdict"], report["ranks"], status) == ("ended", [], 0)
    assert "It hung." in report["text"]


def test_a_forked_child_must_not_use_the_group(tmp_path):
    program = f"""\
{GROUP}
child = os.fork() if RANK == 1 else None
if child == 0:
    group.all_reduce(array)
if child is not None:
    os.waitpid(child, 0)
group.all_reduce(array)
"""
    ended = run_job(tmp_path, ("-n", "2"), program)
    assert ended.status == 0, ended.err
    assert "was forked from process" in ended.err.splitlines()[-1]


def test_the_report_as_text(tmp_path):
    case = HANGS["a rank skips a collective and receives"]
    with running(tmp_path, case):
        deadline = time.monotonic() + ANSWER_S
        while (done := ask(tmp_path)).returncode == 0 and time.monotonic() < deadline:
            pass
    assert done.returncode == 1
    assert 3 <= len(done.stdout.splitlines()) <= MOST_LINES
    assert [word for word in case.words if word not in done.stdout] == [], done.stdout
    assert all(holds(done.stdout, line) for line in case.lines("stuck") + case.lines("waits"))
    done = ask(tmp_path)
    assert done.returncode == 0
    assert "The job has ended. It was interrupted by Ctrl-C." in done.stdout
    assert "all_reduce(SUM, float64[8]), number 1 of group 'world' at" in done.stdout
    assert "rank 1: recv(from rank 0, float64[8]) of group 'world' at" in done.stdout


def test_a_job_that_ends_while_it_is_asked(tmp_path):
    program = f"""\
{GROUP}ready()
while not (FOLDER / "run" / "look.json").exists():
    time.sleep(0.01)
"""
    with ThreadPoolExecutor(1) as pool:
        words = ("-n", "2", "--run-dir", str(tmp_path / "run"))
        job = pool.submit(run_job, tmp_path, words, program)
        while not (tmp_path / "ready-1").exists() and not job.done():
            time.sleep(0.05)
        done = ask(tmp_path)
        assert job.result().status == 0, job.result().err
    assert done.returncode == 0
    assert "The job ended while it was asked." in done.stdout
    assert "did not answer" not in done.stdout


def test_a_folder_without_a_job(tmp_path):
    done = ask(tmp_path)
    assert done.returncode == 2
    assert str(tmp_path / "run") in done.stderr


def test_a_long_wait_of_a_stuck_job_is_reported_once(tmp_path):
    case = replace(HANGS["both receive first"], env={"MPIDIST_STALL_S": "1"})
    with running(tmp_path, case):
        deadline = time.monotonic() + ANSWER_S
        while not holds(output_of(tmp_path), case.lines("stuck")[0]):
            assert time.monotonic() < deadline, output_of(tmp_path)
            time.sleep(0.1)
        time.sleep(3.0)  # for more reports
    assert output_of(tmp_path).count("wait for each other") == 1


def test_slow_jobs_without_a_stall_report(tmp_path):
    for number in range(HEALTHY_JOBS):
        ended = run_job(tmp_path / str(number), ("-n", "2"), TURNS, env={"MPIDIST_STALL_S": "1"})
        assert (ended.status, ended.err) == (0, ""), f"run {number}"
