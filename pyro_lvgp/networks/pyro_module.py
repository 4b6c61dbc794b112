"""Networks as parts of Pyro models and guides."""

from typing import Any

from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.unique_names import take_unique_name

__all__ = ["adopt", "as_pyro_module", "replace_parameter"]


@names_types
def as_pyro_module(network: nn.Module) -> Any:
    """Convert a network in place to a ``PyroModule`` whose parameters are ``PyroParam``; frozen parameters stay frozen.

    Parameters of type ``nn.Parameter`` inside a guide fail under Pyro's setting ``module_local_params``.  Names in Pyro's
    param store begin with a unique name, and calls outside models, guides and handlers leave the store alone.  Call the
    function on copies of a network too, so that they have names of their own.

    :param network: any module.
    :raises ValueError: if two modules share a parameter, which Pyro would register under two names.

    >>> from pyro_lvgp.networks import MLP
    >>> net = as_pyro_module(MLP(3, 2))
    >>> [name for name, _ in net.named_parameters()][0]
    '0.weight_unconstrained'
    """
    module: Any = network  # a PyroModule after the conversion
    _convert(module)
    take_unique_name(module, only_in_pyro=True)
    return module


def _convert(network: Any) -> None:
    """Convert a network in place, as a part of another module or not."""
    to_pyro_module_(network)
    names: dict[int, str] = {}
    for place, module in network.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not name.endswith("_unconstrained"):
                path = f"{place}.{name}".lstrip(".")
                if id(parameter) in names:
                    raise ValueError(
                        f"expected a parameter in one module only, got one shared by {names[id(parameter)]!r} and {path!r}; "
                        "use one module twice, or read the parameter of the other module in forward"
                    )
                names[id(parameter)] = path
                setattr(module, name, PyroParam(parameter.detach()))
                getattr(module, f"{name}_unconstrained").requires_grad_(parameter.requires_grad)


def adopt(owner: PyroModule, name: str, network: nn.Module) -> None:
    """Assign a network, converted by :func:`as_pyro_module`, to an attribute of a model or a guide.

    :param owner: the model or guide.
    :param name: name of the attribute; dots separate nested modules.
    :param network: any module.
    :raises ValueError: if the network has run as a part of another module.
    """
    try:
        _convert(network)
        deep_setattr(owner, name, network)
    except AssertionError as error:  # Pyro cannot rename parts that have run
        raise ValueError(
            f"expected a module of its own for each model and guide, got a {type(network).__name__} that has run elsewhere; "
            "make a new one, and copy the learned parameters by its load_state_dict(...)"
        ) from error


@names_types
def replace_parameter(owner: PyroModule, name: str, value: Tensor) -> None:
    """Replace a ``PyroParam`` by a value that may have another shape; it stays frozen if it was.

    :param owner: module with the parameter.
    :param name: name of the parameter.
    :param value: the new value, which is copied to the dtype and device of the old one.
    :raises ValueError: for another name.

    >>> import torch
    >>> module = PyroModule()
    >>> module.points = PyroParam(torch.zeros(2, 1))
    >>> replace_parameter(module, "points", torch.ones(3, 1))
    >>> module.points.shape
    torch.Size([3, 1])
    """
    if name not in owner._pyro_params:
        raise ValueError(f"expected the name of a PyroParam, one of {list(owner._pyro_params)}, got {name!r}")
    constraint, _ = owner._pyro_params[name]
    old = getattr(owner, f"{name}_unconstrained")
    setattr(owner, name, PyroParam(value.detach().to(old, copy=True), constraint))
    getattr(owner, f"{name}_unconstrained").requires_grad_(old.requires_grad)
