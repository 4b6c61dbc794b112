"""Parameters of a model and a guide, by name."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_lvgp._utils.seeding import forked

__all__ = ["Parameter", "find_parameters", "name_parameters", "unconstrained", "without_gradients"]


@dataclass(frozen=True, eq=False)
class Parameter:
    """Parameter of a model or a guide.

    :param tensor: unconstrained tensor, which optimisers change.
    :param constraint: constraint on the value.
    :param of_guide: whether it is a parameter of the guide.
    """

    tensor: Tensor
    constraint: Any
    of_guide: bool

    def towards(self, value: Tensor, rho: float, name: str) -> Tensor:
        """Compute the unconstrained tensor of ``(1 − ρ) old + ρ value``.

        :param value: constrained value.
        :param rho: ρ in (0, 1].
        :param name: name of the parameter, for errors.
        :raises ValueError: for a value of another shape, or outside the constraint.
        """
        transform = transform_to(self.constraint)
        old = transform(self.tensor)
        if value.shape != old.shape:
            raise ValueError(f"expected a new value of {name!r} of shape {list(old.shape)}, got {list(value.shape)}")
        value = value.to(old)
        if not self._admits(value):
            raise ValueError(
                f"expected a new value of {name!r} in {self.constraint}, got values outside, or NaN; "
                "try a smaller damping, or float64"
            )
        return transform.inv(value if rho == 1.0 else torch.lerp(old, value, rho)).clone()

    def _admits(self, value: Tensor) -> bool:
        """Return whether a value is unchanged, up to rounding, by a map to unconstrained space and back.

        The checks of torch's constraints allow no rounding errors.
        """
        if self.constraint is constraints.real:
            return not value.isnan().any()
        transform = transform_to(self.constraint)
        # 0 and infinity would pass as infinite logarithms.
        if isinstance(self.constraint, constraints.greater_than):
            return bool((self.constraint.check(value) & value.isfinite()).all())
        try:
            back = transform(transform.inv(value))
        except torch.linalg.LinAlgError:  # it is not positive definite
            return False
        tolerance = torch.finfo(value.dtype).eps ** 0.5
        largest = value.nan_to_num(0.0, 0.0, 0.0).abs().max() if value.numel() else 0.0
        return torch.allclose(back, value, rtol=tolerance, atol=tolerance * float(largest))


def find_parameters(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Parameter]:
    """Run guide and model once, and return their parameters by name.

    These are all parameters of modules, and of functions those that they use.  The global random state does not change.
    """
    modules = _modules(model, guide)
    frozen = [tensor for module in modules.values() for tensor in module.parameters() if not tensor.requires_grad]
    with forked():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    for tensor in frozen:
        # Pyro's param store sets requires_grad of an nn.Parameter when it registers the parameter.
        tensor.requires_grad_(False)
    found = [
        (name, Parameter(tensor, constraint, prefix == "guide"))
        for prefix, module in modules.items()
        for name, tensor, constraint in _of_module(module, prefix)
    ]
    stored = pyro.get_param_store().get_state()["constraints"]
    for trace in (model_trace, guide_trace):
        for name, site in trace.nodes.items():
            if site["type"] == "param":
                constraint = stored.get(name, site["kwargs"].get("constraint", constraints.real))
                found.append((name, Parameter(unconstrained(site), constraint, trace is guide_trace)))
    # A shared parameter keeps its first name: that in the model before the guide, in modules before the param store.
    first: dict[Tensor, tuple[str, Parameter]] = {}
    for name, parameter in found:
        first.setdefault(parameter.tensor, (name, parameter))
    return dict(first.values())


def name_parameters(model: Callable[..., Any], guide: Callable[..., Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return unconstrained parameters by their path in model and guide, such as ``"model.kernel.variance"``.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param stored: parameters by their names in Pyro's param store, which parameters of no module keep.
    """
    names: dict[Tensor, str] = {}
    for prefix, module in _modules(model, guide).items():
        for path, tensor, _ in _of_module(module, prefix):
            names.setdefault(tensor, path)
    for name, tensor in stored.items():
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def _modules(model: Callable[..., Any], guide: Callable[..., Any]) -> dict[str, nn.Module]:
    return {name: part for name, part in (("model", model), ("guide", guide)) if isinstance(part, nn.Module)}


def unconstrained(site: Mapping[str, Any]) -> Tensor:
    """Return the unconstrained tensor of a ``pyro.param`` site."""
    value = site["value"]
    try:
        return value.unconstrained()
    except AttributeError:  # a parameter without a constraint is the tensor itself
        return value


def _of_module(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, Any]]:
    """Iterate over path, unconstrained tensor and constraint of each parameter."""
    for path, part in module.named_modules(prefix=prefix):
        constrained = part._pyro_params if isinstance(part, PyroModule) else {}
        for attribute, tensor in part.named_parameters(recurse=False):
            name = attribute.removesuffix("_unconstrained")
            constraint, _ = constrained.get(name, (constraints.real, None))
            yield f"{path}.{name}", tensor, constraint


@contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context in which the tensors require no gradients.

    ``poutine.block`` would hide them from the optimiser only, and let gradients accumulate on them.
    """
    frozen = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in frozen:
        tensor.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            # pyro.module warns of parameters that it has registered already.
            warnings.filterwarnings("ignore", ".* was not registered in the param store because requires_grad=False")
            yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(True)
