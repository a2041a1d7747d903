"""``python -m dataservice``: servers as plain processes."""

import signal
import subprocess
import sys
from contextlib import ExitStack

import cloudpickle
import pytest
from _cases.data_command import Command
from _cases.data_process import Process

from dataservice import Dataset, distribute
from mpidist.errors import UnavailableError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


@pytest.fixture
def start():
    """``start(*words, env=None)``: a server, killed after the test if it is still there."""
    with ExitStack() as stack:
        yield lambda *words, env=None: stack.enter_context(Command(*words, env=env))


def fails(*words):
    """What a command that cannot start prints; it is one line."""
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
