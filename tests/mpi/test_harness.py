"""The harness itself, on a project of its own in a temporary folder."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PROJECT = """
import os, threading, time
import pytest


@pytest.mark.ranks(2, 3)
def test_passes(world, rank_count):
    print("said by", world.rank)
    assert world.allreduce(1) == world.size == rank_count


@pytest.mark.ranks(2)
def test_same_launch_a(world):
    os.environ["LAUNCH"] = "shared"


@pytest.mark.ranks(2)
def test_same_launch_b(world):
    assert os.environ["LAUNCH"] == "shared"


@pytest.mark.ranks(2, own_launch=True)
def test_own_launch():
    assert "LAUNCH" not in os.environ


@pytest.mark.ranks(2)
def test_one_rank_fails(world):
    print("printed by", world.rank)
    assert world.rank != 1


@pytest.mark.ranks(2)
def test_new_launch_after_failure():
    assert "LAUNCH" not in os.environ


@pytest.mark.ranks(2)
def test_one_fails_and_one_waits(world):
    assert world.rank != 1
    world.recv(source=1)


def wait_in_the_background():
    time.sleep(60)


@pytest.mark.ranks(2, timeout=4)
def test_deadlock(world):
    threading.Thread(target=wait_in_the_background, daemon=True).start()
    world.recv(source=1 - world.rank)


@pytest.mark.ranks(2)
def test_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    world.barrier()


@pytest.mark.ranks(2)
def test_leaves(world):
    if world.rank == 1:
        os._exit(5)
    world.barrier()


@pytest.mark.ranks(2)
def test_system_exit(world):
    if world.rank == 0:
        raise SystemExit(3)


@pytest.fixture
def broken(world):
    raise OSError("no such thing")


@pytest.mark.ranks(2)
def test_error_in_setup(broken):
    pass


@pytest.mark.ranks(2)
def test_all_skip(world):
    pytest.skip("not here")


@pytest.mark.ranks(2)
def test_one_skips(world):
    if world.rank == 0:
        pytest.skip("not here")


@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure(world):
    assert world.rank is None


@pytest.mark.ranks(2)
def test_last(world):
    assert world.allreduce(1) == 2


def test_without_ranks(rank_count):
    assert rank_count == 0


@pytest.mark.long
@pytest.mark.ranks(2)
def test_long(world):
    pass
"""

INTERRUPTED = """
import os, signal
import pytest

os.environ.setdefault("OUTER", str(os.getpid()))  # ranks have it from there


@pytest.mark.ranks(2)
def test_waits(world):
    if world.rank == 0:
        world.send(0, 1)
    else:
        world.recv(source=0)
        os.kill(int(os.environ["OUTER"]), signal.SIGINT)
    world.recv(source=1 - world.rank)
"""


def start(folder, *words, project=PROJECT):
    """Run the project's tests; gives the process, and outcomes and texts by test."""
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\npytest_plugins = ['_ranks.plugin']\n"
        + (TESTS / "mpi" / "conftest.py").read_text()
    )
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (folder / "test_project.py").write_text(project)
    results = folder / "results.xml"
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", f"--junitxml={results}", "test_project.py", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    outcomes = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        child = case.find("*")
        kind = "passed" if child is None or child.tag == "system-out" else child.tag
        outcomes[case.get("name")] = (kind, "" if child is None else child.text or "")
    return shown, outcomes


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    shown, outcomes = start(folder, "-q")
    return folder, shown, outcomes


def text_of(project, name, kind="failure"):
    found, text = project[2][name]
    assert found == kind, project[1].stdout
    return text


def test_each_test_has_its_own_outcome(project):
    failed = {name for name, (kind, _) in project[2].items() if kind == "failure"}
    assert failed == {
        "test_one_rank_fails[n2]",
        "test_one_fails_and_one_waits[n2]",
        "test_deadlock[n2]",
        "test_killed[n2]",
        "test_leaves[n2]",
        "test_system_exit[n2]",
        "test_one_skips[n2]",
    }
    passed = {name for name, (kind, _) in project[2].items() if kind == "passed"}
    assert passed == {
        "test_without_ranks",
        "test_passes[n2]",
        "test_passes[n3]",
        "test_same_launch_a[n2]",
        "test_same_launch_b[n2]",
        "test_own_launch[n2]",
        "test_new_launch_after_failure[n2]",
        "test_last[n2]",
    }
    last = project[1].stdout.splitlines()[-1]
    counts = "7 failed, 8 passed, 1 skipped, 1 deselected, 1 xfailed, 1 error"
    assert last.startswith(counts), project[1].stdout
    assert project[1].returncode == 1


def test_failure_on_one_rank(project):
    text = text_of(project, "test_one_rank_fails[n2]")
    assert "rank 1 of 2: call" in text
    assert "assert 1 != 1" in text
    assert "printed by 1" in text
    assert "printed by 0" not in text


def test_one_rank_waits_for_one_that_failed(project):
    text = text_of(project, "test_one_fails_and_one_waits[n2]")
    assert text.startswith("a rank failed, and others did not end the test in 5 s more")
    assert "rank 1 of 2: call" in text
    assert re.search(r"rank 0 of 2: stacks(?s:.)*in test_one_fails_and_one_waits", text)


def test_deadlock_shows_all_threads_of_all_ranks(project):
    text = text_of(project, "test_deadlock[n2]")
    assert text.startswith("timeout: not all ranks have ended the test in 4 s")
    _, first, second = re.split(r"=+ rank \d of 2: stacks =+", text)
    assert "in test_deadlock" in first
    assert "in test_deadlock" in second
    assert text.count("in wait_in_the_background") == 2
    assert "_pytest" not in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [("killed", "killed by signal 9 (SIGKILL)"), ("leaves", "exited with status 5")],
)
def test_rank_that_ends(project, name, reason):
    text = text_of(project, f"test_{name}[n2]")
    assert re.match(r"mpidist run: rank 1 \(pid \d+ on .*\) failed first: ", text)
    assert reason in text.splitlines()[0]


def test_other_outcomes(project):
    assert "SystemExit: 3" in text_of(project, "test_system_exit[n2]")
    assert "no such thing" in text_of(project, "test_error_in_setup[n2]", "error")
    assert "skipped on ranks [0] of 2 alone" in text_of(project, "test_one_skips[n2]")
    assert "not here" in text_of(project, "test_all_skip[n2]", "skipped")


def test_nothing_is_left(project):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(project[0]).encode() not in path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_long_tests_run_when_asked(tmp_path):
    shown, outcomes = start(tmp_path, "--long")
    assert outcomes == {"test_long[n2]": ("passed", "")}, shown.stdout
    assert shown.returncode == 0


def test_interrupt_shows_the_stacks_of_all_ranks(tmp_path):
    shown, _ = start(tmp_path, "-v", project=INTERRUPTED)
    assert shown.returncode == pytest.ExitCode.INTERRUPTED, shown.stdout
    _, first, second = re.split(r"rank \d: stacks", shown.stdout)
    for text in (first, second):
        assert "in test_waits" in text
        assert "/_pytest/" not in text.partition("KeyboardInterrupt")[0]
