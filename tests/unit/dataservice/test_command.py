"""``python -m dataservice``: servers as plain processes."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import cloudpickle
import pytest
from _cases.data_command import Command
from _cases.data_process import Process

from dataservice import Dataset, DispatcherConfig, DispatchServer, distribute
from mpidist.errors import UnavailableError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


@pytest.fixture
def start():
    """Provide ``start(*words, env=None)``, which starts a server and kills it after the test."""
    with ExitStack() as stack:
        yield lambda *words, env=None: stack.enter_context(Command(*words, env=env))


def fails(*words):
    """Return the only error line of a command that cannot start."""
    command = [sys.executable, "-m", "dataservice", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    return line


def squares(target):
    dataset = Dataset.range(100).map(lambda x: x * x)
    return sorted(dataset.apply(distribute("distributed_epoch", target)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(start, number):
    dispatcher = start("dispatcher")
    target = dispatcher.said
    assert target.startswith("tcp://")
    workers = [start("worker", "--dispatcher", address) for address in (target, target[6:])]
    assert [worker.said.startswith("a worker of ") for worker in workers] == [True, True]
    assert squares(target) == [x * x for x in range(100)]
    assert [server.stop(number) for server in (workers[0], dispatcher, workers[1])] == [0, 0, 0]


@pytest.mark.parametrize("attempt", range(5))
def test_a_second_signal_does_not_disturb_the_end(start, attempt):
    dispatcher = start("dispatcher")
    dispatcher._process.send_signal(signal.SIGTERM)
    assert dispatcher.stop(signal.SIGINT) == 0


# The last step of start() takes long, as if functions of the dataset held the GIL.
SLOW_START = """
import atexit, sys, time
from dataservice import WorkerServer
from dataservice.__main__ import main
register = atexit.register
def slowly(function, *arguments):
    if getattr(function, "__func__", None) is WorkerServer.stop:
        print("registered", flush=True)
        time.sleep(1)
    return register(function, *arguments)
atexit.register = slowly
sys.exit(main(["worker", "--dispatcher", sys.argv[1]]))
"""


def test_a_worker_that_is_stopped_before_it_has_said_that_it_is_up(start, caplog):
    with DispatchServer(DispatcherConfig(protocol="tcp")) as dispatcher:
        command = [sys.executable, "-c", SLOW_START, dispatcher.target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout.readline() == "registered\n"
            apply = distribute("distributed_epoch", dispatcher.target)
            elements = iter(Dataset.range(1000).apply(apply))
            got = [next(elements)]
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0
        start("worker", "--dispatcher", dispatcher.target)
        got += elements
        assert sorted(got) == list(range(1000))
        assert [text for text in caplog.messages if "lost" in text] == []


@pytest.mark.parametrize("role", ["dispatcher", "worker"])
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6])
def test_a_signal_while_a_server_starts(start, role, delay_s):
    # The worker waits, because no dispatcher runs.
    words = ["dispatcher"] if role == "dispatcher" else ["worker", "--dispatcher", "localhost:1"]
    script = (
        "import sys; from dataservice.__main__ import main; print('imported', flush=True); "
        "sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout.readline() == "imported\n"
        time.sleep(0.1 + delay_s)
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert server.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_journal_outlives_the_dispatcher(start, tmp_path, number):
    words = ("dispatcher", "--work-dir", str(tmp_path / "journal"))
    dispatcher = start(*words)
    target = dispatcher.said
    start("worker", "--dispatcher", target)
    elements = iter(Dataset.range(1000).apply(distribute("distributed_epoch", target)))
    got = [next(elements) for _ in range(10)]
    dispatcher.stop(number)
    assert start(*words, "--port", target.rpartition(":")[2]).said == target
    got += elements
    assert got == list(range(1000))


def test_secrets_are_taken_from_the_environment(start, tmp_path):
    env = {"MPIDIST_SECRET": "of this test"}
    dispatcher = start("dispatcher", env=env)
    target = dispatcher.said
    start("worker", "--dispatcher", target, env=env)
    expected = [x * x for x in range(100)]
    friend = Process("friend", tmp_path, "plain", env=env)
    stranger = Process("stranger", tmp_path, "plain", env={"MPIDIST_SECRET": "of another"})
    try:
        assert friend.run(lambda _, read: read(target), squares) == expected
        with pytest.raises(UnavailableError, match="no dispatcher answers"):
            stranger.run(lambda _: list(_reader(target)))
    finally:
        friend.end()
        stranger.end()


def _reader(target):
    return Dataset.range(3).apply(distribute("parallel_epochs", target, start_timeout_s=1.0))


def test_what_cannot_start_says_why_in_a_line(start, tmp_path):
    target = start("dispatcher").said
    port = target.rpartition(":")[2]
    assert "choose another port" in fails("dispatcher", "--port", port)
    assert "'localhost' is not an address" in fails("worker", "--dispatcher", "localhost")
    assert "must be 0, for a free one" in fails("dispatcher", "--port", "-1")
    (tmp_path / "file").write_text("")
    assert "file" in fails("dispatcher", "--work-dir", str(tmp_path / "file"))
