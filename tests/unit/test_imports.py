"""Every module can be the first import of a program."""

import importlib.util
import pkgutil
import subprocess
import sys

import mpidist

# Children of a process that has imported numpy, but none of our modules.
EACH_FIRST = """
import importlib, os, sys, traceback
import numpy
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            print("failed:", name, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("died:", name, flush=True)
"""


def test_each_module_first():
    """Importing any module of strategy or dataservice imports the whole package first."""
    modules = pkgutil.walk_packages(mpidist.__path__, "mpidist.")
    names = [each.name for each in modules if not each.name.endswith("__main__")]
    if importlib.util.find_spec("torch") is None:
        names = [name for name in names if not name.startswith("mpidist.torch.")]
        names.remove("mpidist.torch")
    assert len(names) > 100
    ended = subprocess.run(
        [sys.executable, "-c", EACH_FIRST, *names, "strategy", "dataservice"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("", 0), ended.stderr
