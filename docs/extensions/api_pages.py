"""Sphinx extension for the pages of classes: which methods and attributes have an entry, and which bases are shown."""

import importlib
import inspect

from sphinx.ext.autosummary import autosummary_toc


def is_request(name: str) -> bool:
    """Whether a method is one that scikit-learn makes for its metadata routing."""
    return name.startswith("set_") and name.endswith("_request")


def foreign_bases(module: str, name: str) -> list[str]:
    """Return the names of the classes of other packages that a class with a private base inherits from; else none.

    A page has the methods that a class inherits from this package, if a private class is among its bases, which has no page.
    """
    bases = getattr(importlib.import_module(module), name).__mro__[1:]
    if all(is_public(base) for base in bases):
        return []
    return list(dict.fromkeys(base.__name__ for base in bases if not is_of_package(base)))


def described(module: str, name: str, kind: str) -> list[str]:
    """Return the public methods, or attributes, of a class that have a docstring, in the order of the source.

    :param module: name of the module.
    :param name: name of the class.
    :param kind: ``"method"`` or ``"attribute"``.
    """
    cls = getattr(importlib.import_module(module), name)
    bases = [base for base in cls.__mro__ if base is cls or (foreign_bases(module, name) and is_of_package(base))]
    members = {member: value for base in reversed(bases) for member, value in vars(base).items()}
    return [
        member
        for member, value in members.items()
        if not member.startswith("_") and not is_request(member) and _kind(value) == kind and (value.__doc__ or "").strip()
    ]


def _kind(value: object) -> str | None:
    if inspect.isfunction(value) or isinstance(value, classmethod | staticmethod):
        return "method"
    return "attribute" if isinstance(value, property) else None


def is_of_package(base: type) -> bool:
    """Whether a class is one of this package."""
    return base.__module__.startswith("pyro_lvgp")


def show_public_bases(app, name, obj, options, bases):
    """In place of a base that has no page show what it derives from; called by Sphinx."""
    while hidden := [base for base in bases if not is_public(base)]:
        at = bases.index(hidden[0])
        bases[at : at + 1] = [base for base in hidden[0].__bases__ if base not in bases]


def is_public(base: type) -> bool:
    """Whether a class is not of this package, or is among the names of one of its subpackages or modules."""
    name = getattr(base, "__name__", "")
    if not is_of_package(base):
        return True
    home = importlib.import_module(".".join(base.__module__.split(".")[:2]))
    return getattr(home, name, None) is base and not name.startswith("_")


def skip_requests(app, what, name, obj, skip, options):
    """Leave out the methods that scikit-learn makes; called by Sphinx."""
    return True if is_request(name) else None


def leave_out_of_sidebar(app, doctree):
    """Leave pages of classes and functions out of the table of contents, which each page repeats; called by Sphinx."""
    for node in list(doctree.findall(autosummary_toc)):
        node.parent.remove(node)


def setup(app):
    """Called by Sphinx."""
    app.setup_extension("sphinx.ext.autosummary")
    app.connect("doctree-read", leave_out_of_sidebar, priority=400)  # before the nodes are read
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-skip-member", skip_requests)
    return {"parallel_read_safe": True}
