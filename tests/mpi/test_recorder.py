"""The flight recorder: the last operations of each rank, also of one that SIGKILL has ended."""

import json
import os
import subprocess
import sys

from mpidist.recorder import read_recording

PROGRAM = """
import os, signal
import numpy as np
import mpidist as dist

group = dist.init_process_group()
pair = dist.new_group([0, 1], group_desc="pair")
for number in range(300):
    dist.all_reduce(np.ones(3, "float32"))
pair.broadcast(np.ones((2, 5)), src=1)
if group.rank() == 0:
    dist.isend(np.ones(4, "int64"), dst=1, tag=7).wait()
    dist.recv(np.ones(2), src=1)  # rank 1 ends
else:
    dist.recv(np.ones(4, "int64"), src=0, tag=7)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def recordings(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words = ["run", "-n", "2", "--run-dir", str(tmp_path / "run"), str(script)]
    ended = subprocess.run(
        [sys.executable, "-m", "mpidist", *words],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ,
    )  # fmt: skip
    assert ended.returncode == 128 + 9, ended.stderr
    return [read_recording(tmp_path / "run", rank) for rank in range(2)]


def test_the_last_operations(tmp_path):
    waiting, killed = recordings(tmp_path)
    assert len(waiting.entries) == len(killed.entries) == 256
    groups = {name: (number, ranks) for number, (name, ranks) in killed.groups.items()}
    assert groups.keys() == {"world", "pair"}
    assert groups["world"][1] == groups["pair"][1] == (0, 1)
    assert killed.groups == waiting.groups
    *reductions, broadcast, recv = killed.entries
    assert {entry.call for entry in reductions} == {"all_reduce(SUM, float32[3])"}
    numbers = [entry.sequence for entry in reductions]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[-1] == 300
    assert (broadcast.name, broadcast.group, broadcast.peer) == ("broadcast", groups["pair"][0], 1)
    assert (broadcast.dtype, broadcast.shape, broadcast.sequence) == ("float64", (2, 5), 1)
    assert (recv.name, recv.peer, recv.tag, recv.sequence) == ("recv", 0, 7, 0)
    assert (recv.dtype, recv.shape) == ("int64", (4,))
    assert recv.file.endswith("program.py")
    assert recv.line == 1 + PROGRAM[: PROGRAM.index("dist.recv(np.ones(4")].count("\n")
    for entry in killed.entries:
        assert entry.end >= entry.start
        assert not entry.failed
    sent, last = waiting.entries[-2:]
    assert (sent.name, sent.peer, sent.tag) == ("send", 1, 7)
    assert sent.end is not None
    assert (last.name, last.end) == ("recv", None)


def test_a_ring_without_its_texts(tmp_path):
    recordings(tmp_path)
    folder = tmp_path / "run"
    texts = folder / "operations-0.jsonl"
    lines = texts.read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    texts.write_text("\n".join(lines[:1]) + '\n{"call": 2, "na')  # the rank is writing it
    found = read_recording(folder, 0)
    assert list(found.groups.values()) == [("world", (0, 1))]
    assert found.entries == []
    texts.unlink()
    assert read_recording(folder, 0) is None
