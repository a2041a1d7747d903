"""A job that failed starts again, and a job that is told to stop saves first."""

import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from _cases.jobs import run_job
from _cases.kills import KINDS, Job

from mpidist.launcher.vendors import find_launcher

# Adds 1 in each step. A rank dies in the step that the first argument names, once in each attempt.
ARRAYS = """
    import os, sys, time
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    attempt, rank = int(os.environ["MPIDIST_RESTART"]), dist.get_rank()
    here = os.path.dirname(os.path.abspath(__file__))
    fatal = {fatal}
    sums = np.zeros(3)
    with dist.Checkpoints(os.path.join(here, "saved"), {{"sums": sums}}, every=10) as checkpoints:
        begin = checkpoints.restore()
        if rank == 0:
            print("attempt", attempt, "begins at", begin, os.environ["MPIDIST_RESTART_REASON"])
        for step in range(begin, 50):
            dist.all_reduce(np.ones(1))
            sums += step
            if attempt < len(fatal) and step == fatal[attempt] and rank == 1:
                while not os.path.isdir(os.path.join(here, "saved", f"step-{{step // 10 * 10}}")):
                    time.sleep(0.01)
                os.kill(os.getpid(), 9)
            checkpoints.step()
            if step > 20:
                open(os.path.join(here, f"up-{{rank}}"), "w").close()
            time.sleep({pause_s})
    assert sums.tolist() == [sum(range(50))] * 3
"""

# Two workers train in a mode for 60 steps. The chief prints the result.
STRATEGY = """
    import os, sys, time
    import numpy as np
    import mpidist
    from mpidist.cluster_resolver import MPIClusterResolver
    from strategy import ParameterServerStrategy, get_variable, optimizers

    here = os.path.dirname(os.path.abspath(__file__))
    resolver = MPIClusterResolver()
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            strategy = ParameterServerStrategy({arguments})
            with strategy.scope():
                w = get_variable("w", (4,), "float64", initializer="zeros")
            adam = optimizers.Adam(0.1)
            class Count:  # as an iterator over all batches
                value = 0
                get_state = lambda self: b"%d" % self.value
                set_state = lambda self, state: setattr(self, "value", int(state))
            count = Count()
            with strategy.checkpoints(
                os.path.join(here, "saved"), every={every}, extra={{"count": count}}
            ) as checkpoints:
                begin = checkpoints.restore()
                assert {exact} in (False, count.value == begin), (count.value, begin)
                # Workers may take different numbers of steps.
                for step in range(begin, 60 - 7 * strategy.worker_index):
                    count.value += 1
                    random = np.random.default_rng((step, strategy.worker_index))
                    adam.apply_gradients([(w.read_value() - random.normal(size=4), w)])
                    checkpoints.step()
                    if step > 20:
                        open(os.path.join(here, f"up-{{strategy.worker_index}}"), "w").close()
                    time.sleep({pause_s} * (1 + strategy.worker_index))
            if strategy.is_chief:
                print(w.numpy().tobytes().hex(), checkpoints.steps)
"""


def arrays(fatal=(), pause_s=0.0):
    return ARRAYS.format(fatal=tuple(fatal), pause_s=pause_s)


def when_up(*numbers):
    """Return a function that sends signals, one after the other, when both workers are up.

    Between two signals it waits until the script has noted the first.
    """

    def send(process):
        folder = process.args[-1].rpartition("/")[0]
        for number, before in zip(numbers, ("up", "told"), strict=False):
            deadline = time.monotonic() + 30
            while not all(_exists(f"{folder}/{before}-{rank}") for rank in range(2)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)

    return send


def _exists(path):
    try:
        with open(path):
            return True
    except FileNotFoundError:
        return False


def lines_of(ended):
    return [line.removeprefix("mpidist run: ") for line in ended.err.splitlines() if "run:" in line]


def test_a_failed_job_goes_on_at_its_last_checkpoint(tmp_path):
    ended = run_job(tmp_path, ["-n", "2", "--restarts", "1"], arrays([15, 22, 48]))
    assert ended.status == 0, ended.err
    begins = re.findall(r"attempt (\d) begins at (\d+) ?(.*)", ended.out)
    assert [(number, step) for number, step, _ in begins] == [
        ("0", "0"), ("1", "10"), ("2", "20"), ("3", "40"),
    ]  # fmt: skip
    assert all("failed first: killed by signal 9 (SIGKILL)" in why for *_, why in begins[1:])
    lines = lines_of(ended)
    assert [line for line in lines if " begins (" in line] == [
        f"attempt {number} begins (last checkpoint: step {step}; 0 of 1 restarts without progress)"
        for number, step in ((2, 10), (3, 20), (4, 40))
    ]
    for number, step in ((1, 10), (2, 20), (3, 40)):
        assert re.fullmatch(
            rf"attempt {number}: rank 1 .*SIGKILL.* \(saved step {step}\)", lines[-5 + number]
        )
    assert lines[-1] == "attempt 4: success (saved step 50)"


def test_restarts_without_progress_are_counted(tmp_path):
    ended = run_job(tmp_path, ["-n", "2", "--restarts", "2"], arrays([15, 10, 12, 11, 13]))
    assert ended.status == 128 + signal.SIGKILL
    lines = lines_of(ended)
    # The first restart follows progress, so it is not counted.
    assert [line.rpartition("; ")[2] for line in lines if " begins (" in line] == [
        f"{used} of 2 restarts without progress)" for used in (0, 1, 2)
    ]
    assert "attempt 4: rank 1" in lines[-2]
    assert "(no new checkpoint)" in lines[-2]
    assert lines[-1].endswith("no further attempt after 2 restarts without progress")


def test_a_checkpoint_of_the_same_step_is_no_progress(tmp_path):
    script = arrays() + "    raise ValueError('bad')\n"
    ended = run_job(tmp_path, ["-n", "2", "--restarts", "2"], script)
    assert ended.status == 1
    lines = lines_of(ended)
    assert [line.rpartition("; ")[2] for line in lines if " begins (" in line] == [
        f"{used} of 2 restarts without progress)" for used in (0, 1, 2)
    ]
    assert "attempt 4: rank" in lines[-2]
    assert "ValueError: bad" in lines[-2]


def test_without_restarts_the_job_ends(tmp_path):
    ended = run_job(tmp_path, ["-n", "2"], arrays([15]))
    assert ended.status == 128 + signal.SIGKILL
    assert "attempt" not in ended.err
    (last,) = lines_of(ended)
    assert "failed first" in last


def test_the_time_limit_is_that_of_all_attempts(tmp_path):
    source = "import time; time.sleep(1); raise ValueError('bad')"
    begin = time.monotonic()
    ended = run_job(tmp_path, ["-n", "1", "--restarts", "99", "--timeout", "4"], source)
    assert ended.status == 124, ended.err
    assert time.monotonic() - begin < 15
    assert "ran longer than --timeout 4 s" in lines_of(ended)[-1]


def test_a_signal_ends_the_wait_before_a_restart(tmp_path):
    def interrupt(process):
        for line in process.stderr:
            if "attempt 2 begins in 60 s" in line:
                process.send_signal(signal.SIGINT)
                return

    options = ["-n", "1", "--restarts", "1", "--restart-delay", "60"]
    ended = run_job(tmp_path, options, "raise ValueError('bad')", meddle=interrupt)
    assert ended.status == 128 + signal.SIGINT
    assert lines_of(ended)[-1].startswith("attempt 2: interrupted by Ctrl-C before the next")


def test_a_signal_before_the_first_step_waits_for_the_manager(tmp_path):
    script = """
    import os, time
    import numpy as np
    import mpidist as dist

    here = os.path.dirname(os.path.abspath(__file__))
    open(os.path.join(here, f"up-{os.environ['RANK_HERE']}"), "w").close()
    while not os.path.exists(os.path.join(here, "sent")):
        time.sleep(0.01)
    dist.init_process_group()
    with dist.Checkpoints(os.path.join(here, "saved"), {"a": np.zeros(1)}) as checkpoints:
        while True:
            checkpoints.step()
            time.sleep(0.01)
    """
    up = when_up(signal.SIGUSR1)

    def send(process):
        up(process)
        (tmp_path / "sent").touch()

    rank = find_launcher().vendor.rank_variable
    script = script.replace("RANK_HERE", rank)
    ended = run_job(tmp_path, ["-n", "2", "--restarts", "1"], script, meddle=send)
    assert ended.status == 75, ended.err


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_arrays_are_saved_before_the_job_stops(tmp_path, number):
    ended = run_job(
        tmp_path, ["-n", "2", "--restarts", "3"], arrays(pause_s=0.05), meddle=when_up(number)
    )
    assert ended.status == 75, ended.err
    assert "Traceback" not in ended.err
    found = re.fullmatch(
        rf"stopped by signal {number:d} \({number.name}\) after step (\d+), which is saved in "
        r"(.*/step-\1); the same command continues there",
        lines_of(ended)[-1],
    )
    assert found, ended.err
    again = run_job(tmp_path, ["-n", "2"], arrays())
    assert again.status == 0, again.err
    assert f"begins at {found[1]}" in again.out


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ("mode='sync'", 10),
        ("mode='ssp', staleness=2", 10),
        ("mode='async'", None),
        ("mode='sync', backup_workers=1", None),
    ],
    ids=["sync", "ssp", "async", "backup worker"],
)
def test_workers_save_before_the_job_stops(tmp_path, arguments, every):
    def source(pause_s):
        exact = "staleness" not in arguments and "backup" not in arguments
        return STRATEGY.format(arguments=arguments, every=every, pause_s=pause_s, exact=exact)

    layout = ["--ps", "1", "--worker", "2"]
    ended = run_job(tmp_path, layout, source(0.05), meddle=when_up(signal.SIGUSR1))
    assert ended.status == 75, ended.err
    again = run_job(tmp_path, ["--ps", "2", "--worker", "2"], source(0))
    assert again.status == 0, again.err
    result, steps = again.out.split()
    assert steps == "60"
    if arguments == "mode='sync'":
        whole = run_job(tmp_path / "whole", layout, source(0))
        assert whole.out.split() == [result, "60"], whole.err


def test_a_job_that_was_told_to_stop_and_fails_does_not_start_again(tmp_path):
    script = arrays(pause_s=0.05).replace(
        "    sums = np.zeros(3)",
        """    sums = np.zeros(3)

    class Broken:
        def get_state(self):
            raise ValueError("no state")
""",
    )
    script = script.replace("every=10", "extra={'broken': Broken()}")
    ended = run_job(
        tmp_path, ["-n", "2", "--restarts", "3"], script.replace("checkpoints.restore()", "0"),
        meddle=when_up(signal.SIGUSR1),
    )  # fmt: skip
    assert ended.status == 1, ended.err
    (last,) = lines_of(ended)
    assert "ValueError: no state" in last


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_process_without_mpidist_run_saves_after_both_signals(tmp_path, number):
    script = """
    import os, signal, sys
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    with dist.Checkpoints(sys.argv[1], {"a": np.zeros(1)}) as checkpoints:
        checkpoints.step()
        signal.raise_signal(int(sys.argv[2]))
        assert os.listdir(sys.argv[1]) == []
        checkpoints.step()
    """
    (tmp_path / "saved").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "saved"), str(number)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 75, ended.stderr
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-2"]


def test_a_second_signal_ends_the_job_at_once(tmp_path):
    script = """
    import os, signal, time
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    here = os.path.dirname(os.path.abspath(__file__))

    def note(name):
        open(os.path.join(here, f"{name}-{dist.get_rank()}"), "w").close()

    signal.signal(signal.SIGUSR1, lambda number, frame: note("told"))
    with dist.Checkpoints(os.path.join(here, "saved"), {"a": np.zeros(1)}) as checkpoints:
        note("up")
        while True:  # a step that takes very long
            time.sleep(0.01)
    """
    ended = run_job(tmp_path, ["-n", "2"], script, meddle=when_up(signal.SIGTERM, signal.SIGTERM))
    assert ended.status == 128 + signal.SIGTERM, ended.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--restarts", "-1"], "--restarts -1 is negative"),
        (["--restart-delay", "nan"], "--restart-delay nan is not a number of seconds"),
        (["--restart-delay", "1"], "--restart-delay: there are no restarts"),
        (["--restarts", "1", "--stdin"], "--stdin can be read only once"),
        (["--env", "MPIDIST_RESTART=3"], "MPIDIST_RESTART is set by mpidist run itself"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, problem):
    ended = run_job(tmp_path, ["-n", "1", *options], "")
    assert ended.status == 2
    assert problem in ended.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the tensors and states at the end of each job that was not killed."""
    found = {}

    def tensors(name):
        if name not in found:
            job = Job(tmp_path_factory.mktemp("whole") / name, name, 0)
            job.run()
            found[name] = job.tensors()
        return found[name]

    return tensors


@pytest.mark.parametrize("name", ["digits", "words"])
def test_random_kills_change_nothing(tmp_path, name, whole):
    draw = random.Random(name)
    job = Job(tmp_path / "job", name)
    kinds = [kind for kind in KINDS if kind != "full disk"]  # it needs a file system of its own
    draw.shuffle(kinds)
    job.run(kinds[:3], draw)
    assert job.tensors() == whole(name)


LOST_HOSTS = """
    import os, sys
    import mpidist as dist

    dist.init_process_group()
    dist.barrier()
    print("attempt", os.environ["MPIDIST_RESTART"], os.environ["MPIDIST_RESTART_REASON"])
    if os.environ["MPIDIST_RESTART"] == "0" and dist.get_rank() == 1:
        {act}
"""
HERE = "localhost:1,127.0.0.1:1"


def test_the_failure_of_a_rank_is_the_reason_also_if_a_spare_host_is_lost(tmp_path):
    words = ["-n", "2", "--restarts", "1", "--hosts", f"{HERE},no-such-host.invalid:1"]
    program = textwrap.dedent(LOST_HOSTS.format(act="os._exit(3)"))
    ended = run_job(tmp_path, [*words, "--run-dir", str(tmp_path / "run")], program)
    assert ended.status == 0, ended.err
    reason = r"rank 1 \(pid \d+ on \S+\) failed first: exited with status 3"
    assert len(re.findall(rf"^attempt 1 {reason}", ended.out, re.MULTILINE)) == 2
    assert re.search(rf"mpidist run: attempt 1: {reason}", ended.err)
    assert "mpidist run: no-such-host.invalid cannot be reached: " in ended.err
    begins = "attempt 2 begins without no-such-host.invalid (no new checkpoint yet; 1 of 1"
    assert begins in ended.err


def test_a_job_that_removes_its_run_folder_runs_once(tmp_path):
    words = ["-n", "2", "--restarts", "1", "--hosts", f"{HERE},no-such-host.invalid:1"]
    act = """
        import shutil
        while os.path.isdir(folder := os.environ["MPIDIST_RUN_DIR"]):
            shutil.rmtree(folder, ignore_errors=True)  # the watchdogs write meanwhile
    """
    program = textwrap.dedent(LOST_HOSTS.format(act=act))
    ended = run_job(tmp_path, [*words, "--run-dir", str(tmp_path / "run")], program)
    assert (ended.status, ended.out.count("attempt")) == (0, 2), ended.err


def test_the_time_limit_ends_a_job_between_two_attempts(tmp_path):
    words = ["-n", "1", "--restarts", "1", "--restart-delay", "600", "--timeout", "5"]
    ended = run_job(tmp_path, words, "import os; os._exit(3)")
    assert ended.status == 124, ended.err
    assert "mpidist run: attempt 2: the job ran longer than --timeout 5 s before" in ended.err
