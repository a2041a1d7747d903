"""The scripts and commands that a page of the documentation shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```(python|bash|console|pycon)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# ([\w-]+\.\w+)\n")
LIMIT_S = 120

# In the place of CuPy, for scripts that import it.
STAND_IN = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from _cases import stand_in_cupy
sys.modules["cupy"] = stand_in_cupy
"""


class Page:
    """A Markdown file with examples.

    Attributes:
        scripts: The text of each ``python`` or ``bash`` block that begins with the comment
            ``# NAME``, by that name.
        unnamed: The ``python`` blocks without such a comment, which no test could run.
        commands: The commands of ``console`` blocks with the output shown, in order.
        session: The ``pycon`` blocks, which are one interactive session.
    """

    def __init__(self, path):
        self.scripts, self.unnamed, self.commands, sessions = {}, [], [], []
        for language, text in BLOCK.findall(path.read_text()):
            name = NAME.match(text)
            if language == "pycon":
                sessions.append(text)
            elif language == "console":
                for part in text.split("$ ")[1:]:
                    command, _, output = part.partition("\n")
                    self.commands.append((command, output))
            elif name is not None:
                self.scripts[name[1]] = text
            elif language == "python":
                self.unnamed.append(text)
        self.session = "\n".join(sessions)

    def write_scripts(self, folder):
        """Write the scripts into a folder, with the repository's own scripts beside them."""
        for name, text in self.scripts.items():
            (folder / name).write_text(text)
        (folder / "cupy.py").write_text(STAND_IN)
        (folder / "scripts").symlink_to(ROOT / "scripts")


def check(command, shown, folder):
    """Run a command in a folder, and compare its output with the output shown.

    A line "..." in the shown output stands for any lines, and "..." in a line for any text. A
    command with "fail" in it must fail.
    """
    programs = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    printed = result.stdout + result.stderr
    assert (result.returncode == 0) == ("fail" not in command), printed
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.\n?", shown.strip()))
    assert re.search(pattern, printed, re.DOTALL), f"{command}\n{printed}"
