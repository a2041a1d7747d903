"""Every way in which a job ends, at random moments: in time, with the reason, leaving nothing.

What the library's own launcher does wrong where no ``mpidist run`` looks after it cannot be mended
here. It is told apart, and such a run counts as expected to fail:

* Open MPI's prterun may hang, or abort itself and leave its folder, when ranks fail while they
  start;
* MPICH leaves a file in /dev/shm when ranks are killed before all have started MPI.
"""

import re
import tempfile
from pathlib import Path

import pytest
from _cases.endings import WAYS
from _cases.jobs import LauncherStuckError, run_job, run_ranks

from mpidist.launcher.vendors import find_launcher

REPEATS = 20
# With ranks that no other test has by default.
SAMPLE = (
    "exception of a handler",
    "exit of a handler",
    "exit of a handler on the main thread",
    "exception in the serving loop",
    "exit of all",
    "exit of one",
    "SystemExit of one",
    "exit of one that no rank waits for",
    "exception without hooks",
    "exit without hooks",
    "SIGINT to a rank without hooks",
    "all end without hooks",
    "SIGINT to the launcher",
    "SIGINT to a rank",
    "SIGINT to a rank, twice",
    "SIGINT to a rank that waits for the others",
    "leaves a window that others make",
    "leaves a window that others free",
    "leaves a group that others make",
    "hangs, with a limit",
    "hangs for a while",
    "exception with a window",
    "exception with a Server",
    "exception with a Server of two tasks",
    "exception with an async collective",
    "all end with everything open",
    "all end with a receive open",
    "multiprocessing",
    "atexit before the end",
    "atexit after the end",
)
LIMIT_S = 30.0
OF_MPICH = ("mpich_shm_", "ucx_shm_posix_")


def check(way, seed, bare):
    if bare and way.bare is not None:
        way = way.bare
    if bare and find_launcher().vendor.name in way.upsets:
        pytest.skip("the vendor's launcher hangs or aborts itself")
    with tempfile.TemporaryDirectory(prefix="mpidist-") as name:
        folder = Path(name)
        temporary = folder / "tmp"
        temporary.mkdir()
        options = {
            "env": {"TMPDIR": str(temporary), **way.env},
            "timeout_s": LIMIT_S,
            "meddle": lambda process: way.meddle(process, seed),
        }
        try:
            if bare:
                ended = run_ranks(
                    folder, way.ranks, way.script(seed), may_leave_files=True, **options
                )
            else:
                ended = run_job(folder, ("-n", str(way.ranks)), way.script(seed), **options)
        except LauncherStuckError as error:
            pytest.xfail(f"the launcher hangs after all ranks have ended: {error}")
        left = {path.name for path in temporary.iterdir()}
        started = all((folder / f"up-{rank}").exists() for rank in range(way.ranks))
    if bare and ended.status == -6 and not started:
        pytest.xfail(f"the launcher aborted itself: {ended.err}")
    shown = f"status {ended.status}\n{ended.out}\n{ended.err}"
    assert not left, f"left in the temporary folder: {left}\n{shown}"
    if way.signal and ended.status == -way.signal and not started:
        return  # it came before the launcher had begun
    status = way.expected_status(bare)
    assert (ended.status == status) if status is not None else ended.status, shown
    says = way.says.replace("ODD", str(way.odd(seed)))
    assert re.search(says, ended.err), shown
    fewest, most = way.reasons
    assert fewest <= ended.err.count(" ends the job: ") <= most, shown
    assert ended.err == "" or not way.silent, shown
    if not bare and ended.status and not way.signal:
        failed = f"mpidist run: .*rank {way.odd(seed) if 'ODD' in way.says else ''}"
        assert re.search(failed, ended.err), shown
    if ended.files and not started and all(file.startswith(OF_MPICH) for file in ended.files):
        pytest.xfail(f"left by MPICH in /dev/shm: {set(ended.files)}")
    assert not ended.files, f"left in /dev/shm: {ended.files}\n{shown}"


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("launcher", ["run", "mpiexec"])
@pytest.mark.parametrize("seed", range(REPEATS), ids="seed{:02}".format)
def test_end(name, launcher, seed):
    check(WAYS[name], seed, launcher == "mpiexec")


@pytest.mark.parametrize("name", SAMPLE)
def test_end_once(name):
    check(WAYS[name], REPEATS, bare=True)
