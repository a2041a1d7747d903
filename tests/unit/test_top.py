"""``mpidist top`` and ``mpidist timeline``, on what ranks leave."""

import json
import os
import shutil
import socket
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import pytest
from rich.console import Console
from rich.live import Live

from mpidist.config import Config
from mpidist.launcher import main, run_folder, top
from mpidist.launcher.timeline import events_of
from mpidist.launcher.top import Snapshot
from mpidist.mpi import metrics, records
from mpidist.mpi.records import Identity

RANK = {"pid": 77, "host": "h", "started": 100.0}
PS = {"rank": 0, "job": "ps", "task": 0, **RANK}
WORKER = {"rank": 1, "job": "worker", "task": 0, **RANK}


def write(folder, name, record):
    (folder / name).write_text(json.dumps(record))


def write_job(folder, now, steps=40.0):
    write(folder, "rank-0.json", PS)
    write(folder, "rank-1.json", WORKER)
    served = {"steps": steps, "in_bytes": 3 * 2**20, "queued": 2, "busy_s": 5.0}
    write(folder, "state-0.json", {"time": now, "tasks": {"ps 0": served}})
    done = {"steps": steps, "changes": 8, "staleness": 4, "waited_s": 2.5, "out_bytes": 2**20}
    write(folder, "state-1.json", {"time": now, "tasks": {"worker 0": done}})


def test_means_since_the_start_and_since_the_last_look(tmp_path):
    write_job(tmp_path, 110.0)
    first = Snapshot.of(tmp_path)
    ps, worker = first.rows({}, 110.5)
    assert ps == [
        "ps 0",
        "0",
        "h",
        "77",
        "running",
        "-",
        "4.0",
        "0.3",
        "0.0",
        "-",
        "2",
        "-",
        "-",
        "50%",
    ]
    assert worker == [
        "worker 0", "1", "h", "77", "running", "-",
        "4.0", "0.0", "0.1", "0.5", "-", "25%", "-", "-",
    ]  # fmt: skip
    write_job(tmp_path, 112.0, steps=60.0)
    assert [row[6] for row in Snapshot.of(tmp_path).rows(first.metrics, 112.0)] == ["10.0"] * 2
    assert [row[4] for row in first.rows({}, 140.0)] == ["silent 30 s"] * 2
    assert first.states() == {"running"}


def test_how_ranks_end(tmp_path):
    write_job(tmp_path, 110.0)
    write(tmp_path, "exit-0.json", {"rank": 0, "exit_code": 0})
    write(tmp_path, "failure-1.json", {"rank": 1})
    snapshot = Snapshot.of(tmp_path)
    assert [row[4] for row in snapshot.rows({}, 110.0)] == ["ended", "failed"]
    assert snapshot.states() == {"ended", "failed"}
    write(tmp_path, "exit-0.json", {"rank": 0, "exit_code": None, "signal": 9})
    assert Snapshot.of(tmp_path).rows({}, 110.0)[0][4] == "failed"


def test_rates_last_until_there_are_new_numbers(tmp_path, capsys, monkeypatch):
    write_job(tmp_path, 110.0)

    def look(step):
        """Write new numbers before the second look, none before the third, then end the job."""
        if looks.append(step) is None and len(looks) == 1:
            write_job(tmp_path, 112.0, steps=60.0)
        if len(looks) == 3:
            run_folder.write_end(tmp_path, 0)

    looks = []
    monkeypatch.setattr(time, "sleep", look)
    monkeypatch.setattr(
        Live, "update", lambda live, shows, refresh: shown.append(shows.renderables[1])
    )
    shown = []
    assert main(["top", str(tmp_path)]) == 0
    steps = [[cell.plain for cell in table.columns[4].cells] for table in shown]
    assert steps == [["10.0", "10.0"]] * 3
    assert "4.0" in capsys.readouterr().out  # the first rates are those since the start


def test_a_job_that_its_launcher_has_ended(tmp_path, capsys):
    write_job(tmp_path, 110.0)
    write(tmp_path, "exit-0.json", {"rank": 0, "exit_code": None, "signal": 9})
    assert "running" in Snapshot.of(tmp_path).states()
    run_folder.write_end(tmp_path, 137)
    assert main(["top", str(tmp_path)]) == 0  # and does not wait
    assert capsys.readouterr().out.count("ended") == 1
    run_folder.clear_records(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_breaks_while_one_looks(tmp_path, capsys, monkeypatch):
    write_job(tmp_path, 110.0)
    monkeypatch.setattr(time, "sleep", lambda _: write(tmp_path, "state-0.json", []))
    assert "was not written by a rank" in fails(capsys, "top", str(tmp_path))
    write_job(tmp_path, 110.0)
    monkeypatch.setattr(time, "sleep", lambda _: shutil.rmtree(tmp_path))
    assert main(["top", str(tmp_path)]) == 0


def test_a_timeline_that_cannot_be_drawn(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(metrics, "config", Config(timeline=str(tmp_path / "file")))
    monkeypatch.setattr(metrics, "_timeline", None)
    metrics.start_timeline(0)
    assert "no timeline is drawn: MPIDIST_TIMELINE=" in caplog.text
    metrics.task_metrics("worker", 0).note("step", 0.0)


def test_a_timeline_has_the_names_of_the_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "config", Config(timeline=str(tmp_path)))
    monkeypatch.setattr(metrics, "_timeline", None)
    monkeypatch.setattr(metrics, "_tasks", {"ps 0": metrics.TaskMetrics("ps 0")})
    metrics.start_timeline(3)
    metrics.task_metrics("worker", 1)
    events = events_of(tmp_path / "timeline-3.json")
    assert [event["args"]["name"] for event in events] == ["ps 0", "ps 0, worker 1"]


def test_a_timeline_on_a_full_disk(monkeypatch, caplog, tmp_path):
    timeline = metrics.Timeline(str(tmp_path), 0)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(timeline, "_file", full.fileno())
        timeline.add({"name": "step"})
        timeline.add({"name": "step"})
    assert caplog.text.count("the timeline has gaps: cannot write") == 1


def test_numbers_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_tasks", {})
    monkeypatch.setattr(records, "config", Config(run_dir=str(tmp_path)))
    values = metrics.task_metrics("worker", 0).values
    values["loss"] += np.float32(1.5)
    values["steps"] += np.int64(2)
    records.write_state(Identity(0, 77, "h"), metrics.snapshot(), [], {})
    (record,) = Snapshot.of(tmp_path).metrics.values()
    assert record["tasks"] == {"worker 0": {"loss": 1.5, "steps": 2.0}}


def test_a_forked_child_does_not_write_the_timeline(tmp_path):
    source = """
import os, sys
from mpidist import task_metrics
task_metrics("worker", 0).note("step", 0.0)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
sys.exit(0)
"""
    env = {**os.environ, "MPIDIST_TIMELINE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", source], env=env, check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    assert [event["name"] for event in events_of(path)].count("step") == 1


def test_a_rank_without_numbers(tmp_path):
    write(tmp_path, "rank-0.json", {**RANK, "rank": 0, "job": None, "task": None})
    write(tmp_path, "rank-1.json", WORKER)
    assert Snapshot.of(tmp_path).rows({}, 110.0) == [
        ["-", "0", "h", "77", "running", *["-"] * 9],
        ["worker 0", "1", "h", "77", "running", *["-"] * 9],
    ]


def test_one_table(tmp_path, capsys):
    write_job(tmp_path, time.time())
    assert main(["top", "--once", str(tmp_path)]) == 0
    title, *_, header, first, second = capsys.readouterr().out.splitlines()
    assert title.startswith(str(tmp_path))
    assert header.split()[:4] == ["task", "rank", "pid", "state"]
    assert first.split()[:4] == ["ps", "0", "0", "77"]
    assert second.split()[:4] == ["worker", "0", "1", "77"]


def test_a_table_of_eighty_columns(tmp_path, capsys, monkeypatch):
    now = time.time()
    values = {
        "steps": 430_000, "in_bytes": 2e12, "out_bytes": 2e12, "changes": 10, "staleness": 25,
        "queued": 12, "waited_s": 250, "data_waited_s": 100, "busy_s": 500,
    }  # fmt: skip
    record = {**WORKER, "pid": 123456, "task": 12, "host": "a-host-with-a-long-name.example.org"}
    write(tmp_path, "rank-1.json", {**record, "started": now - 1000})
    write(tmp_path, "state-1.json", {"time": now, "tasks": {"worker 12": values}})
    monkeypatch.setattr(top, "_console", lambda: Console(width=80))
    assert main(["top", "--once", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    row = shown.splitlines()[-1]
    assert row.split() == [
        "worker", "12", "1", "123456", "running",
        "430.0", "1,907.3", "1,907.3", "2.5", "12", "25%", "10%", "50%",
    ]  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_q_leaves(tmp_path, monkeypatch, capsys):
    write_job(tmp_path, time.time())
    terminal, keyboard = os.openpty()
    statuses = []
    with os.fdopen(keyboard, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(terminal, b"xq")
        words = ["top", str(tmp_path), "--interval", "1000"]
        watching = threading.Thread(target=lambda: statuses.append(main(words)), daemon=True)
        watching.start()
        watching.join(30)
    os.close(terminal)
    assert statuses == [0]
    assert "running" in capsys.readouterr().out


def test_a_background_job_leaves_the_terminal_alone(monkeypatch):
    terminal, keyboard = os.openpty()
    with os.fdopen(keyboard, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        before = termios.tcgetattr(keyboard)
        with top._keys():
            assert termios.tcgetattr(keyboard) == before
    os.close(terminal)


def test_a_job_that_is_over_is_shown_once(tmp_path, capsys):
    write_job(tmp_path, 110.0)
    for rank in (0, 1):
        write(tmp_path, f"exit-{rank}.json", {"rank": rank, "exit_code": 0})
    assert main(["top", str(tmp_path)]) == 0
    assert "ended" in capsys.readouterr().out


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_is_no_job(tmp_path, capsys, monkeypatch):
    assert "no rank has started in it" in fails(capsys, "top", str(tmp_path))
    assert "is not the folder of a job" in fails(capsys, "top", str(tmp_path / "missing"))
    (tmp_path / "rank-0.json").write_text("{")
    assert "is not the folder of a job" in fails(capsys, "top", str(tmp_path))
    write_job(tmp_path, 110.0)
    write(tmp_path, "state-0.json", [])
    assert "a file was not written by a rank" in fails(capsys, "top", str(tmp_path))
    assert "must be positive" in fails(capsys, "top", str(tmp_path), "--interval", "0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "no job of mpidist run is running on this host" in fails(capsys, "top")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank-0.json", []), ("rank-0.json", {**PS, "started": None}), ("exit-0.json", []),
        ("rank-0.json", {**PS, "started": "x"}), ("state-0.json", {"time": 1.0}),
    ],
)  # fmt: skip
def test_files_of_another_shape(tmp_path, capsys, name, content):
    write_job(tmp_path, time.time())
    write(tmp_path, name, content)
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", str(tmp_path)])
    assert ended.value.code == 2
    assert "was not written by a rank" in capsys.readouterr().err


def test_names_with_brackets(tmp_path, capsys):
    write(tmp_path, "rank-0.json", {**PS, "job": "w[/x][red]"})
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert "w[/x][red] 0" in capsys.readouterr().out


def test_a_job_whose_launcher_was_killed(tmp_path, capsys, monkeypatch):
    host = socket.gethostname()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    folder = tmp_path / "mpidist-run-1"
    folder.mkdir()
    write(folder, "rank-0.json", {**PS, "host": host, "pid": process.pid})
    assert Snapshot.of(folder).states() == {"gone"}
    assert main(["top", "--interval", "0.01", str(folder)]) == 0  # and it ends
    assert "gone" in capsys.readouterr().out
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["top"])
    assert "no job of mpidist run is running on this host" in capsys.readouterr().err
    write(folder, "rank-1.json", {**WORKER, "host": host, "pid": os.getpid()})
    assert Snapshot.of(folder).states() == {"gone", "running"}
    assert main(["top", "--once"]) == 0
    assert "running" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["0", "-1", "inf", "1e300", "nan"])
def test_intervals_that_cannot_be(tmp_path, capsys, interval):
    write_job(tmp_path, time.time())
    with pytest.raises(SystemExit):
        main(["top", "--interval", interval, str(tmp_path)])
    assert "must be positive" in capsys.readouterr().err


def test_the_newest_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "mpidist-run-abc"
    folder.mkdir()
    write_job(folder, time.time())
    assert main(["top", "--once"]) == 0
    assert "worker 0" in capsys.readouterr().out


def test_timelines_become_one(tmp_path, capsys):
    (tmp_path / "timeline-0.json").write_text('[\n{"pid": 0, "name": "a"},\n')
    (tmp_path / "timeline-1.json").write_text('[\n{"pid": 1, "name": "b"},\n{"pid": 1, "na')
    assert main(["timeline", str(tmp_path)]) == 0
    assert "2 events of 2 rank(s)" in capsys.readouterr().out
    whole = json.loads((tmp_path / "timeline.json").read_text())
    assert [event["name"] for event in whole["traceEvents"]] == ["a", "b"]
    (tmp_path / "timeline-2.json").write_text("")  # of a rank that has just begun
    assert main(["timeline", str(tmp_path), "-o", str(tmp_path / "other")]) == 0
    assert json.loads((tmp_path / "other").read_text()) == whole


def test_what_is_no_timeline(tmp_path, capsys):
    assert "has no timelines" in fails(capsys, "timeline", str(tmp_path))
    (tmp_path / "timeline-0.json").write_text('{"pid": 0}')
    assert "is not the timeline of a rank" in fails(capsys, "timeline", str(tmp_path))
    (tmp_path / "timeline-0.json").write_bytes(b"\xff")
    assert "timeline-0.json: " in fails(capsys, "timeline", str(tmp_path))
    (tmp_path / "timeline-0.json").write_text('[\n{"pid":\n{"pid": 0},\n')
    assert "line 2" in fails(capsys, "timeline", str(tmp_path))


def test_a_rank_without_metrics_is_silent_when_it_stops_writing(tmp_path, capsys):
    """Ranks that only use collectives write their state, too."""
    host = socket.gethostname()
    write(tmp_path, "rank-0.json", {**PS, "host": host, "pid": os.getpid(), "job": ""})
    write(tmp_path, "state-0.json", {"time": time.time() - 60, "tasks": {}})
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert "silent 60 s" in capsys.readouterr().out
