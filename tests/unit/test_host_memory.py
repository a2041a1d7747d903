"""Memory that this process may still allocate, as limited by the host and control groups."""

import os
import subprocess
import sys

import pytest

from mpidist import errors, host_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Return a writer of Linux's files on memory: ``system(available, groups, **files)``."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")

    def make(available, groups="", **files):
        files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {available >> 10} kB\n"} | files
        files["proc/self/cgroup"] = groups
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    return make


def group(path, limit, used, files=0, version=2):
    limit_name, use_name, prefix = host_memory._FILES[version]
    stat = f"anon 5\n{prefix}active_file {files - 3}\n{prefix}inactive_file 3\n"
    return {
        f"groups/{path}{limit_name}": f"{limit}\n",
        f"groups/{path}{use_name}": f"{used}\n",
        f"groups/{path}memory.stat": stat,
    }


def test_a_host_without_groups(system):
    system(12 * MIB)
    assert host_memory.free_memory() == (12 * MIB, "host")


def test_the_least_of_all_groups_that_it_is_in(system):
    files = group("a/b/", "max", 1) | group("a/", 10 * MIB, 7 * MIB, 2 * MIB)
    system(99 * MIB, "0::/a/b\n", **files, **group("", 8 * MIB, 2 * MIB, 3))
    assert host_memory.free_memory() == (5 * MIB, "container or batch job")


def test_groups_of_the_first_version(system):
    files = group("memory/job/", 10 * MIB, 7 * MIB, 3, version=1)
    system(99 * MIB, "4:cpu,memory:/job\n1:pids:/else\n0::/\n", **files)
    assert host_memory.free_memory() == (3 * MIB + 3, "container or batch job")


def test_a_container_that_does_not_see_its_own_path(system):
    system(99 * MIB, "0::/docker/abc\n", **group("", 10 * MIB, 7 * MIB, 3))
    assert host_memory.free_memory() == (3 * MIB + 3, "container or batch job")


def test_a_group_above_its_limit(system):
    system(99 * MIB, "0::/\n", **group("", 10 * MIB, 11 * MIB, 3))
    assert host_memory.free_memory() == (0, "container or batch job")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.stat", ""),
        ("memory.stat", "anon 5\nactive_file\n"),
        ("memory.stat", None),
        ("memory.max", ""),
        ("memory.max", "many"),
        ("memory.current", None),
    ],
)
def test_a_group_that_tells_less(system, tmp_path, name, text):
    system(99 * MIB, "0::/\n", **group("", 10 * MIB, 7 * MIB, 3))
    if text is None:
        (tmp_path / "groups" / name).unlink()
    else:
        (tmp_path / "groups" / name).write_text(text)
    expected = 3 * MIB if name == "memory.stat" else 99 * MIB
    assert host_memory.free_memory()[0] == expected


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense", "0::", "0:://x\n", "4:memory:\n"])
def test_odd_lists_of_groups(system, text):
    system(12 * MIB, text)
    assert host_memory.free_memory() == (12 * MIB, "host")


@pytest.mark.parametrize("text", ["", "MemFree: 5 kB\n", "a headline\nMemAvailable: 5 kB\n", None])
def test_a_host_that_tells_less(system, tmp_path, text):
    system(12 * MIB)
    if text is None:
        (tmp_path / "proc" / "meminfo").unlink()
    else:
        (tmp_path / "proc" / "meminfo").write_text(text)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory.free_memory() == (total, "host")


def test_the_second_version_beside_the_first(system):
    system(99 * MIB, "0::/a\n", **group("unified/a/", 10 * MIB, 7 * MIB, 3))
    assert host_memory.free_memory() == (3 * MIB + 3, "container or batch job")


def test_what_is_too_much_is_told(system):
    system(12 * MIB)
    host_memory.check_free(12 * MIB, "take less")
    with pytest.raises(errors.ResourceExhaustedError, match="host has 12 MiB of memory left: take"):
        host_memory.check_free(12 * MIB + 1, "take less")


def test_this_system():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_memory.free_memory()[0] < total


FREED = """\
import numpy as np
from mpidist import errors, host_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) >> 8  # MiB, with pages of 4 KiB

host_memory.keep_freed_memory()
large, small = [], []
for _ in range(6):
    large.append(np.ones(8 << 20))
    small.append(np.ones(1 << 20))  # below it, the heap cannot shrink
del large
before = resident()
try:
    host_memory.check_free(1 << 60, "wait")
except errors.ResourceExhaustedError as error:
    print(before, resident(), error)
"""


@pytest.mark.skipif(not hasattr(host_memory._libc, "malloc_trim"), reason="needs glibc")
def test_freed_arrays_are_kept_until_memory_is_short():
    ended = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    before, after, *words = ended.stdout.split()
    assert int(before) > 300
    assert int(after) < int(before) - 250
    assert "of memory left: wait" in " ".join(words)
