"""The site builds without a warning, its links lead somewhere, and the reference is complete."""

import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from _cases.pages import ROOT

DOCS = ROOT / "docs"
LIMIT_S = 600
PACKAGES = ("mpidist", "mpidist.cluster_resolver", "strategy", "strategy.optimizers", "dataservice")
ERROR = "DataLossError"  # mpidist.errors has no __all__
PAGES = {
    path.relative_to(DOCS).with_suffix(".html").as_posix()
    for path in DOCS.rglob("*.md")
    if "_build" not in path.parts
}


class Html(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def build(source, target):
    programs = Path(sys.prefix) / "bin"
    command = [programs / "sphinx-build", "-q", "-W", "--keep-going", source, target]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    result = build(DOCS, target)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture(scope="module")
def pages(site):
    files = (path for path in site.rglob("*.html") if "_static" not in path.parts)
    return {path: Html(path) for path in files}


def test_every_page_is_in_the_tree(site, pages):
    listed = {
        (path.parent / urlsplit(link).path).resolve().relative_to(site).as_posix()
        for path in (site / "index.html", site / "reference" / "index.html")
        for link in pages[path].links
        if not urlsplit(link).scheme and urlsplit(link).path.endswith(".html")
    }
    assert PAGES - listed == set()


def test_links_within_the_site_work(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            at = unquote(parts.fragment)
            missing = at and target.suffix == ".html" and at not in pages[target].ids
            if missing or not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_links_of_the_readme_work():
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()):
        path, _, anchor = link.partition("#")
        target = ROOT / (path or "README.md")
        if urlsplit(link).scheme:
            continue
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if target.is_file() else []
        anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
        if not target.exists() or (anchor and anchor not in anchors):
            broken.append(link)
    assert broken == []


def test_every_public_name_has_an_entry(site):
    # A header of four lines, then lines of name, domain:role, priority, URI and title.
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split()[0] for line in lines.splitlines() if " py:" in line}
    names = {f"{module}.{name}" for module in PACKAGES for name in import_module(module).__all__}
    assert names - shown == set()
    assert {f"mpidist.errors.{ERROR}", "strategy.Strategy.run", "dataservice.Dataset.map"} <= shown


def test_no_result_is_taken_for_a_type(site):
    # Napoleon takes the text before a colon in "Returns:" for a type.
    odd = [page for page in site.rglob("*.html") if "Return type" in page.read_text()]
    assert odd == []


def test_missing_names_are_errors(tmp_path):
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS / '_ext')!r})\n"
        "extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', "
        "'public_names', 'generated', 'signatures']\n"
    )
    (tmp_path / "index.md").write_text(
        "# Page\n\n{func}`mpidist.all_redcue`\n\n```{names} mpidist\nall_reduce\n```\n"
    )
    result = build(tmp_path, tmp_path / "built")
    assert result.returncode != 0
    assert "the reference has no mpidist.all_redcue" in result.stderr
    assert "no page of the reference shows mpidist.broadcast" in result.stderr
    assert "no page of the reference shows mpidist-run --ps" in result.stderr
    assert "no page of the reference shows mpidist.all_reduce\n" not in result.stderr
