"""Programs under ``mpidist run``: their environment, and the report of a failing rank."""

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


BAD = """
class Bad:
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__
"""
FROZEN = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Refused(Exception):
    reason: int
raise Refused(7)
"""
EMPTY = """
class Empty(Exception):
    def __init__(self, text):
        super().__init__(text)
    def __len__(self):
        return 0
def work():
    raise Empty("lost")
threading.Thread(target=work).start()
threading.Event().wait()
"""
INTERRUPTED = (130, "interrupted (Ctrl-C)")
RAISING_HOOK = """
def hook(*_):
    raise RuntimeError("of the hook")
sys.excepthook = hook
"""
EXITING_HOOK = "sys.excepthook = lambda *_: sys.exit(4)\n"
INTERRUPTED_HOOK = "sys.excepthook = lambda *_: [os.kill(os.getpid(), 2), sum(range(1000))]\n"
SHADOWED = "import socket, json\nsocket.gethostname = json.dump = None\n"
# Ends that the script itself makes difficult.
HARD_ENDS = {
    "KeyboardInterrupt": ("raise KeyboardInterrupt", *INTERRUPTED),
    "a subclass of it": ("class Stop(KeyboardInterrupt): pass\nraise Stop", *INTERRUPTED),
    "SIGINT": ("os.kill(os.getpid(), 2)\nthreading.Event().wait()", *INTERRUPTED),
    "KeyboardInterrupt in a thread": (
        THREAD.replace('KeyError("lost")', "KeyboardInterrupt"),
        *INTERRUPTED,
    ),
    "hook raises": (RAISING_HOOK + "raise ValueError('real')", 1, "ValueError: real"),
    "hook raises, KeyboardInterrupt": (RAISING_HOOK + "raise KeyboardInterrupt", *INTERRUPTED),
    "hook exits": (EXITING_HOOK + "raise ValueError('real')", 4, "ValueError: real"),
    "hook is interrupted": (INTERRUPTED_HOOK + "raise ValueError('real')", 1, "ValueError: real"),
    "no hook": ("del sys.excepthook\nraise ValueError('real')", 1, "ValueError: real"),
    "no environment": ("os.environ.clear()\n1 / 0", 1, "ZeroDivisionError: division by zero"),
    "no environment, exit": ("os.environ.clear()\nsys.exit(3)", 3, "sys.exit(3)"),
    "no environment, thread": ("os.environ.clear()\n" + THREAD, 1, "KeyError: 'lost'"),
    "no run folder": ("del os.environ['MPIDIST_RUN_DIR']\nsys.exit(3)", 3, "sys.exit(3)"),
    "exit with a bad object": (BAD + "sys.exit(Bad())", 1, "sys.exit(<Bad object"),
    "SystemExit of a bad object": (BAD + "raise SystemExit(Bad())", 1, "sys.exit(<Bad object"),
    "exception with a bad object": (BAD + "raise ValueError(Bad())", 1, "ValueError: <exception"),
    "frozen exception": (FROZEN, 1, "Refused: 7"),
    "thread, exception without elements": (EMPTY, 1, "Empty: lost"),
    "cause of itself": (
        "try: 1 / 0\nexcept Exception as error: raise error from error", 1, "ZeroDivisionError"
    ),
}  # fmt: skip
HARD_STARTS = ("mpi4py alone", "mpidist used")


def last_line(ended):
    # Open MPI ends its own text with zero bytes.
    return ended.err.splitlines()[-1].strip(" \0")


def others_wait(start):
    """Return the code of the other ranks after the failure of rank 1."""
    if start == "mpi4py alone":
        return "MPI.COMM_WORLD.barrier()\n"
    return "import mpidist\nmpidist.init_process_group()\nmpidist.barrier()\n"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        *((start, end) for start in STARTS for end in ENDS),
        *((start, end) for start in HARD_STARTS for end in HARD_ENDS),
    ],
)
def test_a_failing_rank_is_named_with_its_reason_and_status(tmp_path, start, end):
    fail, status, reason = (ENDS | HARD_ENDS)[end]
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


def test_the_text_of_an_exit_is_printed_alone(tmp_path):
    body = "import sys\nimport mpidist as dist\ndist.init_process_group()\nsys.exit('no data')\n"
    ended = run_job(tmp_path, ("-n", "2"), body)
    assert ended.status == 1
    assert last_line(ended).startswith("mpidist run: rank "), ended.err
    assert " failed first: sys.exit('no data'); " in last_line(ended)
    assert "no data" in ended.err.splitlines()
    assert "Traceback" not in ended.err
    assert "ends the job" not in ended.err


LONGER = """
import numpy as np
import mpidist as dist
group = dist.init_process_group()
for _ in range(2):
    group.all_reduce(np.zeros(3))
longer = np.zeros(6 if group.rank() == 1 else 3)
"""


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        ("group.all_reduce(longer)", "all_reduce number 3 of group 'world'"),
        ("group.send(longer, 0) if group.rank() else group.recv(longer)", "recv of group 'world'"),
    ],
    ids=["all_reduce", "recv"],
)
def test_the_operation_in_which_mpi_finds_a_longer_message_is_named(tmp_path, call, operation):
    """Name the operation, although MPICH ends the process there without an exception."""
    ended = run_job(tmp_path, ("-n", "2"), LONGER + call, env={"MPIDIST_DEBUG": "off"})
    assert ended.status == 1
    assert last_line(ended).startswith("mpidist run: rank "), ended.err
    assert operation in last_line(ended)
    assert "script.py" in ended.err  # the line of the call


@pytest.mark.parametrize("end", HARD_ENDS)
def test_a_rank_that_fails_without_mpi(tmp_path, end):
    fail, status, reason = HARD_ENDS[end]
    ended = run_job(tmp_path, ("-n", "1"), f"{HEAD}{fail}\n")
    assert ended.status == status, ended.err
    assert f" failed first: {reason}" in last_line(ended)
    assert "runner.py" not in ended.err


@pytest.mark.parametrize(
    ("end", "status"), [("1 / 0", 1), ("raise KeyboardInterrupt", 130), ("sys.exit(3)", 3)]
)
@pytest.mark.parametrize("problem", [SHADOWED, "sys.stderr = None\n"])
def test_a_rank_ends_although_its_reason_cannot_be_recorded(tmp_path, problem, end, status):
    fail = textwrap.indent(problem + end, "    ")
    source = f"{HEAD}from mpi4py import MPI\nif RANK == 1:\n{fail}\nMPI.COMM_WORLD.barrier()\n"
    ended = run_job(tmp_path, ("-n", "2"), source)
    assert ended.status == status, ended.err
    assert last_line(ended).startswith("mpidist run: rank 1 (pid "), ended.err
    assert "runner.py" not in ended.err


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


@pytest.mark.parametrize("start", ["nothing imported", "mpidist used"])
@pytest.mark.parametrize("end", ["raise SystemExit(0)", ""])
def test_a_daemon_that_fails_after_a_good_end(tmp_path, start, end):
    body = """
import atexit
over = threading.Event()
def work():
    over.wait()
    raise KeyError("late")
thread = threading.Thread(target=work, daemon=True)
thread.start()
def wait():
    over.set()
    thread.join()
atexit.register(wait)
"""
    ended = run_job(tmp_path, ("-n", "2"), f"{HEAD}{body}{STARTS[start]}{end}\n")
    assert ended.status == 0, ended.err
    assert "KeyError: 'late'" in ended.err


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


@pytest.mark.parametrize("module", [(), ("-m",)])
def test_a_program_without_a_name(tmp_path, module):
    ended = launch(tmp_path, "-n", "1", *module, "")
    assert ended.returncode == 2
    assert ended.stderr.startswith("mpidist run: the name of the ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("hook", ["raise RuntimeError('of the hook')", "1 / 0", "print(1, 2)"])
def test_errors_of_hooks_are_printed_as_python_prints_them(tmp_path, hook):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\ndef hook(*_):\n    print(sys.exc_info())\n    {hook}\n"
        "sys.excepthook = hook\nraise ValueError('real')\n"
    )
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    ended = launch(tmp_path, "-n", "1", str(script))
    assert ended.stdout == alone.stdout
    assert ended.stderr.startswith(alone.stderr)
    assert " failed first: ValueError: real; the rank was ended" in ended.stderr.splitlines()[-1]


PIPED = "import sys\nprint(sys.argv, __name__)\n"


@pytest.mark.parametrize("script", ["/dev/stdin", "fifo"])
def test_a_script_in_a_pipe(tmp_path, script):
    os.mkfifo(tmp_path / "fifo")
    into = "" if script == "/dev/stdin" else f"> {script}"
    command = [sys.executable, "-m", "mpidist", "run", "-n", "1", "--stdin", script, "x"]
    ended = subprocess.run(
        ["bash", "-c", f'printf %s "$0" {into} {"|" if not into else "&"} "$@"', PIPED, *command],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{[script, 'x']} __main__\n"


@pytest.mark.parametrize(
    "words",
    [("-n", "1", "/dev/stdin"), ("-n", "2", "--stdin", "/dev/stdin"), ("-n", "2", "fifo")],
    ids=" ".join,
)
def test_a_pipe_that_not_all_ranks_can_read_as_a_script(tmp_path, words):
    os.mkfifo(tmp_path / "fifo")
    ended = launch(tmp_path, *words)
    assert ended.returncode == 2
    assert "give " in ended.stderr
    assert ended.stderr.count("\n") == 1


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
    MPIClusterResolver({"ps": 2, "worker": -1})  # other numbers are no warning
    MPIClusterResolver({"chief": 1, "worker": -1})
"""
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "2"), body)
    assert ended.status == 0, ended.err
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert "{'ps': 1, 'worker': 2}" in lines[0]
    assert "{'chief': 1, 'worker': -1}" in lines[0]


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


def test_ranks_with_one_traceback_print_it_once(tmp_path):
    ended = run_job(tmp_path, ["-n", "3"], "import no_such_module")
    assert ended.status == 1
    assert ended.err.count("Traceback") == 1, ended.err
    assert ended.err.count("in <module>") == 1


def test_a_rank_with_another_standard_error_does_not_silence_the_others(tmp_path):
    source = (
        HEAD
        + """
import time

class Elsewhere:
    def write(self, text):
        with open(os.environ["FILE"], "a") as file:
            file.write(text)
        limit = time.monotonic() + 10  # rank 0 records its failure after its traceback
        record = os.path.join(os.environ["MPIDIST_RUN_DIR"], "failure-0.json")
        while not os.path.exists(record) and time.monotonic() < limit:
            pass
    def flush(self):
        pass

if RANK == 1:
    sys.stderr = Elsewhere()
1 / 0
"""
    )
    file = tmp_path / "elsewhere"
    ended = run_job(tmp_path, ["-n", "2"], source, env={"FILE": str(file)})
    assert ended.err.count("Traceback") == 1, ended.err
    assert file.read_text().count("Traceback") == 1


def test_a_hook_of_the_script_prints_on_every_rank(tmp_path):
    source = """\
        import os, sys
        sys.excepthook = lambda kind, error, trace: (print("of the hook", file=sys.stderr), wait())
        def wait():
            open(f"{os.environ['FOLDER']}/{os.getpid()}", "w").close()
            while len(os.listdir(os.environ["FOLDER"])) < 3:
                pass
        1 / 0
    """
    (tmp_path / "seen").mkdir()
    ended = run_job(tmp_path, ["-n", "3"], source, env={"FOLDER": str(tmp_path / "seen")})
    assert ended.err.count("of the hook") == 3, ended.err
