"""mpidist.Checkpoints on one rank: its files, signals and errors."""

import os
import re
import signal
import time

import numpy as np
import pytest

import mpidist as dist
from mpidist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from strategy import ParameterServerStrategy, get_variable

pytestmark = pytest.mark.ranks(1)


@pytest.fixture(autouse=True)
def group():
    """Give each test a default group, and the signals their usual actions."""
    dist.init_process_group()
    yield
    dist.destroy_process_group()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Counter:
    """A stateful object."""

    value = 0

    def get_state(self):
        """Return the value."""
        return b"%d" % self.value

    def set_state(self, state):
        """Set the value."""
        self.value = int(state)


def names(folder):
    return sorted(os.listdir(folder))


def test_saves_every_few_steps_and_at_the_end(tmp_path):
    a, count = np.zeros((2, 3)), Counter()
    with dist.Checkpoints(tmp_path, {"a": a}, every=4, keep=2, own={"count": count}) as checkpoints:
        assert checkpoints.restore() == 0
        for step in range(10):
            a += 1
            count.value = step
            checkpoints.step()
    assert names(tmp_path) == ["step-10", "step-8"]
    assert names(tmp_path / "step-10") == ["count-0", "index.json", "rank-0-of-1.safetensors"]
    a[:], count.value = 0, 0
    again = dist.Checkpoints(tmp_path, {"a": a}, own={"count": count})
    assert again.restore() == again.steps == 10
    assert again.path == str(tmp_path / "step-10")
    assert a.tolist() == [[10] * 3] * 2
    assert count.value == 9
    checkpoints.close()  # does nothing
    with pytest.raises(FailedPreconditionError, match="was closed"):
        checkpoints.save()


def test_folders_of_other_programs_stay(tmp_path):
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "model.pt").touch()
    with dist.Checkpoints(tmp_path, {"a": np.zeros(3)}, every=1, keep=1) as checkpoints:
        for _ in range(5):
            checkpoints.step()
    assert names(tmp_path) == ["step-0", "step-5"]
    assert names(tmp_path / "step-0") == ["model.pt"]


def test_a_folder_that_cannot_be_written_is_found_at_the_begin(tmp_path):
    (tmp_path / "file").touch()
    problem = f"cannot write checkpoints into '{tmp_path}/file': .*; give another folder"
    checkpoints = dist.Checkpoints(tmp_path / "file", {"a": np.zeros(3)})
    with pytest.raises(FailedPreconditionError, match=problem):
        checkpoints.step()


def test_the_copy_is_that_of_the_step(tmp_path):
    a = np.zeros(4 << 20)
    checkpoints = dist.Checkpoints(tmp_path, {"a": a})
    a[:] = 1
    checkpoints.save()
    a[:] = 2  # the thread has not written all of the 32 MiB yet
    deadline = time.monotonic() + 30
    while checkpoints.path is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert dist.Checkpoints(tmp_path, {"a": a}).restore() == 0
    assert (a == 1).all()


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_an_error_of_the_thread_leaves_no_checkpoint(tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("mpidist.checkpoints.tensor_file._write", fail)
    with pytest.raises(FailedPreconditionError, match=r"MemoryError|No space left"):
        dist.Checkpoints(tmp_path, {"a": np.zeros(1)}).close()
    assert names(tmp_path) == []


def test_another_error_of_the_thread_is_raised_by_the_next_call(tmp_path, monkeypatch):
    def fail(self, problem):
        raise RuntimeError("the message was not sent")

    monkeypatch.setattr("threading.excepthook", lambda args: None)  # that of mpidist ends the job
    monkeypatch.setattr("mpidist.Checkpoints._gather_problems", fail)
    checkpoints = dist.Checkpoints(tmp_path, {"a": np.zeros(1)}, every=1)
    checkpoints.step()
    with pytest.raises(RuntimeError, match="the message was not sent"):
        checkpoints.close()


def test_a_signal_saves_after_the_step_and_ends_the_process(tmp_path):
    number = signal.SIGUSR1  # mpidist run sends it after SIGTERM, too
    before, noted = signal.getsignal(number), []
    signal.signal(number, lambda *arguments: noted.append(arguments[0]))
    own = signal.getsignal(number)
    try:
        with dist.Checkpoints(tmp_path, {"a": np.zeros(1)}) as checkpoints:
            checkpoints.step()
            signal.raise_signal(number)
            assert names(tmp_path) == []
            with pytest.raises(SystemExit) as ended:
                checkpoints.step()
        assert signal.getsignal(number) == own
    finally:
        signal.signal(number, before)
    assert ended.value.code == 75
    assert noted == [number]
    assert names(tmp_path) == ["step-2"]


def test_an_exception_in_the_block_saves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), dist.Checkpoints(tmp_path, {"a": np.zeros(1)}):
        _ = 1 / 0
    assert names(tmp_path) == []
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "every must be at least 1 step, not 0"),
        ({"keep": 0}, "keep must be at least 1, not 0"),
        ({"extra": {"a/b": Counter()}}, "'a/b' cannot be a file"),
        ({"own": {"index.json": Counter()}}, "has a file 'index.json' itself"),
        ({"extra": {"x": Counter()}, "own": {"x": Counter()}}, "'x' is in extra and in own"),
        ({"rule": "last"}, "rule must be 'first' or a function"),
    ],
)
def test_wrong_arguments(tmp_path, options, problem):
    with pytest.raises(ValueError, match=problem):
        dist.Checkpoints(tmp_path, {"a": np.zeros(1)}, **options)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_what_a_checkpoint_lacks(tmp_path):
    dist.Checkpoints(tmp_path, {"a": np.zeros(3)}).close()
    with pytest.raises(NotFoundError, match=r"has no \['b'\]"):
        dist.Checkpoints(tmp_path, {"b": np.zeros(3)}).restore()
    with pytest.raises(NotFoundError, match="has no state of 'count'"):
        dist.Checkpoints(tmp_path, {"a": np.zeros(3)}, extra={"count": Counter()}).restore()
    a = np.ones(3, np.float32)
    with pytest.raises(InvalidArgumentError, match=r"'a' is float64\[3\] .* and float32\[3\] here"):
        dist.Checkpoints(tmp_path, {"a": a}).restore()
    assert a.tolist() == [1, 1, 1]
    (tmp_path / "step-0" / "rank-0-of-1.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataLossError, match="cannot be read"):
        dist.Checkpoints(tmp_path, {"a": np.zeros(3)}).restore()
    (tmp_path / "step-0" / "index.json").write_bytes(b"{")
    with pytest.raises(DataLossError, match=r"the index of .* is damaged"):
        dist.Checkpoints(tmp_path, {"a": np.zeros(3)}).restore()


def test_a_checkpoint_with_more_arrays_is_restored_with_a_warning(tmp_path, caplog):
    more = {f"b{n}": np.ones(2) for n in range(12)}
    dist.Checkpoints(tmp_path, {"a": np.ones(3), **more}).close()
    with pytest.raises(NotFoundError):
        dist.Checkpoints(tmp_path, {"c": np.zeros(1)}).restore()
    assert not caplog.records
    a = np.zeros(3)
    dist.Checkpoints(tmp_path, {"a": a}).restore()
    assert a.tolist() == [1, 1, 1]
    (record,) = caplog.records
    assert "'b9'] and 2 more, which the program does not have" in record.getMessage()


def test_a_damaged_index_is_reported(tmp_path, caplog):
    with dist.Checkpoints(tmp_path, {"a": np.zeros(3)}, every=1) as checkpoints:
        checkpoints.step()
        checkpoints.step()
    (tmp_path / "step-2" / "index.json").write_text("{")
    assert dist.Checkpoints(tmp_path, {"a": np.zeros(3)}).restore() == 1
    (record,) = caplog.records
    assert re.search(r"step-2 is damaged: .*step-1 is restored", record.getMessage())


def test_a_job_that_does_not_restore_replaces_checkpoints_with_a_warning(tmp_path, caplog):
    dist.Checkpoints(tmp_path, {"a": np.zeros(3)}).close()
    assert not caplog.records
    with dist.Checkpoints(tmp_path, {"a": np.zeros(3)}, every=1, keep=2) as checkpoints:
        for _ in range(3):
            checkpoints.step()
    (record,) = caplog.records
    assert "restore() has not been called" in record.getMessage()
    assert str(tmp_path / "step-0") in record.getMessage()
    assert names(tmp_path) == ["step-2", "step-3"]


def test_checkpoints_of_strategies_and_of_groups_are_different(tmp_path):
    strategy = ParameterServerStrategy()
    with strategy.scope():
        get_variable("a", initializer=1.0)
    saved = strategy.save(str(tmp_path / "strategy"))
    with dist.Checkpoints(tmp_path / "group", {"a": np.ones(1)}) as checkpoints:
        pass
    with pytest.raises(InvalidArgumentError, match=r"by a strategy, and mpidist\.Checkpoints"):
        dist.Checkpoints(tmp_path / "strategy", {"a": np.zeros(1)}).restore()
    with pytest.raises(InvalidArgumentError, match=r"by mpidist\.Checkpoints, and a strategy"):
        strategy.restore(checkpoints.path)
    strategy.restore(saved)


def test_a_dtype_that_files_do_not_have(tmp_path):
    with pytest.raises(TypeError, match="cannot hold an array of complex128"):
        dist.Checkpoints(tmp_path, {"a": np.zeros(1, "complex128")})
