"""Sphinx settings; `make docs` builds the site."""

from pyro_lvgp import __version__

project = "pyro_lvgp"
version = release = __version__
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 2

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
    """In place of a private base show what it derives from."""
    while private := [base for base in bases if getattr(base, "__name__", "").startswith("_")]:
        at = bases.index(private[0])
        bases[at : at + 1] = private[0].__bases__


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-bases", _show_public_bases)
