"""The pure parts of the runtime: launchers, pauses, and who is missing."""

import itertools
import os
import re
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.errors import DistBackendError
from mpidist.group import mpi_backend
from mpidist.mpi import shutdown
from mpidist.mpi.backoff import Backoff, SharedCoreBackoff
from mpidist.mpi.launch_env import (
    foreign_launcher,
    foreign_step,
    launcher_of,
    local_size_hint,
    rank_hint,
    size_hint,
    start_settings,
    unspoken_launcher,
)
from mpidist.mpi.pending import PendingOps, missing_rank
from mpidist.mpi.startup import has_loaded, missing_here
from mpidist.mpi.world import _check_versions

OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "9"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("env", "launcher", "size"),
    [
        ({}, None, None),
        (OPENMPI, "prte", 4),
        (MPICH, "hydra", 3),
        ({"PMI_FD": "9"}, "hydra", None),
        ({"PMIX_RANK": "0"}, "pmix", None),
        ({"PMIX_RANK": "0", **STEP}, "slurm", None),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", **STEP}, "slurm", 4),
        ({**OPENMPI, **STEP}, "prte", 4),  # mpiexec inside an allocation
        (STEP, None, None),
        ({"PMI_SIZE": "many", "PMI_RANK": "0"}, "hydra", None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "prte", 1),
    ],
)
def test_launchers(env, launcher, size):
    assert launcher_of(env) == launcher
    assert size_hint(env) == size


@pytest.mark.parametrize(
    ("env", "rank", "local_size"),
    [
        ({}, None, None),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, 1, 3),
        ({"PMIX_RANK": "5"}, 5, None),
        ({"PMI_RANK": "", "MPI_LOCALNRANKS": "two"}, None, None),
    ],
)
def test_ranks_and_hosts(env, rank, local_size):
    assert rank_hint(env) == rank
    assert local_size_hint(env) == local_size


def test_nobody_is_missing_where_no_launcher_is(monkeypatch):
    assert missing_here() == set()
    monkeypatch.setenv("PMI_RANK", "0")  # of a launcher that is not among our ancestors
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert missing_here() == set()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {**STEP, "SLURM_STEP_ID": "batch"},  # the body of an sbatch script
        {key: STEP[key] for key in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "PMI_RANK": "0"},  # srun speaks the library's PMI
        {**STEP, "PMIX_RANK": "0"},
        {**STEP, **OPENMPI},
        {key: STEP[key] for key in ("SLURM_PROCID", "SLURM_STEP_ID")},
    ],
)
def test_a_world_of_one_that_is_right(env):
    assert foreign_step(env) is None


def test_a_world_of_one_that_is_wrong():
    text = foreign_step(STEP)
    assert text.startswith("srun started 4 tasks, but this MPI library does not speak srun's PMI")
    assert "mpidist run" in text
    assert "--mpi=pmi2" in text


def test_open_mpi_does_not_speak_every_pmi():
    pmi = {**STEP, "PMI_RANK": "0", "PMI_SIZE": "4"}
    assert foreign_step(pmi, "MPICH") is None
    assert "srun started 4 tasks" in foreign_step(pmi, "Open MPI")
    for more in ({"PMIX_RANK": "0"}, OPENMPI):
        assert foreign_step({**pmi, **more}, "Open MPI") is None


@pytest.mark.parametrize(
    ("env", "vendor", "shown"),
    [
        (MPICH, "Open MPI", "rank 1 is alone in a world of 1, .* 3 ranks .PMI_SIZE=3.*, Open MPI"),
        (OPENMPI, "MPICH", "4 ranks .OMPI_COMM_WORLD_SIZE=4.*, MPICH"),
        (OPENMPI, "Intel MPI", "OMPI_COMM_WORLD_SIZE=4"),
        (OPENMPI, "Open MPI", "OMPI_COMM_WORLD_SIZE=4"),  # of a version that does not fit
        (MPICH, "MPICH", "PMI_SIZE=3"),
        ({**OPENMPI, **MPICH, "PMI_SIZE": "2"}, "MPICH", "PMI_SIZE=2"),
    ],
)
def test_an_mpiexec_of_another_library(env, vendor, shown):
    text = foreign_launcher(env, vendor, 1)
    assert re.search(shown, text), text
    assert "mpidist run" in text
    assert "beside this Python" in text
    assert foreign_launcher(env, vendor, 2) is None


@pytest.mark.parametrize(
    ("env", "vendor"),
    [
        ({}, "MPICH"),
        ({"PMI_SIZE": "3"}, "Open MPI"),  # the rest was removed: it shall be alone
        ({**MPICH, "PMI_SIZE": "1"}, "Open MPI"),
        ({**MPICH, "PMI_SIZE": "1", **OPENMPI}, "MPICH"),  # inside a job of Open MPI's
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1", **MPICH}, "Open MPI"),
        ({**MPICH, "PMIX_RANK": "0"}, "Open MPI"),  # srun --mpi=pmix, in a shell of srun
        ({"PMI_RANK": "0", "PMI_SIZE": "many"}, "MPICH"),
    ],
)
def test_a_rank_that_is_rightly_alone(env, vendor):
    assert foreign_launcher(env, vendor, 1) is None


def test_mpich_under_open_mpis_launcher():
    env = {**OPENMPI, "PMIX_NAMESPACE": "job"}
    text = unspoken_launcher(env, "MPICH", speaks_pmix=False)
    assert "started rank 1 of 4, but the MPI library is MPICH" in text
    assert "mpidist run" in text
    assert unspoken_launcher(env, "MPICH", speaks_pmix=True) is None
    assert unspoken_launcher(env, "Open MPI", speaks_pmix=False) is None
    assert unspoken_launcher({**env, **MPICH}, "MPICH", speaks_pmix=False) is None
    assert unspoken_launcher(OPENMPI, "MPICH", speaks_pmix=False) is None


def test_which_libraries_are_loaded():
    assert has_loaded("libc.so") or has_loaded("ld-musl")
    assert not has_loaded("libnothing")


def test_what_mpich_needs_under_srun():
    wheel = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
    step = {**STEP, "PMI_RANK": "0"}
    settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    assert start_settings(step, wheel) == settings
    assert start_settings(step, wheel.replace("ucx ofi", "ofi")) == {}
    assert start_settings(step, "Open MPI v5.0.11") == {}
    assert start_settings({"PMI_RANK": "0"}, wheel) == {}
    assert start_settings({**step, "MPI_LOCALNRANKS": "2"}, wheel) == {}  # by mpiexec, in a job


@given(st.integers(0, 50), st.floats(1e-4, 1.0), st.integers(0, 1000))
def test_backoff(spins, longest_s, count):
    backoff = Backoff(spins, longest_s)
    for _ in range(2):
        sleeps = [backoff.next_sleep() for _ in range(count)]
        assert sleeps[:spins] == [0.0] * min(spins, count)
        slept = sleeps[spins:]
        assert all(0 < s <= longest_s for s in slept)
        assert slept == sorted(slept)
        for before, after in itertools.pairwise(slept):
            quick = before < 3e-4
            assert after == min((2 if quick else 1.01) * before, longest_s)
        if len(slept) > 900:
            assert slept[-1] == longest_s
        backoff.reset()


def test_pause_yields_or_sleeps(monkeypatch):
    from mpidist.mpi import backoff as module

    did = []
    monkeypatch.setattr(module.os, "sched_yield", lambda: did.append("yield"))
    monkeypatch.setattr(module.time, "sleep", did.append)
    backoff = Backoff(spins=2, longest_s=5e-5)
    for _ in range(5):
        backoff.pause()
    assert did == ["yield", "yield", 2e-5, 4e-5, 5e-5]


@dataclass
class Waiting:
    """An operation, as the watchdog sees it."""

    sequence: int = 0
    peer: int = -1
    group_number: int = 5
    members: tuple[int, ...] = (0, 1, 2)

    def describe(self):
        return "waiting"


def test_collective_that_a_rank_has_left_before():
    operation = Waiting(sequence=4)
    assert missing_rank(operation, 0.0, {}, {}, 100.0) is None
    assert missing_rank(operation, 0.0, {1: 50.0}, {1: {5: 4}}, 100.0) is None  # it took part
    assert missing_rank(operation, 0.0, {1: 50.0}, {1: {5: 3}}, 50.0) == 1
    assert missing_rank(operation, 0.0, {1: 50.0}, {1: {6: 9}}, 50.0) == 1  # of another group
    assert missing_rank(operation, 0.0, {7: 50.0}, {7: {}}, 50.0) is None  # not a member


def test_message_of_a_rank_that_has_left():
    operation = Waiting(peer=2)
    assert missing_rank(operation, 0.0, {1: 1.0}, {1: {}}, 99.0) is None
    assert missing_rank(operation, 0.0, {2: 50.0}, {2: {}}, 50.5) is None  # it may be on its way
    assert missing_rank(operation, 0.0, {2: 50.0}, {2: {}}, 51.5) == 2
    assert missing_rank(operation, 60.0, {2: 50.0}, {2: {}}, 60.5) is None
    assert missing_rank(operation, 60.0, {2: 50.0}, {2: {}}, 61.5) == 2


def test_message_from_anybody():
    operation = Waiting()
    assert missing_rank(operation, 0.0, {1: 1.0}, {1: {}}, 99.0) is None  # rank 2 may still send
    # One member is the rank that waits: it has not left, and will not send to itself.
    assert missing_rank(operation, 0.0, {1: 1.0, 2: 50.0}, {1: {}, 2: {}}, 50.5) is None
    assert missing_rank(operation, 0.0, {1: 1.0, 2: 50.0}, {1: {}, 2: {}}, 51.5) in (1, 2)
    assert missing_rank(Waiting(members=(0,)), 0.0, {}, {}, 99.0) is None


ranks = st.integers(0, 5)


@given(st.sets(ranks, min_size=1), st.integers(0, 4), st.data(), st.floats(0, 10), st.floats(0, 10))
def test_only_a_member_that_has_left_is_ever_missing(members, sequence, data, since, now):
    members = tuple(sorted(members))
    peer = -1 if sequence else data.draw(st.sampled_from([-1, *members]))
    left = data.draw(st.dictionaries(ranks, st.floats(0, 10)))
    counts = {rank: data.draw(st.dictionaries(st.just(5), st.integers(0, 4))) for rank in left}
    operation = Waiting(sequence, peer, 5, members)
    gone = missing_rank(operation, since, left, counts, now)
    if gone is not None:
        assert gone in left
        assert gone in members
    if sequence:
        behind = [r for r in members if r in left and counts[r].get(5, 0) < sequence]
        assert (gone is None) == (not behind)
    elif peer >= 0:
        assert (gone == peer) == (peer in left and now - max(since, left[peer]) > 1.0)
    elif sum(rank not in left for rank in members) > 1:
        assert gone is None


def test_operations_under_way():
    pending = PendingOps()
    first, second = Waiting(1), Waiting(2)
    pending.current[id(first)] = first
    assert pending.observe(10.0) == [(first, 10.0)]
    pending.current[id(second)] = second
    assert pending.observe(11.0) == [(first, 10.0), (second, 11.0)]
    del pending.current[id(first)]
    assert pending.observe(12.0) == [(second, 11.0)]
    del pending.current[id(second)]
    pending.current[id(first)] = first
    assert pending.observe(13.0) == [(first, 13.0)]


def test_ranks_of_different_versions():
    _check_versions(["1.2"] * 3)
    with pytest.raises(DistBackendError, match=r"rank 0 has mpidist 1\.2 and rank 2 has 1\.3"):
        _check_versions(["1.2", "1.2", "1.3", "1.2"])


def test_what_was_printed_last_is_read_before_the_end(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"last words")
    got = []
    reader = threading.Thread(target=lambda: got.append(os.read(reading, 100)))
    threading.Timer(0.05, reader.start).start()
    with monkeypatch.context() as patched:
        patched.setattr(shutdown, "OUTPUT_LIMIT_S", 30.0)
        shutdown.wait_until_read(writing)
    reader.join()
    assert got == [b"last words"]
    os.write(writing, b"nobody reads this")
    shutdown.wait_until_read(writing)  # not for ever
    os.close(reading)
    os.close(writing)
    shutdown.wait_until_read(writing)
    with open(os.devnull) as file:
        shutdown.wait_until_read(file.fileno())


def test_backoff_on_shared_cores_yields_first(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("mpidist.mpi.backoff.time.monotonic", lambda: now[0])
    backoff = SharedCoreBackoff()
    assert backoff.next_sleep() == 0
    now[0] += 0.0019
    assert backoff.next_sleep() == 0
    now[0] += 0.0002
    assert backoff.next_sleep() == 1e-4
    backoff.reset()
    assert backoff.next_sleep() == 0


@pytest.mark.parametrize(("cores", "shares"), [(2, False), (1, True)])
def test_ranks_share_cores_if_a_node_has_more_ranks(monkeypatch, cores, shares):
    here = SimpleNamespace(nodes=(0, 1, 0, 1, 1), rank=2)
    monkeypatch.setattr(mpi_backend, "world", lambda: here)
    monkeypatch.setattr(mpi_backend.os, "cpu_count", lambda: cores)
    mpi_backend._shares_cores.cache_clear()
    assert mpi_backend._shares_cores() == shares
    assert isinstance(mpi_backend._new_backoff(), SharedCoreBackoff) == shares
    mpi_backend._shares_cores.cache_clear()
