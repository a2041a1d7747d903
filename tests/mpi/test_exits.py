"""Exits of ranks and jobs under the MPI library's own launcher, without ``mpidist run``."""

import subprocess
import sys

import pytest
from _cases.jobs import run_job, run_ranks

HEAD = """
import os, sys, threading, time, warnings
import numpy as np
import mpidist as dist
group = dist.init_process_group()
rank, size = group.rank(), group.size()
group.barrier()
def say(*words):  # in one piece, whatever the other ranks write
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait_for_ever():
    group.recv(np.zeros(1), 1 - rank if size == 2 else (rank + 1) % size)
"""


BAD = """
    class Bad:
        def __repr__(self):
            raise RuntimeError("no text")
    sys.exit(Bad())
"""
LONG = pytest.mark.long  # variants, each with a launch of its own


@pytest.fixture
def run(tmp_path):
    def start(body, count=2, **arguments):
        return run_ranks(tmp_path, count, HEAD + body, **arguments)

    return start


def reason_of(ended):
    """Return the only line with which the runtime ended the job."""
    lines = [line for line in ended.err.splitlines() if "ends the job: " in line]
    assert len(lines) == 1, ended.err
    return lines[0]


def test_one_rank_fails_while_the_other_waits(run):
    ended = run("""
def worker():
    raise ValueError("no such luck")
if rank == 1:
    worker()
wait_for_ever()
""")
    assert ended.status == 1, ended.err
    assert reason_of(ended).startswith("mpidist: rank 1 on ")
    assert reason_of(ended).endswith(" ends the job: ValueError: no such luck")
    assert ended.err.index("in worker") < ended.err.index("ends the job")


EXITS = {
    "sys.exit": ("sys.exit(3)", 3, ""),
    "SystemExit": ("raise SystemExit(3)", 3, ""),
    "text": ("sys.exit('all is lost')", 1, "all is lost"),
    "array": ("sys.exit(np.zeros(2))", 1, "[0. 0.]"),
    "quit": ("quit(4)", 4, ""),
    "bad object": (BAD, 1, ""),
}


@pytest.mark.parametrize(
    "name",
    ["sys.exit", "SystemExit", *(pytest.param(name, marks=LONG) for name in list(EXITS)[2:])],
)
def test_one_rank_exits_while_the_other_waits(run, name):
    end, _, shown = EXITS[name]
    ended = run(f"""
def worker():
    {end}
if rank == 1:
    worker()
wait_for_ever()
""")
    assert ended.status == 1, ended.err
    assert shown in ended.err
    assert reason_of(ended).startswith("mpidist: rank 0 on ")
    assert "recv from rank 1 of group 'world' waits for rank 1, whose script" in reason_of(ended)


@pytest.mark.parametrize("name", EXITS)
def test_one_rank_exits_and_no_rank_waits_for_it(run, name):
    end, status, shown = EXITS[name]
    ended = run(f"""
def worker():
    {end}
if rank == 1:
    worker()
time.sleep(0.3)
say("goes on")
""")
    assert ended.status == status, ended.err
    assert ended.out == "goes on\n"
    assert shown in ended.err
    assert "ends the job" not in ended.err


def test_exception_in_a_thread(run):
    ended = run("""
def worker():
    raise KeyError("lost")
if rank == 0:
    threading.Thread(target=worker, daemon=True).start()
wait_for_ever()
""")
    assert ended.status == 1, ended.err
    assert reason_of(ended).startswith("mpidist: rank 0 on ")
    assert reason_of(ended).endswith("KeyError: 'lost'")
    assert "in worker" in ended.err


def test_streams_that_are_something_else(run):
    ended = run("""
class Tee:
    def write(self, text):
        return len(text)
sys.stdout = Tee()
if rank == 1:
    raise ValueError("the true reason")
wait_for_ever()
""")
    assert ended.status == 1, ended.err
    assert reason_of(ended).endswith("ValueError: the true reason")


def test_several_threads_wait_for_one_operation(run, tmp_path):
    ended = run(f"""
told = {str(tmp_path / "told")!r}
if rank == 1:
    while not os.path.exists(told):
        time.sleep(0.01)
else:
    work = group.irecv(np.zeros(1), 1)
    thread = threading.Thread(target=work.wait)
    thread.start()
    try:
        work.wait(timeout=0.2)
    except TimeoutError:
        say("not yet")
    open(told, "w").close()
    thread.join()
""")
    assert ended.status == 1, ended.err
    assert "not yet" in ended.out
    assert "waits for rank 1, whose script has ended" in reason_of(ended)


def test_several_threads_start_mpi(tmp_path):
    ended = run_ranks(
        tmp_path,
        2,
        """
        import threading
        from mpidist.mpi import world
        ready, worlds = threading.Barrier(2), []
        def begin():
            ready.wait()
            worlds.append(world())
        thread = threading.Thread(target=begin)
        thread.start()
        begin()
        thread.join()
        assert worlds[0] is worlds[1]
        print("one world")
        """,
    )
    assert (ended.status, ended.out) == (0, "one world\n" * 2), ended.err


def test_daemons_that_outlive_a_script_that_ends_well(run, tmp_path):
    ended = run(f"""
over = {str(tmp_path / "over")!r}
endpoint = dist.open_endpoint()
def beat():
    try:
        while True:
            endpoint.notify(endpoint.address, "a/B")
            time.sleep(0.001)
    finally:
        open(over, "w").close()
if rank == 0:
    threading.Thread(target=beat, daemon=True).start()
else:
    while not os.path.exists(over):
        time.sleep(0.01)
""")
    assert ended.status == 0, ended.err
    assert "ends the job" not in ended.err


def test_a_prompt_goes_on_after_an_error(tmp_path):
    begin = "import mpidist; mpidist.init_process_group()"
    ended = subprocess.run(
        [sys.executable, "-i", "-c", begin],
        input="mistyped(1)\nprint('goes', 'on')\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr
    assert "NameError" in ended.stderr


def test_who_was_served_leaves_the_word_to_who_served(run):
    ended = run("""
with dist.open_endpoint() as endpoint:
    addresses = [None, None]
    group.all_gather_object(addresses, str(endpoint.address))
    kept = []
    def keep(request):
        kept.append(request)
        return dist.LATER
    endpoint.register("a", {"B": keep})
    if rank == 0:
        endpoint.serve(lambda: bool(kept))
    else:
        work = endpoint.call(addresses[0], "a/B")
        threading.Thread(target=work.wait).start()
        while not work.is_completed():
            endpoint.progress()
        group.send(np.zeros(1), 0)
        wait_for_ever()
group.recv(np.zeros(1), 1)
time.sleep(0.3)  # one that goes first would have ended the job by now
raise RuntimeError("why it was closed")
""")
    assert ended.status == 1, ended.err
    assert reason_of(ended).startswith("mpidist: rank 0 on ")
    assert reason_of(ended).endswith("RuntimeError: why it was closed")


def test_exits_that_end_nothing(run):
    ended = run("""
thread = threading.Thread(target=sys.exit, args=(5,))
thread.start()
thread.join()
try:
    sys.exit(3)
except SystemExit as error:
    say("caught", error.code)
# Python 3.12 and later warn of a fork beside other threads, and every rank has a watchdog's.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
child = os.fork()
if child == 0:
    os._exit(7)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    sys.exit(8)  # ends the child, and nothing else
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
group.barrier()
sys.exit(0 if rank else None)
""")
    assert ended.status == 0, ended.err
    assert ended.out.count("caught 3") == 2
    assert ended.err == ""


def test_a_forked_child_cannot_use_what_its_parent_has(run):
    ended = run("""
endpoint = dist.open_endpoint()
tries = {
    "group": lambda: group.all_reduce(np.zeros(1)),
    "async": lambda: group.barrier(async_op=True),
    "endpoint": lambda: endpoint.notify(endpoint.address, "a/B"),
    "init": lambda: dist.open_endpoint("mpi"),
    "server": lambda: dist.Server({"worker": ["a:1", "b:1"]}, "worker", rank),
}
child = os.fork()
if child == 0:
    for name, use in tries.items():
        try:
            use()
        except dist.errors.FailedPreconditionError as error:
            say(name, "forked from process" in str(error), "'spawn' or 'forkserver'" in str(error))
    raise ValueError("of the child")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
endpoint.close()
group.barrier()
""")
    assert ended.status == 0, ended.err
    for name in ("group", "async", "endpoint", "init", "server"):
        assert ended.out.count(f"{name} True True") == 2, ended.out
    # Once in the line of the script and once in the error; both ranks write at the same time.
    assert ended.err.count("of the child") == 4, ended.err
    assert "ends the job" not in ended.err


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("group.all_reduce(np.zeros(2))", "all_reduce number 2 of group 'world'"),
        ("group.barrier(timeout=60)", "barrier number 2 of group 'world'"),
        ("group.recv(np.zeros(1), 1)", "recv from rank 1 of group 'world'"),
        ("group.recv(np.zeros(1))", "recv of group 'world'"),
        pytest.param(
            "group.irecv(np.zeros(1), 1).wait(60)", "recv from rank 1 of group 'world'", marks=LONG
        ),
        pytest.param(
            "group.all_reduce(np.zeros(2), async_op=True).wait()",
            "all_reduce number 2 of group 'world'",
            marks=LONG,
        ),
        (
            "group.irecv(np.zeros(1), 1).then(str).get_future().result(60)",
            "recv from rank 1 of group 'world'",
        ),
    ],
    ids=["all_reduce", "barrier", "recv", "recv any", "irecv", "async", "future"],
)
def test_a_rank_leaves_while_the_other_waits_for_it(run, call, what):
    ended = run(f"""
def step():
    {call}
if rank == 0:
    step()
""")
    assert ended.status == 1, ended.err
    assert reason_of(ended).startswith("mpidist: rank 0 on ")
    assert f"{what} waits for rank 1, whose script has ended" in reason_of(ended)
    assert "in step" in ended.err


def test_ranks_that_end_early_are_left_alone(run):
    ended = run("""
pair = None
if rank < 2:
    from mpidist.mpi import world
    comm = world().comm
    pair = dist.ProcessGroup(comm.Create_group(comm.group.Incl([0, 1])), "pair")
if rank == 2:
    group.send(np.array([7.0]), 0)      # arrives although its sender has left
    say("left early")
    sys.exit(0)
import time
deadline = time.monotonic() + 1.5       # longer than the runtime waits for a message on its way
while True:
    pair.all_reduce(np.zeros(1))
    if rank == 0:
        pair.send(np.zeros(1), 1)
    else:
        pair.recv(np.zeros(1))
    done = np.array([float(time.monotonic() >= deadline)])
    pair.all_reduce(done, "max")
    if done[0]:
        break
if rank == 0:
    into = np.zeros(1)
    assert group.recv(into, 2) == 2 and into[0] == 7.0
say("ended", rank)
""", count=3)  # fmt: skip
    assert ended.status == 0, ended.err
    assert sorted(line for line in ended.out.splitlines() if line) == [
        "ended 0",
        "ended 1",
        "left early",
    ]
    assert ended.err == ""


def test_system_exit_leaves_a_server(tmp_path):
    source = """
        import mpidist
        from mpidist.cluster_resolver import MPIClusterResolver
        resolver = MPIClusterResolver({"ps": 1, "worker": -1})
        job, task = resolver.task_type, resolver.task_id
        with mpidist.Server(resolver.cluster_spec(), job, task) as server:
            if job == "ps" or task:
                server.join()
            else:
                raise SystemExit(3)
    """
    ended = run_ranks(tmp_path, 3, source)
    assert ended.status == 3, ended.err
    assert reason_of(ended).startswith("mpidist: rank 1 (worker 0) on ")
    assert reason_of(ended).endswith("ends the job: SystemExit(3)")


def test_mpi_that_the_script_has_started_itself(tmp_path):
    ended = run_ranks(tmp_path, 2, "from mpi4py import MPI\n" + HEAD + """
say("mine", MPI.COMM_WORLD.rank)
""")  # fmt: skip
    assert ended.status == 0, ended.err
    assert ended.out.count("mine") == 2
    assert ended.err == ""


def test_the_launcher_names_the_task_that_failed(tmp_path):
    source = HEAD + "if rank == 1:\n    raise RuntimeError('broken step')\nwait_for_ever()\n"
    ended = run_job(tmp_path, ("--ps", "1", "--worker", "1"), source)
    assert ended.status == 1, ended.err
    last = ended.err.splitlines()[-1].strip(" \0")
    assert last.startswith("mpidist run: worker 0 (rank 1, pid ")
    assert "failed first: RuntimeError: broken step; all 2 ranks were ended" in last
