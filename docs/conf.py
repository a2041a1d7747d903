"""The Sphinx configuration of the documentation, which ``scripts/docs`` builds."""

import logging
import sys
from pathlib import Path

import mpidist

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from signatures import ALIASES

project = "mpidist"
copyright = "2026 The mpidist authors"
version = release = mpidist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "public_names",
    "generated",
    "signatures",
    "breaks",
]
exclude_patterns = ["_build", "_ext"]
smartquotes_action = "D"  # dashes alone
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ALIASES} | {
    "DTypeLike": "~numpy.typing.DTypeLike",
    "_Counts": "Partitioner",
}
autodoc_typehints_format = "short"
autosummary_generate = False
maximum_signature_line_length = 80
napoleon_custom_sections = [("Every operation raises", "params_style")]
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

intersphinx_mapping = {
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
intersphinx_timeout = 5
# Without internet the links to other projects are missing, and nothing else.
logging.getLogger("sphinx.sphinx.ext.intersphinx").addFilter(
    lambda record: "inventories" not in str(record.msg)
)

copybutton_exclude = ".linenos, .gp, .go"
html_theme = "pydata_sphinx_theme"
html_title = f"mpidist {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"**": ["sidebar-pages"]}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "footer_start": ["copyright"],
    "footer_end": [],
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
