"""The public names, and what importing them costs."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import dataservice
import mpidist
import strategy

PACKAGES = [mpidist, strategy, dataservice]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_true(package):
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert list(package.__all__) == sorted(package.__all__)
    modules = {n for n in package.__all__ if isinstance(getattr(package, n), ModuleType)}
    assert set(package.__all__) - modules == public


def test_names_are_there_before_they_have_been_used():
    loaded = run(
        "import sys, mpidist\n"
        "assert 'numpy' not in sys.modules and 'Server' not in vars(mpidist)\n"
        "assert {'Server', 'all_reduce', '__version__'} <= set(dir(mpidist))\n"
        "assert mpidist.Server is mpidist.public.Server and 'all_reduce' in vars(mpidist)\n"
        "assert not hasattr(mpidist, 'all_reduc') and not hasattr(mpidist, '_Server')\n"
        "from mpidist import *\n"
        "assert Server is mpidist.Server\n"
        "print(*mpidist.__all__)"
    )
    assert loaded == mpidist.__all__


def test_dir_has_public_names_alone():
    """Before and after modules of the package were imported."""
    shown = run(
        "import mpidist\n"
        "before = dir(mpidist)\n"
        "import mpidist.store, mpidist.cluster_resolver, mpidist.launcher\n"
        "mpidist.all_reduce\n"
        "assert dir(mpidist) == before\n"
        "print(*before)"
    )
    assert {name for name in shown if not name.startswith("_")} == set(mpidist.__all__)
    dunders = {name for name in shown if name.startswith("_")}
    assert all(name.startswith("__") and name.endswith("__") for name in dunders)
    assert {"__all__", "__doc__", "__name__", "__path__", "__version__"} <= dunders


def test_completion_offers_public_names_alone():
    offered = run(
        "import mpidist, rlcompleter\n"
        "completer = rlcompleter.Completer({'mpidist': mpidist})\n"
        "found = iter(lambda: completer.complete('mpidist.', next(numbers)), None)\n"
        "numbers = iter(range(1000))\n"
        "print(*[text.partition('.')[2].partition('(')[0] for text in found])"
    )
    assert set(offered) == set(mpidist.__all__)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'mpidist' has no attribute 'all_reduc'"):
        mpidist.all_reduc  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'all_reduc' from 'mpidist'"):
        from mpidist import all_reduc  # noqa: F401


def test_what_somebody_has_set_stays():
    run(
        "import mpidist\n"
        "mpidist.barrier = 5\n"
        "mpidist.all_reduce\n"
        "from unittest import mock\n"
        "with mock.patch('mpidist.all_reduce') as m:\n"
        "    assert not hasattr(mpidist, 'zzz') and dir(mpidist)\n"
        "    from mpidist import cluster_resolver\n"
        "    assert mpidist.all_reduce is m and mpidist.barrier == 5\n"
        "assert mpidist.all_reduce is mpidist.public.all_reduce"
    )
    run(
        "import mpidist\n"
        "from unittest import mock\n"
        "with mock.patch('mpidist.scatter') as m:\n"
        "    assert mpidist.scatter is m\n"
        "assert mpidist.scatter is mpidist.public.scatter"
    )


@pytest.mark.parametrize("error", ["AttributeError", "ImportError", "RuntimeError"])
def test_what_keeps_the_names_from_being_imported_is_said_each_time(tmp_path, error):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(f"raise {error}('it is broken')")
    expected = "ImportError" if error == "AttributeError" else error
    run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import mpidist\n"
        "for use in ('mpidist.Server', 'hasattr(mpidist, \"x\")', 'from mpidist import *'):\n"
        "    for again in range(2):\n"
        "        try:\n"
        "            exec(use)\n"
        f"        except {expected} as error:\n"
        "            assert 'it is broken' in str(error), error\n"
        "        else:\n"
        "            raise AssertionError(use)"
    )


def test_many_threads_may_use_the_first_name():
    run(
        "import threading, mpidist\n"
        "barrier, found = threading.Barrier(8), []\n"
        "def use(name):\n"
        "    barrier.wait()\n"
        "    found.append(getattr(mpidist, name))\n"
        "threads = [threading.Thread(target=use, args=(n,)) for n in 4 * ['Work', 'errors']]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
        "assert len(found) == 8"
    )


def test_commands_need_no_numpy():
    for command in ("run", "top", "timeline", "sbatch"):
        loaded = run(f"import sys, mpidist.launcher.{command}; print(*sys.modules)")
        assert "numpy" not in loaded, command
    loaded = run(
        "import sys, mpidist.launcher\n"
        "try:\n"
        "    mpidist.launcher.main(['--help'])\n"
        "except SystemExit:\n"
        "    print(*sys.modules)"
    )
    assert "mpidist.launcher.doctor" in loaded
    assert "numpy" not in loaded


def functions_of(thing):
    if not isinstance(thing, type):
        yield thing
        return
    for name, member in vars(thing).items():
        function = inspect.unwrap(getattr(member, "__func__", member))
        if not name.startswith("_") and inspect.isfunction(function):
            yield function


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_has_a_docstring(package):
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, ModuleType) or not callable(value):
            continue
        for function in functions_of(value):
            assert inspect.getdoc(function), (name, function)


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_starts_no_mpi():
    loaded = run(
        "import sys, threading, mpidist, strategy, dataservice, mpidist.cluster_resolver, "
        "mpidist.launcher\n"
        "assert threading.active_count() == 1\n"
        "assert sys.excepthook is sys.__excepthook__\n"
        "print(*sys.modules)"
    )
    assert "mpidist.group" in loaded
    assert not {"mpi4py.MPI", "numba", "cupy", "torch", "zmq"} & set(loaded)


def test_a_plain_process_without_groups_needs_no_mpi():
    loaded = run(
        "import sys, numpy, mpidist, strategy\n"
        "from mpidist.cluster_resolver import MPIClusterResolver\n"
        "r = MPIClusterResolver({'ps': 1, 'worker': -1})\n"
        "with mpidist.Server(r.cluster_spec(), r.task_type, r.task_id):\n"
        "    with strategy.ParameterServerStrategy(r).scope():\n"
        "        strategy.get_variable('v', 2, initializer='zeros').assign_add(1)\n"
        "print(*sys.modules)"
    )
    assert "strategy.protocol.push_message" in loaded
    assert "mpi4py.MPI" not in loaded


def test_every_module_is_in_the_contract_of_strategy_and_dataservice():
    """A new module of mpidist must be forbidden to them or named as allowed."""
    allowed = {
        "arena", "buffers", "checkpoints", "cluster_resolver", "config", "errors", "gpu",
        "host_memory", "mpi", "ps_memory", "public", "work",
    }  # fmt: skip
    root = Path(mpidist.__file__).parent
    modules = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    modules -= {"__init__", "__main__", "__pycache__"}
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = [
        one for one in contracts if one.get("source_modules") == ["strategy", "dataservice"]
    ]
    forbidden = {name.removeprefix("mpidist.") for name in contract["forbidden_modules"]}
    assert modules == allowed | forbidden
