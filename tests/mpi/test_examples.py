"""Every example program prints the output that its header shows."""

import pytest
from _cases.examples import (
    EXAMPLES,
    FOLDER,
    MAX_LINES,
    commands_of,
    header_of,
    imports_torch,
    run_commands,
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, monkeypatch):
    if imports_torch(name):
        pytest.importorskip("torch")  # tests/docs has an environment with torch
    run_commands(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", EXAMPLES)
def test_header(name):
    commands = [command for command, _ in commands_of(name)]
    assert header_of(name).count("$ ") == len(commands)
    assert all(shown.strip() for _, shown in commands_of(name))
    programs = {command.split()[0] for command in commands}
    assert {"mpidist", "python"} <= programs <= {"mpidist", "mpiexec", "python"}
    assert all(f"scripts/examples/{name}" in command for command in commands)


def test_lengths():
    lengths = {name: len((FOLDER / name).read_text().splitlines()) for name in EXAMPLES}
    assert len(lengths) >= 10
    assert max(lengths.values()) <= MAX_LINES, lengths
