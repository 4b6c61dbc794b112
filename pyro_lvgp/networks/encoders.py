"""Encoders of data with missing entries: zero imputation, and sums of features of observed entries."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.networks._layers import LinearPerOutput, layers, network_per_output
from pyro_lvgp.networks.base import Encoder, loc_and_scale, positive
from pyro_lvgp.networks.mlp import MLP

__all__ = ["IndexNet", "PointNet", "ZeroImputation"]


class ZeroImputation(Encoder):
    r"""Encoder of the data with zeros for missing entries, and of the mask of observed entries.

    :math:`(m_n, S_n) = \mathrm{MLP}(\tilde y_n, o_n)`, with :math:`\tilde y_{nd} = y_{nd}` and :math:`o_{nd} = 1` where
    observed, both zero where missing (NaN).

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers.
    :param covariance: ``"diagonal"`` returns loc and scale [*, Q]; ``"full"`` loc and scale_tril [*, Q, Q].
    :param init_scale: scale, or diagonal of scale_tril, where the network returns zero, and so approximately at
        initialisation.
    :param activation: class of the activation between layers.
    :raises ValueError: for a size below 1, another covariance, an ``init_scale`` that is not positive, or data with another
        number of outputs.

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
        init_scale: float = 0.7,
        activation: type[nn.Module] = nn.SiLU,
    ):
        super().__init__(data_dim, latent_dim, init_scale)
        if covariance not in ("diagonal", "full"):
            raise ValueError(f'expected covariance "diagonal" or "full", got {covariance!r}')
        self.covariance = covariance
        self._scale_size = latent_dim if covariance == "diagonal" else latent_dim * (latent_dim + 1) // 2
        self.net = MLP(2 * data_dim, latent_dim + self._scale_size, hidden_dims, activation)

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Tensor]:
        values, observed = self.split_missing(y)
        output = self.net(torch.cat([values, observed.to(y)], -1))
        if self.covariance == "diagonal":
            return loc_and_scale(output, self.init_scale)
        loc, scale = output.split([self.latent_dim, self._scale_size], -1)
        tril = scale.new_zeros(*scale.shape[:-1], self.latent_dim, self.latent_dim)
        rows, columns = torch.tril_indices(self.latent_dim, self.latent_dim, device=scale.device)
        tril[..., rows, columns] = torch.where(rows == columns, positive(scale, self.init_scale), scale)
        return loc, tril


class _SumNet(Encoder):
    """Network ``rho`` of the sum, over observed outputs, of their features ``h``.

    The sum is divided by √D, so that the initial scale is near ``init_scale`` for many outputs too.
    """

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (20,),
        *,
        feature_dim: int = 20,
        init_scale: float = 0.5,
        activation: type[nn.Module] = nn.SiLU,
    ):
        super().__init__(data_dim, latent_dim, init_scale)
        check_sizes(feature_dim=feature_dim)
        self.h = self._make_h(hidden_dims, feature_dim, activation)
        self.rho = MLP(feature_dim, 2 * latent_dim, hidden_dims, activation)

    @abstractmethod
    def _make_h(self, hidden_dims: Sequence[int], feature_dim: int, activation: type[nn.Module]) -> nn.Sequential:
        """Create the network h of each entry, from [*, D, 1] to [*, D, feature_dim]."""

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
        values, observed = self.split_missing(y)
        features = self.h(values[..., None])
        total = torch.where(observed[..., None], features, 0.0).sum(-2) / self.data_dim**0.5
        return loc_and_scale(self.rho(total), self.init_scale)


class PointNet(_SumNet):
    r"""Encoder by a sum of features of the observed entries, with one network for all outputs and an embedding of each.

    :math:`(m_n, \sigma_n) = \rho\big(D^{-1/2} \sum_{p \in O_n} h(p, y_{np})\big)`, where :math:`O_n` are the observed outputs
    of row n, the rest being missing (NaN).  The first layer of h is :math:`w y_{np} + e_p` with a learned embedding
    :math:`e_p` of output p.  The encoder is invariant to permutations of the outputs together with their embeddings.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers of h, and of ρ.
    :param feature_dim: number of features that h returns.
    :param init_scale: scale where ρ returns zero, and so approximately at initialisation.
    :param activation: class of the activation between layers.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = PointNet(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: eqs. 3.32 and 3.33 of the GP-VAE thesis, whose h takes the number p itself; Ma et al. (2019), "EDDI: Efficient
    dynamic discovery of high-value information with partial VAE", for embeddings.
    """

    def _make_h(self, hidden_dims: Sequence[int], feature_dim: int, activation: type[nn.Module]) -> nn.Sequential:
        sizes = [1, *hidden_dims, feature_dim]
        h = nn.Sequential(*layers(sizes, activation=activation))
        h[0] = LinearPerOutput(self.data_dim, 1, sizes[1], share_weight=True)
        return h


class IndexNet(_SumNet):
    r"""Encoder by a sum of features of the observed entries, with a network for each output.

    :math:`(m_n, \sigma_n) = \rho\big(D^{-1/2} \sum_{p \in O_n} h_p(y_{np})\big)`, where :math:`O_n` are the observed outputs
    of row n, the rest being missing (NaN).

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers of each h_p, and of ρ.
    :param feature_dim: number of features that each h_p returns.
    :param init_scale: scale where ρ returns zero, and so approximately at initialisation.
    :param activation: class of the activation between layers.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, or data with another number of outputs.

    >>> loc, scale = IndexNet(4, 2)(torch.tensor([[1.0, torch.nan, 0.5, 2.0]]))
    >>> loc.shape, scale.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))

    Source: eqs. 3.32 and 3.34 of the GP-VAE thesis; Ashman et al. (2020), section 3.
    """

    def _make_h(self, hidden_dims: Sequence[int], feature_dim: int, activation: type[nn.Module]) -> nn.Sequential:
        return network_per_output(self.data_dim, feature_dim, hidden_dims, activation)
