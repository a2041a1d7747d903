"""The waits of stuck jobs with ps tasks and data tasks, in the records of their ranks."""

import json
import os
import signal
import time

import pytest
from _cases.jobs import run_job

START_S = 40.0  # until a wait of a second is recorded, on a busy machine

HEAD = """
import os, signal, threading, time
from pathlib import Path
import numpy as np
import mpidist
from dataservice import Dataset, distribute
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

RESOLVER = MPIClusterResolver()
JOB, TASK = RESOLVER.task_type, RESOLVER.task_id

def hang():
    threading.Event().wait()

def serve(train):
    with mpidist.Server(RESOLVER.cluster_spec(), job_name=JOB, task_index=TASK) as server:
        if JOB == "worker":
            train(server)
        server.join()

def variable(**options):
    strategy = ParameterServerStrategy(**options)
    with strategy.scope():
        return strategy, get_variable("v", (2,), dtype="float64", initializer="zeros")

OPTIMIZER = optimizers.SGD(0.5)

def push(v):
    return OPTIMIZER.apply_gradients([(np.ones(2), v)])

def stop_ps(server):
    reply = server.endpoint.call(server.task_address("ps", 0), "test/Pid").result()
    os.kill(int(reply.body), signal.SIGSTOP)
"""
STEPS = """
def train(server):
    strategy, v = variable({options})
    for step in range(3):
        if TASK == {late} and step == {late_step}:
            hang()
        push(v).wait()

serve(train)
"""
STOPPED_PS = """
def train(server):
    strategy, v = variable(transport="p2p")
    push(v).wait()
    stop_ps(server)
    {then}

def serve_and_tell(train):
    with mpidist.Server(RESOLVER.cluster_spec(), job_name=JOB, task_index=TASK) as server:
        server.endpoint.register("test", {{
            "Pid": lambda request: mpidist.Reply(str(os.getpid()).encode()),
            "Nothing": lambda request: None,
        }})
        if JOB == "worker":
            train(server)
        server.join()

serve_and_tell(train)
"""
DATASET = """
def train(server):
    dataset = Dataset.range(20).repeat(){steps}
    apply = distribute({mode}, RESOLVER.master("data", 0), job_name="train"{options})
    for number, element in enumerate(dataset.apply(apply)):
        {then}

serve(train)
"""
SLOW_MAP = """
def slow_map(x):
    if x == 3:
        threading.Event().wait(1000)  # slow
    return x
"""

# For each case: the layout, the script, and the expected waits by task, with their tasks.
CASES = {
    "sync": (
        "--ps 1 --worker 3",
        STEPS.format(options='mode="sync"', late=1, late_step=1),
        {
            "worker 0": ("step 1 of strategy 'default'", ["worker 1"]),
            "worker 2": ("step 1 of strategy 'default'", ["worker 1"]),
            "ps 0": ("requests", []),
        },
    ),
    "backup workers": (
        "--ps 1 --worker 4",
        STEPS.format(options='mode="sync", backup_workers=1', late="max(TASK, 2)", late_step=0),
        {"worker 0": ("step 0 of strategy 'default'", ["worker 2", "worker 3"])},
    ),
    "ssp": (
        "--ps 1 --worker 2",
        STEPS.format(options='mode="ssp", staleness=1', late=1, late_step=0),
        {
            "worker 0": (
                "the slowest workers of strategy 'default', to begin its next step",
                ["worker 1"],
            )
        },
    ),
    "a ps that does not start": (
        "--ps 2 --worker 1",
        "if (JOB, TASK) == ('ps', 1):\n    hang()\nserve(hang)",
        {"worker 0": ("ps 1 to start", ["ps 1"]), "ps 0": ("ps 1 to start", ["ps 1"])},
    ),
    "an initial value": (
        "--ps 1 --worker 2",
        """
DEFINED = Path(__file__).with_name("defined")

def slow(shape, dtype=None, **_):
    DEFINED.touch()
    hang()

def train(server):
    strategy = ParameterServerStrategy()
    while TASK == 1 and not DEFINED.exists():
        time.sleep(0.01)
    with strategy.scope():
        get_variable("slow", (2,), initializer=slow)

serve(train)
""",
        {"worker 1": ("the initial value of variable 'slow'", ["worker 0"])},
    ),
    "the chief": (
        "--ps 1 --worker 2",
        """
def train(server):
    strategy, v = variable()
    if TASK == 0:
        hang()
    strategy.restore("missing")

serve(train)
""",
        {"worker 1": (f"the chief to restore {os.path.abspath('missing')!r}", ["worker 0"])},
    ),
    "a key of a store": (
        "--worker 2",
        """
store = mpidist.MPIStore()
if TASK == 1:
    store.get("checkpoint")
hang()
""",
        {"rank 1": ("key 'checkpoint' of the store of rank 0", [])},
    ),
    "a call to a stopped ps": (
        "--ps 1 --worker 1",
        STOPPED_PS.format(
            then='server.endpoint.call(server.task_address("ps", 0), "test/Nothing").wait()'
        ),
        {"worker 0": ("the reply to test/Nothing from rank 0", ["rank 0"])},
    ),
    "a pull from a stopped ps": (
        "--ps 1 --worker 1",
        STOPPED_PS.format(then="v.numpy()"),
        {"worker 0": ("variable 'v' from ps 0", ["ps 0"])},
    ),
    "a push to a stopped ps": (
        "--ps 1 --worker 1",
        STOPPED_PS.format(then="push(v); v.numpy()"),
        {"worker 0": ("ps 0 to apply pushes of strategy 'default'", ["ps 0"])},
    ),
    "a dataset function": (
        "--data 1 --worker 1",
        SLOW_MAP
        + DATASET.format(
            steps=".map(slow_map)", mode='"parallel_epochs"', options="", then="assert element < 3"
        ),
        {
            "worker 0": ("elements of job 'train' from data 0", ["data 0"]),
            "data 0": (
                "the function `slow_map` at script.py:SLOW for output element 3 (dataset ",
                [],
            ),
        },
    ),
    "a parallel dataset function": (
        "--data 1 --worker 1",
        SLOW_MAP
        + DATASET.format(
            steps=".map(slow_map, num_parallel_calls=2)",
            mode='"parallel_epochs"',
            options="",
            then="pass",
        ),
        {
            "worker 0": ("elements of job 'train' from data 0", ["data 0"]),
            "data 0": ("the function `slow_map` at script.py:SLOW", []),
        },
    ),
    "a coordinated read": (
        "--data 1 --worker 2",
        DATASET.format(
            steps="",
            mode='"parallel_epochs"',
            options=", num_consumers=2, consumer_index=TASK",
            then="hang() if TASK == 1 else None",
        ),
        {
            "worker 0": ("elements of job 'train' from data 0", ["data 0"]),
            "data 0": ("consumer 1 of 2 to take element ", ["worker 1"]),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stuck_job_records_its_waits(case, tmp_path):
    words, script, expected = CASES[case]
    run = tmp_path / "run"
    source = HEAD + script
    slow = source.partition("# slow")[0].count("\n") + 1

    def look(process):
        try:
            for task, (what, tasks) in expected.items():
                _await_wait(process, run, task, what.replace("SLOW", str(slow)), tasks)
        finally:
            for record in _ranks(run):
                os.kill(record["pid"], signal.SIGCONT)
            process.terminate()

    run_job(tmp_path, [*words.split(), "--run-dir", str(run)], source, meddle=look)


def _await_wait(process, run, task, what, tasks):
    """Wait until a task has recorded a wait. The record may name the tasks by their ranks."""
    deadline = time.monotonic() + START_S
    while True:
        records = {f"rank {one['rank']}": one for one in _ranks(run)}
        states = {f"rank {one}": state for one, state in _states(run).items()}
        names = {rank: _name(one) for rank, one in records.items()}
        waits = [wait for rank in states if names[rank] == task for wait in states[rank]["waits"]]
        for wait in waits:
            named = [each if each in tasks else names.get(each) for each in wait["tasks"]]
            if wait["what"].startswith(what) and named == tasks:
                return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, (task, what, waits)
        time.sleep(0.1)


def _name(record):
    if record["job"] is None:  # the script has no Server
        return f"rank {record['rank']}"
    return f"{record['job']} {record['task']}"


def _states(run):
    """Return the last state of each rank that has recorded one."""
    paths = {one["rank"]: run / f"state-{one['rank']}.json" for one in _ranks(run)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def _ranks(run):
    return [json.loads(path.read_text()) for path in run.glob("rank-*.json")]
