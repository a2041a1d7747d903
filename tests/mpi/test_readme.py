"""Every example of the README does what it says there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"```(python|bash|console)\n(.*?)```", re.DOTALL)


def scripts_and_commands():
    """Scripts by the name in their first line; commands with the output shown, in order."""
    scripts, commands = {}, []
    for language, text in BLOCK.findall((ROOT / "README.md").read_text()):
        if language != "console":
            scripts[text.split("\n", 1)[0].removeprefix("# ")] = text
        else:
            for part in text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                commands.append((command, output))
    return scripts, commands


SCRIPTS, COMMANDS = scripts_and_commands()

# In the place of CuPy, for scripts that import it.
STAND_IN = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
"""


def case(command, shown):
    """Ranks of benchmarks spin: where others want the cores too, they take ten times as long."""
    marks = [pytest.mark.alone] if "scripts/bench_" in command else []
    return pytest.param(command, shown, id=command, marks=marks)


@pytest.mark.parametrize(("command", "shown"), [case(*each) for each in COMMANDS])
def test_command(command, shown, tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cupy.py").write_text(STAND_IN)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    programs = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    printed = result.stdout + result.stderr
    assert (result.returncode == 0) == ("fail" not in command), printed
    # "..." in what the README shows stands for anything, a line of it for any lines.
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.\n?", shown.strip()))
    assert re.search(pattern, printed, re.DOTALL), printed


def test_the_readme_has_examples():
    assert len(SCRIPTS) >= 4
    assert len(COMMANDS) >= 8
