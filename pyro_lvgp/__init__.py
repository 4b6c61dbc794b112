"""Latent-variable Gaussian processes in Pyro.

The models, guides, bounds and the training loop are names of this package; everything else is in its subpackages.  Both are
imported when they are first used, so that ``import pyro_lvgp`` is fast.

>>> import pyro_lvgp
>>> pyro_lvgp.BayesianGPLVM.__module__
'pyro_lvgp.models.gplvm'
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyro_lvgp import (
        conjugate,
        datasets,
        diagnostics,
        distributions,
        guides,
        infer,
        kernels,
        likelihoods,
        models,
        networks,
        ops,
        plots,
        sklearn,
        tables,
    )
    from pyro_lvgp.datasets import load_dataset
    from pyro_lvgp.diagnostics import to_arviz
    from pyro_lvgp.guides import (
        AutoAnnealedLangevin,
        MeanFieldGuide,
        RandomFeatureGuide,
        SparseStructuredGPGuide,
        StructuredGPGuide,
    )
    from pyro_lvgp.infer import (
        Block,
        BlockCoordinateVI,
        CompiledELBO,
        ImportanceWeightedELBO,
        MeanFieldELBO,
        StructuredELBO,
        fit,
        load,
        save,
    )
    from pyro_lvgp.models import GPVAE, BayesianGPLVM, MultiViewGPLVM, RandomFeatureLVM, SparseGPVAE

__version__ = version("pyro-lvgp")

__all__ = [
    "GPVAE",
    "AutoAnnealedLangevin",
    "BayesianGPLVM",
    "Block",
    "BlockCoordinateVI",
    "CompiledELBO",
    "ImportanceWeightedELBO",
    "MeanFieldELBO",
    "MeanFieldGuide",
    "MultiViewGPLVM",
    "RandomFeatureGuide",
    "RandomFeatureLVM",
    "SparseGPVAE",
    "SparseStructuredGPGuide",
    "StructuredELBO",
    "StructuredGPGuide",
    "__version__",
    "conjugate",
    "datasets",
    "diagnostics",
    "distributions",
    "fit",
    "guides",
    "infer",
    "kernels",
    "likelihoods",
    "load",
    "load_dataset",
    "models",
    "networks",
    "ops",
    "plots",
    "save",
    "sklearn",
    "tables",
    "to_arviz",
]

_HOMES = {
    "AutoAnnealedLangevin": "guides",
    "BayesianGPLVM": "models",
    "Block": "infer",
    "BlockCoordinateVI": "infer",
    "CompiledELBO": "infer",
    "GPVAE": "models",
    "ImportanceWeightedELBO": "infer",
    "MeanFieldELBO": "infer",
    "MeanFieldGuide": "guides",
    "MultiViewGPLVM": "models",
    "RandomFeatureGuide": "guides",
    "RandomFeatureLVM": "models",
    "SparseGPVAE": "models",
    "SparseStructuredGPGuide": "guides",
    "StructuredELBO": "infer",
    "StructuredGPGuide": "guides",
    "fit": "infer",
    "load": "infer",
    "load_dataset": "datasets",
    "save": "infer",
    "to_arviz": "diagnostics",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
