"""Sphinx settings; `make docs` builds the site."""

import sys
from pathlib import Path

from pyro_lvgp import __version__

project = "pyro_lvgp"
version = release = __version__
html_show_copyright = False

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import api_pages  # noqa: E402

# The package sphinx-mathjax-offline has the files of MathJax, so that formulas need no network.
extensions = [
    "api_pages",
    "myst_parser",
    "notebooks",
    "sphinx-mathjax-offline",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
if tags.has("online"):  # noqa: F821 - links to other projects need their inventories, by network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "arviz": ("https://python.arviz.org/en/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "pandas": ("https://pandas.pydata.org/docs", None),
        "pyro": ("https://docs.pyro.ai/en/stable", None),
        "python": ("https://docs.python.org/3", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "xarray": ("https://docs.xarray.dev/en/stable", None),
    }
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"pyro_lvgp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autosummary_context = {"described": api_pages.described, "foreign_bases": api_pages.foreign_bases}
autosummary_ignore_module_all = False
suppress_warnings = ["config.cache"]  # functions among the settings
# A method that implements a documented interface says nothing new.
autodoc_inherit_docstrings = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
