"""Host lists and host files of ``mpidist run``."""

import socket
import subprocess
import sys

import pytest

RUN = [sys.executable, "-m", "mpidist", "run", "-n", "3"]
PROGRAM = (
    "import os\nimport mpidist as dist\ndist.init_process_group()\ndist.barrier()\n"
    "if dist.get_rank() == 0: os.write(1, b'%d' % dist.get_world_size())\n"
)
JOB_S = 60
HOST = socket.gethostname()


@pytest.fixture
def run(tmp_path):
    """Provide a function that runs three ranks on the given hosts."""
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)

    def start(*words):
        return subprocess.run(
            [*RUN, *words, str(path)], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=JOB_S, check=False,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("form", ["{},", " {}:3 , ", "{0}:2 {0}:1", "{}\t", ",,{}:3", "\ufeff{}:3"])
def test_lists(run, form):
    done = run("--hosts", form.format(HOST))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3", "")


@pytest.mark.parametrize("form", ["{}:", "{}: 3", "{} # all", "{};{}", "{} [1-2]", "{}[1, 2]", ","])
def test_lists_that_are_wrong(run, form):
    done = run("--hosts", form.format(HOST, HOST))
    assert done.returncode == 2
    assert done.stderr.startswith("mpidist run: ")
    assert "host" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "form",
    [
        "\ufeff{}:3\r\n",
        "# all\n\t{}\tslots=3\t# this one\n",
        "{0},\n \n{0} \n",
        "{0}:2,\n{0}:1, # the last\n",
        "{0} slots=2 ,,\n{0} slots=1 max_slots=1,\n",
    ],
)
def test_files(run, tmp_path, form):
    path = tmp_path / "hosts"
    path.write_bytes(form.format(HOST).encode())
    done = run("--hostfile", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3", "")


@pytest.mark.parametrize(
    "form", ["{}:,\n", ",\n", "{0}:2,{0}:1\n", "{0} {0}\n", "{}:3 // all\n", "# {}\n", "-{}\n"]
)
def test_files_that_are_wrong(run, tmp_path, form):
    path = tmp_path / "hosts"
    path.write_text(form.format(HOST))
    done = run("--hostfile", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"mpidist run: --hostfile {path}")
    assert done.stderr.count("\n") == 1
