"""The batch scripts that ``mpidist sbatch`` writes."""

import subprocess
import sys

import pytest

from mpidist.launcher import main


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").write_text("")
    (tmp_path / "train.py").write_text("")


def test_a_batch_script(capsys):
    words = "--ps 1 --worker 6 --job chief=1 --nodes 2 --time 1:00:00 --partition gpu --account me"
    more = ["--gpus-per-node", "4", "--cpus-per-task", "8", "--option=--constraint=ib",
            "--setup", "module load mpich"]  # fmt: skip
    script = ["my train.py", "--epochs", "2", "a b"]
    assert main(["sbatch", *words.split(), *more, *script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "#!/bin/bash",
        "#SBATCH --job-name='my train'",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=8",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --constraint=ib",
        "",
        "module load mpich",
        f"exec {sys.executable} -m mpidist run --ps 1 --worker 6 --job chief=1 "
        "--run-dir \"runs/$SLURM_JOB_ID\" 'my train.py' --epochs 2 'a b'",
    ]
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("-n 4 --ps-per-node", "-n 4 --ps-per-node"),
        ("--worker 2 --colocate-ps --data 1", ""),
    ],
)
def test_options_of_the_job_stay_as_they_are(words, options, capsys):
    assert main(["sbatch", *words.split(), "train.py"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    shown = last.split(" run ")[1].split(" --run-dir")[0]
    assert sorted(shown.split()) == sorted(words.split())
    assert not options or shown == options


@pytest.mark.parametrize(
    "words", ["-n 4 --ps-per-node --nodes 3", "-n 5 --ps-per-node --nodes 3 --data 1"]
)
def test_a_ps_on_each_node_with_one_worker(words, capsys):
    assert main(["sbatch", *words.split(), "train.py"]) == 0
    assert "#SBATCH --nodes=3" in capsys.readouterr().out


@pytest.mark.usefixtures("capsys")
def test_a_module(capsys):
    assert main(["sbatch", "-np", "2", "-m", "package.train", "-m", "x"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --job-name=package.train\n" in text
    assert text.endswith(' --run-dir "runs/$SLURM_JOB_ID" -m package.train -m x\n')


def test_a_ps_beside_a_worker_on_each_node():
    assert main(["sbatch", "--worker", "3", "--colocate-ps", "--nodes", "3", "train.py"]) == 0


def test_a_file(tmp_path, capsys):
    assert main(["sbatch", "-n", "2", "--output", "job.sh", "train.py"]) == 0
    assert capsys.readouterr().out == ""
    assert "--ntasks=2" in (tmp_path / "job.sh").read_text()


def test_submission(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text("#!/bin/sh\n/bin/cat\nexit 3\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert main(["sbatch", "-n", "2", "--submit", "train.py"]) == 3
    assert "#SBATCH --ntasks=2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("train.py", "give --worker N, or -n N"),
        ("-n 2 --nodes 3 train.py", "2 ranks do not run on 3 nodes"),
        ("-n 2 --nodes 0 train.py", "do not run on 0 nodes"),
        ("-n 3 --ps-per-node --nodes 3 train.py", "leaves no worker with a ps on each of 3 nodes"),
        ("-n 4 --ps-per-node --nodes 3 --data 1 train.py", "give -n 5 or more, or fewer nodes"),
        ("-n 2 nowhere.py", "give the path of a Python file"),
        ("-n 2 --output none/job train.py", "cannot be written"),
        ("-n 2 --submit train.py", "needs Slurm"),
        ("-n 2 --option constraint=ib train.py", "begin with a dash"),
        ("-n 2 --job-name a\nb train.py", "not printable"),
        ("-n 2 --cpus-per-task -1 train.py", "--cpus-per-task -1 must be 1 or more"),
        ("-n 2 --cpus-per-task 0 train.py", "--cpus-per-task 0 must be 1 or more"),
        ("-n 2 --gpus-per-node -5 train.py", "--gpus-per-node -5 must be 0 or more"),
        ("-n 2 --time= train.py", "--time is empty"),
        ("-n 2 --nodes 1 extra.py --bogus", "give the path of a Python file"),
    ],
)
def test_bad_input(words, remedy, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["sbatch", *words.split(" ")])
    assert caught.value.code == 2
    assert remedy in capsys.readouterr().err
