"""The check of the words of docstrings and comments."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prose_check"


@pytest.fixture(scope="module")
def check():
    loader = importlib.machinery.SourceFileLoader("prose_check", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("prose_check", loader))
    loader.exec_module(module)
    return module


def messages(check, text):
    return [message for _, message in check.problems(text)]


def test_plain_text_passes(check):
    text = (
        '"""Collective. Send an array."""\n\n\ndef f():\n    """Return the size."""  # in bytes\n'
    )
    assert messages(check, text) == []


@pytest.mark.parametrize(
    "opening", ["What a rank sends.", "Whether it ends.", "Of the GPU.", "Local. The size."]
)
def test_relative_openings_are_found(check, opening):
    text = f'"""A module."""\n\n\ndef f():\n    """{opening}"""\n'
    assert check.problems(text)[0][0] == 5
    assert "a docstring begins with" in messages(check, text)[0]


def test_vague_words_are_counted_in_docstrings_and_comments(check):
    text = '"""A module."""\n# who waits\n# whose turn\n# what is left\nwhat = "who whom"\n'
    assert messages(check, text) == ["3 of 12 words are vague: what, who, whose"]
    assert messages(check, text.replace("# what is left\n", "")) == []


def test_long_files_may_have_more(check):
    words = "word " * 2000
    assert messages(check, f'"""A module. {words} who who who"""\n') == []
    assert messages(check, f'"""A module. {words} who who who who who"""\n') != []


def test_the_opening_of_collective_calls_is_no_sentence_for_ruff(check):
    text = '    """Collective over ``comm``. Allocate memory."""\n    """Collective. Free it."""\n'
    stripped = check.OPENING.sub(r"\1", text)
    assert stripped == '    """Allocate memory."""\n    """Free it."""\n'
