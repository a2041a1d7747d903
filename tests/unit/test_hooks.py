"""Every hook that the package sets is listed in docs/hooks.md."""

import re
from pathlib import Path

import pytest

from mpidist.mpi.launch_env import start_settings

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "hooks.md").read_text()
# What sets a hook, by its name in the tables.
SETS = {
    "sys.excepthook": r"sys\.excepthook\s*=|sys\.excepthook, threading\.excepthook =",
    "threading.excepthook": r"threading\.excepthook\s*=",
    "sys.stdout": r"stdout\.reconfigure|sys\.stdout\s*=",
    "SIGINT": r"signal\.signal\(signal\.SIGINT",
    "SIGUSR1": r"signal\.signal\(number",
    "atexit": r"atexit\.register\(",
    "exit(3)": r"__cxa_atexit",
    "faulthandler": r"faulthandler\.\w+\(",
    "os.register_at_fork": r"register_at_fork\(",
    "HOME": r"environ\.setdefault\(|environ\.update|putenv",
    # Not in an example of a docstring.
    "CUDA_VISIBLE_DEVICES": r"(?m)^(?! *>>>).*environ\[[^\]]+\] =",
    "UCX_TLS": r"env\.setdefault\(",
    "mpi4py.rc.initialize": r"(?m)^ *mpi4py\.rc\.\w+ =",
    "mallopt": r"\bmallopt\(",
}
BUILTINS = re.compile(r"builtins\.\w+\s*=[^=]|sys\.exit\s*=[^=]|setattr\((sys|builtins)\b")
# Commands are processes of their own; the runner belongs to the command `mpidist run`.
COMMANDS = ("launcher/", "runner.py", "__main__.py")


def sources():
    package = ROOT / "mpidist"
    files = {str(path.relative_to(package)): path for path in package.rglob("*.py")}
    return {name: path.read_text() for name, path in files.items() if not name.startswith(COMMANDS)}


@pytest.mark.parametrize("name", SETS)
def test_hooks_are_listed(name):
    found = [file for file, text in sources().items() if re.search(SETS[name], text)]
    assert found
    for file in found:
        rows = [row for row in DOCUMENT.splitlines() if row.startswith("|") and name in row]
        if file != "mpi/shutdown.py":
            assert any(f"`{file}`" in row for row in rows), file
        assert rows, name


def test_variables_that_are_set_are_listed():
    device = "MPICH Device: ch4:ucx,ofi"
    variables = start_settings({"SLURM_PROCID": "0", "PMI_RANK": "0"}, device)
    assert len(variables) == 2
    for variable in (*variables, "HOME", "UCX_TLS"):
        assert f"`{variable}`" in DOCUMENT


def test_nothing_of_python_is_replaced():
    assert [file for file, text in sources().items() if BUILTINS.search(text)] == []
