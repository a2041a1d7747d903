"""Requirements of MPI libraries on /dev/shm before and after they start."""

import pytest

from mpidist.errors import DistBackendError
from mpidist.mpi import shared_memory
from mpidist.mpi.shared_memory import own_segments, prepare, usable_bytes

MIB = 1 << 20
MAPS = """\
7f0000000000-7f0001000000 rw-s 00000000 00:1a 5 /dev/shm/mpidist-shm-x/sm_segment.host.0.61930001.2
7f0002000000-7f0003000000 rw-s 00000000 00:1a 6 /dev/shm/sm_segment.host.0.61930001.12
7f0004000000-7f0004001000 r--p 00000000 00:1a 7 /usr/lib/libmpi.so.40
7f0005000000-7f0005001000 rw-p 00000000 00:00 0
7f0006000000-7f0007000000 rw-s 00000000 00:1a 8 /tmp/sm_segment.host.0.61930001.2
""".splitlines()


@pytest.mark.parametrize("ranks", [1, 4])
def test_mpich_on_a_small_dev_shm(ranks):
    needed = ranks * (MIB + (1 << 16))
    env = {}
    with pytest.raises(DistBackendError, match=f"{needed >> 10} KiB for the {ranks} rank"):
        prepare("MPICH", ranks, needed - 1, env)
    assert env == {}
    prepare("MPICH", ranks, needed, env)
    assert env == {"UCX_TLS": "^posix"}


def test_what_the_user_has_set_is_kept():
    env = {"UCX_TLS": "tcp"}
    prepare("MPICH", 2, 8 * MIB, env)
    assert env == {"UCX_TLS": "tcp"}


@pytest.mark.parametrize(("vendor", "usable"), [("MPICH", 1 << 30), ("Open MPI", 0)])
def test_where_nothing_has_to_be_done(vendor, usable):
    env = {}
    prepare(vendor, 4, usable, env)
    assert env == {}


def test_what_a_job_has_taken_already_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "shared_memory_space", lambda folder: (5, 10))
    assert usable_bytes(str(tmp_path)) == 5
    (tmp_path / "mpich_shm_1").write_bytes(b"x" * MIB)
    (tmp_path / "other").write_bytes(b"x" * MIB)
    taken = (tmp_path / "mpich_shm_1").stat().st_blocks * 512
    assert taken >= MIB
    assert usable_bytes(str(tmp_path)) == 5 + taken


def test_own_segments_of_open_mpi():
    assert own_segments(MAPS, 2) == [(0x7F0000000000, 1 << 24)]
    assert own_segments(MAPS, 12) == [(0x7F0002000000, 1 << 24)]
    assert own_segments(MAPS, 0) == []
