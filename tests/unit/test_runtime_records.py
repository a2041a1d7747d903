"""Files that a rank writes into the run folder."""

import json
import time

import pytest

from mpidist import launched
from mpidist.config import Config
from mpidist.mpi import records
from mpidist.mpi.records import Identity


@pytest.fixture
def use_folder(monkeypatch):
    return lambda path: monkeypatch.setattr(records, "config", Config(run_dir=path))


@pytest.fixture
def folder(tmp_path, use_folder):
    use_folder(str(tmp_path))
    return tmp_path


def content(folder):
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir()}


def test_a_rank_says_who_it_is(folder):
    identity = Identity(3, 4711, "node")
    records.write_rank(identity, 5.5)
    facts = {"rank": 3, "pid": 4711, "host": "node", "started": 5.5}
    assert content(folder) == {"rank-3.json": {**facts, "job": None, "task": None}}
    identity.job, identity.task = "ps", 1
    records.write_rank(identity, 5.5)
    assert content(folder) == {"rank-3.json": {**facts, "job": "ps", "task": 1}}


def test_a_rank_says_why_it_ends_the_job(folder):
    before = time.time()
    records.write_failure(Identity(0, 1, "h", "worker", 2), "KeyError: 'ä'", "Traceback\n", 3)
    ((name, record),) = content(folder).items()
    assert name == "failure-0.json"
    assert before <= record.pop("time") <= time.time()
    assert record == {
        "rank": 0,
        "pid": 1,
        "host": "h",
        "job": "worker",
        "task": 2,
        "reason": "KeyError: 'ä'",
        "traceback": "Traceback\n",
        "exit_code": 3,
    }


def test_without_a_folder_nothing_is_written(folder, use_folder, caplog):
    use_folder(None)
    records.write_rank(Identity(0, 1, "h"), 0.0)
    assert content(folder) == {}
    use_folder(str(folder / "gone"))
    records.write_rank(Identity(0, 1, "h"), 0.0)
    assert "cannot write" in caplog.text


def test_names():
    assert str(Identity(2, 1, "h")) == "rank 2 on h"
    assert str(Identity(2, 1, "h", "ps", 0)) == "rank 2 (ps 0) on h"


@pytest.mark.parametrize(
    ("env", "answer"),
    [
        ({}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"SLURM_PROCID": "0"}, False),
    ],
)
def test_whether_there_are_several_ranks(monkeypatch, env, answer):
    for name in ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launched() == answer
