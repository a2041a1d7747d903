"""``mpidist run`` with its ranks on other hosts than itself."""

import json
import re
import signal
import subprocess
import time

import pytest

FACTS = """
    import json, os, socket
    import mpidist as dist
    from mpidist.mpi import world

    dist.init_process_group()
    dist.barrier()
    facts = {"host": socket.gethostname(), "nodes": world().nodes, "rank": dist.get_rank(),
             "jobs": os.environ["MPIDIST_JOBS"], "folder": os.environ["MPIDIST_RUN_DIR"]}
    os.write(1, json.dumps(facts).encode() + b"\\n")
"""
FAIL = """
    import os, signal
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(np.zeros(1), 2)
"""
BY_NODE = """
    import os
    import numpy as np
    import mpidist
    from mpidist.cluster_resolver import MPIClusterResolver
    from strategy import ParameterServerStrategy, get_variable, optimizers

    resolver = MPIClusterResolver()
    spec = resolver.cluster_spec()
    with mpidist.Server(spec, resolver.task_type, resolver.task_id) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            strategy = ParameterServerStrategy(resolver, placement="round_robin")
            with strategy.scope():
                sums = [get_variable(f"v{n}", (3,), initializer="zeros") for n in range(2)]
            optimizers.SGD(1.0).apply_gradients([(-np.ones(3, "f"), v) for v in sums]).wait()
            server.job_group("worker").barrier()
            totals = [float(v.numpy().sum()) for v in sums]
            hosts = [spec.task_address("ps", n).split(":") for n in spec.task_indices("ps")]
            os.write(1, f"{resolver.task_id} {hosts} {totals}\\n".encode())
            server.job_group("worker").barrier()
"""
WAIT = """
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    dist.barrier()
    print("waiting", flush=True)
    dist.recv(np.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())
"""
PLACES = {"node1": 2, "node2": 1}
LAYOUT = ("--ps", "1", "--worker", "2")


def test_ranks_know_their_jobs_and_nodes(jobs, tmp_path):
    folder = str(tmp_path / "run")
    words = [*LAYOUT, "--run-dir", folder, *jobs.script(FACTS)]
    ended = jobs.mpidist_run(PLACES, words)
    assert ended.status == 0, ended.err
    # Open MPI's launcher and its child both put the child into a group, and one may come too late.
    lines = [line for line in ended.err.splitlines() if "plm:ssh: Warning: setpgid(" not in line]
    assert lines == []
    facts = sorted(map(json.loads, ended.out.splitlines()), key=lambda one: one["rank"])
    assert [one["host"] for one in facts] == ["node1", "node1", "node2"]
    for one in facts:
        assert (one["nodes"], one["jobs"]) == ([0, 0, 1], "ps=1,worker=2")
        assert one["folder"] == folder


@pytest.mark.parametrize("option", ["--hosts", "--hostfile"])
def test_hosts_that_are_given(jobs, tmp_path, option):
    given = "node2,node[3,1]:2"
    if option == "--hostfile":
        given = tmp_path / "given"
        given.write_text("node2:1  # first\n\nnode3 slots=2\nnode1:2\n")
    words = [*LAYOUT, "--run-dir", tmp_path / "run", option, given, "--env", "FROM_HERE=a b"]
    script = jobs.script(FACTS.replace("MPIDIST_JOBS", "FROM_HERE"))
    ended = jobs.mpidist_run(PLACES, [*map(str, words), *script])
    assert ended.status == 0, ended.err
    facts = sorted(map(json.loads, ended.out.splitlines()), key=lambda one: one["rank"])
    assert [one["host"] for one in facts] == ["node2", "node3", "node3"]
    assert {one["jobs"] for one in facts} == {"a b"}


@pytest.mark.parametrize(
    ("words", "workers", "total"),
    [(["-n", "4", "--ps-per-node"], 2, 6.0), (["--worker", "4", "--colocate-ps"], 4, 12.0)],
)
def test_a_ps_on_each_node(jobs, tmp_path, words, workers, total):
    words = [*words, "--hosts", "node[1-2]", "--run-dir", str(tmp_path / "run")]
    ended = jobs.mpidist_run(PLACES, [*words, *jobs.script(BY_NODE)])
    assert ended.status == 0, ended.err
    servers = [["node1", "0"], ["node2", "2"]]
    shown = [f"{n} {servers} {[total, total]}" for n in range(workers)]
    assert sorted(ended.out.splitlines()) == shown


def test_the_task_that_failed_first_is_named_with_its_host(jobs, tmp_path):
    words = [*LAYOUT, "--run-dir", tmp_path / "run", *jobs.script(FAIL)]
    ended = jobs.mpidist_run(PLACES, words, timeout_s=30)
    last = ended.err.splitlines()[-1]
    assert re.fullmatch(
        r"mpidist run: worker 1 \(rank 2, pid \d+ on node2\) failed first: killed by signal 9 "
        r"\(SIGKILL\); all 3 ranks were ended",
        last,
    ), ended.err
    assert ended.status == 137


def test_standard_input_does_not_reach_other_hosts(jobs, tmp_path):
    # The others do not start MPI: MPICH leaves files of ranks that are killed while they do.
    script = jobs.script("import signal\nsignal.pause()\n")
    words = [*LAYOUT, "--stdin", "--run-dir", str(tmp_path / "run"), *script]
    ended = jobs.mpidist_run(PLACES, words, timeout_s=30)
    assert ended.status == 1
    assert "failed first: --stdin needs rank 0 on the host of mpidist run" in ended.err


def test_a_folder_that_other_hosts_do_not_see_is_an_error(jobs):
    ended = jobs.mpidist_run(PLACES, [*LAYOUT, *jobs.script(FACTS)], timeout_s=30)
    assert ended.status == 1
    assert re.search(r"is not there on node[12]; give --run-dir a folder that all h", ended.err)


@pytest.mark.parametrize("option", ["--hosts", "--hostfile"])
def test_a_host_that_is_not_known_is_named(jobs, tmp_path, option):
    given = "node1,nowhere"
    if option == "--hostfile":
        given = tmp_path / "given"
        given.write_text("node1:2\nnowhere:1\n")
    words = [*LAYOUT, "--run-dir", tmp_path / "run", option, given]
    # prterun does not tell a daemon that is just starting elsewhere that it has given up.
    ended = jobs.mpidist_run(
        PLACES,
        [*map(str, words), *jobs.script(FACTS)],
        timeout_s=30,
        may_leave=jobs.open_mpi,
    )
    assert ended.status not in (0, 2)
    last = ended.err.splitlines()[-1].strip(" \0")  # Open MPI ends its own text with these
    assert re.fullmatch(
        rf"mpidist run: the launcher ended with status {ended.status}; hosts without an address "
        r"here: nowhere \(.+\); correct --hosts or --hostfile, or give them one in DNS or "
        r"/etc/hosts",
        last,
    ), ended.err
    assert '"rank"' not in ended.out  # none has run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_nothing_on_other_hosts(hosts, jobs, number, tmp_path):
    words = [*LAYOUT, "--run-dir", tmp_path / "run", *jobs.script(WAIT)]
    process = jobs.start_mpidist_run(PLACES, words)
    assert [process.stdout.readline() for _ in range(3)] == ["waiting\n"] * 3
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    if number != signal.SIGKILL:  # then it can leave folders on its own host
        assert process.returncode == 128 + number, err
        assert hosts.head.files() == []
    hosts.await_end(10)
    assert not any(host.processes() or host.files() for host in hosts.nodes.values())
    hosts.clear()


def test_a_process_of_the_launcher_that_is_killed_on_another_host_ends_the_job(
    hosts, jobs, tmp_path
):
    child = """
    import subprocess
    subprocess.Popen(["sleep", "600"], close_fds=False)
    """
    words = [*LAYOUT, "--run-dir", tmp_path / "run", *jobs.script(child + WAIT)]
    process = jobs.start_mpidist_run(PLACES, words)
    assert [process.stdout.readline() for _ in range(3)] == ["waiting\n"] * 3
    node = hosts.nodes["node2"]
    (rank,) = [pid for pid, line in node.processes().items() if "rank_wrapper.py" in line]
    launcher = node.path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    subprocess.run(hosts.command("node2", ["kill", "-9", launcher]), check=True)
    _, err = process.communicate(timeout=30)
    assert process.returncode not in (0, None), err
    assert "no rank recorded a reason" in err
    deadline = time.monotonic() + 10
    # A child stays if its rank ends before the wrapper notices.
    while left := {line for node in hosts.nodes.values() for line in node.processes().values()} - {
        "sleep 600 "
    }:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    hosts.clear()


HANG = """
    import time
    import mpidist as dist

    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(600)
    dist.barrier()
"""


def test_a_hang_on_another_host_is_explained(jobs, tmp_path):
    words = ["-n", "3", "--timeout", "6", "--run-dir", str(tmp_path / "run"), *jobs.script(HANG)]
    ended = jobs.mpidist_run(PLACES, words)
    assert ended.status == 124, ended.err
    text = re.sub(r"\s+(mpidist run:)?\s*", " ", ended.err)
    assert "Each of ranks 0 and 1 waits in barrier number 2 of group 'world'" in text
    assert re.search(r"for rank 2\. Rank 2 sleeps at \S+script\.py:8", text)
    look = json.loads((tmp_path / "run" / "look-2.json").read_text())
    assert look["host"] == "node2"
