"""``mpidist doctor --hang``: the report says why a job hangs. See ``_cases/hangs.py``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from _cases.hangs import ERRORS, GROUP, HANGS, HEALTHY, TURNS
from _cases.jobs import run_job
from _cases.leftovers import abandoned, remaining, shared_files

START_S = 30.0  # on a busy machine
ANSWER_S = 10.0  # from the first question to the expected answer
END_S = 10.0
GONE_S = 5.0
LAST_LINES = 30
MOST_LINES = 40
HEALTHY_JOBS = 10
QUESTIONS = 2  # to a job that goes on


@contextlib.contextmanager
def running(folder, case):
    """Start a job and wait until its ranks are about to hang. End it by SIGINT after the block."""
    before = shared_files()
    script = folder / "script.py"
    script.write_text(case.program)
    command = [sys.executable, "-m", "mpidist", "run", *case.layout, "--run-dir", f"{folder}/run"]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [*command, str(script)],
            env=os.environ | case.env,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        deadline = time.monotonic() + START_S
        while missing := [rank for rank in case.ready if not (folder / f"ready-{rank}").exists()]:
            assert process.poll() is None, output_of(folder)
            assert time.monotonic() < deadline, f"ranks {missing} are late: {output_of(folder)}"
            time.sleep(0.05)
        yield
        assert process.poll() is None, output_of(folder)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130, output_of(folder)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
        process.stdin.close()
    left = remaining(str(folder), GONE_S)
    assert not left, f"processes are left: {left}"
    files = abandoned(before, GONE_S)
    assert not files, f"left in /dev/shm: {files}"


def output_of(folder):
    return (folder / "output").read_text(errors="replace")


def ask(folder, *words):
    """Run ``mpidist doctor --hang`` on the job of a folder."""
    command = [sys.executable, "-m", "mpidist", "doctor", "--hang", str(folder / "run"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def report_of(folder):
    """Return the report of a job as an object, and the exit status of the command."""
    done = ask(folder, "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    print(done.returncode, json.dumps(report, indent=1))  # shown if the test fails
    return report, done.returncode


def differences(case, report, status):
    """Return the differences between a report and the expected one, in words."""
    found = []
    answer = report["verdict"], report["cause"], report["ranks"]
    if answer not in case.answers():
        found.append(f"{answer} is none of {case.answers()}")
    if status != (report["verdict"] == "stuck"):
        found.append(f"exit status {status}")
    text = report["text"]
    found += [f"no {word!r} in the text" for word in case.words if word not in text]
    named = case.lines("stuck") + case.lines("named")
    found += [f"no {line} in the text" for line in named if not holds(text, line)]
    loop = case.lines("loop")
    if loop and not any(holds(text, line) for line in loop):
        found.append(f"none of {loop} in the text")
    frames = [frame for stack in report["stacks"] for frame in stack["frames"]]
    places = " ".join(f"{os.path.basename(file)}:{line} " for file, line, _ in frames)
    marked = case.lines("stuck") + case.lines("waits")
    found += [f"no {line} in the stacks" for line in marked if not holds(places, line)]
    return found


def holds(text, line):
    """Return whether a text has ``script.py:LINE``, and not only a longer number."""
    return re.search(rf"\b{re.escape(line)}\b", text) is not None


@pytest.mark.parametrize("name", HANGS)
def test_the_report_names_the_cause_the_ranks_and_the_line(tmp_path, name):
    case = HANGS[name]
    with running(tmp_path, case):
        deadline = time.monotonic() + ANSWER_S
        while found := differences(case, *report_of(tmp_path)):
            assert time.monotonic() < deadline, "; ".join(found)


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
    assert "has ended" in done.stdout


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
