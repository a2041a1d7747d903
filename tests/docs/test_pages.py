"""Every example of the documentation does what its page says."""

import doctest

import pytest
from _cases.pages import ROOT, Page, check

FOLDER = ROOT / "docs"
PAGES = sorted(path for path in FOLDER.rglob("*.md") if "_build" not in path.parts)
NAMES = [str(path.relative_to(FOLDER)) for path in PAGES]


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_page(path, tmp_path):
    page = Page(path)
    assert page.unnamed == [], "a python block begins with '# NAME.py', and a command runs it"
    page.write_scripts(tmp_path)
    text = path.read_text()
    for command, shown in page.commands:
        check(command, shown, tmp_path)
    unused = [name for name in page.scripts if text.count(name.partition(".")[0]) < 2]
    assert unused == [], "these scripts are shown and not run"


SESSIONS = [path for path in PAGES if Page(path).session]


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_session(path):
    session = doctest.DocTestParser().get_doctest(Page(path).session, {}, path.name, str(path), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    failures = []
    runner.run(session, out=failures.append)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(failures)
