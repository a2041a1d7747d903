"""Invalid input to the command: one line with the remedy, and status 2."""

import subprocess
import sys

import pytest

from mpidist.launcher import main, run
from mpidist.launcher.vendors import VENDORS, Launcher, LauncherError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def launcher(monkeypatch):
    found = Launcher("mpiexec", VENDORS[-1])
    monkeypatch.setattr(run, "find_launcher", lambda: found)
    return found


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("", "put it after the options"),
        ("--ps 1", "put it after the options"),
        ("--ps 0 SCRIPT", "give --worker N, or -n N"),
        ("--worker -1 SCRIPT", "give 0 or more"),
        ("--worker x SCRIPT", "invalid int value"),
        ("--worker 1 nowhere.py", "give the path of a Python file"),
        ("--worker 1 --job chief SCRIPT", "NAME=N"),
        ("--worker 1 --timeout 0 SCRIPT", "must be positive"),
        ("--worker 4294967298 SCRIPT", "more than MPI can have, 2147483647"),
        ("-n 4294967298 SCRIPT", "more than MPI can have, 2147483647"),
        ("-n 2 --bogus SCRIPT", "unrecognized arguments: --bogus; see mpidist run --help"),
        ("-n 2 --run-dir= SCRIPT", "--run-dir is empty"),
        ("-n 3 --hosts a:1,b:1 SCRIPT", "slots for 2 ranks, and the job has 3"),
        ("-n 1 --hosts a;b SCRIPT", "host list"),
        ("-n 1 --hosts a --hostfile b SCRIPT", "not allowed with argument --hosts"),
        ("-n 1 --hostfile nowhere SCRIPT", "cannot be read"),
        ("-n 1 --env NOT_SET_ANYWHERE SCRIPT", "use --env NOT_SET_ANYWHERE=VALUE"),
        ("-n 1 --env =x SCRIPT", "use NAME=VALUE"),
        ("-n 1 --env A;B=x SCRIPT", "use NAME=VALUE"),
        ("-n 1 --env MPIDIST_JOBS=x SCRIPT", "set by mpidist run itself"),
        ("-n 1 --hosts=-x SCRIPT", "not a host name"),
        ("-n 2 --colocate-ps --data 2 SCRIPT", "add --worker N"),
        ("-n 3 --ps-per-node --job ps=1 SCRIPT", "follow the nodes"),
        ("--wroker 1 SCRIPT", "--wroker (did you mean '--worker'?); see mpidist run --help"),
        ("--work 1 SCRIPT", "--work (did you mean '--worker'?); see mpidist run --help"),
    ],
)
def test_bad_input(words, remedy, script, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *words.replace("SCRIPT", script).split()])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mpidist")
    assert printed.err.count("\n") == 1
    assert remedy in printed.err


def test_no_launcher(monkeypatch, script, capsys):
    def none():
        raise LauncherError('no mpiexec; pip install "mpidist[mpich]"')

    monkeypatch.setattr(run, "find_launcher", none)
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "2", script])
    assert caught.value.code == 2
    assert 'pip install "mpidist[mpich]"' in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--foo", "run", "-n", "1", "SCRIPT"]])
def test_no_command(words, script, capsys):
    with pytest.raises(SystemExit) as caught:
        main([word.replace("SCRIPT", script) for word in words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("mpidist: ")


def test_a_variable_that_is_wrong(monkeypatch):
    command = [sys.executable, "-m", "mpidist", "top"]
    monkeypatch.setenv("MPIDIST_STALL_S", "abc")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "MPIDIST_STALL_S" in done.stderr
    assert done.stderr.count("\n") == 1


def test_whoever_reads_has_enough(tmp_path):
    (tmp_path / "rank-0.json").write_text('{"rank": 0}')
    command = f"{sys.executable} -m mpidist top --once {tmp_path}"
    done = subprocess.run(
        ["bash", "-c", f"{command} > >(exec true); wait; {command} | true"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert not done.stderr


def test_the_command_starts_without_mpi(script):
    code = "import sys, mpidist.launcher; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


PRINT_ENVIRONMENT = """
import sys
from mpidist.launcher import main, run
from mpidist.launcher.vendors import VENDORS, Launcher
(vendor,) = [vendor for vendor in VENDORS if vendor.scratch_variable]
run.find_launcher = lambda: Launcher(sys.argv[1], vendor)
main(["run", "-n", "2", *sys.argv[2:]])
"""


@pytest.fixture
def environment(script, tmp_path):
    """Return a function that reads the environment of a launcher with a scratch folder."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nenv\n")
    launcher.chmod(0o755)

    def get(*words):
        command = [sys.executable, "-c", PRINT_ENVIRONMENT, str(launcher), *words, script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return dict(line.partition("=")[::2] for line in done.stdout.splitlines())

    return get


@pytest.mark.parametrize("option", [False, True])
def test_the_folder_for_the_launchers_own_files(environment, monkeypatch, option):
    """The folder is removed with the job, unless the user chooses a folder for all hosts."""
    (vendor,) = [vendor for vendor in VENDORS if vendor.scratch_variable]
    assert "/mpidist-run-" in environment()[vendor.scratch_variable]
    if not option:
        monkeypatch.setenv(vendor.scratch_choice, "/var/tmp")
    found = environment(*(["--env", f"{vendor.scratch_choice}=/var/tmp"] if option else []))
    assert found[vendor.scratch_choice] == "/var/tmp"
    assert vendor.scratch_variable not in found


def test_the_variables_of_the_user_win(environment):
    assert environment("--env", "OMP_NUM_THREADS=3")["OMP_NUM_THREADS"] == "3"
