"""Typed programs that use the package: mypy and pyright find only the intended errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TYPED = ROOT / "tests" / "_cases" / "typed"
EXAMPLES = ["mean.py", "together.py"]  # without errors; the first is in the README
LIMIT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the programs, outside of the repository and its settings."""
    folder = tmp_path_factory.mktemp("typed")
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(# mean.py\n.*?)```", readme, re.S)
    (folder / "mean.py").write_text(example)
    for name in ("calls.py", "together.py"):
        (folder / name).write_text((TYPED / name).read_text())
    return folder


def marked(folder):
    """Return the lines in which errors are expected."""
    return {
        (path.name, number)
        for path in folder.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# error")
    }


def run(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_mypy_strict(folder):
    done = run(folder, "mypy", "--strict", "--config-file=", *EXAMPLES, "calls.py")
    found = re.findall(r"^(\w+\.py):(\d+): error:", done.stdout, re.M)
    assert {(name, int(number)) for name, number in found} == marked(folder), done.stdout
    assert len(marked(folder)) > 10


def test_pyright(folder):
    done = run(folder, "pyright", "--outputjson", "--pythonpath", sys.executable)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 3, done.stderr
    found = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in report["generalDiagnostics"]
    }
    assert found == marked(folder), done.stdout
