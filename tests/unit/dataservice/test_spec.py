"""The examples of the specification, with the prefixes of its names dropped."""

import subprocess
import sys
import threading

from dataservice import Dataset, DispatchServer, distribute

FIRST = """
from dataservice import DispatchServer, WorkerServer, Dataset, distribute

dispatcher = DispatchServer(port=0)
dispatcher_address = dispatcher.target.split("://")[1]
worker = WorkerServer(
    port=0, dispatcher_address=dispatcher_address)
dataset = Dataset.range(10)
dataset = dataset.apply(distribute(
    processing_mode="parallel_epochs", service=dispatcher.target))
elements = list(dataset.as_numpy_iterator())
print([int(element) for element in elements])
print({type(element).__name__ for element in elements})

import sys
print("mpi4py.MPI" in sys.modules)
"""


def test_first_example_in_a_plain_process():
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=30, check=False
    )
    expected = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n{'int64'}\nFalse\n"
    # Nothing was stopped in the script: leaving it so must be quiet, too.
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


def test_start_false():
    dispatcher = DispatchServer(port=0, start=False)
    dispatcher.start()
    dispatcher.stop()


def test_join_blocks_until_the_server_has_shut_down():
    dispatcher = DispatchServer(port=5050)
    assert dispatcher.target == "tcp://localhost:5050"
    joined = threading.Thread(target=dispatcher.join)
    joined.start()
    joined.join(0.05)
    assert joined.is_alive()
    dispatcher.stop()
    joined.join(10)
    assert not joined.is_alive()


def test_target_in_distribute():
    with DispatchServer(port=0) as dispatcher:
        dataset = Dataset.range(10)
        dataset = dataset.apply(
            distribute(processing_mode="parallel_epochs", service=dispatcher.target)
        )
        assert isinstance(dataset, Dataset)
