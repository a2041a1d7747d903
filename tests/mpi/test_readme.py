"""Every example of the README does what it says there."""

import pytest
from _cases.pages import ROOT, Page, check

PAGE = Page(ROOT / "README.md")


@pytest.mark.parametrize(("command", "shown"), PAGE.commands, ids=[c for c, _ in PAGE.commands])
def test_command(command, shown, tmp_path):
    PAGE.write_scripts(tmp_path)
    check(command, shown, tmp_path)


def test_the_readme_has_examples():
    assert len(PAGE.scripts) >= 3
    assert len(PAGE.commands) >= 3
