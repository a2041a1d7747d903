"""The example programs that need torch, which the environments of tests/mpi do not have."""

import pytest
from _cases.examples import EXAMPLES, imports_torch, run_commands

WITH_TORCH = [name for name in EXAMPLES if imports_torch(name)]


@pytest.mark.parametrize("name", WITH_TORCH)
def test_example(name, tmp_path, monkeypatch):
    run_commands(name, tmp_path, monkeypatch)


def test_there_are_examples():
    assert WITH_TORCH
