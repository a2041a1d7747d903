"""Standard input and output of ``mpidist run``."""

import os
import pty
import subprocess
import sys
import zlib

import pytest

# One write per line: print() may write two parts, which can mix with lines of other ranks.
SAY = "say = lambda text: os.write(1, f'{text}\\n'.encode())\n"
RUN = [sys.executable, "-m", "mpidist", "run"]
WORLD = "import os, sys\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n" + SAY
READ = WORLD + (
    "import zlib\ndata = sys.stdin.buffer.read()\n"
    "for rank in range(world.size):\n"
    "    world.barrier()\n"
    "    if rank == world.rank: say(f'{rank} {len(data)} {zlib.crc32(data)}')\n"
)
IDLE = WORLD + "world.barrier()\nsay('done')\n"
EMPTY = [f"{rank} 0 0" for rank in range(2)]
JOB_S = 60


@pytest.fixture
def command(tmp_path):
    """Provide a function that returns the command to run a source on ranks."""

    def make(source, *words):
        path = tmp_path / "script.py"
        path.write_text(source)
        return [*RUN, *(words or ("-n", "2")), str(path)]

    return make


def run(words, **options):
    return subprocess.run(words, capture_output=True, timeout=JOB_S, check=False, **options)


def lines(done):
    assert done.returncode == 0, done.stderr.decode()
    return sorted(done.stdout.decode().split("\n")[:-1])


@pytest.mark.parametrize("flags", [(), ("--stdin",)])
def test_input_that_stays_unread(command, flags):
    done = run(command(IDLE, "-n", "2", *flags), input=b"x" * 200_000)
    assert lines(done) == ["done", "done"]
    assert b"mpidist run:" not in done.stderr


@pytest.mark.parametrize(
    ("source", "flags"), [("/dev/null", ()), ("/dev/null", ("--stdin",)), ("/dev/zero", ())]
)
def test_ranks_read_an_empty_input(command, source, flags):
    with open(source, "rb") as file:
        assert lines(run(command(READ, "-n", "2", *flags), stdin=file)) == EMPTY


@pytest.mark.parametrize("flags", ["", "--stdin"])
def test_a_closed_input_is_an_empty_one(command, flags):
    words = command(READ, "-n", "2", *flags.split())
    assert lines(run(["bash", "-c", 'exec "$@" <&-', "bash", *words])) == EMPTY


def test_ranks_do_not_wait_for_a_pipe_that_stays_open(command):
    reading, writing = os.pipe()
    try:
        assert lines(run(command(READ), stdin=reading)) == EMPTY
        assert lines(run(command(IDLE, "-n", "2", "--stdin"), stdin=reading)) == ["done", "done"]
    finally:
        os.close(reading)
        os.close(writing)


def test_a_shell_loop_keeps_its_list(command):
    loop = 'while read x; do "$@" >&2 || exit 1; echo "$x"; done'
    done = run(["bash", "-c", loop, "bash", *command(IDLE)], input=b"a\nb\nc\n")
    assert lines(done) == ["a", "b", "c"]


@pytest.mark.parametrize("size", [0, 1, 65_537, 100_000_000])
def test_rank_0_reads_all(command, size):
    data = (b"0123456789abcdef\n" * (size // 17 + 1))[:size]
    done = run(command(READ, "-n", "2", "--stdin"), input=data)
    assert lines(done) == [f"0 {size} {zlib.crc32(data)}", EMPTY[1]]


def test_rank_0_reads_a_file(command, tmp_path):
    (tmp_path / "data").write_bytes(b"first\nrest\n")
    with open(tmp_path / "data", "rb", buffering=0) as file:
        assert file.read(6) == b"first\n"
        done = run(command(READ, "-n", "2", "--stdin"), stdin=file)
    data = b"rest\n"
    assert lines(done) == [f"0 5 {zlib.crc32(data)}", EMPTY[1]]


def test_the_first_task_of_the_first_job_reads(command):
    words = command(READ, "--worker", "1", "--ps", "1", "--label", "--stdin")
    found = lines(run(words, input=b"abc"))
    assert found == [f"[ps 0] 0 3 {zlib.crc32(b'abc')}", f"[worker 0] {EMPTY[1]}"]


def test_what_rank_0_leaves_is_there_for_the_next(command):
    source = WORLD + "if world.rank == 0: say(os.read(0, 2))\nworld.barrier()\n"
    words = command(source, "-n", "2", "--stdin")
    done = run(["bash", "-c", '"$@" && cat', "bash", *words], input=b"a\nb\nc\n")
    assert lines(done) == sorted([r"b'a\n'", "b", "c"])


def test_a_writer_learns_that_rank_0_reads_no_more(command):
    source = WORLD + "if world.rank == 0:\n    os.read(0, 2)\n    os.close(0)\n"
    # Rank 0 leaves the barrier only after the writer has ended.
    source += "    os.read(os.open(sys.argv[1], os.O_RDONLY), 1)\nworld.barrier()\n"
    words = command(source, "-n", "2", "--stdin")
    script = 'mkfifo "$1"; { yes; echo done > "$1"; } | "${@:2}" "$1"'
    fifo = os.path.join(os.path.dirname(words[-1]), "fifo")
    done = run(["bash", "-c", script, "bash", fifo, *words])
    assert done.returncode == 0, done.stderr.decode()


def test_a_writer_learns_that_rank_0_has_failed(command):
    source = (
        WORLD + "world.barrier()\nif world.rank == 0: os.read(0, 2); sys.exit(3)\nworld.barrier()"
    )
    words = command("import mpidist\nmpidist.init_process_group()\n" + source, "-n", "2", "--stdin")
    done = run(["bash", "-c", 'yes | "$@"; echo "${PIPESTATUS[*]}"', "bash", *words])
    assert done.stdout == b"141 3\n"
    assert b"mpidist run: rank 0 (pid" in done.stderr


def test_rank_0_reads_a_terminal(command):
    source = WORLD + (
        "line = (os.isatty(0), input()) if world.rank == 0 else sys.stdin.read()\n"
        "world.barrier()\nsay(repr(line))\n"
    )
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"hello\n")
        done = run(command(source, "-n", "2", "--stdin"), stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert lines(done) == ["''", "(True, 'hello')"]


def test_a_terminal_that_another_process_reads(command):
    words = command(READ, "-n", "2", "--stdin")
    pid, ours = pty.fork()
    if pid == 0:  # the shell takes the terminal from its background job
        script = 'set -m; "$@" & wait $!; echo "status $?"'
        os.execvp("bash", ["bash", "-c", script, "bash", *words])
    text = b""
    try:
        while data := os.read(ours, 65536):
            text += data
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    os.waitpid(pid, 0)
    assert b"mpidist run: --stdin: this command runs in the background of its terminal" in text
    assert b"status 2" in text


@pytest.mark.parametrize("label", [(), ("--label",)])
@pytest.mark.parametrize("shell", ['"$@" | head -1', '"$@" 2>&1 | head -1'])
def test_a_reader_that_has_enough(command, shell, label):
    source = WORLD + "while True: say(f'rank {world.rank}')\n"
    words = command(source, "-n", "2", *label)
    done = run(["bash", "-c", f'{shell}; echo "status ${{PIPESTATUS[0]}}"', "bash", *words])
    first, last = done.stdout.decode().splitlines()
    assert first.endswith(("rank 0", "rank 1"))
    assert last == "status 141"
    assert b"mpidist run:" not in done.stderr


def test_a_failure_is_told_although_the_reader_has_enough(command):
    source = WORLD + (
        "if world.rank == 0: say('first')\nworld.barrier()\n"
        "if world.rank == 1: os._exit(3)\nworld.barrier()\n"
    )
    shell = '"$@" | head -1; echo "status ${PIPESTATUS[0]}"'
    done = run(["bash", "-c", shell, "bash", *command(source)])
    assert done.stdout == b"first\nstatus 3\n"
    assert b"rank 1 (pid" in done.stderr
