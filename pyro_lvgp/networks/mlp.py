"""Fully connected networks."""

from collections.abc import Sequence

from torch import nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.networks._layers import layers

__all__ = ["MLP"]


class MLP(nn.Sequential, metaclass=AbstractModuleMeta):
    """Fully connected network.

    :param in_dim: size of the input.
    :param out_dim: size of the output.
    :param hidden_dims: sizes of the hidden layers.
    :param activation: class of the activation between layers.
    :raises ValueError: if a size is below 1.
    :raises TypeError: if a size is no integer.

    >>> import torch
    >>> MLP(3, 2, [16])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, in_dim: int, out_dim: int, hidden_dims: Sequence[int] = (64, 64), activation: type[nn.Module] = nn.SiLU
    ):
        check_sizes(in_dim=in_dim, out_dim=out_dim)
        super().__init__(*layers([in_dim, *hidden_dims, out_dim], activation=activation))
