"""Inference networks of sites on inducing values, from data and their distances to the inducing points."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.validation import check_init_scale, check_sizes
from pyro_lvgp.networks.base import loc_and_scale, smallest_scale
from pyro_lvgp.networks.mlp import MLP

__all__ = ["NeighbourNet", "OffsetNet"]


class OffsetNet(nn.Module, metaclass=AbstractModuleMeta):
    r"""Encoder of the sites of each datum on the values at its T nearest inducing points.

    .. math::

        (m_n, s_n) = \mathrm{encoder}(y_n), \qquad
        (\mu_{nm}, \sigma_{nm}) = \mathrm{MLP}\big(z_m - x_n,\; m_n,\; \tfrac12 \log(1 + s_n^{-2})\big)

    Sites :math:`N(u_{mk}; \mu_{nmk}, \sigma_{nmk}^2)` on the inducing values multiply over n.  The nearest inducing
    points of a datum are those of highest prior correlation.

    :param encoder: a module that maps data ``[*, N, D]``, NaN where missing, to loc and scale ``[*, N, F]``, such as an
        :class:`~pyro_lvgp.networks.IndexNet`; F may be any number.
    :param feature_dim: number of features F.
    :param input_dim: number of input columns P.
    :param latent_dim: number of processes Q.
    :param num_nearest: T; all inducing points if there are fewer.
    :param hidden_dims: sizes of the hidden layers.
    :param init_scale: scale of the sites where the network returns zero, and so approximately at initialisation; a small one
        keeps the posterior from collapsing onto the prior early in training.
    :raises ValueError: for a size below 1, or an ``init_scale`` that is not positive.

    >>> from pyro_lvgp.networks import IndexNet
    >>> net = OffsetNet(IndexNet(4, 8), 8, input_dim=1, latent_dim=2, num_nearest=5)
    >>> loc, scale = net(torch.randn(10, 4), torch.randn(10, 5, 1))
    >>> loc.shape
    torch.Size([10, 5, 2])

    Source: eq. 3.43 of the GP-VAE thesis.
    """

    def __init__(
        self,
        encoder: nn.Module,
        feature_dim: int,
        *,
        input_dim: int,
        latent_dim: int,
        num_nearest: int = 20,
        hidden_dims: Sequence[int] = (50, 50),
        init_scale: float = 0.5,
    ):
        super().__init__()
        check_sizes(feature_dim=feature_dim, input_dim=input_dim, latent_dim=latent_dim, num_nearest=num_nearest)
        check_init_scale(init_scale)
        self.encoder, self.num_nearest, self.init_scale = encoder, num_nearest, init_scale
        self.net = MLP(input_dim + 2 * feature_dim, 2 * latent_dim, hidden_dims)

    def forward(
        self, y: Float[Tensor, "*#batch N D"], offset: Float[Tensor, "*#batch N T P"]
    ) -> tuple[Float[Tensor, "*batch N T Q"], Float[Tensor, "*batch N T Q"]]:
        """Compute loc and scale of the sites.

        :param y: data, NaN where missing.
        :param offset: z_m − x_n for the T inducing points m of each datum.
        """
        loc, scale = self.encoder(y)
        return loc_and_scale(self.net(_pairs(offset, loc, _information(scale))), self.init_scale)


class NeighbourNet(nn.Module, metaclass=AbstractModuleMeta):
    r"""Encoder of the sites of each datum on its own function values, one for each of its T nearest inducing points.

    .. math::

        N(f_{nk};\, m_{nk}, s_{nk}^2) = \mathrm{encoder}(y_n), \qquad
        (\delta_{nm}, \epsilon_{nm}) = \mathrm{MLP}\big(z_m - x_n,\; m_n,\; \tfrac12 \log(1 + s_n^{-2})\big), \qquad
        N\big(f_{nk};\; m_{nk} + \delta_{nmk},\; T s_{nk}^2 e^{2 \epsilon_{nmk}}\big)

    The guide transfers each site to its inducing value through :math:`p(f_{nk} \mid u_{mk})`, so that the kernel determines
    the range of its influence.  The network is zero at initialisation: T equal sites then have the precision of one site of
    the encoder.

    :param encoder: a module that maps data ``[*, N, D]``, NaN where missing, to loc and scale ``[*, N, Q]``, such as an
        :class:`~pyro_lvgp.networks.IndexNet`.
    :param input_dim: number of input columns P.
    :param latent_dim: number of processes Q.
    :param num_nearest: T; all inducing points if there are fewer.  The nearest ones have the highest prior correlation.
    :param hidden_dims: sizes of the hidden layers.
    :raises ValueError: for a size below 1, or an encoder of another number of processes.

    >>> from pyro_lvgp.networks import IndexNet
    >>> net = NeighbourNet(IndexNet(4, 2), input_dim=1, latent_dim=2, num_nearest=5)
    >>> loc, scale = net(torch.randn(10, 4), torch.randn(10, 5, 1))
    >>> loc.shape
    torch.Size([10, 5, 2])

    Source: eq. 3.43 of the GP-VAE thesis, with the prior conditional in place of a learned function of the offset.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        input_dim: int,
        latent_dim: int,
        num_nearest: int = 20,
        hidden_dims: Sequence[int] = (50,),
    ):
        super().__init__()
        check_sizes(input_dim=input_dim, latent_dim=latent_dim, num_nearest=num_nearest)
        self.encoder, self.latent_dim, self.num_nearest = encoder, latent_dim, num_nearest
        self.net = MLP(input_dim + 2 * latent_dim, 2 * latent_dim, hidden_dims)
        for parameter in self.net[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, y: Float[Tensor, "*#batch N D"], offset: Float[Tensor, "*#batch N T P"]
    ) -> tuple[Float[Tensor, "*batch N T Q"], Float[Tensor, "*batch N T Q"]]:
        """Compute loc and scale of the sites on f, one for each of the T inducing points.

        :param y: data, NaN where missing.
        :param offset: z_m − x_n for the T inducing points m of each datum.
        :raises ValueError: if the encoder is for another number of processes.
        """
        loc, scale = self.encoder(y)
        if loc.shape[-1] != self.latent_dim:
            raise ValueError(f"expected an encoder of latent_dim={self.latent_dim} processes, got one of {loc.shape[-1]}")
        shift, log_factor = self.net(_pairs(offset, loc, _information(scale))).chunk(2, -1)
        site_scale = offset.shape[-2] ** 0.5 * scale.unsqueeze(-2) * log_factor.exp()
        return loc.unsqueeze(-2) + shift, site_scale.clamp_min(smallest_scale(scale))


def _information(scale: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
    """Compute ½ log(1 + s⁻²), the information of a site, which is 0 for a site without any; −log s would be unbounded."""
    return 0.5 * torch.log1p(scale.square().reciprocal())


def _pairs(
    offset: Float[Tensor, "*#batch N T P"], *features: Float[Tensor, "*#batch N F"]
) -> Float[Tensor, "*batch N T P_and_all_F"]:
    """Concatenate each offset with the features of its datum."""
    of_datum = torch.cat(features, -1).unsqueeze(-2)
    lead = torch.broadcast_shapes(of_datum.shape[:-1], offset.shape[:-1])
    return torch.cat([offset.expand(*lead, -1), of_datum.expand(*lead, -1)], -1)
