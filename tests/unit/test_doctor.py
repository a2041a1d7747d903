"""The findings of ``mpidist doctor``."""

import json
import os
import socket
import subprocess
import sys

import pytest

from mpidist.launcher import doctor, main, probe
from mpidist.launcher.vendors import VENDORS, Launcher, LauncherError

BY_NAME = {vendor.name: vendor for vendor in VENDORS}
RANKS = [
    ["two ranks", "ok", "a world of 2, thread level multiple", ""],
    ["collectives", "ok", "all_reduce of 8 B in 3.2 us", ""],
    ["GPU memory", "ok", "arrays on GPUs are staged through pinned host memory", ""],
]


def lines(findings):
    return "".join(f"{json.dumps(finding)}\n" for finding in findings)


@pytest.fixture
def machine(monkeypatch):
    """Set up a machine without problems. Return the answers of its child processes."""
    said = {
        "library": ("4.1.2 MPICH Version: 5.0.2, more\nand more\0", ""),
        "address": ("10.0.0.1\n", ""),
        "gpus": (lines([["GPUs", "ok", "0 that this process may use", ""]]), ""),
        "ranks": (f"noise\n{lines(RANKS)}", ""),
    }

    def ask(command, limit_s):
        codes = {doctor._LIBRARY: "library", doctor._ADDRESS: "address"}
        return said[codes.get(command[-1], command[-1])]

    monkeypatch.setattr(doctor, "_ask", ask)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = Launcher("/x/mpiexec", BY_NAME["mpich"])
    monkeypatch.setattr(doctor, "find_launcher", lambda: found)
    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (1 << 30, 1 << 30))
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


def test_a_library_that_does_not_load(machine, capsys):
    machine["library"] = ("", "RuntimeError: cannot load MPI library")
    findings = found()
    assert findings["MPI library"].verdict == "problem"
    assert "cannot load MPI library" in findings["MPI library"].fact
    assert "pip install" in findings["MPI library"].remedy
    assert "two ranks" not in findings
    assert main(["doctor"]) == 1
    assert "-> install one" in capsys.readouterr().out


def test_a_launcher_of_another_library(machine):
    machine["library"] = ("4.1.2 Open MPI v5.0.11, package", "")
    finding = found()["launcher"]
    assert finding.verdict == "problem"
    assert "but the library is openmpi's" in finding.fact
    assert "put the library's own mpiexec first" in finding.remedy


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


def test_little_shared_memory_and_a_host_without_an_address(machine, monkeypatch, capsys):
    machine["address"] = ("", "gaierror: not known")
    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (8 << 20, 64 << 20))
    findings = found()
    for name, text in (("shared memory", "8 of 64 MiB"), ("host name", "has no address")):
        assert findings[name].verdict == "warning"
        assert text in findings[name].fact
        assert findings[name].remedy
    assert main(["doctor"]) == 0  # warnings are not problems
    with monkeypatch.context() as changed:
        changed.setattr(doctor.os, "access", lambda path, mode: False)
        assert found()["shared memory"].verdict == "problem"
    monkeypatch.setattr(doctor, "shared_memory_space", lambda: (1 << 20, 64 << 20))
    assert found()["shared memory"].verdict == "problem"
    capsys.readouterr()


@pytest.mark.parametrize("probe", ["ranks", "gpus"])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (("", "mpidist run: rank 1 failed first"), "rank 1 failed first"),
        (("no json\n", ""), "prints nothing"),
        ((lines([["extra", "ok", "fine", ""]]), "no answer within 90 s"), "no answer within 90 s"),
    ],
)
def test_a_probe_that_fails(machine, probe, answer, text):
    machine[probe] = answer
    findings = found()
    finding = findings["two ranks" if probe == "ranks" else "GPUs"]
    assert finding.verdict == "problem"
    assert text in finding.fact
    assert finding.remedy
    assert ("extra" in findings) == ("extra" in answer[0])


@pytest.mark.parametrize("gpus", [0, 2])
def test_gpus(monkeypatch, capfd, gpus):
    monkeypatch.setattr(probe, "visible_gpus", lambda env: ["0"] * gpus)
    monkeypatch.setattr(probe, "find_spec", lambda name: None)

    def told():
        probe.check_gpus()
        found = [doctor.Finding(*json.loads(line)) for line in capfd.readouterr().out.splitlines()]
        assert found.pop(0).fact.startswith(f"{gpus} that")
        return found

    found = told()
    assert len(found) == (gpus > 0)
    for finding in found:
        assert finding.verdict == "warning"
        assert "mpidist[cuda13]" in finding.remedy
    monkeypatch.setattr(probe, "find_spec", lambda name: name)
    (finding,) = told()  # CuPy finds no GPU
    assert finding.verdict == ("problem" if gpus else "warning")
    assert finding.fact.startswith("no GPU can be used: ")
    assert "nvidia-smi" in finding.remedy


@pytest.mark.usefixtures("machine")
def test_batch_jobs():
    assert "batch job" not in found()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert found(job)["batch job"].fact == "Slurm job 7 on n[1-2]"
    step = job | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert found(step)["batch job"].verdict == "problem"
    assert "srun --mpi=pmi2" in found(step)["batch job"].remedy


@pytest.mark.parametrize(
    ("code", "limit_s", "answer"),
    [
        ("print('x')", 30, ("x\n", "")),
        ("print('x'); raise ValueError('bad')", 30, ("x\n", "ValueError: bad")),
        ("import os; os.kill(os.getpid(), 11)", 30, ("", "its process ended with status -11")),
        (
            "import signal; print('x', flush=True); signal.pause()",
            1,
            ("x\n", "no answer within 1 s"),
        ),
    ],
)
def test_answers_of_processes(code, limit_s, answer):
    assert doctor._ask([sys.executable, "-c", code], limit_s) == answer


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


@pytest.mark.parametrize("words", [("--hang", "--json"), ("--hang", "--torch-trace", "traces")])
def test_the_folder_of_a_job_after_other_options(tmp_path, capsys, words):
    with pytest.raises(SystemExit):
        main(["doctor", *words, str(tmp_path / "nope")])
    assert f"{tmp_path}/nope does not exist; name the --run-dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", *words, str(tmp_path)])
    assert f"{tmp_path} has no job.json" in capsys.readouterr().err


def test_the_job_and_the_other_jobs_of_the_host(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = {"ranks": 0, "names": [], "pid": os.getpid(), "host": socket.gethostname()}
    for name in ("old", "new"):
        folder = tmp_path / f"mpidist-run-{name}"
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(job))
    os.utime(tmp_path / "mpidist-run-old" / "job.json", (0, 0))
    assert main(["doctor", "--hang"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("The job is ")
    assert first.endswith(f"(process {os.getpid()}).")
    assert second.startswith("Another job runs on this host: ")
    assert second.endswith(f"mpidist doctor --hang {tmp_path}/mpidist-run-old")
