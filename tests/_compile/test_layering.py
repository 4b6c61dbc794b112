"""The compiler is known to :mod:`pyro_lvgp.infer` alone."""

import ast
from pathlib import Path

import pyro_lvgp

ROOT = Path(pyro_lvgp.__file__).parent


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_infer_alone_imports_the_compiler():
    importers = {
        path.relative_to(ROOT).parts[0]
        for path in ROOT.rglob("*.py")
        if any(name.startswith("pyro_lvgp._compile") for name in imports(path))
    }
    assert importers - {"_compile"} == {"infer"}
