"""What ``mpidist doctor`` makes of what it finds."""

import json
import os
import subprocess
import sys
import threading

import pytest

from mpidist.cluster_resolver import accelerators
from mpidist.launcher import doctor, main
from mpidist.launcher.vendors import VENDORS, Launcher, LauncherError

BY_NAME = {vendor.name: vendor for vendor in VENDORS}
FACTS = {
    "ranks": 2, "thread_level": "multiple", "sums_are_right": True,
    "one_sided_is_right": True, "all_reduce_us": 3.25, "broadcast_gib_s": 9.5,
    "gpu_rule": "arrays on GPUs are staged through pinned host memory",
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """A machine where all is well, until a test changes what its child processes say."""
    said = {
        "library": (0, "4.1.2 MPICH Version: 5.0.2, more\nand more\0", ""),
        "ranks": (0, f"noise\n{json.dumps(FACTS)}\n", ""),
    }

    def child(command, limit_s):
        asked = [name for name in said if any(f"{name}_probe" in word for word in command)]
        answer = said[asked[0] if asked else "library" if "-c" in command else "ranks"]
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(doctor, "_child", child)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = Launcher("/x/mpiexec", BY_NAME["mpich"])
    monkeypatch.setattr(doctor, "find_launcher", lambda: found)
    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name: "10.0.0.1")
    return said


def found(env=None):
    return {finding.name: finding for finding in doctor.findings(env or {})}


@pytest.mark.usefixtures("machine")
def test_all_is_well(capsys):
    findings = found()
    assert {f.verdict for f in findings.values()} == {"ok"}
    assert {f.remedy for f in findings.values()} == {""}
    assert findings["MPI library"].fact == "MPICH Version: 5.0.2, by mpi4py 4.1.2"
    assert "all_reduce of 8 B in 3.2 us" in findings["collectives"].fact
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(findings)
    assert main(["doctor", "--json"]) == 0
    assert [f["name"] for f in json.loads(capsys.readouterr().out)] == list(findings)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ((1, "", "Traceback\nRuntimeError: cannot load MPI library\n"), "cannot load MPI library"),
        (subprocess.TimeoutExpired("x", 1), "does not load in time"),
    ],
)
def test_a_library_that_does_not_load(machine, answer, fact, capsys):
    machine["library"] = answer
    findings = found()
    assert findings["MPI library"].verdict == "problem"
    assert fact in findings["MPI library"].fact
    assert "pip install" in findings["MPI library"].remedy
    assert "two ranks" not in findings
    assert main(["doctor"]) == 1
    assert "-> install one" in capsys.readouterr().out


def test_a_launcher_of_another_library(machine):
    machine["library"] = (0, "4.1.2 Open MPI v5.0.11, package", "")
    machine["ranks"] = (0, json.dumps(FACTS | {"ranks": 1}), "")
    findings = found()
    assert findings["launcher"].verdict == "problem"
    assert "but the library is openmpi's" in findings["launcher"].fact
    assert findings["two ranks"].verdict == "problem"
    assert "do not belong together" in findings["two ranks"].remedy


@pytest.mark.usefixtures("machine")
def test_no_launcher(monkeypatch):
    def none():
        raise LauncherError("no mpiexec; install an MPI library")

    monkeypatch.setattr(doctor, "find_launcher", none)
    findings = found()
    assert (findings["launcher"].verdict, findings["launcher"].remedy[:10]) == (
        "problem",
        "no mpiexec",
    )
    assert "two ranks" not in findings


@pytest.mark.usefixtures("machine")
def test_little_shared_memory_and_a_host_without_an_address(monkeypatch, capsys):
    def unknown(name):
        raise OSError("not known")

    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (8 << 20, 64 << 20))
    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    findings = found()
    for name, text in (("shared memory", "8 of 64 MiB"), ("host name", "has no address")):
        assert findings[name].verdict == "warning"
        assert text in findings[name].fact
        assert findings[name].remedy
    assert main(["doctor"]) == 0  # warnings are no problem
    with monkeypatch.context() as changed:
        changed.setattr(doctor.os, "access", lambda path, mode: False)
        assert found()["shared memory"].verdict == "problem"
    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (1 << 20, 64 << 20))
    assert found()["shared memory"].verdict == "problem"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("answer", "name", "text"),
    [
        ((3, "", "boom\nmpidist run: rank 1 failed first\n"), "two ranks", "rank 1 failed first"),
        ((0, "", ""), "two ranks", ""),
        ((0, "no json\n", ""), "two ranks", "says nothing"),
        (subprocess.TimeoutExpired("x", 1), "two ranks", "says nothing"),
        ((0, json.dumps(FACTS | {"sums_are_right": False}), ""), "collectives", "wrong"),
        ((0, json.dumps(FACTS | {"one_sided_is_right": False}), ""), "one-sided", "lost"),
    ],
)
def test_ranks_that_do_not_work(machine, answer, name, text):
    machine["ranks"] = answer
    findings = found()
    assert findings[name].verdict == "problem"
    assert text in findings[name].fact
    assert findings[name].remedy


@pytest.mark.usefixtures("machine")
def test_the_rule_for_gpus():
    finding = found()["GPU memory"]
    assert (finding.verdict, finding.fact) == ("ok", FACTS["gpu_rule"])


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ((0, "noise\nCuPy 14: copies to and from 2 GPUs arrive\n", ""), "copies to and from 2"),
        ((1, "", "Traceback\nno GPU can be used: cudaErrorNoDevice\n"), "cudaErrorNoDevice"),
        ((-11, "", ""), "its process ended with status -11"),
        (subprocess.TimeoutExpired("x", 1), "does not end"),
    ],
)
def test_cupy(machine, monkeypatch, answer, fact, gpus):
    machine["gpu"] = answer
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "cupy" or None)
    monkeypatch.setattr(accelerators, "visible_gpus", lambda env: ["0"] * gpus)
    finding = found()["CuPy"]
    assert fact in finding.fact
    bad = "problem" if gpus else "warning"
    assert finding.verdict == ("ok" if fact.startswith("copies") else bad)
    assert ("nvidia-smi" in finding.remedy) == (finding.verdict != "ok")


def test_gpus_without_cupy(monkeypatch):
    assert "CuPy" not in found()
    monkeypatch.setattr(accelerators, "visible_gpus", lambda env: ["0"])
    finding = found()["CuPy"]
    assert finding.verdict == "warning"
    assert "mpidist[cuda13]" in finding.remedy


@pytest.mark.usefixtures("machine")
def test_batch_jobs():
    assert "batch job" not in found()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert found(job)["batch job"].fact == "Slurm job 7 on n[1-2]"
    step = job | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert found(step)["batch job"].verdict == "problem"
    assert "srun --mpi=pmi2" in found(step)["batch job"].remedy


@pytest.mark.usefixtures("machine")
def test_systems_that_do_not_answer(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(doctor, "_SYSTEM_S", 0.05)
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name: never.wait(30))
    monkeypatch.setattr(accelerators, "visible_gpus", lambda env: never.wait(30))
    findings = found()
    never.set()
    assert findings["host name"].verdict == "warning"
    assert findings["GPUs"].verdict == "problem"
    for name in ("host name", "GPUs"):
        assert "no answer within 0.05 s" in findings[name].fact


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch):
    def interrupted(env):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(doctor, "findings", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("package", ["numpy", "mpi4py"])
def test_packages_that_are_broken(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError('libsomething.so is gone')")
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    broken = findings["mpidist" if package == "numpy" else "MPI library"]
    assert broken["verdict"] == "problem"
    assert "libsomething.so is gone" in broken["fact"]
    assert broken["remedy"]
    assert "two ranks" not in findings
