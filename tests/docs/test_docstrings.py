"""Every example in the docstring of a public name does what it shows."""

import json
import subprocess
import sys

import pytest
from _cases import docstrings

EXAMPLES = sorted(docstrings.examples())
LIMIT_S = 120
LEAST = 45


@pytest.fixture(scope="module")
def failures():
    """Run all examples in a process of their own, because they start MPI."""
    command = [sys.executable, docstrings.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, failures):
    assert failures.get(name, "") == ""


def test_there_are_many():
    assert len(EXAMPLES) >= LEAST
