"""The modes of consumption: each is complete, and only they know the number on the wire."""

import re
from pathlib import Path

import pytest

import dataservice
from dataservice import CrossTrainerCache
from dataservice.consumption import (
    COORDINATED,
    CROSS_TRAINER,
    DETERMINISTIC,
    EXCLUSIVE,
    FIRST_COME,
    SNAPSHOT,
    mode_of,
)
from dataservice.options import JobOptions
from dataservice.proto import dataservice_pb2 as pb
from dataservice.read import buffers as read_buffers
from dataservice.work import buffers as work_buffers

MODES = (EXCLUSIVE, FIRST_COME, DETERMINISTIC, COORDINATED, CROSS_TRAINER, SNAPSHOT)
CHOSEN = {
    EXCLUSIVE: {},
    FIRST_COME: {"job_name": "j"},
    DETERMINISTIC: {"deterministic": True},
    COORDINATED: {"job_name": "j", "num_consumers": 2, "consumer_index": 1},
    CROSS_TRAINER: {"job_name": "j", "cross_trainer_cache": CrossTrainerCache("a")},
}


@pytest.mark.parametrize("message", [pb.Terms, pb.Task])
def test_every_number_has_a_mode_of_its_name(message):
    found = {number: mode_of(message(consumption=number)) for number in pb.Consumption.values()}
    assert {mode.number: mode for mode in MODES} == found
    assert {mode.name: number for number, mode in found.items()} == dict(pb.Consumption.items())


@pytest.mark.parametrize("mode", CHOSEN, ids=lambda mode: mode.name)
def test_options_choose_a_mode_that_has_buffers(mode):
    options = JobOptions("distributed_epoch", "localhost:1", **CHOSEN[mode])
    assert options.mode is mode
    assert mode_of(options.job) is mode
    buffer = read_buffers.buffer_for("a consumer", options, None)
    assert isinstance(buffer, read_buffers.ElementBuffer)
    lease = pb.Task(consumption=mode.number, num_parts=2, num_consumers=2)
    buffer = work_buffers.buffer_for(lease, "a task", lambda: None, 1000)
    assert isinstance(buffer, work_buffers.ElementBuffer)


def test_the_numbers_are_tested_nowhere_else():
    numbers = re.compile(rf"pb\.({'|'.join(pb.Consumption.keys())})\b|pb\.Consumption\b")
    folder = Path(dataservice.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if numbers.search(path.read_text())}
    assert found == {"consumption.py"}
