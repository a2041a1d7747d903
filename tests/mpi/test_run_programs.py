"""Programs under ``mpidist run``: what they see, and what the job says when a rank fails."""

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from _cases.jobs import run_job

RANK = 'RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))\n'
HEAD = "import os, sys, threading\n" + RANK
STARTS = {
    "nothing imported": "",
    "mpidist imported": "import mpidist as dist\n",
    "mpi4py alone": "from mpi4py import MPI\n",
    "mpi4py and mpidist": "import mpidist as dist\nfrom mpi4py import MPI\n",
    "mpidist used": "import mpidist as dist\ndist.init_process_group()\n",
}
THREAD = """
def work():
    raise KeyError("lost")
thread = threading.Thread(target=work)
thread.start()
threading.Event().wait()
"""
ENDS = {
    "exception": ("open('/no/such/file')", 1, "FileNotFoundError: [Errno 2] No such file"),
    "SystemExit(3)": ("raise SystemExit(3)", 3, "sys.exit(3)"),
    "SystemExit(text)": ("raise SystemExit('all is lost')", 1, "sys.exit('all is lost')"),
    "SystemExit(256)": ("raise SystemExit(256)", 1, "sys.exit(256)"),
    "sys.exit in finally": ("try: 1 / 0\nfinally: sys.exit(True)", 1, "sys.exit(True)"),
    "os._exit": ("os._exit(5)", 5, "exited with status 5"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (SIGKILL)"),
    "thread": (THREAD, 1, "KeyError: 'lost'"),
}


def last_line(ended):
    # Open MPI ends its own text with zero bytes.
    return ended.err.splitlines()[-1].strip(" \0")


def others_wait(start):
    """Return what the other ranks do after the failure of rank 1."""
    if start == "mpi4py alone":
        return "MPI.COMM_WORLD.barrier()\n"
    return "import mpidist\nmpidist.init_process_group()\nmpidist.barrier()\n"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", STARTS)
def test_a_failing_rank_is_named_with_its_reason_and_status(tmp_path, start, end):
    fail, status, reason = ENDS[end]
    body = textwrap.indent(fail.strip("\n"), "    ")
    if start == "mpidist used":
        waiting = "dist.barrier()\n"
    else:
        waiting = others_wait(start)
    ended = run_job(tmp_path, ("-n", "2"), f"{HEAD}{STARTS[start]}if RANK == 1:\n{body}\n{waiting}")
    assert ended.status == status, ended.err
    assert last_line(ended).startswith("mpidist run: rank 1 (pid "), ended.err
    assert f" failed first: {reason}" in last_line(ended)
    assert "runner.py" not in ended.err  # no frame of the runner


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_ends_at_once_with_status_0_is_named(tmp_path, start):
    waiting = "dist.barrier()\n" if start == "mpidist used" else others_wait(start)
    ended = run_job(
        tmp_path, ("-n", "2"), f"{HEAD}{STARTS[start]}if RANK == 1: os._exit(0)\n{waiting}"
    )
    assert ended.status != 0
    assert "rank 1" in last_line(ended), ended.err


@pytest.mark.parametrize("end", ["raise SystemExit", "raise SystemExit(0)", "sys.exit(None)", ""])
def test_good_ends(tmp_path, end):
    ended = run_job(tmp_path, ("-n", "2"), f"{HEAD}from mpi4py import MPI\n{end}\n")
    assert (ended.status, ended.err) == (0, "")


def test_a_system_exit_that_the_program_catches_ends_nothing(tmp_path):
    body = """
import atexit
def late():
    raise SystemExit(4)  # the interpreter ignores it
atexit.register(late)
for end in (sys.exit, exit):
    try:
        end(3)
    except SystemExit as error:
        assert error.code == 3
thread = threading.Thread(target=sys.exit, args=(5,))
thread.start()
thread.join()
"""
    ended = run_job(tmp_path, ("-n", "2"), HEAD + body)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"x = (\n", "SyntaxError: '(' was never closed"),
        (b"# coding: nothing-known\n", "SyntaxError: "),
        (b"x = '\xff'\n", "SyntaxError: "),
        (b"  x = 1\n", "IndentationError: unexpected indent"),
        (b"import nowhere_at_all\n", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_scripts_that_do_not_start(tmp_path, text, reason):
    (tmp_path / "bad.py").write_bytes(text)
    ended = launch(tmp_path, "-n", "2", "bad.py")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f" failed first: {reason}" in last, ended.stderr
    assert "runner.py" not in ended.stderr


def launch(folder, *words, timeout_s=60):
    return subprocess.run(
        [sys.executable, "-m", "mpidist", "run", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


FACTS = """
import json, sys, os, inspect, pickle, multiprocessing, concurrent.futures, dataclasses
import beside
@dataclasses.dataclass
class Point:
    x: int = 1
def double(point): return Point(2 * point.x)
class Names:
    y: int
if __name__ == "__main__":
    main = sys.modules["__main__"]
    assert vars(main) is globals()
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    assert inspect.getsource(double).startswith("def double")
    for kind in ("spawn", "forkserver") if sys.argv[1:2] == ["pool"] else ():
        with multiprocessing.get_context(kind).Pool(1) as pool:
            assert pool.map(double, [Point(4)]) == [Point(8)]
    names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
    facts = {name: globals().get(name) for name in names}
    facts |= {"argv": sys.argv, "path": sys.path, "keys": sorted(globals())}
    facts |= {"loader": type(__loader__).__name__, "spec": str(__spec__ and __spec__.name)}
    print(json.dumps(facts))
"""


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text(FACTS)
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbf" + FACTS.replace("\n", "\r\n").encode())
    (tmp_path / "cookie.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n" + FACTS.encode())
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("value = 1")
    (package / "__main__.py").write_text("from . import value\n" + FACTS)
    (package / "module.py").write_text("from . import value\n" + FACTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    (folder / "__main__.py").write_text(FACTS)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["script.py", "pool", "-n", "a b"],
        ["bom.py"],
        ["cookie.py"],
        ["folder", "x"],
        ["-m", "package.inner", "-m", "x"],
        ["-m", "package.inner.module", "pool"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_sees_under_python(programs, words):
    alone = subprocess.run(
        [sys.executable, *words], cwd=programs, capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 0, alone.stderr
    ended = launch(programs, "-np", "1", *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout) == json.loads(alone.stdout)


def test_a_zip_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", "import other, sys\nprint(other.value, sys.argv)\n")
        archive.writestr("other.py", "value = 7\n")
    ended = launch(tmp_path, "-n", "1", "program.zip", "x")
    assert (ended.returncode, ended.stdout) == (0, "7 ['program.zip', 'x']\n"), ended.stderr


def test_a_failing_module(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    ended = launch(tmp_path, "-n", "2", "-m", "fails")
    assert ended.returncode == 3
    assert " failed first: sys.exit(3)" in ended.stderr.splitlines()[-1]
    ended = launch(tmp_path, "-n", "2", "-m", "no_such_module")
    assert ended.returncode == 1
    assert "No module named no_such_module" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("mpidist", "import mpidist\nmpidist.init_process_group()"),
        ("strategy", "from strategy import ParameterServerStrategy"),
        ("dataservice", "import dataservice.dataset"),
        ("strategy", "import mpidist\nmpidist.init_process_group()\nimport strategy\nstrategy.no"),
    ],
)
def test_a_file_that_hides_a_package_is_named(tmp_path, name, use):
    (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "script.py").write_text(use)
    # The command itself must not run in the folder, where its own package is hidden too.
    ended = launch(Path(os.path.sep), "-n", "2", str(tmp_path / "script.py"))
    assert ended.returncode == 1
    hint = f"{tmp_path / name}.py hides the package {name!r} that mpidist installs"
    assert hint in ended.stderr.splitlines()[-1], ended.stderr


def test_the_layout_that_replaces_the_layout_of_the_script_is_told_once(tmp_path):
    body = """
from mpidist.cluster_resolver import MPIClusterResolver
for _ in range(2):
    MPIClusterResolver({"ps": 2, "worker": -1})
"""
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "2"), body)
    assert ended.status == 0, ended.err
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert "{'ps': 1, 'worker': 2}" in lines[0]
    assert "{'ps': 2, 'worker': -1}" in lines[0]


def test_version():
    command = [sys.executable, "-m", "mpidist", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0
    assert ended.stdout.startswith("mpidist ")


@pytest.mark.parametrize(
    ("fail", "status", "shown"),
    [("1 / 0", 1, "ZeroDivisionError"), ("sys.exit(3)", 3, ""), ("raise SystemExit(3)", 3, "")],
)
def test_a_single_plain_process_fails_like_any_other(tmp_path, fail, status, shown):
    script = tmp_path / "script.py"
    script.write_text(f"import sys, mpidist\nmpidist.init_process_group()\n{fail}\n")
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert shown in ended.stderr
    assert "ends the job" not in ended.stderr
    prompt = subprocess.run(
        [sys.executable, "-i", str(script)],
        input="print('goes', 'on')\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (prompt.returncode, prompt.stdout) == (0, "goes on\n"), prompt.stderr
    assert "ends the job" not in prompt.stderr
