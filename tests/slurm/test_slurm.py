"""The places of Slurm's tasks: the resolver's answer against Slurm's."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Tasks write to files, because srun may mix long lines of different tasks.
TELL = """
    import json, os, sys
    from pathlib import Path
    from mpidist.cluster_resolver import SlurmClusterResolver, auto

    facts = {"rank": int(os.environ["SLURM_PROCID"]), "node": os.environ["SLURMD_NODENAME"]}
    try:
        resolver = SlurmClusterResolver()
        facts["task"] = [resolver.task_type, resolver.task_id]
        facts["spec"] = resolver.cluster_spec().as_dict()
        facts["auto"] = [type(auto()).__name__, auto().cluster_spec().as_dict()]
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    facts["env"] = {name: text for name, text in os.environ.items() if name.startswith("SLURM_")}
    (Path(sys.argv[1]) / f"{facts['rank']}.json").write_text(json.dumps(facts))
"""
STEPS = {
    "one node": ["-N1", "-n3"],
    "as many on each": ["-N3", "--ntasks-per-node=2"],
    "one on each": ["-N3", "-n3"],
    "uneven": ["-N2", "-n5", "--ntasks-per-node=3"],
    "first node full": ["-N3", "-n18"],
    "cyclic": ["-N3", "-n7", "-m", "cyclic"],
    "cyclic and uneven": ["-N2", "-n18", "-m", "cyclic"],
    "plane": ["-N3", "-n9", "-m", "plane=2"],
    "plane and uneven": ["-N3", "-n20", "-m", "plane=4"],
    "block, sockets in turn": ["-N3", "-n8", "-m", "block:cyclic"],
    "chosen nodes": ["-w", "n1,n3", "-n4"],
}
HET = """\
    #!/bin/bash
    #SBATCH -N1 -n2 -w {first}
    #SBATCH hetjob
    #SBATCH -N2 -n4 -w {others}
    {step}
"""


@pytest.fixture
def tell(script, tmp_path):
    """Return the command of a task that writes its view of the cluster to a file."""
    (tmp_path / "told").mkdir()
    return [sys.executable, str(script(TELL)), str(tmp_path / "told")]


@pytest.fixture
def told(tmp_path):
    """Provide a check of the task files. The check returns the node of each task."""

    def check(count):
        read = map(json.loads, (path.read_text() for path in (tmp_path / "told").iterdir()))
        facts = sorted(read, key=lambda one: one["rank"])
        assert [one["rank"] for one in facts] == list(range(count))
        spec = facts[0].get("spec")
        for one in facts:
            assert "error" not in one, f"{one['error']}\n{one['env']}"
            assert one["spec"] == spec
            assert one["task"] == ["worker", one["rank"]]
            host = spec["worker"][one["rank"]].partition(":")[0]
            assert host == one["node"], f"rank {one['rank']}: {spec}\n{one['env']}"
            if count > 1:
                assert one["auto"] == ["SlurmClusterResolver", spec]
        assert len(set(spec["worker"])) == count
        return [one["node"] for one in facts]

    return check


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_steps(slurm, tell, told, options):
    ended = slurm.srun(*options, *tell)
    assert ended.status == 0, ended.err
    (count,) = [int(word[2:]) for word in options if word[:2] == "-n"] or [6]
    nodes = told(count)
    if "cyclic" in options:
        assert nodes[:2] == ["n1", "n2"]


def test_steps_in_the_order_of_a_file(slurm, tell, told, tmp_path):
    wanted = ["n2", "n1", "n2", "n3", "n1"]
    file = tmp_path / "hosts"
    file.write_text("".join(f"{name}\n" for name in wanted))
    ended = slurm.srun("-m", "arbitrary", *tell, env={"SLURM_HOSTFILE": str(file)})
    assert ended.status == 0, ended.err
    assert told(5) == wanted


@pytest.mark.parametrize(
    ("step", "count"),
    [("", 5), ("-N1 -n2", 2), ("-N2 -n3", 3), ("-w n3 -N1 -n1", 1), ("-N2 -n2 -w n2,n3", 2)],
)
def test_steps_of_a_larger_job(slurm, script, tell, told, step, count):
    batch = f"#!/bin/bash\nsrun {step} {' '.join(tell)}\n"
    job = ("-N3", "-n5", "-m", "cyclic")
    ended = slurm.sbatch(*job, script(batch, "job"))
    assert ended.status == 0, ended.err
    told(count)


@pytest.mark.parametrize(("first", "others"), [("n1", "n2,n3"), ("n3", "n1,n2")])
@pytest.mark.parametrize(
    ("step", "count"),
    [
        ("srun --het-group=0,1 {}", 6),
        ("srun --het-group=0,1 -m cyclic {}", 6),
        ("srun --het-group=0 -n1 {0} : --het-group=1 -n3 {0}", 4),
        ("srun --het-group=1 {}", 4),
        ("srun --het-group=1 -n3 {}", 3),
        ("srun {}", 2),
    ],
    ids=["all", "cyclic", "fewer", "second", "fewer of second", "first"],
)
def test_steps_of_heterogeneous_jobs(slurm, script, tell, told, first, others, step, count):
    batch = HET.format(first=first, others=others, step=step.format(" ".join(tell)))
    ended = slurm.sbatch(script(batch, "job"))
    assert ended.status == 0, ended.err
    told(count)


@pytest.mark.parametrize("first", ["n1", "n3"])
def test_heterogeneous_steps_without_a_batch_job(slurm, tell, told, first):
    ended = slurm.srun("-w", first, "-n1", *tell, ":", "-w", "n2", "-n2", *tell)
    assert ended.status == 0, ended.err
    assert told(3) == [first, "n2", "n2"]


@pytest.mark.parametrize("name", ["cpu", "gpu", "heterogeneous"])
def test_batch_scripts_that_users_copy_are_accepted(slurm, name):
    said = slurm.run(["sbatch", "--test-only", ROOT / "scripts" / "slurm" / f"{name}.sbatch"])
    assert said.status == 0, said.err
    assert "to start at" in said.err


def test_gpus_that_are_not_there_are_refused(slurm):
    script = ROOT / "scripts" / "slurm" / "gpu.sbatch"
    said = slurm.run(["sbatch", "--test-only", "--gres=gpu:3", script])
    assert said.status != 0  # so --gres=gpu:2 of the script was read
