"""mpidist.Checkpoints on several ranks: other numbers of ranks, states, and saves that fail."""

import re

from _cases.jobs import run_job

HEAD = """
    import os, sys
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    here = os.path.dirname(os.path.abspath(__file__))
    saved = os.path.join(here, "saved")

    class Counter:
        def __init__(self, start=0):
            self.value = start

        def get_state(self):
            return str(self.value).encode()

        def set_state(self, state):
            self.value = int(state)
"""
WRITE = (
    HEAD
    + """
    part = np.arange(4.0) + 10 * rank
    shared = np.full(2, 7, "int32")
    count, own = Counter(5 if rank == 0 else 6), Counter(rank)
    with dist.Checkpoints(
        saved, {"part": part, "shared": shared}, extra={"count": count}, own={OWN}
    ) as checkpoints:
        assert checkpoints.restore() == 0
        for _ in range(3):
            checkpoints.step()
    assert os.path.basename(checkpoints.path) == "step-3", checkpoints.path
"""
)
READ = (
    HEAD
    + """
    part, shared = np.zeros({length}), np.zeros(2, "int32")
    count, own = Counter(), Counter()
    checkpoints = dist.Checkpoints(
        saved, {{"part": part, "shared": shared}}, extra={{"count": count}}, own={own}, rule={rule}
    )
    steps = checkpoints.restore()
    values = [None] * size
    dist.all_gather_object(values, (steps, part.tolist(), shared.tolist(), count.value, own.value))
    if rank == 0:
        print(values)
"""
)


def read(folder, ranks, *, length=4, rule=None, own="{}"):
    ended = run_job(folder, ["-n", str(ranks)], READ.format(length=length, rule=rule, own=own))
    return eval(ended.out) if ended.status == 0 else ended.err


def test_as_many_ranks_get_their_own_arrays_and_states(tmp_path):
    ended = run_job(tmp_path, ["-n", "3"], WRITE.replace("{OWN}", '{"own": own}'))
    assert ended.status == 0, ended.err
    found = read(tmp_path, 3, own='{"own": own}')
    expected = [(3, [10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3], [7, 7], 5, r) for r in range(3)]
    assert found == expected
    assert "written by 3 ranks, and there are 2" in read(tmp_path, 2)
    err = read(tmp_path, 2, rule="'first'", own='{"own": own}')
    assert "the states ['own'] in checkpoint" in err
    assert "belong to 3 ranks, and this training has 2" in err


def test_a_rule_fits_the_arrays_to_another_number_of_ranks(tmp_path):
    ended = run_job(tmp_path, ["-n", "2"], WRITE.replace("{OWN}", "{}"))
    assert ended.status == 0, ended.err
    assert read(tmp_path, 3, rule="'first'") == [(3, [0, 1, 2, 3], [7, 7], 5, 0)] * 3
    rule = 'lambda name, parts: np.concatenate(parts) if name == "part" else parts[-1]'
    together = [0, 1, 2, 3, 10, 11, 12, 13]
    assert read(tmp_path, 1, length=8, rule=rule) == [(3, together, [7, 7], 5, 0)]
    err = read(tmp_path, 1, length=5, rule=rule)
    assert "the array 'part' is float64[8] in the checkpoint" in err
    assert "and float64[5] here" in err


def test_a_periodic_save_that_fails_is_a_warning_and_the_last_one_an_error(tmp_path):
    """The writes of rank 1 fail, as on a full disk."""
    script = (
        HEAD
        + """
    from mpidist.checkpoints import arrays

    write = arrays.write_tensors
    broken = False

    def fails(*arguments):
        if broken and rank == 1:
            raise OSError(28, "No space left on device")
        write(*arguments)

    arrays.write_tensors = fails
    checkpoints = dist.Checkpoints(saved, {"a": np.zeros(3)}, every=2)
    for step in range(1, 9):
        broken = step in (4, 5, 6, 8)
        checkpoints.step()
    broken = True
    try:
        checkpoints.close()
    except dist.errors.FailedPreconditionError as error:
        print(rank, "close:", error)
    dist.barrier()
    if rank == 0:
        print(sorted(os.listdir(saved)))
    """
    )
    ended = run_job(tmp_path, ["-n", "2"], script)
    assert ended.status == 0, ended.err
    assert ended.err.count("a checkpoint could not be written, and the training goes on") >= 2
    closes = re.findall(r"(\d) close: cannot write the checkpoint .*No space left", ended.out)
    assert sorted(closes) == ["0", "1"]
    assert "step-2" in ended.out
    assert "partial" not in ended.out


def test_the_default_group_stays_free_for_other_threads(tmp_path):
    script = (
        HEAD
        + """
    import threading

    def reduce_all():
        for _ in range(200):
            dist.all_reduce(np.ones(100))

    thread = threading.Thread(target=reduce_all)
    thread.start()
    with dist.Checkpoints(saved, {"a": np.zeros(1000)}, every=1, keep=1) as checkpoints:
        for _ in range(20):
            checkpoints.step()
    thread.join()
    if rank == 0:
        print(os.listdir(saved))
    """
    )
    ended = run_job(tmp_path, ["-n", "2"], script)
    assert ended.status == 0, ended.err
    assert ended.out == "['step-20']\n"


def test_saves_after_the_end_of_the_script(tmp_path):
    """A thread trains on, and an exit handler saves the end of another training."""
    script = (
        HEAD
        + """
    import atexit, threading

    group = dist.new_group()

    def train():
        threading.main_thread().join()
        with dist.Checkpoints(saved, {"a": np.zeros(3)}, every=2) as checkpoints:
            for _ in range(6):
                checkpoints.step()

    threading.Thread(target=train).start()
    other = dist.Checkpoints(f"{saved}-at-exit", {"a": np.zeros(3)}, every=2, group=group)
    other.step()
    atexit.register(other.close)
    """
    )
    ended = run_job(tmp_path, ["-n", "2"], script)
    assert ended.status == 0, ended.err
    assert {one.name for one in (tmp_path / "saved").iterdir()} == {"step-2", "step-4", "step-6"}
    assert [one.name for one in (tmp_path / "saved-at-exit").iterdir()] == ["step-1"]


def test_an_error_of_the_writing_thread_ends_the_job(tmp_path):
    script = (
        HEAD
        + """
    import time

    def fail(self, problem):
        raise RuntimeError("the message was not sent")

    dist.Checkpoints._gather_problems = fail
    checkpoints = dist.Checkpoints(saved, {"a": np.zeros(3)}, every=1)
    checkpoints.step()
    time.sleep(60)
    """
    )
    ended = run_job(tmp_path, ["-n", "2"], script)
    assert ended.status == 1
    assert "failed first: RuntimeError: the message was not sent" in ended.err
