"""Virtual environments of the scripts, made at the first use and kept under ``.venv``.

This module uses only the standard library, because it makes the first environment.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
# Extras and groups of the environment "docs", which builds the site and runs its examples.
DOCS = (["mpich", "demo", "fast", "compress"], ["test", "docs"])
_UNWANTED = (
    # These variables would direct Python, pip or mpi4py away from the environment.
    *("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "MPI4PY_LIBMPI"),
    # With this variable, each process of the scripts would compile all modules again: 0.3 s.
    "PYTHONDONTWRITEBYTECODE",
)


def ensure_python():
    """Restart the script under Python 3.11 or newer if necessary.

    Exit with a message if there is no such Python.
    """
    if sys.version_info >= OLDEST:
        return
    for minor in range(OLDEST[1], OLDEST[1] + 10):
        found = shutil.which(f"python3.{minor}")
        if found is not None:
            os.execv(found, [found, *sys.argv])
    sys.exit(f"{sys.argv[0]}: needs Python 3.{OLDEST[1]} or newer; install it")


def clean_environ():
    """Return the environment variables for programs of a virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}


def environment(name, extras=(), groups=()):
    """Make a virtual environment with the project, unless it exists and is current.

    Args:
        name: Name of the environment.
        extras: Extras of the project to install.
        groups: Dependency groups of the project to install.

    Returns:
        The folder with the programs of the environment.
    """
    folder = ROOT / ".venv" / name
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [sys.version, str(folder), *extras, *groups, (ROOT / "pyproject.toml").read_text()]
    stamp = hashlib.sha256("\n".join(wanted).encode()).hexdigest()
    stamp_file = folder / "stamp"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another script may make the same environment
        with contextlib.suppress(FileNotFoundError):
            if stamp_file.read_text() == stamp:
                return folder / "bin"
        print(
            f"making the environment .venv/{name} (once; this takes some minutes)",
            file=sys.stderr,
            flush=True,
        )
        _make(folder, extras, groups)
        stamp_file.write_text(stamp)
    return folder / "bin"


def _make(folder, extras, groups):
    """Make a new virtual environment and install the project in it."""
    environ = clean_environ()
    environ.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    project = f".[{','.join(extras)}]" if extras else "."
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "install"]
    chosen = [word for group in groups for word in ("--group", group)]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--upgrade", "pip>=25.1"],  # the first version with --group
        [*pip, "--editable", project, *chosen],
    ):
        if subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode != 0:
            sys.exit(f"{sys.argv[0]}: failed: {' '.join(command)}")
