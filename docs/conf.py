"""Sphinx settings; `make docs` builds the site."""

import importlib
import sys
from pathlib import Path

from pyro_lvgp import __version__

project = "pyro_lvgp"
version = release = __version__
html_show_copyright = False

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
# The package sphinx-mathjax-offline has the files of MathJax, so that formulas need no network.
extensions = [
    "myst_parser",
    "notebooks",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"pyro_lvgp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
# A method that implements a documented interface says nothing new.
autodoc_inherit_docstrings = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def _show_public_bases(app, name, obj, options, bases):
    """In place of a base that has no page show what it derives from."""
    while hidden := [base for base in bases if not _is_public(base)]:
        at = bases.index(hidden[0])
        bases[at : at + 1] = [base for base in hidden[0].__bases__ if base not in bases]


def _is_public(base):
    """Whether a class is not of this package, or is among the names of one of its subpackages or modules."""
    module, name = base.__module__, getattr(base, "__name__", "")
    if not module.startswith("pyro_lvgp"):
        return True
    home = importlib.import_module(".".join(module.split(".")[:2]))
    return getattr(home, name, None) is base and not name.startswith("_")


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-bases", _show_public_bases)
