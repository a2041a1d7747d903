"""The command lines and environments of the vendors' launchers."""

import os
import pwd
import stat
import sys

import pytest
from _cases.standard_input import input_of_this_process

from mpidist.launcher import vendors
from mpidist.launcher.vendors import VENDORS, Launcher, LauncherError, find_launcher, vendor_of

BY_NAME = {vendor.name: vendor for vendor in VENDORS}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "mpich"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", "openmpi"),
        ("prterun (PRRTE) 3.0.13", "openmpi"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9\nHYDRA", "intelmpi"),
    ],
)
def test_version_tells_the_vendor(text, name):
    assert vendor_of(text) is BY_NAME[name]


def test_unknown_version():
    assert vendor_of("slurm 23.02") is None


@pytest.fixture
def user(monkeypatch):
    """Return a function that sets the number of cores, and whether the user is root."""

    def user(cores, root=False):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)

    return user


def test_mpich_needs_no_flags(user):
    user(cores=2, root=True)
    command = Launcher("mpiexec", BY_NAME["mpich"]).command(8, ["A"])
    assert command == ["mpiexec", "-n", "8"]


def test_openmpi_flags_depend_on_cores_and_user(user):
    user(cores=2)
    launcher = Launcher("mpiexec", BY_NAME["openmpi"])
    plain = launcher.command(2)
    assert plain == ["mpiexec", "--bind-to", "none", "-n", "2"]
    user(cores=2, root=True)
    full = launcher.command(3, ["A", "B"])
    assert "--oversubscribe" in full
    assert "--allow-run-as-root" in full
    assert full[-6:] == ["-x", "A", "-x", "B", "-n", "3"]


def test_environment_keeps_what_the_user_set(user):
    user(cores=8)
    launcher = Launcher("mpiexec", BY_NAME["openmpi"])
    given = {"OMP_NUM_THREADS": "7", "OMPI_MCA_osc": "rdma"}
    environment = launcher.environment(given, 3)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["OMPI_MCA_osc"] == "rdma"
    assert environment["OPENBLAS_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    assert launcher.environment({}, 9)["OMP_NUM_THREADS"] == "1"


def test_a_home_for_the_ranks(monkeypatch):
    launcher = Launcher("mpiexec", BY_NAME["openmpi"])
    monkeypatch.delenv("HOME")
    own = pwd.getpwuid(os.getuid()).pw_dir
    assert launcher.environment({}, 1)["HOME"] == own
    for given in ("", "/elsewhere"):
        assert launcher.environment({"HOME": given}, 1)["HOME"] == given

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert launcher.environment({}, 1)["HOME"] == "/"


def test_no_launcher_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match=r'pip install "mpidist\[mpich\]"'):
        find_launcher()


def _fake(folder, text):
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_one_beside_python_comes_first(monkeypatch, tmp_path):
    beside, other = tmp_path / "a", tmp_path / "b"
    for folder in (beside, other):
        folder.mkdir()
    path = _fake(beside, "echo HYDRA")
    _fake(other, "echo Open MPI")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert find_launcher() == Launcher(str(path), BY_NAME["mpich"])
    path.unlink()
    assert find_launcher() == Launcher(str(other / "mpiexec"), BY_NAME["openmpi"])


def test_launcher_of_unknown_vendor(monkeypatch, tmp_path):
    _fake(tmp_path, "echo something")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LauncherError, match="no known vendor"):
        find_launcher()


def test_a_launcher_leaves_standard_input(monkeypatch, tmp_path):
    """Sites wrap launchers in scripts that may read standard input."""
    path = _fake(tmp_path, "cat > /dev/null; echo HYDRA")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "list").write_text("a\nb\n")
    with input_of_this_process(tmp_path / "list") as position:
        assert find_launcher() == Launcher(str(path), BY_NAME["mpich"])
        assert position() == 0


def test_launcher_that_hangs(monkeypatch, tmp_path):
    _fake(tmp_path, "exec sleep 60")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(vendors, "_VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(LauncherError, match="repair the MPI"):
        find_launcher()
