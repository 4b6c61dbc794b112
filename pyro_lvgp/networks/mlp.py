"""Networks for any use."""

from collections.abc import Sequence

from pyro.nn import PyroParam
from pyro.nn.module import to_pyro_module_
from torch import nn

from pyro_lvgp.networks._layers import layers


def as_pyro_module(network: nn.Module) -> nn.Module:
    """Make a network, in place, a ``PyroModule`` whose parameters are all ``PyroParam``.

    Plain ``nn.Parameter`` inside a guide fail under Pyro's setting ``module_local_params``.

    >>> net = as_pyro_module(MLP(3, 2))
    >>> [name for name, _ in net.named_parameters()][0]
    '0.weight_unconstrained'
    """
    to_pyro_module_(network)
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not name.endswith("_unconstrained"):
                setattr(module, name, PyroParam(parameter.detach()))
    return network


class MLP(nn.Sequential):
    """Fully connected network.

    :param in_dim: size of the input.
    :param out_dim: size of the output.
    :param hidden_dims: sizes of the hidden layers.
    :param activation: class of the activation between layers.

    >>> import torch
    >>> MLP(3, 2, [16])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, in_dim: int, out_dim: int, hidden_dims: Sequence[int] = (64, 64), activation: type[nn.Module] = nn.SiLU
    ):
        super().__init__(*layers([in_dim, *hidden_dims, out_dim], activation=activation))
