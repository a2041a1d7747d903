"""Cases for the end of a job: the code of the ranks, and the expected result.

A script is drawn from a seed: the odd rank, its number of common steps, and its delay after them.
Names in capitals, except RANK, are equal on all ranks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

HEAD = """
import os, random, signal, sys, threading, time
rng = random.Random(SEED)
ODD, STEPS, MOMENT = rng.randrange(RANKS), rng.randrange(1, 600), rng.uniform(0.0, 0.3)
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
odd = RANK == ODD
def send_soon(number):  # in the midst of the work, or while it is being started
    threading.Timer(rng.uniform(0.0, 1.0), os.kill, (os.getpid(), number)).start()
"""

WORK = """
import numpy as np
import mpidist as dist
from mpidist.mpi import world
group = dist.init_process_group()
open(os.path.join(os.path.dirname(__file__), f"up-{RANK}"), "w").close()
def step(number):
    group.all_reduce(np.ones(8 if number % 50 else 10_000))
    if number % 10 == 0:
        sent = group.isend(np.ones(4), (RANK + 1) % RANKS)
        group.recv(np.zeros(4), (RANK - 1) % RANKS)
        sent.wait()
def work(steps=STEPS):
    for number in range(steps):
        step(number)
def work_on():
    work(1 << 62)
def say(*words):  # in one piece, whatever the other ranks write
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def boom():
    raise ValueError("no such luck")
work()
if odd:
    time.sleep(MOMENT)
"""

SERVICE = """
def die(request):
    raise KeyError("lost")
def leave(request):
    sys.exit(6)
endpoint = dist.open_endpoint()
addresses = world().comm.allgather(str(endpoint.address))
kept = []
def never(request):
    kept.append(request)
    return dist.LATER
endpoint.register("a", {"Die": die, "Leave": leave, "Never": never})
"""


@dataclass(frozen=True)
class Way:
    """A case for the end of a job.

    Attributes:
        body: Code of the ranks.
        status: Exit status; None for any nonzero status.
        bare_status: Exit status under the launcher of the MPI library; by default ``status``.
        says: Regular expression to find in standard error. ODD stands for the odd rank.
        reasons: Least and greatest number of ranks that report the end of the job.
        ranks: Number of ranks.
        signal: Signal for the launcher, sent between its start and the middle of the work; 0 for
            none.
        to_all: Whether the signal goes to the process group of the launcher, as Ctrl-C does.
        silent: Whether standard error must be empty.
        env: Variables added to the environment.
        upsets: Vendors with a launcher that does not reliably end such a job.
        bare: The case under the launcher of the MPI library, if more than the status differs.
    """

    body: str
    status: int | None = 0
    bare_status: int | str | None = "the same"
    says: str = ""
    reasons: tuple[int, int] = (0, 0)
    ranks: int = 2
    signal: int = 0
    to_all: bool = False
    silent: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    upsets: tuple[str, ...] = ()
    bare: Way | None = None

    def script(self, seed):
        return f"SEED, RANKS = {seed}, {self.ranks}\n{HEAD}{self.body}"

    def odd(self, seed):
        return random.Random(seed).randrange(self.ranks)

    def expected_status(self, bare):
        return self.bare_status if bare and self.bare_status != "the same" else self.status

    def meddle(self, process, seed):
        """Send the signal, if the case has one, after a random delay."""
        if not self.signal:
            return
        try:
            process.wait(random.Random(seed).uniform(0.05, 2.0))
        except subprocess.TimeoutExpired:
            target = os.killpg if self.to_all else os.kill
            target(process.pid, self.signal)


def ended(reason, rank="ODD"):
    """Return a regular expression for the line with which a rank ends the job."""
    return rf"mpidist: rank {rank}( \(\w+ \d\))? on \S+ ends the job: {reason}"


def fails(body, reason, status=1, **others):
    """Return a case in which one rank ends the job and reports the reason."""
    others = {"reasons": (1, 1), "says": ended(reason), **others}
    return Way(body, status, **others)


def killed(body, number, **others):
    """Return a case in which a signal kills a rank, so that only its wrapper can report it."""
    return Way(body, 128 + number, None, reasons=(0, 1), **others)


def exits(body, reason, status, **others):
    """Return a case in which one rank exits while another rank waits for it.

    ``mpidist run`` sees the exit. Under the launcher of the MPI library, the rank leaves, and the
    waiting rank ends the job.
    """
    left = ended(".* waits for rank ODD, whose script has ended", OTHER)
    return fails(body, reason, status, bare=fails(body, "", says=left, **others), **others)


LUCK = "ValueError: no such luck"
OTHER = r"\d"  # any rank
WITHOUT_HOOKS = {"MPIDIST_HOOKS": "0"}

SERVED = (
    WORK
    + SERVICE
    + """
if odd:
    endpoint.serve(lambda: False)
else:
    endpoint.call(addresses[ODD], "a/Leave").wait()
"""
)

WAYS = {
    "all end": Way(WORK, silent=True),
    "one ends early": Way(WORK.replace("group = dist", "pair = None\ngroup = dist", 1) + """
if not odd:
    comm = world().comm
    rest = [rank for rank in range(RANKS) if rank != ODD]
    pair = dist.ProcessGroup(comm.Create_group(comm.group.Incl(rest)), "pair")
    for number in range(300):
        pair.all_reduce(np.ones(8))
        if pair.rank():
            pair.send(np.ones(4), group_dst=0)
        else:
            pair.recv(np.zeros(4), group_src=1)
        if number == STEPS // 3:
            time.sleep(MOMENT)
""", ranks=3, silent=True),
    "exception": fails(WORK + "boom() if odd else work_on()\n", LUCK),
    "exception in a thread": fails(
        WORK + "if odd:\n    threading.Thread(target=boom).start()\nwork_on()\n", LUCK
    ),
    "exception of a handler": fails(WORK + SERVICE + """
if odd:
    endpoint.serve_in_thread()
else:
    endpoint.call(addresses[ODD], "a/Die").wait()
work_on()
""", "", says=ended(r".*UnknownError: KeyError: 'lost' \(in a/Die at mpi:", OTHER)),
    "exit of a handler": fails(WORK + SERVICE + """
if odd:
    endpoint.serve_in_thread()
else:
    endpoint.call(addresses[ODD], "a/Leave").wait()
work_on()
""", "", says=ended(r".*SystemExit: 6 \(in a/Leave at mpi:", OTHER)),
    "exit of a handler on the main thread": fails(SERVED, "", 6, says=ended(r"sys\.exit\(6\)"),
        bare=fails(SERVED, "", says=ended(".*UnavailableError: .*script there has ended", OTHER))),
    "exception in the serving loop": fails(WORK + SERVICE + """
if odd:
    endpoint._report_loss = None  # a flaw of our own
    endpoint.serve_in_thread()
    endpoint.peer_lost("another process")
work_on()
""", "TypeError: 'NoneType' object is not callable"),
    "exit of one": exits(WORK + "sys.exit(3) if odd else work_on()\n", r"sys\.exit\(3\)", 3),
    "SystemExit of one": exits(
        WORK + "if odd:\n    raise SystemExit(3)\nwork_on()\n", r"sys\.exit\(3\)", 3
    ),
    "exit of one that no rank waits for": fails(
        WORK + "sys.exit(3) if odd else time.sleep(0.5)\n", r"sys\.exit\(3\)", 3,
        bare=Way(WORK + "sys.exit(3) if odd else time.sleep(0.5)\n", 3),
    ),
    "exit of all": Way(
        WORK + "sys.exit(4)\n", 4, says=ended(r"sys\.exit\(4\)", OTHER), reasons=(1, 2),
        bare=Way(WORK + "sys.exit(4)\n", 4),
    ),
    "exception without hooks": Way(
        WORK + "boom() if odd else work_on()\n", 1, says=LUCK, env=WITHOUT_HOOKS,
        bare=exits(WORK + "boom() if odd else work_on()\n", "", 1, env=WITHOUT_HOOKS).bare,
    ),
    "exit without hooks": exits(
        WORK + "sys.exit(3) if odd else work_on()\n", r"sys\.exit\(3\)", 3, env=WITHOUT_HOOKS
    ),
    "SIGINT to a rank without hooks": Way(
        WORK + "if odd:\n    os.kill(os.getpid(), signal.SIGINT)\nwork_on()\n", 130, None,
        says="KeyboardInterrupt", reasons=(0, 1), env=WITHOUT_HOOKS,
    ),
    "all end without hooks": Way(WORK, silent=True, env=WITHOUT_HOOKS),
    "leaves a collective": fails(
        WORK + "if not odd:\n    group.all_reduce(np.ones(2))\n", "",
        says=ended(r"all_reduce number \d+ of group 'world' waits for rank ODD, whose script has "
                   "ended", OTHER),
    ),
    "leaves a window that others make": fails(
        WORK + "if not odd:\n    dist.Window.shared(world().node, 4096)\n", "",
        says=ended(r"Window\.shared of 2 ranks waits for rank ODD, whose script has ended", OTHER),
    ),
    "leaves a window that others free": fails(
        WORK + "window = dist.Window.rma(world().comm, 4096)\n"
        "if not odd:\n    window.free()\n", "",
        says=ended(r"Window\.free of 2 ranks waits for rank ODD, whose script has ended", OTHER),
    ),
    "leaves a group that others make": fails(
        WORK + "if not odd:\n    dist.new_group()\n", "",
        says=ended(
            r"the creation of group '.*' of 2 ranks waits for rank ODD, whose script", OTHER
        ),
    ),
    "leaves a message": fails(
        WORK + "if not odd:\n    group.recv(np.ones(2), ODD)\n", "",
        says=ended("recv from rank ODD of group 'world' waits for rank ODD, whose script", OTHER),
    ),
    "leaves a call": fails(
        WORK + SERVICE + "if not odd:\n    endpoint.call(addresses[ODD], 'a/Never').wait()\n", "",
        says=ended(".*UnavailableError: no reply to a/Never from mpi:.*the script there has ended",
                   OTHER),
    ),
    "SIGTERM to the launcher": Way(
        WORK + "work_on()\n", 143, None, signal=signal.SIGTERM, reasons=(0, 2)
    ),
    "SIGINT to the launcher": Way(
        WORK + "work_on()\n", 130, None, signal=signal.SIGINT, reasons=(0, 2)
    ),
    "Ctrl-C": Way(
        WORK + "work_on()\n", 130, None, signal=signal.SIGINT, to_all=True, reasons=(0, 2)
    ),
    "SIGINT to a rank": fails(
        WORK + "if odd:\n    os.kill(os.getpid(), signal.SIGINT)\nwork_on()\n",
        r"interrupted \(Ctrl-C\)", 130,
    ),
    "SIGINT to a rank that waits for the others": fails(
        WORK + """
if odd:  # from outside: a thread of its own would be waited for first
    import subprocess
    command = f"sleep {rng.uniform(0.3, 1.5)}; kill -INT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command])
else:
    time.sleep(1000)
""", r"interrupted \(Ctrl-C\)", 130,
    ),
    "SIGINT to a rank, twice": fails(
        WORK + """
if odd:
    again = threading.Timer(rng.choice([0.0, 0.002]) * rng.random(), os.kill, (os.getpid(), 2))
    again.start()
    os.kill(os.getpid(), signal.SIGINT)
work_on()
""", r"interrupted \(Ctrl-C\)", 130,
    ),
    "SIGKILL to a rank": killed(f"if odd: send_soon(9)\n{WORK}work_on()\n", 9),
    "SIGTERM to a rank": killed(f"if odd: send_soon(15)\n{WORK}work_on()\n", 15),
    "os._exit": Way(WORK + "os._exit(5) if odd else work_on()\n", 5, None, reasons=(0, 1)),
    "hangs, with a limit": fails(
        WORK + "time.sleep(1000) if odd else work_on()\n", "",
        says=ended(r"all_reduce number \d+ of group 'world' has waited for \d+ s, the limit set by "
                   "MPIDIST_STALL_ABORT_S", OTHER),
        env={"MPIDIST_STALL_ABORT_S": "1.5"},
    ),
    "hangs for a while": Way(
        WORK + "if odd:\n    time.sleep(2.5)\nwork(3)\n",
        says=r"\A.*: all_reduce number \d+ of group 'world' has waited for \d s.*\n\Z",
        env={"MPIDIST_STALL_S": "1"},
    ),
    "error of MPI": fails(
        WORK + "group._comm.Send(np.ones(1), 99) if odd else work_on()\n",
        r"mpi4py\.MPI\.Exception: .*(MPI_ERR_RANK|rank)",
    ),
    "exception with a window": fails(WORK + """
window = dist.Window.shared(world().node, 1 << 20)
window.local[:] = 1
boom() if odd else work_on()
""", LUCK),
    "exception with a Server": fails("""
import mpidist as dist
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver({"ps": 1, "worker": -1})
job, task = resolver.task_type, resolver.task_id
with dist.Server(resolver.cluster_spec(), job, task) as server:
""" + "    ".join(WORK.splitlines(keepends=True)) + """
    if job == "worker":
        server.endpoint.serve_in_thread()
    if odd:
        boom()
    server.join()
""", LUCK),
    "exception with a Server of two tasks": fails(WORK + """
host = world().host
tasks = [f"{host}:{rank}" for rank in range(RANKS)]
with dist.Server({"ps": tasks[:1], "worker": tasks}, "worker", RANK):
    boom() if odd else work_on()
""", LUCK),
    "exception with an async collective": fails(WORK + """
pending = group.all_reduce(np.ones(1000), async_op=True) if odd else None
boom() if odd else group.all_reduce(np.ones(1000), async_op=True).wait()
work_on()
""", LUCK),
    "all end with everything open": Way(WORK + SERVICE + """
window = dist.Window.shared(world().node, 1 << 20)
window.local[:] = 1
endpoint.serve_in_thread()
never = endpoint.call(addresses[ODD], "a/Never")
pending = [group.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
sent = group.isend(np.ones(100_000), (RANK + 1) % RANKS)
received = group.irecv(np.ones(100_000), (RANK - 1) % RANKS)
""", silent=True),
    "all end with a receive open": Way(
        WORK + "never = group.irecv(np.ones(10), (RANK + 1) % RANKS)\n", silent=True
    ),
    "a fork": Way(WORK + """
endpoint = dist.open_endpoint()
child = os.fork()
if child == 0:
    try:
        step(0)
    except dist.errors.FailedPreconditionError as error:
        sys.exit(7 if "forked from process" in str(error) else 8)
for number in range(100):
    step(number)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""", silent=True),
    "multiprocessing": Way(WORK + """
import multiprocessing
def use():
    group.all_reduce(np.ones(1))
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
for number in range(100):
    step(number)
child.join()
assert child.exitcode == 1
""", says="FailedPreconditionError: process .* was forked from process"),
    "atexit before the end": Way(
        "import atexit\n" + WORK + "atexit.register(work, 100)\n", silent=True
    ),
    "atexit after the end": Way(f"""
import atexit
def last():
    try:
        step(0)
    except dist.errors.FailedPreconditionError as error:
        sys.stderr.write("as it should be\\n" if "has ended" in str(error) else "no\\n")
atexit.register(last)
{WORK}""", says=r"\A(as it should be\n){2}\Z"),
    "exception before MPI": Way(
        f"if odd:\n    raise ValueError('no such luck')\n{WORK}work_on()\n", 1, None, says=LUCK,
        reasons=(0, 1), upsets=("openmpi",),
    ),
    "exit before MPI": Way(
        f"if odd:\n    sys.exit(3)\n{WORK}work_on()\n", 3, None, reasons=(0, 1),
        upsets=("openmpi",),
    ),
    "ends before MPI": Way(
        f"if odd:\n    sys.exit(0)\n{WORK}work_on()\n", 1, None,
        says=ended("this rank waits in MPI_Init for rank ODD, whose script has ended", OTHER),
        reasons=(1, 1),
    ),
}  # fmt: skip
