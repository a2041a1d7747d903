"""Programs that hang, and the report that ``mpidist doctor --hang`` must give on them.

A program calls ``ready()`` just before its ranks hang. The comments in a program mark lines:

* ``# stuck``: the report names this line, as ``script.py:LINE``. It belongs to a rank at fault.
* ``# named``: as ``# stuck``, but the line is not in the stacks.
* ``# loop``: as ``# stuck``, but one of these lines is enough.
* ``# waits``: another rank waits here, so the line is only in the stacks.
"""

from dataclasses import dataclass, field

# Verdicts by cause; "stuck" for all others. The next line of a rank that computes or sleeps may be
# the expected call, so the rank is only slow.
VERDICTS = {
    "computing": ["slow"],
    "sleeping": ["slow"],
    "waiting": ["slow", "stuck"],
    "child": ["slow", "stuck"],
    "socket": ["slow", "stuck"],
    "event_loop": ["slow"],
    "window_lock": ["unknown"],
}
CAUSES_BY_LINES = ("missing_call", "different_calls", "deadlock")

HEAD = """\
import collections, itertools, os, queue, signal, subprocess, sys, threading, time
from pathlib import Path
import numpy as np
FOLDER = Path(__file__).parent
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
def ready():
    (FOLDER / f"ready-{RANK}").touch()
"""
GROUP = f"""\
{HEAD}import mpidist as dist
group = dist.init_process_group()
array = np.ones(8)
"""
PLAIN = f"{HEAD}from mpi4py import MPI\nworld = MPI.COMM_WORLD\narray = np.ones(8)\n"
SERVER = f"""\
{HEAD}import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver()
def serve(train):
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "worker":
            train(server)
        else:
            server.join()
"""
STRATEGY = f"""\
{SERVER}from strategy import ParameterServerStrategy, get_variable, optimizers
def variable():
    return get_variable("v", (8,), dtype="float64", initializer="zeros")
def step(variable):
    variable.read_value()
    optimizers.SGD(0.1).apply_gradients([(np.ones(8), variable)])
"""


@dataclass
class Hang:
    """A program that hangs, and the expected report.

    Attributes:
        program: The script.
        cause: The cause, or several causes of which any is right.
        ranks: The ranks at fault. If there are several causes, the ranks of each.
        words: Words of the text.
        layout: Words of ``mpidist run``.
        ready: Ranks that call ``ready()``.
        env: Variables added to the environment.
    """

    program: str
    cause: str | tuple[str, ...]
    ranks: list[int] | tuple[list[int], ...]
    words: tuple[str, ...] = ()
    layout: tuple[str, ...] = ("-n", "2")
    ready: tuple[int, ...] = (0, 1)
    env: dict[str, str] = field(default_factory=dict)

    def answers(self):
        """Return the accepted verdicts, causes and ranks."""
        several = not isinstance(self.cause, str)
        causes, ranks = (self.cause, self.ranks) if several else ([self.cause], [self.ranks])
        # A healthy loop of messages looks like a deadlock if only the lines of its calls are known.
        by_lines = CAUSES_BY_LINES if self.program.startswith((PLAIN, TORCH)) else ()
        return [
            (verdict, cause, at_fault)
            for cause, at_fault in zip(causes, ranks, strict=True)
            for verdict in (*VERDICTS.get(cause, ["stuck"]), *["unknown"] * (cause in by_lines))
        ]

    def lines(self, mark):
        """Return the lines with a mark, as ``script.py:LINE``."""
        lines = enumerate(self.program.splitlines(), 1)
        return [f"script.py:{number}" for number, line in lines if line.endswith(f"# {mark}")]


@dataclass
class Error:
    """A program whose mistake ends the job.

    Attributes:
        program: The script.
        words: Words of the last lines.
        layout: Words of ``mpidist run``.
        failed: The rank that has failed; None if it is any.
    """

    program: str
    words: tuple[str, ...]
    layout: tuple[str, ...] = ("-n", "2")
    failed: int | None = None


THREE = {"layout": ("-n", "3"), "ready": (0, 1, 2)}
FOUR = {"layout": ("-n", "4"), "ready": (0, 1, 2, 3)}
UNCOMPARED = {"env": {"MPIDIST_DEBUG": "off"}}

CALLS = {
    "a rank skips a collective and receives": Hang(
        GROUP + """
if RANK == 1:
    ready()
    group.recv(array, 0)  # stuck
else:
    ready()
    group.all_reduce(array)  # waits
""",
        "missing_call", [1], ("all_reduce", "recv", "rank 1"), **THREE,
    ),
    "a rank skips a collective and calls one of another group": Hang(
        GROUP + """
pair = dist.new_group([0, 1])
for step in range(3):
    group.all_reduce(array)
    if RANK < 2:
        pair.all_reduce(array)
ready()
if RANK == 1:
    pair.barrier()  # stuck
else:
    group.all_reduce(array)  # waits
    if RANK == 0:
        pair.barrier()
""",
        # Rank 1 could also make the calls in another order. Both explanations are right.
        ("missing_call", "deadlock"), ([1], [0, 1]), ("all_reduce", "barrier"), **THREE,
    ),
    "a swallowed exception in a loop, after which a rank receives": Hang(
        GROUP + """
def load(step):
    if RANK == 1 and step == 3:
        raise OSError("bad file")
    return np.ones(8)
for step in range(6):
    if step == 5:
        ready()
    try:
        batch = load(step)
        group.all_reduce(batch)  # waits
    except OSError:
        pass
if RANK == 0:
    group.send(array, 1)
else:
    group.recv(array, 0)  # stuck
""",
        "missing_call", [1], ("all_reduce", "recv", "rank 1"),
    ),
    "an asynchronous collective that a rank never waits for": Hang(
        GROUP + """
work = group.all_reduce(np.ones(1 << 20), async_op=True)
if RANK == 1:
    ready()
    time.sleep(600)  # stuck
work.wait()
ready()
group.barrier()
""",
        "sleeping", [1], ("rank 1",), ready=(1,),
    ),
    "other order of two collectives": Hang(
        GROUP + """
for step in range(3):
    group.all_reduce(array)
large = np.ones(1 << 20)
ready()
if RANK == 1:
    group.barrier()  # stuck
    group.all_reduce(large)
else:
    group.all_reduce(large)  # stuck
    group.barrier()
""",
        "different_calls", [0, 1], ("all_reduce", "barrier"), **UNCOMPARED,
    ),
    "other root": Hang(
        GROUP + """
large = np.ones(1 << 20)
ready()
group.broadcast(large, src=RANK)  # stuck
group.barrier()
""",
        "different_calls", [0, 1], ("broadcast",), **UNCOMPARED,
    ),
    "the wait for an asynchronous collective that a rank skips": Hang(
        GROUP + """
ready()
if RANK == 0:
    work = group.all_reduce(array, async_op=True)
    work.wait()  # waits
else:
    group.recv(array, 0)  # stuck
""",
        "missing_call", [1], ("all_reduce", "recv"),
    ),
    "a collective in another thread": Hang(
        GROUP + """
ready()
if RANK == 0:
    thread = threading.Thread(target=group.all_reduce, args=(array,))
    thread.start()
    thread.join()  # waits
else:
    group.recv(array, 0)  # stuck
""",
        "missing_call", [1], ("all_reduce", "recv", "rank 1"),
    ),
    "a new group that a rank does not make": Hang(
        GROUP + """
ready()
if RANK == 0:
    dist.new_group([0, 1])  # waits
group.recv(array, 0)  # stuck
""",
        ("missing_call", "deadlock"), ([1], [0, 1]), ("group 1", "recv"),
    ),
    "a key of a store that no rank sets": Hang(
        GROUP + """
store = dist.MPIStore()
ready()
if RANK == 1:
    store.get("missing")  # stuck
group.barrier()  # waits
""",
        ("waiting", "deadlock"), ([1], [0, 1]), ("missing", "store"),
    ),
}  # fmt: skip

MESSAGES = {
    "both send first": Hang(
        GROUP + """
large = np.ones(1 << 22)
ready()
group.send(large, 1 - RANK)  # stuck
group.recv(large, 1 - RANK)
""",
        "deadlock", [0, 1], ("send",),
    ),
    "both receive first": Hang(
        GROUP + """
ready()
group.recv(array, 1 - RANK)  # stuck
group.send(array, 1 - RANK)
""",
        "deadlock", [0, 1], ("recv",),
    ),
    "a ring of receives": Hang(
        GROUP + """
ready()
group.recv(array, (RANK - 1) % 3)  # stuck
group.send(array, (RANK + 1) % 3)
""",
        "deadlock", [0, 1, 2], ("recv",), **THREE,
    ),
    "wrong tag": Hang(
        GROUP + """
if RANK == 0:
    group.send(array, 1, tag=7)
ready()
if RANK == 0:
    group.all_reduce(array)  # waits
else:
    group.recv(array, 0, tag=8)  # stuck
""",
        "unmatched_message", [0, 1], ("recv", "tag 8", "tag 7"),
    ),
    "wrong tag, and the sender receives the reply": Hang(
        GROUP + """
if RANK == 0:
    group.send(array, 1, tag=7)
    ready()
    group.recv(array, 1)  # waits
else:
    ready()
    group.recv(array, 0, tag=8)  # stuck
    group.send(array, 0)
""",
        "unmatched_message", [0, 1], ("recv", "tag 8", "tag 7"),
    ),
    "wrong peer": Hang(
        GROUP + """
if RANK == 1:
    group.send(array, 0)
ready()
if RANK == 0:
    group.recv(array, 2)  # stuck
group.barrier()  # waits
""",
        "unmatched_message", [0, 1], ("rank 1", "rank 2"), **THREE,
    ),
    "two groups in another order": Hang(
        GROUP + """
left, right = dist.new_group([0, 1]), dist.new_group([0, 1])
ready()
if RANK == 0:
    left.barrier()  # stuck
    right.barrier()
else:
    right.barrier()  # stuck
    left.barrier()
""",
        "deadlock", [0, 1], ("barrier", "use the groups in different orders"),
    ),
    "a swallowed exception in one of two groups": Hang(
        GROUP + """
left, right = dist.new_group([0, 1]), dist.new_group([2, 3])
def step(number):
    if number == 4 and RANK == 3:
        raise ValueError("bad record")
    (left if RANK < 2 else right).all_reduce(array)
for number in range(8):
    if number == 7 and RANK > 1:
        ready()
    try:
        step(number)  # waits
    except ValueError:
        pass
group.barrier()  # stuck
""",
        "deadlock", [2, 3],
        ("has made 7 collectives of group 'group 2'", "Either a rank has skipped a call"),
        layout=("-n", "4"), ready=(2, 3),
    ),
    "a ring in which a rank sends to the wrong rank": Hang(
        GROUP + """
ready()
got = group.irecv(array, (RANK - 1) % 3)
group.isend(np.ones(8), 1 if RANK == 2 else RANK + 1)
got.wait()  # stuck
group.barrier()  # waits
""",
        "missing_call", [0], ("Rank 0 waits in recv", "was sent to another rank"), **THREE,
    ),
    "a step without the manager of checkpoints": Hang(
        GROUP + """
with dist.Checkpoints(FOLDER / "saved", {"a": array}) as checkpoints:
    checkpoints.restore()
    for number in range(6):
        if number == 5:
            ready()
        if (number, RANK) == (3, 1):
            continue
        checkpoints.step()  # stuck
    group.barrier()  # stuck
""",
        "deadlock", [0, 1],
        ("has made 6 collectives of group 'mpidist.Checkpoints'", "restore(), step(), save()"),
    ),
    "a manager of checkpoints on one rank alone": Hang(
        GROUP + """
ready()
if RANK == 0:
    dist.Checkpoints(FOLDER / "saved", {"a": array})  # stuck
group.barrier()  # stuck
""",
        "deadlock", [0, 1], ("All ranks must make the manager of checkpoints",),
    ),
    "a part of the job is stuck": Hang(
        GROUP + """
left, right = dist.new_group([0, 1]), dist.new_group([2, 3])
ready()
if RANK < 2:
    left.recv(array, 1 - RANK)  # stuck
while True:
    right.all_reduce(array)
    time.sleep(0.01)
""",
        "deadlock", [0, 1], ("recv",), **FOUR,
    ),
}  # fmt: skip


def alone(program, **rest):
    """Return a program in which rank 1 does something while the others are in a collective."""
    body = "".join(f"    {line}\n" for line in program.strip("\n").splitlines())
    return f"{GROUP}if RANK == 1:\n{body}else:\n    ready()\ngroup.all_reduce(array)  # waits\n"


CODE = {
    "a lock that another thread holds": Hang(
        alone("""
lock = threading.Lock()
held = threading.Event()
def hold():
    with lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
ready()
with lock:  # stuck
    pass
"""),
        "lock", [1], ("lock", "rank 1"),
    ),
    "an empty queue": Hang(
        alone("""
batches = queue.Queue()
ready()
batches.get()  # stuck
"""),
        "lock", [1], ("No other thread of rank 1 runs code", "no child processes"),
    ),
    "a pool of processes whose worker has died": Hang(
        alone("""
import multiprocessing
pool = multiprocessing.get_context("fork").Pool(1)
ready()
pool.map(os._exit, [1])  # stuck
"""),
        "lock", [1], ("No other thread of rank 1 runs code", "child processes", "has died"),
    ),
    "a thread that is no daemon": Hang(
        GROUP + """
def load():
    threading.Event().wait()  # named
if RANK == 1:
    threading.Thread(target=load, name="loader").start()
ready()
""",
        "thread", [1], ("has ended its script", "'loader'"),
    ),
    "an endless loop in Python": Hang(
        alone("""
ready()
while True:  # loop
    pass  # loop
"""),
        "computing", [1], ("rank 1",),
    ),
    "an endless loop in C that holds the GIL": Hang(
        alone("""
ready()
collections.deque(itertools.count(), maxlen=0)  # stuck
"""),
        "computing", [1], ("rank 1",),
    ),
    "a rank that sleeps": Hang(
        alone("""
ready()
time.sleep(600)  # stuck
"""),
        "sleeping", [1], ("rank 1", "sleep"),
    ),
    "a stopped rank": Hang(
        alone("""
ready()
os.kill(os.getpid(), signal.SIGSTOP)
"""),
        "stopped", [1], ("rank 1", "stopped"),
    ),
    "the open of a FIFO": Hang(
        alone("""
os.mkfifo(FOLDER / "fifo")
ready()
open(FOLDER / "fifo").read()  # stuck
"""),
        "file", [1], ("rank 1", "FIFO"),
    ),
    "the read of a FIFO": Hang(
        alone("""
os.mkfifo(FOLDER / "fifo")
fifo = os.open(FOLDER / "fifo", os.O_RDWR)
ready()
os.read(fifo, 1)  # stuck
"""),
        "file", [1], ("rank 1", "fifo"),
    ),
    "a child process": Hang(
        alone("""
ready()
subprocess.run(["sleep", "600"])  # stuck
"""),
        "child", [1], ("rank 1", "sleep"),
    ),
    "the output of a child process": Hang(
        alone("""
ready()
subprocess.run(["sleep", "600"], capture_output=True)  # stuck
"""),
        "child", [1], ("rank 1", "sleep"),
    ),
    "a process of multiprocessing": Hang(
        alone("""
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
ready()
child.join()  # stuck
"""),
        "child", [1], ("rank 1",),
    ),
    "a server that no process connects to": Hang(
        alone("""
import socket
server = socket.create_server(("localhost", 0))
ready()
server.accept()  # stuck
"""),
        "accept", [1], ("rank 1", "waits for a process that connects"),
    ),
    "a coroutine that awaits an empty queue": Hang(
        alone("""
import asyncio
async def take():
    ready()
    await asyncio.Queue().get()
asyncio.run(take())  # stuck
"""),
        "event_loop", [1], ("rank 1", "event loop of asyncio"),
    ),
    "a socket without data": Hang(
        alone("""
import socket
reading, writing = socket.socketpair()
ready()
reading.recv(1)  # stuck
"""),
        "socket", [1], ("rank 1",),
    ),
    "a loop that waits for a file": Hang(
        alone("""
ready()
while not (FOLDER / "done").exists():
    time.sleep(0.1)  # stuck
"""),
        "sleeping", [1], ("rank 1",),
    ),
    "a forked child": Hang(
        alone("""
child = os.fork()
if child == 0:
    threading.Event().wait()
ready()
os.waitpid(child, 0)  # stuck
"""),
        "child", [1], ("rank 1",),
    ),
    "user code under a training loop": Hang(
        GROUP + """
class Loader:
    def __iter__(self):
        while True:
            batch = []
            while len(batch) < 4:  # loop
                batch += self.load()  # loop
            yield np.array(batch)
    def load(self):
        if RANK == 1 and self.step == 2:  # loop
            return []  # loop
        return [1.0, 2.0]
class Trainer:
    def __init__(self, loader):
        self.loader, self.weights = loader, np.zeros(4)
    def fit(self, steps):
        for step, batch in zip(range(steps), self.loader):
            self.training_step(step, batch)
    def training_step(self, step, batch):
        loss = self.weights * batch
        self.backward(loss)
        if step == 1:
            self.loader.step = 2
            ready()
    def backward(self, loss):
        group.all_reduce(loss)  # waits
        self.weights -= 0.1 * loss
loader = Loader()
loader.step = 0
Trainer(loader).fit(10)
""",
        "computing", [1], ("rank 1",),
    ),
    "a rank that does not start MPI": Hang(
        HEAD + """
import mpidist as dist
ready()
if RANK == 1:
    time.sleep(600)  # stuck
dist.init_process_group()  # waits
""",
        ("not_started", "sleeping"), ([1], [1]), ("rank 1",),
    ),
    "a rank in the debugger": Hang(
        GROUP + """
ready()
dist.breakpoint(rank=0)  # stuck
""",
        "debugger", [0], ("rank 0",), layout=("-n", "2", "--stdin"),
    ),
    "the write to a full pipe": Hang(
        alone("""
reading, writing = os.pipe()
ready()
open(writing, "wb").write(bytes(1 << 20))  # stuck
"""),
        "file", [1], ("rank 1", "pipe"),
    ),
    "a locked file": Hang(
        GROUP + """
import fcntl
file = open(FOLDER / "lock", "w")
if RANK == 0:
    fcntl.flock(file, fcntl.LOCK_EX)
group.barrier()
ready()
if RANK == 1:
    fcntl.flock(file, fcntl.LOCK_EX)  # stuck
group.all_reduce(array)  # waits
""",
        "file", [1], ("Rank 1 waits for the lock of", "/lock at", "Rank 0 (process"),
    ),
}  # fmt: skip

# Scripts that use mpi4py alone leave no records of their calls.
WITHOUT_MPIDIST = {
    "mpi4py: a receive and a collective": Hang(
        PLAIN + """
ready()
if RANK == 1:
    world.Recv(array, 0)  # stuck
else:
    world.Allreduce(MPI.IN_PLACE, array)  # waits
""",
        ("missing_call", "different_calls"), ([1], [1]), ("Recv", "Allreduce"), **THREE,
    ),
    "mpi4py: a window that another rank has locked": Hang(
        PLAIN + """
window = MPI.Win.Allocate(8, comm=world)
if RANK == 0:
    window.Lock(0, MPI.LOCK_EXCLUSIVE)
    world.send(None, 1)
    ready()
    world.Barrier()  # stuck
else:
    world.recv(source=0)
    ready()
    window.Lock(0, MPI.LOCK_EXCLUSIVE)  # stuck
    window.Get(np.ones(1), 0)
    window.Unlock(0)
""",
        "window_lock", [0, 1], ("may hold the lock of the window",),
    ),
    "mpi4py: a rank computes": Hang(
        PLAIN + """
ready()
while RANK == 1:  # loop
    pass  # loop
world.Barrier()  # waits
""",
        "computing", [1], ("rank 1",),
    ),
    "mpi4py: the script of a rank has ended": Hang(
        PLAIN + """
ready()
if RANK == 1:
    sys.exit()
world.Barrier()  # waits
""",
        "ended", [1], ("rank 1", "ended"),
    ),
    "mpi4py: both receive": Hang(
        PLAIN + """
ready()
world.Recv(array, 1 - RANK)  # stuck
""",
        "deadlock", [0, 1], ("Recv",),
    ),
}  # fmt: skip

TASKS = {
    "a function of a dataset hangs": Hang(
        SERVER + """
from dataservice import Dataset, distribute
def slow(number):
    (FOLDER / "ready-1").touch()
    time.sleep(600)  # named
    return number
def train(server):
    apply = distribute("distributed_epoch", resolver.master("data", 0))
    for batch in Dataset.range(10).map(slow).apply(apply):  # waits
        pass
serve(train)
""",
        ("sleeping", "waiting"), ([1], [1]), ("data 0", "slow"),
        layout=("--data", "1", "--worker", "1"), ready=(1,),
    ),
    "a worker without a Server": Hang(
        STRATEGY + """
import mpi4py.MPI
ready()
if resolver.task_type == "worker" and resolver.task_id == 1:
    time.sleep(600)  # stuck
serve(lambda server: ParameterServerStrategy())
""",
        ("not_started", "sleeping"), ([2], [2]), ("worker 1",),
        layout=("--ps", "1", "--worker", "2"), ready=(0, 1, 2),
    ),
    "a ps whose only other worker sleeps": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy().scope():
        v = variable()
    step(v)
    ready()
    if resolver.task_id == 1:
        time.sleep(600)  # stuck
serve(train)
""",
        "sleeping", [2], ("worker 1",),
        layout=("--ps", "1", "--worker", "2"), ready=(1, 2),
    ),
    "sync: a worker makes fewer steps": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy(mode="sync").scope():
        v = variable()
    workers = server.job_group("worker")
    for number in range(5 - resolver.task_id):
        if number == 3:
            ready()
        step(v)  # waits
    workers.barrier()  # stuck
serve(train)
""",
        "deadlock", [1, 2], ("worker 1", "step 4", "finish()"),
        layout=("--ps", "1", "--worker", "2"), ready=(1, 2),
    ),
    "sync: a worker makes fewer steps, and receives by mpi4py": Hang(
        STRATEGY + """
from mpi4py import MPI
def train(server):
    with ParameterServerStrategy(mode="sync").scope():
        v = variable()
    for number in range(4 + resolver.task_id):
        if number == 3:
            ready()
        step(v)  # waits
    if resolver.task_id == 0:
        MPI.COMM_WORLD.recv(source=2)  # stuck
serve(train)
""",
        "deadlock", [1, 2], ("is in COMM_WORLD.recv(source=2) at", "worker 1", "finish()"),
        layout=("--ps", "1", "--worker", "2"), ready=(1, 2),
    ),
    "sync: two of three workers sleep, and one is needed": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy(mode="sync", backup_workers=1).scope():
        v = variable()
    step(v)
    server.job_group("worker").barrier()
    ready()
    if resolver.task_id > 0:
        time.sleep(600)  # stuck
    step(v)  # waits
    v.read_value()
serve(train)
""",
        "sleeping", [2, 3], ("step 1", "worker 1", "worker 2"),
        layout=("--ps", "1", "--worker", "3"), ready=(1, 2, 3),
    ),
    "a stopped ps": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy().scope():
        v = variable()
    step(v)
    (FOLDER / "stop").touch()
    ready()
    while True:
        step(v)  # waits
def stop():
    while not (FOLDER / "stop").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
if resolver.task_type == "ps":
    threading.Thread(target=stop).start()
serve(train)
""",
        "stopped", [0], ("ps 0", "stopped"), layout=("--ps", "1", "--worker", "1"), ready=(1,),
    ),
    "an optimizer that hangs on a ps": Hang(
        STRATEGY + """
def rule(param, grad, slots, learning_rate, step):
    time.sleep(600)
def train(server):
    with ParameterServerStrategy().scope():
        v = variable()
    ready()
    optimizers.Function(rule, [], learning_rate=0.1, name="own").apply_gradients([(np.ones(8), v)])
    v.read_value()  # waits
serve(train)
""",
        ("sleeping", "waiting"), ([0], [0]), ("ps 0",),
        layout=("--ps", "1", "--worker", "1"), ready=(1,),
    ),
}  # fmt: skip

ERRORS = {
    "other order of two collectives": Error(
        GROUP + """
if RANK == 1:
    group.barrier()
group.all_reduce(array)
if RANK == 0:
    group.barrier()
""",
        ("call different collectives", "rank 0 calls all_reduce", "rank 1 calls barrier"),
    ),
    "other shape": Error(
        GROUP + "group.all_reduce(np.ones(8 + RANK))\n",
        ("rank 0 calls all_reduce(SUM, float64[8])", "rank 1 calls all_reduce(SUM, float64[9])"),
    ),
    "other dtype": Error(
        GROUP + "group.all_reduce(np.ones(8, 'float32' if RANK else 'float64'))\n",
        ("rank 0 calls all_reduce(SUM, float64[8])", "rank 1 calls all_reduce(SUM, float32[8])"),
    ),
    "other root": Error(
        GROUP + "group.broadcast(array, src=RANK)\n",
        ("call different collectives", "rank 0 calls broadcast", "rank 1 calls broadcast"),
    ),
    "a swallowed exception, and another collective": Error(
        GROUP + """
try:
    group.all_reduce("no array" if RANK == 1 else array)
except Exception:
    pass
group.barrier()
""",
        ("call different collectives", "rank 0 calls all_reduce", "rank 1 calls barrier"),
    ),
    "a swallowed exception, and one call too few": Error(
        GROUP + """
for step in range(4):
    try:
        group.all_reduce(array if step != 2 or RANK == 0 else None)
    except Exception:
        pass
""",
        ("all_reduce number 4", "waits for rank 1, whose script has ended"),
    ),
    "an early return": Error(
        GROUP + """
def main():
    group.all_reduce(array)
    if RANK == 1:
        return
    group.all_reduce(array)
main()
""",
        ("all_reduce number 2", "waits for rank 1, whose script has ended"), layout=("-n", "3"),
    ),
    "different calls after many equal ones": Error(
        GROUP + """
for step in range(150):
    group.all_reduce(array)
if RANK == 1:
    group.barrier()
group.all_reduce(np.ones(1 << 20))
if RANK == 0:
    group.barrier()
""",
        ("call different collectives", "all_reduce", "barrier", "rank 0", "rank 1"),
    ),
    "SIGKILL": Error(
        GROUP + """
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
group.all_reduce(array)
""",
        ("killed by signal 9",), failed=1,
    ),
    "a worker that ends without a Server": Error(
        STRATEGY + """
if resolver.task_type != "worker" or resolver.task_id == 0:
    serve(lambda server: ParameterServerStrategy())
""",
        ("worker 1", "script of rank 2 has ended"), layout=("--ps", "1", "--worker", "2"),
    ),
}  # fmt: skip

# The partners of a call of gloo are not known, as those of mpi4py.
TORCH = f"{HEAD}import torch\nimport torch.distributed as dist\narray = torch.ones(8)\n"
GLOO = {
    "gloo: a rank sleeps": Hang(
        TORCH + """
dist.init_process_group("gloo")
ready()
while RANK == 1:
    time.sleep(0.1)  # stuck
dist.all_reduce(array)  # waits
""",
        "sleeping", [1], ("is in torch.distributed.all_reduce", "rank 1"), **THREE,
    ),
    "gloo: a worker of a DataLoader hangs": Hang(
        TORCH + """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        ready()
        time.sleep(600 if RANK == 1 else 0)
        return array
dist.init_process_group("gloo")
for batch in torch.utils.data.DataLoader(Numbers(), num_workers=1):  # stuck
    dist.all_reduce(batch)  # waits
""",
        "child", [1], ("is in torch.distributed.all_reduce", "child process pt_data_worker"),
    ),
    "gloo: uneven batches": Hang(
        TORCH + """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(3 - RANK):
    model(array).sum().backward()  # stuck
ready()
dist.barrier()  # stuck
""",
        "different_calls", [0, 1],
        ("backward() of torch", "torch.distributed.barrier"), ready=(1,),
    ),
}  # fmt: skip

HANGS = CALLS | MESSAGES | CODE | WITHOUT_MPIDIST | TASKS

# Jobs that go on: each answer must be a right one.
HEALTHY = {
    "ranks compute in turns": Hang(
        GROUP + """
ready()
for step in range(600):
    end = time.monotonic() + 1.0
    while RANK == step % 2 and time.monotonic() < end:
        pass
    group.all_reduce(array)
""",
        ("none", "computing", "computing"), ([], [0], [1]),
    ),
    "a worker computes between the steps": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy(mode="sync").scope():
        v = variable()
    step(v)
    v.read_value()
    ready()
    while True:
        end = time.monotonic() + 1.0
        while resolver.task_id == 1 and time.monotonic() < end:
            pass
        step(v)
serve(train)
""",
        ("none", "computing"), ([], [2]),
        layout=("--ps", "1", "--worker", "2"), ready=(1, 2),
    ),
    "sync with a backup worker: the worker that is not needed sleeps": Hang(
        STRATEGY + """
def train(server):
    with ParameterServerStrategy(mode="sync", backup_workers=1).scope():
        v = variable()
    step(v)
    v.read_value()
    ready()
    if resolver.task_id == 2:
        time.sleep(600)
    while True:
        step(v)
serve(train)
""",
        "none", [], layout=("--ps", "1", "--worker", "3"), ready=(1, 2, 3),
    ),
    "a trainer computes between the elements of a data service": Hang(
        SERVER + """
from dataservice import Dataset, distribute
def train(server):
    dataset = Dataset.range(1_000_000)
    ready()
    for batch in dataset.apply(distribute("distributed_epoch", resolver.master("data", 0))):
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
serve(train)
""",
        ("none", "computing"), ([], [0]), layout=("--data", "1", "--worker", "1"), ready=(0,),
    ),
    "a function that a dataset calls in parallel is slow": Hang(
        SERVER + """
from dataservice import Dataset, distribute
def load(number):
    (FOLDER / "ready-1").touch()
    time.sleep(600)
    return number
def train(server):
    dataset = Dataset.range(100).map(load, num_parallel_calls=2).batch(2).prefetch(2)
    for batch in dataset.apply(distribute("distributed_epoch", resolver.master("data", 0))):
        pass
serve(train)
""",
        ("none", "waiting"), ([], [1]), ("the function `load` at script.py", "output element 0"),
        layout=("--data", "1", "--worker", "1"), ready=(1,),
    ),
    "a pool of threads computes": Hang(
        alone("""
from concurrent.futures import ThreadPoolExecutor
def work():
    while True:
        pass
ready()
ThreadPoolExecutor(1).submit(work).result()
"""),
        ("computing", "lock"), ([1], [1]),
    ),
    "a pool of processes computes": Hang(
        alone("""
import multiprocessing
def work(number):
    while True:
        pass
pool = multiprocessing.get_context("fork").Pool(1)
ready()
pool.map(work, [0])
"""),
        ("computing", "child", "lock"), ([1], [1], [1]),
    ),
    "a child process computes": Hang(
        alone("""
ready()
subprocess.run([sys.executable, "-c", "while True: pass"])
"""),
        ("computing", "child"), ([1], [1]),
    ),
    "a connection with little data": Hang(
        alone("""
import socket
reading, writing = socket.socketpair()
def send():
    while True:
        writing.send(b"x")
        time.sleep(0.1)
threading.Thread(target=send, daemon=True).start()
ready()
while True:
    reading.recv(1)
"""),
        ("computing", "sleeping", "socket", "none"), ([1], [1], [1], []),
    ),
    "a loop with a queue that has a limit of time": Hang(
        alone("""
batches = queue.Queue()
ready()
while True:
    try:
        batches.get(timeout=0.1)
    except queue.Empty:
        pass
"""),
        ("computing", "sleeping", "lock", "none"), ([1], [1], [1], []),
    ),
    "a thread that computes the next batch": Hang(
        GROUP + """
batches = queue.Queue(2)
def load():
    while True:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        batches.put(np.ones(8))
threading.Thread(target=load, daemon=True).start()
ready()
while True:
    group.all_reduce(batches.get() if RANK else array)
""",
        ("none", "computing", "lock"), ([], [1], [1]),
    ),
    "mpi4py: ping-pong": Hang(
        PLAIN + """
ready()
while True:
    if RANK:
        world.Send(array, 0)
        world.Recv(array, 0)
    else:
        world.Recv(array, 1)
        world.Send(array, 1)
""",
        ("none", "deadlock", "different_calls"), ([], [0, 1], [0, 1]),
    ),
}  # fmt: skip

# Ranks take turns to compute for longer than MPIDIST_STALL_S.
TURNS = (
    GROUP
    + """
for step in range(2):
    end = time.monotonic() + 1.5
    while RANK == step and time.monotonic() < end:
        pass
    group.all_reduce(array)
"""
)
