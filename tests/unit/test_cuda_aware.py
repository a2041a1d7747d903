"""Whether MPI takes device memory: what libraries say, and what is made of it."""

import ctypes
import subprocess
import types

import pytest

from mpidist.config import Config
from mpidist.cuda import aware
from mpidist.cuda.aware import Awareness, claim
from mpidist.cuda.trial import Outcome
from mpidist.runtime.launch import without_launcher

OPEN_MPI = "Open MPI v5.0.11, package: of somebody\0"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.30 (ANL base 3.4a2)\n"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\n"
BOTH = ["int MPIX_Query_cuda_support(void) {{ return {}; }}"]
BOTH += ["int MPIX_GPU_query_support(int kind, int *flag) {{ *flag = {}; return kind; }}"]


@pytest.fixture
def library(tmp_path):
    """Compiles an MPI library that has a few functions."""

    def compiled(*lines):
        source, made = tmp_path / "library.c", tmp_path / f"library{len(lines)}.so"
        source.write_text("\n".join(("int MPI_Init(void) { return 0; }", *lines)))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True, timeout=60)
        return ctypes.CDLL(made)

    return compiled


@pytest.mark.parametrize("lines", [BOTH[:1], BOTH[1:], BOTH])
@pytest.mark.parametrize("says", [0, 1])
def test_a_library_is_asked(library, lines, says):
    asked = library(*[line.format(says) for line in lines])
    claims, said = claim(OPEN_MPI, asked, "", {})
    assert claims == bool(says)
    words = "says that it takes" if says else "does not say that it takes"
    assert said.startswith(f"Open MPI v5.0.11 {words} device memory")


def test_one_of_two_functions_is_enough(library):
    asked = library(BOTH[0].format(0), BOTH[1].format(1))
    assert claim(MPICH, asked, "", {})[0]


def test_a_library_that_has_no_such_function(library):
    claims, said = claim(MPICH, library(), "", {})
    assert not claims
    assert said == "MPICH Version: 5.0.2 does not say that it takes device memory"


@pytest.mark.parametrize(
    ("kinds", "claims"),
    [("system,mpi,cuda:device:host", True), ("mpi , cuda", True), ("mpi,system,rocm", False)],
)
def test_the_kinds_of_memory_that_the_standard_names(library, kinds, claims):
    assert claim(MPICH, library(), kinds, {})[0] == claims


@pytest.mark.parametrize(
    ("version", "variable"), [(CRAY, "MPICH_GPU_SUPPORT_ENABLED"), (MVAPICH, "MV2_USE_CUDA")]
)
def test_what_else_a_library_wants(library, version, variable):
    asked = library(*[line.format(1) for line in BOTH])
    for env in ({}, {variable: "0"}):
        claims, said = claim(version, asked, "", env)
        assert not claims
        assert said.endswith(f"only where {variable}=1")
    assert claim(version, asked, "", {variable: "1"})[0]


@pytest.fixture
def asked(monkeypatch):
    """A process that has found nothing out yet, with a library that claims and a GPU; no trial."""
    facts = types.SimpleNamespace(claims=True, trials=[], outcome=Outcome(True, "it was right"))

    def carry_out(env):
        facts.trials.append(env)
        return facts.outcome

    monkeypatch.setattr(aware, "_found", [])
    monkeypatch.setattr(aware, "_trials", [])
    monkeypatch.setattr(aware, "_asked", lambda: (facts.claims, "the library says something"))
    monkeypatch.setattr("mpidist.cuda.trial.carry_out", carry_out)
    monkeypatch.setattr(aware, "find_spec", lambda name: name == "cupy" or None)
    monkeypatch.setattr(aware, "_DRIVER_FILES", ("/dev/no such", "/dev/null"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return facts


def test_a_trial_that_went_well_is_not_repeated(asked):
    expected = Awareness(True, "the library says something, and it was right")
    assert [aware.device_memory_by_mpi() for _ in range(3)] == [expected] * 3
    assert len(asked.trials) == 1


def test_a_trial_that_failed(asked):
    asked.outcome = Outcome(False, "3 numbers are wrong")
    found = aware.device_memory_by_mpi()
    assert not found.usable
    assert found.reason == "the library says something, but 3 numbers are wrong"
    assert "MPIDIST_GPU_MPI=0" in found.remedy


def test_a_library_that_does_not_claim_is_not_tried(asked):
    asked.claims = False
    assert aware.device_memory_by_mpi() == Awareness(False, "the library says something")
    assert not asked.trials


@pytest.mark.parametrize(("word", "usable"), [("0", False), ("1", True)])
def test_the_environment_decides(asked, monkeypatch, word, usable):
    monkeypatch.setattr(aware, "config", Config.from_env({"MPIDIST_GPU_MPI": word}))
    monkeypatch.delattr(aware, "_asked")
    found = aware.device_memory_by_mpi()
    assert found == Awareness(usable, f"MPIDIST_GPU_MPI={word} says so")
    assert not asked.trials


@pytest.mark.parametrize("what", ["no CuPy", "CUDA_VISIBLE_DEVICES hides", "no GPU"])
def test_without_a_gpu_nothing_is_tried(asked, monkeypatch, what):
    if what == "no CuPy":
        monkeypatch.setattr(aware, "find_spec", lambda name: None)
    elif what == "no GPU":
        monkeypatch.setattr(aware, "_DRIVER_FILES", ("/dev/no such",))
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = aware.device_memory_by_mpi()
    assert not found.usable
    assert what in found.reason
    assert not found.remedy
    assert not asked.trials


def test_the_environment_of_a_process_outside_the_job():
    stays = {
        "PATH": "/bin", "PMIERS": "x", "CUDA_VISIBLE_DEVICES": "1", "UCX_TLS": "cuda",
        "OMPI_MCA_pml": "ucx", "MPICH_GPU_SUPPORT_ENABLED": "1", "MV2_USE_CUDA": "1",
        "MPIR_CVAR_ENABLE_GPU": "1", "MPIDIST_SECRET": "s", "LD_LIBRARY_PATH": "/cuda",
    }  # fmt: skip
    goes = {
        "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MPI_LOCALNRANKS": "2",
        "HYDI_CONTROL_FD": "5", "HYDRA_HOST_FILE": "hosts", "PRTE_LAUNCHED": "1",
        "OMPI_MCA_orte_hnp_uri": "x", "OMPI_MCA_ess": "^singleton", "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "7", "PBS_NODEFILE": "nodes", "MPIDIST_RUN_DIR": "runs",
        "MPIDIST_GPU_MPI": "auto", "PALS_RANKID": "0",
    }  # fmt: skip
    assert without_launcher({**stays, **goes}) == stays
