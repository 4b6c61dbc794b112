"""Transformations of inputs, and of batches of processes, under which kernels do not change."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch.distributions import Distribution

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.kernels.base import Kernel
from pyro_lvgp.kernels.categorical import Categorical, Index
from pyro_lvgp.kernels.composition import Product, Sum, _Constant
from pyro_lvgp.kernels.embedded import Embedded
from pyro_lvgp.kernels.linear import Linear
from pyro_lvgp.kernels.periodic import Cosine, Periodic
from pyro_lvgp.kernels.spectral_mixture import SpectralMixture
from pyro_lvgp.kernels.stationary import RBF, Matern, RationalQuadratic

__all__ = [
    "KernelSymmetry",
    "SymmetryGroup",
    "intersection",
    "is_rotation_invariant",
    "symmetry_of_columns",
    "symmetry_of_processes",
]

SymmetryGroup = Literal["none", "signs", "signed permutations", "rotations"]
_GROUPS: tuple[SymmetryGroup, ...] = ("none", "signs", "signed permutations", "rotations")  # each contains the earlier ones
_TOLERANCE = 1e-4  # of log densities that are equal but for rounding
# Parameters with one number for each column, or one for all.
_OF_COLUMNS: dict[type[Kernel], tuple[str, ...]] = {
    RBF: ("lengthscale",),
    RationalQuadratic: ("lengthscale",),
    Matern: ("lengthscale",),
    Linear: ("variance",),
    Periodic: ("lengthscale", "period"),
    Cosine: ("period",),
}
# Numbers of dimensions of the parameters after the batch shape, where they are not 0.
_EVENT_DIMS: dict[type[Kernel], dict[str, int]] = {
    **{kernel: dict.fromkeys(names, 1) for kernel, names in _OF_COLUMNS.items()},
    SpectralMixture: {"weights": 1, "locs": 2, "scales": 2},
    Categorical: {},
    Index: {"factor": 2, "variance": 1},
}


class KernelSymmetry(NamedTuple):
    """Group of transformations, and axes of the parameters that are permuted with what they belong to, by name."""

    group: SymmetryGroup
    scales: dict[str, int]


def symmetry_of_columns(kernel: Kernel, name: str = "kernel") -> KernelSymmetry:
    """Return the transformations of inputs under which a kernel is the same, up to a permutation of its parameters.

    A function of the Euclidean distance, or of the scalar product, is invariant under all orthogonal transformations.  With a
    parameter for each column, columns can be permuted together with their parameters, and change sign, if the parameters are
    learned, or have one prior.  Kernels of other classes, also subclasses, have no known symmetry.

    :param kernel: the kernel.
    :param name: path of the kernel in the model.
    """
    if type(kernel) is _Constant:
        return KernelSymmetry("rotations", {})
    if type(kernel) in (Sum, Product):
        return intersection(symmetry_of_columns(part, f"{name}.kernels.{i}") for i, part in enumerate(kernel.kernels))
    if type(kernel) is SpectralMixture and kernel.input_dim == 1 and kernel.active_dims is None:
        return KernelSymmetry("signed permutations", {})
    if type(kernel) not in _OF_COLUMNS or kernel.active_dims is not None:
        return KernelSymmetry("none", {})
    names = _OF_COLUMNS[type(kernel)]
    of_columns = [part for part in names if kernel.input_dim != 1 and _size(kernel, part, -1) != 1]
    if not all(_is_exchangeable(kernel, part, -1) for part in of_columns):
        return KernelSymmetry("signs", {})
    if of_columns or type(kernel) in (Periodic, Cosine):
        return KernelSymmetry("signed permutations", {f"{name}.{part}": -1 for part in of_columns})
    return KernelSymmetry("rotations", {})


def symmetry_of_processes(kernel: Kernel, name: str = "kernel") -> KernelSymmetry:
    """Return the transformations of a batch of independent processes under which their prior is the same.

    Processes of mean zero can change sign.  They can be permuted together with the parameters of their kernels, if these are
    learned, or have one prior.  With equal kernels that are not learned their covariance is I ⊗ k, and no rotation R changes
    it: (R ⊗ I)(I ⊗ k)(Rᵀ ⊗ I) = I ⊗ k.

    :param kernel: kernel with a batch dimension over processes.
    :param name: path of the kernel in the model.
    """
    if type(kernel) is _Constant:
        return KernelSymmetry("rotations", {})
    if type(kernel) in (Sum, Product):
        return intersection(symmetry_of_processes(part, f"{name}.kernels.{i}") for i, part in enumerate(kernel.kernels))
    if type(kernel) is Embedded:
        of_kernel = symmetry_of_processes(kernel.kernel, f"{name}.kernel")
        if _size(kernel, "embedding", -3) in (0, 1):  # one embedding for all
            return of_kernel
        return intersection([of_kernel, _permutations(kernel, {"embedding": -3}, name)])
    if type(kernel) not in _EVENT_DIMS or len(kernel.batch_shape) > 1:
        return KernelSymmetry("signs", {})
    if kernel.batch_shape in ((), (1,)):  # one kernel for all
        return KernelSymmetry("rotations", {})
    event_dims = _EVENT_DIMS[type(kernel)]
    axes = {part: -1 - event_dims.get(part, 0) for part in (*kernel._pyro_params, *kernel._pyro_samples)}
    return _permutations(kernel, axes, name)


def _permutations(kernel: Kernel, axes: dict[str, int], name: str) -> KernelSymmetry:
    """Return the transformations of processes, with axes of parameters over them that are permuted."""
    if all(_is_constant(kernel, part, axis) for part, axis in axes.items()):
        return KernelSymmetry("rotations", {})
    if not all(_is_exchangeable(kernel, part, axis) for part, axis in axes.items()):
        return KernelSymmetry("signs", {})
    return KernelSymmetry("signed permutations", {f"{name}.{part}": axis for part, axis in axes.items()})


def is_rotation_invariant(module: Any, name: str) -> bool:
    """Return whether a parameter of rows is learned, or has a prior that is invariant under rotations of the rows.

    :param module: the module of the parameter.
    :param name: name of the parameter.
    """
    if name not in module._pyro_samples:
        return getattr(module, f"{name}_unconstrained").requires_grad
    if (value := _draw(module, name)) is None:
        return False
    with seeded(0):
        rotation, _ = torch.linalg.qr(torch.randn(value.shape[-1], value.shape[-1], dtype=value.dtype))
    return _has_equal_density(module._pyro_samples[name], value, value @ rotation)


def _is_exchangeable(module: Any, name: str, axis: int) -> bool:
    """Return whether entries along an axis of a parameter can be permuted, as they are learned, equal, or have one prior."""
    if name not in module._pyro_samples:
        return getattr(module, f"{name}_unconstrained").requires_grad or _is_constant(module, name, axis)
    value = _draw(module, name)
    if value is None or -axis > value.dim():
        return False
    return all(
        _has_equal_density(module._pyro_samples[name], value, other) for other in (value.flip(axis), value.roll(1, axis))
    )


def _is_constant(module: Any, name: str, axis: int) -> bool:
    """Return whether a parameter is not learned, has no prior, and is equal along an axis."""
    if name in module._pyro_samples:
        return False
    unconstrained = getattr(module, f"{name}_unconstrained")
    return not unconstrained.requires_grad and bool((unconstrained == unconstrained.roll(1, axis)).all())


def _size(module: Any, name: str, axis: int) -> int:
    """Return the size of an axis of a parameter."""
    value = _draw(module, name) if name in module._pyro_samples else getattr(module, f"{name}_unconstrained")
    return 0 if value is None or -axis > value.dim() else value.shape[axis]


def _draw(module: Any, name: str) -> torch.Tensor | None:
    """Draw from the prior of a parameter; None if it depends on the module."""
    prior = module._pyro_samples[name]
    if not isinstance(prior, Distribution):
        return None
    with torch.no_grad(), seeded(0):
        return prior.sample()


def _has_equal_density(prior: Distribution, value: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (prior.log_prob(value) - prior.log_prob(other)).sum()
    return abs(float(difference.detach())) < _TOLERANCE


def intersection(parts: Iterable[KernelSymmetry]) -> KernelSymmetry:
    """Return the transformations that several kernels allow.

    :param parts: symmetries of the kernels.
    """
    parts = list(parts)
    group = min((part.group for part in parts), key=_GROUPS.index)
    permuted = {name: axis for part in parts for name, axis in part.scales.items()}
    return KernelSymmetry(group, permuted if group == "signed permutations" else {})
