"""A job whose host is lost starts again on other hosts."""

import re

import pytest

# Adds the numbers of the steps. In the first attempt, the ranks wait at step 20 for their end.
SCRIPT = """
    import os, socket, sys, time
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    total, folder = np.zeros(2), sys.argv[1]
    with dist.Checkpoints(folder, {"total": total}, every=5) as checkpoints:
        begin = checkpoints.restore()
        if dist.get_rank() == 0:
            print(begin, *hosts, flush=True)
        for step in range(begin, 40):
            if step == 20 and os.environ["MPIDIST_RESTART"] == "0":
                while not os.path.isdir(os.path.join(folder, "step-20")):
                    time.sleep(0.01)
                dist.barrier()
                if dist.get_rank() == 0:
                    print("ready", flush=True)
                dist.recv(np.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())
            dist.all_reduce(np.ones(1))
            total += step
            checkpoints.step()
    if dist.get_rank() == 0:
        print("total", *total)
"""


@pytest.fixture
def lose_node2(hosts, jobs, tmp_path):
    """Provide a function that runs the script and powers "node2" off at step 20."""
    lost = []

    def run(*words):
        words = [
            *words,
            "--env",
            "MPIDIST_STALL_S=2",
            "--run-dir",
            str(tmp_path / "run"),
            *jobs.script(SCRIPT),
        ]
        job = jobs.start_mpidist_run({"node1": 4}, [*words, str(tmp_path / "saved")])
        shown = [job.stdout.readline() for _ in range(2)]
        assert shown[1] == "ready\n", job.communicate(timeout=60)[1]
        lost.append("node2")
        hosts.power_off("node2")
        out, err = job.communicate(timeout=60)
        lines = [*shown, *out.splitlines(keepends=True)]  # launchers add lines of their own
        return job.returncode, [line for line in lines if re.match(r"\d+ |ready|total", line)], err

    yield run
    for name in lost:
        hosts.power_on(name)


@pytest.mark.parametrize(
    ("given", "count", "before", "after"),
    [
        (["node1,node2,node3", "--spare", "1"], 4, "1 1 2 2", "1 1 3 3"),
        (["node1:2,node2:2,node3:2"], 4, "1 1 2 2", "1 1 3 3"),
        (["node3,node2,node1"], 3, "3 2 1", "3 3 1"),
    ],
    ids=["spare", "free slots", "shared"],
)
def test_other_hosts_take_the_ranks_of_a_lost_one(lose_node2, given, count, before, after):
    status, out, err = lose_node2("-n", str(count), "--restarts", "2", "--hosts", *given)
    assert status == 0, err
    names = [" ".join(f"node{digit}" for digit in digits.split()) for digits in (before, after)]
    assert out == [f"0 {names[0]}\n", "ready\n", f"20 {names[1]}\n", "total 780.0 780.0\n"]
    assert "mpidist run: attempt 1: node2 cannot be reached; the launcher ended" in err
    begins = "mpidist run: attempt 2 begins without node2 (last checkpoint: step 20; "
    assert f"{begins}0 of 2 restarts without progress)" in err
    assert err.endswith("mpidist run: attempt 2, without node2: success (saved step 40)\n")


def test_too_few_hosts_are_left(lose_node2):
    words = ["-n", "4", "--restarts", "2", "--hosts", "node1:2,node2:2"]
    status, out, err = lose_node2(*words)
    assert status not in (0, 75), err
    assert len(out) == 2
    assert (
        "mpidist run: no further attempt without node2: the remaining hosts have too few slots for "
        "4 ranks; give more hosts\n"
    ) in err
