"""Neural networks: inference networks for data with missing entries."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from pyro.nn import PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn


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

    >>> MLP(3, 2, [16])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, in_dim: int, out_dim: int, hidden_dims: Sequence[int] = (64, 64), activation: type[nn.Module] = nn.SiLU
    ):
        sizes = [in_dim, *hidden_dims]
        hidden = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), activation())]
        super().__init__(*hidden, nn.Linear(sizes[-1], out_dim))


class ZeroImputation(nn.Module):
    r"""Encoder that puts zero where an entry is missing and says so.

    :math:`(m_n, S_n) = \mathrm{MLP}(\tilde y_n, o_n)`, with :math:`\tilde y_{nd} = y_{nd}` and :math:`o_{nd} = 1` where
    observed, both zero where missing (NaN).

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers.
    :param covariance: ``"diagonal"`` returns loc and scale [*, Q]; ``"full"`` loc and scale_tril [*, Q, Q].

    >>> loc, scale = ZeroImputation(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: Ashman et al. (2020), "Sparse Gaussian process variational autoencoders", section 3.
    """

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (64, 64),
        *,
        covariance: Literal["diagonal", "full"] = "diagonal",
    ):
        super().__init__()
        self.latent_dim, self.covariance = latent_dim, covariance
        self._scale_size = latent_dim if covariance == "diagonal" else latent_dim * (latent_dim + 1) // 2
        self.net = MLP(2 * data_dim, latent_dim + self._scale_size, hidden_dims)

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Tensor]:
        observed = ~torch.isnan(y)
        output = self.net(torch.cat([torch.nan_to_num(y), observed.to(y)], -1))
        loc, scale = output.split([self.latent_dim, self._scale_size], -1)
        if self.covariance == "diagonal":
            return loc, nn.functional.softplus(scale)
        tril = scale.new_zeros(*scale.shape[:-1], self.latent_dim, self.latent_dim)
        rows, columns = torch.tril_indices(self.latent_dim, self.latent_dim, device=scale.device)
        tril[..., rows, columns] = torch.where(rows == columns, nn.functional.softplus(scale), scale)
        return loc, tril
