"""Models whose parameters stay as they are while a guide is fitted, and data that are simulated from them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import nn

MakeGuide = Callable[..., Any]


def fixed_copy(model: Callable[..., Any]) -> Any:
    """Return a copy of a module with parameters that require no gradients; a function is returned as it is.

    :param model: a model.
    """
    return deepcopy(model).requires_grad_(False) if isinstance(model, nn.Module) else model


def simulate(model: Callable[..., Any], inputs: tuple[Any, ...]) -> Trace:
    """Trace a model without data.

    :param model: a model, called with the inputs, and None in place of the data.
    :param inputs: arguments before the data.
    :raises ValueError: for a function with parameters, which a fit would change.
    """
    with torch.no_grad(), poutine.block():
        trace = prune_subsample_sites(poutine.trace(model).get_trace(*inputs, None))
    if isinstance(model, nn.Module):
        model.requires_grad_(False)  # Pyro's param store sets requires_grad of a parameter when it registers it
    elif parameters := [name for name, site in trace.nodes.items() if site["type"] == "param"]:
        raise ValueError(
            f"expected a module, or a function without pyro.param, whose parameters can be kept as they are, got parameters "
            f"{parameters} of a function; give them priors, or write the model as a PyroModule"
        )
    return trace


def fit_guide(make_guide: MakeGuide, model: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return a new guide of a model, fitted to data.

    :param make_guide: function of the model and the data.
    :param model: a model, from :func:`fixed_copy`.
    :param args: its arguments, the data last.
    :raises ValueError: if the parameters of the model change.
    """
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    guide = make_guide(model, *args)
    if changed := [name for name, tensor in parameters.items() if not torch.equal(tensor.detach(), before[name])]:
        raise ValueError(
            f"expected make_guide to leave the parameters of the model as they are, got changes of {changed}; fit the guide "
            "by pyro_lvgp.infer.fit, which trains no parameter that requires no gradient, and do not initialize the model"
        )
    return guide
