"""Score of a target as a function of one tensor of all coordinates, whose derivatives are those of autograd."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_lvgp.guides.annealed.transitions import Coordinates

Evaluated = tuple[Tensor, Tensor]  # a position and its score, with a graph


@dataclass(frozen=True)
class AutogradScore:
    """Score of :func:`~pyro_lvgp.ops.langevin.langevin_chain` by a function of the coordinates of each site.

    The score at each position is a differentiable tensor that the chain is a function of.  Autograd derives whatever else the
    function reads from these tensors.

    :param score: z ↦ ∇ log p(z).
    :param shapes: shape of the coordinates of each site.
    """

    score: Callable[[Coordinates], Coordinates]
    shapes: Sequence[torch.Size]

    def evaluate(self, X: Tensor) -> tuple[Tensor, Evaluated]:
        """Compute the score.

        :param X: coordinates of all sites.
        """
        with torch.enable_grad():
            X = X.detach().requires_grad_()
            score = joined(self.score(split(X, self.shapes)))
        return score.detach(), (X, score)

    def tensors(self, evaluated: Sequence[Evaluated]) -> Coordinates:
        """Return the scores."""
        return tuple(score for _, score in evaluated)

    def pull_back(self, at: Evaluated, bar: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the derivative of a loss by the coordinates, given that by the score."""
        X, score = at
        if not score.requires_grad:
            return torch.zeros_like(bar), bar
        (X_bar,) = torch.autograd.grad(score, X, bar, retain_graph=True, materialize_grads=True)
        return X_bar, bar

    def gradients(self, evaluated: Sequence[Evaluated], bars: Sequence[Tensor]) -> Coordinates:
        """Return the derivatives by the scores."""
        return tuple(bars)


def joined(parts: Coordinates, start_dim: int = 0) -> Tensor:
    """Concatenate the coordinates of several sites as one vector; those of one site stay as they are.

    :param parts: coordinates of each site.
    :param start_dim: first of the dimensions that become one.
    """
    return parts[0] if len(parts) == 1 else torch.cat([x.reshape(*x.shape[:start_dim], -1) for x in parts], start_dim)


def split(x: Tensor, shapes: Sequence[torch.Size]) -> Coordinates:
    """Return the coordinates of each site.

    :param x: result of :func:`joined`.
    :param shapes: shape of the coordinates of each site.
    """
    if len(shapes) == 1:
        return (x,)
    parts = x.split([shape.numel() for shape in shapes])
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
