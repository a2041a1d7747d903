"""Valid journal records that contradict each other."""

import itertools
import re

import pytest
from _cases.data_registry import TIMEOUTS, Play

from dataservice import DispatcherConfig, DispatchServer
from dataservice.dispatch.journal import Journal
from dataservice.dispatch.messages import record_of, restore
from dataservice.dispatch.registry import Registry
from dataservice.payload import Parcel
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import DataLossError

KINDS = ["client", "dataset", "iteration", "job", "part", "worker"]


@pytest.fixture
def tables():
    """Return the records of a worker that evaluates a part for a client."""
    play = Play(workers=1)
    play.start(play.join())
    registry = play.registry
    parts = {
        part.id: part for each in registry.jobs.iterations.values() for part in each.parts.values()
    }
    return {
        kind: {key: record_of(value, {key: Parcel(b"pickled", ())}) for key, value in some.items()}
        for kind, some in (
            ("client", registry.clients),
            ("dataset", registry.datasets.by_id),
            ("iteration", registry.jobs.iterations),
            ("job", registry.jobs.by_id),
            ("part", parts),
            ("worker", registry.workers),
        )
    }


def restored(tables):
    restore(Registry(TIMEOUTS, itertools.count(1000)), tables, 0.0)


def test_all_together(tables):
    assert sorted(tables) == KINDS
    assert all(len(table) == 1 for table in tables.values())
    restored(tables)


@pytest.mark.parametrize(
    ("gone", "kind"),
    [("dataset", "job"), ("job", "iteration"), ("iteration", "client"), ("worker", "part")],
)
def test_a_record_without_what_it_belongs_to(tables, gone, kind):
    (missed,) = tables.pop(gone)
    (key,) = tables[kind]
    match = rf"^{kind} {key} contradicts the other records: KeyError\({missed}\)$"
    with pytest.raises(DataLossError, match=match):
        restored(tables)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_cannot_be_read(tables, kind):
    (key,) = tables[kind]
    tables[kind][key] = b"\xff\xff\xff"
    with pytest.raises(DataLossError, match=f"^{kind} {key} contradicts .*Error parsing"):
        restored(tables)


def change_part(tables, **fields):
    (key,) = tables["part"]
    part = pb.StoredPart.FromString(tables["part"][key])
    part.MergeFrom(pb.StoredPart(**fields))
    tables["part"][key] = part.SerializeToString()
    return key


def test_a_part_with_contents_that_cannot_be(tables):
    key = change_part(tables, used=pb.Ranges(bounds=[1, 2, 3]))
    with pytest.raises(DataLossError, match=f"^part {key} contradicts the other records: .*zip"):
        restored(tables)


def test_a_lost_task_needs_no_worker(tables):
    del tables["worker"]
    change_part(tables, lost=True)
    restored(tables)


def test_what_a_dispatcher_says(tmp_path, tables):
    directory = tmp_path / "journal"
    journal = Journal(directory)
    journal.commit({("part", key): data for key, data in tables["part"].items()})
    journal.close()
    (key,) = tables["part"]
    config = DispatcherConfig(work_dir=str(directory), fault_tolerant_mode=True)
    match = f"in {re.escape(str(directory))}: part {key} contradicts .*; put a copy of the direct"
    with pytest.raises(DataLossError, match=match) as caught:
        DispatchServer(config)
    Journal(directory).close()  # the journal is unlocked, although the error still exists
    assert caught.value.__cause__ is not None
