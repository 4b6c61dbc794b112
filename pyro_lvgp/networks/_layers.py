"""Layers that networks are made of."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn


def layers(
    sizes: Sequence[int], linear: Callable[[int, int], nn.Module] = nn.Linear, activation: type[nn.Module] = nn.SiLU
) -> list[nn.Module]:
    """Linear layers from size to size, with activations between them."""
    return [module for a, b in pairwise(sizes) for module in (linear(a, b), activation())][:-1]


class LinearPerOutput(nn.Module):
    """Linear layers, one for each output, initialised like ``nn.Linear``; with shared weights they differ in their biases."""

    def __init__(self, data_dim: int, in_dim: int, out_dim: int, *, share_weight: bool = False):
        super().__init__()
        bound = in_dim**-0.5
        self.weight = nn.Parameter(torch.empty(1 if share_weight else data_dim, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(data_dim, out_dim).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "*batch D in_dim"]) -> Float[Tensor, "*batch D out_dim"]:
        return torch.einsum("...di,dio->...do", x, self.weight) + self.bias


def network_per_output(data_dim: int, out_dim: int, hidden_dims: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """One network for each output, [*, D, 1] to [*, D, out_dim]."""
    return nn.Sequential(*layers([1, *hidden_dims, out_dim], partial(LinearPerOutput, data_dim), activation))
