"""Jobs in Slurm: worlds by every way to start one, the main job, and failures."""

import json
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mpidist.launcher.vendors import find_launcher

ROOT = Path(__file__).resolve().parent.parent.parent.parent
TRAIN = ROOT / "scripts" / "train_digits.py"
PMI2 = ("--mpi=pmi2", "--kill-on-bad-exit=1")
REFUSED = "does not speak srun's PMI"
WORLD = """
    import json, os, sys
    from pathlib import Path
    import numpy as np
    import mpidist as dist
    from mpidist.mpi import world

    group = dist.init_process_group()
    array = np.full(1000, group.rank(), "f8")
    dist.all_reduce(array)
    facts = {"node": os.environ["SLURMD_NODENAME"], "nodes": world().nodes, "sum": array.tolist()}
    (Path(sys.argv[1]) / f"{group.rank()}.json").write_text(json.dumps(facts))
"""
FAIL = """
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 2:
        raise ValueError("no luck")
    dist.recv(np.zeros(1), 2)
"""
PLAIN = """
    from mpidist.cluster_resolver import SlurmClusterResolver, auto
    from mpidist.errors import FailedPreconditionError

    resolver = auto({"ps": 1, "worker": -1})
    spec = resolver.cluster_spec()
    assert [spec.num_tasks(job) for job in spec.jobs] == [1, 1], spec
    assert auto().cluster_spec().num_tasks("worker") == 1
    try:
        SlurmClusterResolver()
    except FailedPreconditionError as error:
        print(error)
"""
# Replaces CuPy in scripts that import it.
STAND_IN_FOR_CUPY = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
"""


@pytest.fixture(scope="session")
def open_mpi():
    return find_launcher().vendor.name == "openmpi"


@pytest.fixture
def pmi(open_mpi):
    """Skip the test if srun cannot start MPI ranks."""
    if open_mpi:
        pytest.skip("the wheel of Open MPI speaks PMIx alone, and Debian's Slurm has none for it")


@pytest.fixture
def mpiexec(open_mpi):
    return "mpiexec --allow-run-as-root" if open_mpi else "mpiexec"


@pytest.fixture
def batch(slurm, script):
    """Provide a function that runs a command as the body of a batch job."""

    def batch(command, *options, **settings):
        body = script(f"#!/bin/bash\n{command}\n", "job")
        return slurm.sbatch(*options, body, **settings)

    return batch


@pytest.fixture
def world(script, tmp_path):
    """Return the script and argument of a rank that writes its view of the world to a file."""
    (tmp_path / "told").mkdir()
    return f"{script(WORLD)} {tmp_path / 'told'}"


@pytest.fixture
def told(tmp_path):
    """Provide a check of the files of six ranks. The check returns the node of each rank."""

    def check():
        files = [tmp_path / "told" / f"{rank}.json" for rank in range(6)]
        facts = [json.loads(file.read_text()) for file in files]
        names = [one["node"] for one in facts]
        assert sorted(set(names)) == ["n1", "n2", "n3"]
        for one in facts:
            assert one["nodes"] == [int(name[1:]) - 1 for name in names]
            assert one["sum"] == [15.0] * 1000
        return names

    return check


@pytest.mark.parametrize("way", ["mpiexec -n 6 python", "mpidist run -n 6"])
def test_worlds_of_launchers(batch, mpiexec, world, told, way):
    ended = batch(f"{way.replace('mpiexec', mpiexec)} {world}", "-N3", "--ntasks-per-node=2")
    assert ended.status == 0, ended.err
    assert told() == ["n1", "n1", "n2", "n2", "n3", "n3"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["-N3", "--ntasks-per-node=2"], "n1 n1 n2 n2 n3 n3"),
        (["-N3", "-n6"], "n1 n1 n1 n1 n2 n3"),
        (["-N3", "-n6", "-m", "cyclic"], "n1 n2 n3 n1 n1 n1"),
    ],
    ids=["even", "uneven", "cyclic"],
)
@pytest.mark.usefixtures("pmi")
def test_worlds_of_srun(slurm, world, told, options, names):
    words = ["python", *world.split()]
    ended = slurm.srun(*PMI2, *options, *words)
    assert ended.status == 0, ended.err
    assert told() == names.split()


def test_srun_without_pmi_is_refused(slurm, world, tmp_path):
    words = ["--mpi=none", "-n3", "python", *world.split()]
    ended = slurm.srun(*words)
    assert ended.status != 0
    assert ended.err.count("mpidist.errors.DistBackendError: srun started 3 tasks, but") == 3
    assert REFUSED in ended.err
    assert list((tmp_path / "told").iterdir()) == []


def test_srun_with_a_pmi_that_the_library_does_not_speak_is_refused(
    slurm, open_mpi, world, tmp_path
):
    if not open_mpi:
        pytest.skip("MPICH speaks what srun speaks")
    ended = slurm.srun(*PMI2, "-n3", "python", *world.split())
    assert list((tmp_path / "told").iterdir()) == []
    assert ended.status != 0
    assert REFUSED in ended.err


@pytest.mark.parametrize("way", ["mpiexec", "mpidist run", "srun"])
def test_the_main_job(batch, request, mpiexec, way, tmp_path):
    words = f"{TRAIN} --ps 1 --data 0 --epochs 15 --quiet --output-dir {tmp_path / 'results'}"
    if way == "srun":
        request.getfixturevalue("pmi")
        command = f"srun {' '.join(PMI2)} python {words}"
    elif way == "mpiexec":
        command = f"{mpiexec} -n 3 python {words}"
    else:
        command = f"mpidist run --ps 1 --worker 2 {words}"
    ended = batch(command, "-N3", "-n3", timeout_s=100)
    assert ended.status == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("accuracy ")]
    assert float(line.split()[1]) > 0.95
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert (results["workers"], results["step"]) == (2, 15 * 45)


@pytest.mark.parametrize("name", ["cpu", "gpu", "heterogeneous"])
def test_batch_scripts_that_users_copy(slurm, request, name, tmp_path):
    """Run each batch script in a folder of its own, because it writes there."""
    if name != "cpu":
        request.getfixturevalue("pmi")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    # The GPUs of the nodes are only files, so a stand-in takes the place of CuPy.
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "cupy.py").write_text(STAND_IN_FOR_CUPY)
    words = [f"scripts/slurm/{name}.sbatch", "--epochs", "2"]
    ended = slurm.sbatch(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "packages")})
    assert ended.status == 0, ended.err
    assert ended.out.startswith("accuracy "), ended.err


def start_soon(slurm, job, facts):
    """Let a requeued job start in five seconds.

    Slurm waits two minutes, so that the earlier processes have ended on all nodes.
    """
    begin = facts["EligibleTime"]
    if facts["JobState"] != "PENDING" or facts["Restarts"] == "0" or begin == "Unknown":
        return
    if datetime.fromisoformat(begin) > datetime.now() + timedelta(seconds=6):
        slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])


def test_a_job_goes_back_into_the_queue_before_its_time_limit(slurm, tmp_path):
    """The test sends the signal of the time limit, because Slurm checks limits every 30 s."""
    told = []

    def watch(job, facts):
        if not told and any((tmp_path / "checkpoints").glob("step-*[0-9]")):
            slurm.run(["scancel", "--batch", "--signal=USR1", job])
            told.append("USR1")
        start_soon(slurm, job, facts)

    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    words = ["--signal=B:USR1@10", "scripts/slurm/requeue.sbatch", "--mode", "sync"]
    words += ["--epochs", "30", "--checkpoint-every", "1", "--output-dir", str(tmp_path)]
    ended = slurm.sbatch(*words, cwd=tmp_path, timeout_s=300, watch=watch)
    assert ended.status == 0, ended.err
    assert told == ["USR1"]
    assert "stopped by signal 10 (SIGUSR1) after step" in ended.err
    (result,) = re.findall(r"accuracy (0\.\d+)", ended.out)
    assert float(result) > 0.9
    # Three workers take 15 batches each in an epoch.
    assert (tmp_path / "checkpoints" / f"step-{30 * 15}").is_dir()


@pytest.fixture
def take_down(slurm):
    """Provide a function that takes a node down. It comes back after the test."""
    down = []

    def update(node, **settings):
        words = [f"{name}={text}" for name, text in settings.items()]
        said = slurm.run(["scontrol", "update", f"NodeName={node}", *words])
        assert said.status == 0, said.err

    def take_down(node):
        down.append(node)
        update(node, State="DOWN", Reason="test")
        update(node, State="DRAIN", Reason="test")  # otherwise it comes back by itself

    yield take_down
    for node in down:
        update(node, State="RESUME")


def test_a_job_goes_back_into_the_queue_without_a_node_that_is_down(slurm, take_down, tmp_path):
    steps = []

    def watch(job, facts):
        if not steps and any((tmp_path / "checkpoints").glob("step-*[0-9]")):
            assert facts["NodeList"] == "n[1-2]"
            take_down("n2")
            steps.append("down")
        start_soon(slurm, job, facts)
        if facts["JobState"] == "RUNNING" and facts["Restarts"] != "0" and len(steps) == 1:
            steps.append(facts["NodeList"])

    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    words = ["scripts/slurm/requeue.sbatch", "--mode", "sync", "--epochs", "30"]
    words += ["--checkpoint-every", "1", "--output-dir", str(tmp_path)]
    ended = slurm.sbatch(*words, cwd=tmp_path, timeout_s=300, watch=watch)
    assert ended.status == 0, ended.err
    assert steps == ["down", "n[1,3]"]
    (result,) = re.findall(r"accuracy (0\.\d+)", ended.out)
    assert float(result) > 0.9
    assert (tmp_path / "checkpoints" / f"step-{30 * 15}").is_dir()


# Adds the numbers of the steps. In the first attempt, the ranks wait at step 20 for their end.
RESTARTED = """
    import os, sys
    from pathlib import Path
    import numpy as np
    import mpidist as dist

    dist.init_process_group()
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    nodes = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, os.environ["SLURMD_NODENAME"])
    total = np.zeros(2)
    with dist.Checkpoints(folder / "saved", {"total": total}, every=20) as checkpoints:
        begin = checkpoints.restore()
        if rank == 0:
            print(begin, *nodes, flush=True)
        for step in range(begin, 40):
            total += step
            checkpoints.step()
            if step == 25 and os.environ["MPIDIST_RESTART"] == "0":
                (folder / f"waiting-{rank}").touch()
                dist.recv(np.zeros(1), (rank + 1) % len(nodes))
    if rank == 0:
        print("total", *total)
"""


def test_a_spare_node_takes_the_ranks_of_a_node_that_is_down(batch, script, take_down, tmp_path):
    def watch(job, facts):
        if all((tmp_path / f"waiting-{rank}").exists() for rank in range(4)) and not down:
            take_down("n2")
            down.append("n2")

    down = []
    run = f"mpidist run -n 4 --restarts 2 --spare 1 {script(RESTARTED)} {tmp_path}"
    options = ["-N3", "--ntasks-per-node=2", "--no-kill"]
    ended = batch(run, *options, watch=watch, timeout_s=100)
    assert ended.status == 0, ended.err
    lines = ["0 n1 n1 n2 n2", "20 n1 n1 n3 n3", "total 780.0 780.0"]
    assert ended.out.splitlines() == lines, ended.err
    assert "attempt 2, without n2: success (saved step 40)" in ended.err


def test_a_rank_that_raises_ends_the_job(batch, script):
    ended = batch(f"mpidist run -n 3 {script(FAIL)}", "-N3", "-n3")
    assert ended.status == 1, ended.err
    named = "mpidist run: rank 2 (pid "
    (line,) = [line for line in ended.err.splitlines() if line.startswith(named)]
    assert line.endswith("failed first: ValueError: no luck; all 3 ranks were ended")


@pytest.mark.usefixtures("pmi")
def test_a_rank_of_srun_that_raises_ends_the_job(slurm, script):
    ended = slurm.srun(*PMI2, "-N3", "-n3", "python", script(FAIL))
    assert ended.status != 0
    assert "mpidist: rank 2 on " in ended.err
    assert "ends the job: ValueError: no luck" in ended.err


def test_a_batch_script_is_one_process(batch, script):
    ended = batch(f"python {script(PLAIN)}", "-N3", "-n6")
    assert ended.status == 0, ended.err
    assert "SLURM_STEP_NUM_TASKS" in ended.out
    assert "Start the script with srun" in ended.out
