"""The architecture, checked: layers, public names, imports, words, complexity."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from radon.complexity import cc_rank, cc_visit

import pyro_lvgp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pyro_lvgp"

# Imports go from a greater to a smaller number, never between two packages of one number.
LAYERS = {
    "sklearn": 8,
    "plots": 8,
    "datasets": 8,
    "tables": 8,
    "diagnostics": 7,
    "models": 6,
    "guides": 6,
    "infer": 5,
    "distributions": 4,
    "kernels": 3,
    "likelihoods": 3,
    "conjugate": 2,
    "networks": 2,
    "ops": 1,
    "_compile": 1,
    "_utils": 0,
}
PUBLIC_PACKAGES = sorted(name for name in LAYERS if not name.startswith("_"))


class Import(NamedTuple):
    """A module or a name of a module, imported at a line of a file."""

    module: str
    name: str | None
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}
PUBLIC_MODULES = [name for name in FILES if not any(part.startswith("_") for part in name.split("."))]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module outside its functions, which run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from statements(node)


def imports_of(name: str, *, at_import: bool = False) -> Iterator[Import]:
    """All imports of a module, also those inside functions, or only those that run when the module is imported."""
    for node in statements(TREES[name]) if at_import else ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: expected an absolute import, got a relative one"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                is_module = submodule in FILES
                yield Import(submodule if is_module else str(node.module), None if is_module else alias.name, node.lineno)


def subpackage(module: str) -> str:
    """The part of ``pyro_lvgp`` that a module is in, "" for the root itself."""
    return [*module.split("."), ""][1]


def own_imports(name: str, *, at_import: bool = False) -> list[Import]:
    return [found for found in imports_of(name, at_import=at_import) if found.module.split(".")[0] == "pyro_lvgp"]


def assert_none(found: list[str], expected: str) -> None:
    """Fail with one line for each finding."""
    assert not found, "\n".join([f"expected {expected}, got {len(found)} exceptions:", *found])


def test_the_root_has_the_packages_of_the_architecture_and_nothing_else():
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == {*LAYERS, "__init__.py", "py.typed"}


def test_imports_go_down_the_layers_only():
    upwards = [
        f"{name}, line {found.line}, imports {found.module}"
        for name in FILES
        if name != "pyro_lvgp"
        for found in own_imports(name)
        if subpackage(found.module) != subpackage(name) and LAYERS.get(subpackage(found.module), 9) >= LAYERS[subpackage(name)]
    ]
    assert_none(upwards, "imports from lower layers alone")


def test_compilation_is_known_to_infer_alone():
    others = [
        f"{name}, line {found.line}"
        for name in FILES
        for found in own_imports(name)
        if subpackage(found.module) == "_compile" and subpackage(name) not in {"infer", "_compile"}
    ]
    assert_none(others, "imports of _compile by infer alone")


def test_tensor_functions_import_torch_alone():
    allowed = {*sys.stdlib_module_names, "torch", "jaxtyping"}
    foreign = [
        f"{name}, line {found.line}, imports {found.module}"
        for name in FILES
        if subpackage(name) == "ops"
        for found in imports_of(name)
        if found.module.split(".")[0] not in allowed and not found.module.startswith("pyro_lvgp.ops")
    ]
    assert_none(foreign, "imports of torch and jaxtyping alone")


def test_modules_import_in_no_circle():
    open_modules: list[str] = []
    closed: set[str] = set()

    def visit(name: str) -> None:
        if name in closed:
            return
        assert name not in open_modules, " -> ".join([*open_modules[open_modules.index(name) :], name])
        open_modules.append(name)
        for found in own_imports(name, at_import=True):
            visit(found.module)
        closed.add(open_modules.pop())

    for name in FILES:
        if name != "pyro_lvgp":
            visit(name)


def test_modules_import_each_other_and_not_their_own_package():
    from_own_package = [
        f"{name}, line {found.line}, imports {found.name} from {found.module}"
        for name, path in FILES.items()
        if path.name != "__init__.py"
        for found in own_imports(name)
        if name.startswith(f"{found.module}.")
    ]
    assert_none(from_own_package, "an import from the module that defines the name")


def declared(name: str) -> list[str] | None:
    """``__all__`` of a module, None if there is none."""
    for node in TREES[name].body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def definitions(name: str) -> list[str]:
    """Public functions and classes that a module defines."""
    nodes = [node for node in TREES[name].body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node.name for node in nodes if not node.name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_public_modules_declare_their_names(name):
    names = declared(name)
    assert names is not None, f"expected __all__ in {name}, got none"
    assert len(set(names)) == len(names)
    module = importlib.import_module(name)
    assert not [each for each in names if not hasattr(module, each)]
    missing = [each for each in definitions(name) if each not in names]
    assert_none(missing, f"all public definitions in __all__ of {name}, or a leading underscore")


def test_all_public_names_have_an_api_page():
    pages = {path.stem for path in (ROOT / "docs" / "api").glob("*.md")}
    assert pages == {"index", "pyro_lvgp", *PUBLIC_PACKAGES}


def on_page(page: str) -> set[str]:
    """Full names of the modules and objects of an API page: of its directives, and of its tables of contents."""
    shown, module = set(), ""
    for line in page.splitlines():
        if directive := re.match(r"\.\. auto(module|class|data|function|exception):: (\S+)$", line):
            shown.add(directive[2])
            module = directive[2] if directive[1] == "module" else module
        elif entry := re.match(r"   (\w+)$", line):
            shown.add(f"{module}.{entry[1]}")
    return shown


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_all_names_of_a_package_are_on_its_api_page(package):
    page = (ROOT / "docs" / "api" / f"{package}.md").read_text("utf-8")
    module = importlib.import_module(f"pyro_lvgp.{package}")
    shown = on_page(page)
    assert module.__name__ in shown
    for name in module.__all__:
        value = getattr(module, name)
        full = value.__name__ if inspect.ismodule(value) else f"{module.__name__}.{name}"
        assert full in shown, f"expected {name} on the page of {package}"
        documented = [getattr(value, each) for each in value.__all__] if inspect.ismodule(value) else [value]
        assert all(inspect.getdoc(each) for each in documented if inspect.isclass(each) or inspect.isroutine(each)), name


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_tables_of_contents_have_all_names_of_their_module(package):
    page = (ROOT / "docs" / "api" / f"{package}.md").read_text("utf-8")
    for section in page.split(".. automodule:: ")[1:]:
        name = section.split()[0]
        entries = re.findall(r"^   (\w+)$", section, re.MULTILINE)
        names = [each for each in declared(name) or [] if not inspect.ismodule(getattr(importlib.import_module(name), each))]
        assert not entries or set(names) <= set(entries), name


def exported(name: str) -> set[str]:
    """Names of the packages that a module is in, below the root."""
    parts = name.split(".")
    packages = [".".join(parts[:depth]) for depth in range(2, len(parts))]
    return {each for package in packages for each in declared(package) or []}


def test_public_modules_are_documented():
    """A module without a name on an API page has a leading underscore."""
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    hidden = [
        name
        for name in PUBLIC_MODULES
        if FILES[name].name != "__init__.py"
        and f".. automodule:: {name}\n" not in pages
        and not {*definitions(name)} & exported(name)
    ]
    assert_none(hidden, "a name on an API page or a leading underscore")


def test_all_names_of_the_root_are_on_its_api_page():
    page = (ROOT / "docs" / "api" / "pyro_lvgp.md").read_text("utf-8")
    missing = [name for name in pyro_lvgp.__all__ if not re.search(rf"\b{name}\b", page)]
    assert not missing


IMPORT = """
import random, sys, warnings
import numpy, pyro, torch

def state():
    return (
        repr(pyro.settings.get()), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate(),
        repr(numpy.random.get_state()), list(pyro.get_param_store().keys()),
    )

before, filters, modules = state(), list(warnings.filters), set(sys.modules)
import pyro_lvgp
new = {name for name in sys.modules.keys() - modules if name.split(".")[0] not in sys.stdlib_module_names}
assert new == {"pyro_lvgp"}, new  # not even the package's own parts
assert warnings.filters == filters, "filters of warnings"  # SciPy, which the models import, adds some of its own
for name in "models", "guides", "infer", "kernels", "likelihoods", "distributions", "conjugate", "networks", "ops":
    getattr(pyro_lvgp, name)
slow = {"anndata", "arviz_base", "arviz_stats", "gpytorch", "h5py", "matplotlib", "pandas", "pooch", "sklearn", "xarray"}
slow.add("scipy.stats")
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
for was, now in zip(before, state()):
    assert was == now, (was, now)
"""


def test_import_loads_little_and_changes_no_global_state():
    done = subprocess.run([sys.executable, "-c", IMPORT], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Banned(NamedTuple):
    """Words that must not come back, and why."""

    pattern: str
    reason: str


# Whole identifiers: names of variables, arguments, attributes, functions and classes.
IDENTIFIERS = [
    Banned("told|kept|held|dear", "name the quantity"),
    Banned("climb|climbed|descend", "forward and backward"),
    Banned("stand_in", "fill_value"),
    Banned("touching_points?", "variational_parameter"),
    Banned("theta|kernel_theta", "params, since kernels and likelihoods have parameters of several names"),
    Banned("slopes|starting_function|log_marginal", "log_prob_derivatives, initial_function, log_predictive_density"),
    Banned("Chain|draw_prior|rsample_chain", "StateSpaceModel, sample_prior, rsample_state_space"),
    Banned("even_draws|hide_(?:entries|like_rows|like_shifted)|Masking", "qmc_normal, mask_*, Corruption"),
    Banned("NoisyFunction", "LikelihoodPredictive"),
    Banned("Watch|Tensors|Processes", "names of PyTorch: state, module state, process group"),
    Banned("IntegrateGaussians|is_integrating", "sample_moments and MarginalizeGaussians"),
    Banned("Imputation|MixturePrediction", "all models return a Prediction"),
    Banned("_PYRO_STACK", "handlers and plates are reached by messages and by public functions of Pyro"),
    Banned("__mro__|mro", "capabilities are declared by a class and checked by isinstance"),
]
# Anywhere in a docstring.
DOCSTRINGS = [
    Banned(r"\A\s*What\b", "begin with an imperative or a noun phrase that has the field's term in it"),
    Banned(r"(?i)\btouching points?\b", "variational parameter"),
    Banned(r"(?i)\bstand-ins?\b", "fill value"),
    Banned(r"(?i)\bclimb(?:s|ed|ing)?\b", "a bound is maximised, a chain moves towards the posterior"),
    Banned(r"\b(?:NoisyFunction|IntegrateGaussians|MixturePrediction|Imputation|even_draws|Masking)\b", "old names"),
    Banned(r"\bintegrate=|\blearning_rate=|\bearly_stopping=", "arguments of 0.1"),
]
# Attributes that Pyro and torch put on objects, which have no class of their own for it.
FOREIGN_ATTRIBUTES = {"unconstrained"}


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name, line
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, line
            case ast.alias(name=name, asname=asname):
                yield asname or name, line


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node, clean=False)):
            yield text, node.body[0].lineno


def test_old_identifiers_are_gone():
    found = [
        f"{name}, line {line}: {word}: {banned.reason}"
        for name, tree in TREES.items()
        for word, line in identifiers(tree)
        for banned in IDENTIFIERS
        if re.fullmatch(banned.pattern, word)
    ]
    assert_none(found, "names of the second edition")


def test_old_words_are_gone_from_docstrings():
    found = [
        f"{name}, line {line}: {match[0]!r}: {banned.reason}"
        for name, tree in TREES.items()
        for text, line in docstrings(tree)
        for banned in DOCSTRINGS
        if (match := re.search(banned.pattern, text))
    ]
    assert_none(found, "words of the second edition")


def looks_up_a_capability(node: ast.AST) -> bool:
    """Whether a node is ``hasattr(object, name)`` or ``getattr(object, name, default)``."""
    match node:
        case ast.Call(func=ast.Name(id="hasattr"), args=[_, name]) | ast.Call(func=ast.Name(id="getattr"), args=[_, name, _]):
            return not (isinstance(name, ast.Constant) and name.value in FOREIGN_ATTRIBUTES)
    return False


@pytest.mark.parametrize("package", ["models", "guides", "infer", "diagnostics"])
def test_capabilities_are_declared_by_classes(package):
    found = [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name, tree in TREES.items()
        if subpackage(name) == package
        for node in ast.walk(tree)
        if looks_up_a_capability(node)
    ]
    assert_none(found, "isinstance with a Protocol of infer/protocols.py")


def test_tensor_functions_ask_no_tensor_for_its_value():
    found = [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name, tree in TREES.items()
        if subpackage(name) == "ops"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"item", "tolist", "numpy", "cpu"}
    ]
    assert_none(found, "tensor functions that leave tensors on their device")


@pytest.mark.parametrize("folder", ["pyro_lvgp", "benchmarks", "tutorials", "tests"])
def test_no_function_is_hard_to_follow(folder):
    """Cyclomatic complexity of 20 at most, which is grade C."""
    found = [
        f"{path.relative_to(ROOT)}, line {block.lineno}: {block.name}, {block.complexity}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for block in cc_visit(path.read_text("utf-8"))
        if cc_rank(block.complexity) >= "D"
    ]
    assert_none(found, "a complexity of at most 20")


def test_no_test_file_is_long():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert not {path.relative_to(ROOT).as_posix(): lines for path, lines in lengths.items() if lines > 420}


def test_fit_has_few_arguments():
    parameters = inspect.signature(pyro_lvgp.fit).parameters
    assert len(parameters) <= 12, list(parameters)
