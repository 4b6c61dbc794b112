"""Layers of networks."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp._utils.validation import check_sizes


def layers(
    sizes: Sequence[int], linear: Callable[[int, int], nn.Module] = nn.Linear, activation: type[nn.Module] = nn.SiLU
) -> list[nn.Module]:
    """Create linear layers of the given sizes, with activations between them."""
    check_sizes(hidden_dims=min(sizes[1:-1], default=1))
    return [module for a, b in pairwise(sizes) for module in (linear(a, b), activation())][:-1]


class LinearPerOutput(nn.Module):
    """Linear layer for each output, initialised as ``nn.Linear``.

    :param data_dim: number of outputs D.
    :param in_dim: size of the input of each output.
    :param out_dim: size of the result of each output.
    :param share_weight: whether the layers differ in their biases only.
    """

    def __init__(self, data_dim: int, in_dim: int, out_dim: int, *, share_weight: bool = False):
        super().__init__()
        bound = in_dim**-0.5
        self.weight = nn.Parameter(torch.empty(1 if share_weight else data_dim, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(data_dim, out_dim).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "*batch D in_dim"]) -> Float[Tensor, "*batch D out_dim"]:
        return torch.einsum("...di,dio->...do", x, self.weight) + self.bias


def network_per_output(data_dim: int, out_dim: int, hidden_dims: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Create one network for each output, from [*, D, 1] to [*, D, out_dim]."""
    return nn.Sequential(*layers([1, *hidden_dims, out_dim], partial(LinearPerOutput, data_dim), activation))
