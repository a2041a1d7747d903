"""Jobs that hang, and ``mpidist doctor --hang``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

from _cases.leftovers import abandoned, remaining, shared_files

START_S = 30.0  # on a busy machine
ANSWER_S = 10.0  # from the first question to the expected answer
END_S = 10.0
GONE_S = 5.0


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


def check_answer(folder, case):
    """Start a job, and ask until the report is the expected one."""
    with running(folder, case):
        deadline = time.monotonic() + ANSWER_S
        while found := differences(case, *report_of(folder)):
            assert time.monotonic() < deadline, "; ".join(found)
