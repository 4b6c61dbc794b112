"""Inference networks for inducing points, from where data lie and what is observed there."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp._utils.validation import check_init_scale, check_sizes
from pyro_lvgp.networks._encoder import loc_and_scale, smallest_scale
from pyro_lvgp.networks.mlp import MLP


class OffsetNet(nn.Module):
    r"""Encoder of what a datum says about each of the T inducing points nearest to it.

    .. math::

        (m_n, s_n) = \mathrm{encoder}(y_n), \qquad
        (\mu_{nm}, \sigma_{nm}) = \mathrm{MLP}\big(z_m - x_n,\; m_n,\; \tfrac12 \log(1 + s_n^{-2})\big)

    Sites :math:`N(u_{mk}; \mu_{nmk}, \sigma_{nmk}^2)` on the inducing values multiply over n.  "Nearest" are those with the
    highest prior correlation, which for a periodic kernel is after the map onto its circle.

    :param encoder: a module that maps data ``[*, N, D]``, NaN where missing, to loc and scale ``[*, N, F]``, such as an
        :class:`~pyro_lvgp.networks.IndexNet`; F may be any number.
    :param feature_dim: number of features F.
    :param input_dim: number of input columns P.
    :param latent_dim: number of processes Q.
    :param num_nearest: T; all inducing points if there are fewer.
    :param hidden_dims: sizes of the hidden layers.
    :param init_scale: the scale where the network gives zero, and so about the initial one; a small one keeps the posterior
        from collapsing onto the prior before the decoder has learned anything.
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
        """Loc and scale of the sites.

        :param y: data, NaN where missing.
        :param offset: z_m − x_n for the inducing points m to speak of.
        """
        loc, scale = self.encoder(y)
        return loc_and_scale(self.net(_pairs(offset, loc, _known(scale))), self.init_scale)


class NeighbourNet(nn.Module):
    r"""Encoder of what a datum says about its own function values, as each of the T inducing points nearest to it is told.

    .. math::

        N(f_{nk};\, m_{nk}, s_{nk}^2) = \mathrm{encoder}(y_n), \qquad
        (\delta_{nm}, \epsilon_{nm}) = \mathrm{MLP}\big(z_m - x_n,\; m_n,\; \tfrac12 \log(1 + s_n^{-2})\big), \qquad
        N\big(f_{nk};\; m_{nk} + \delta_{nmk},\; T s_{nk}^2 e^{2 \epsilon_{nmk}}\big)

    The guide takes each of them to its inducing value through :math:`p(f_{nk} \mid u_{mk})`, so that the kernel says how far a
    datum reaches.  The network starts at zero, where T points share what the datum knows, and learns what is wrong with that.

    :param encoder: a module that maps data ``[*, N, D]``, NaN where missing, to loc and scale ``[*, N, Q]``, such as an
        :class:`~pyro_lvgp.networks.IndexNet`.
    :param input_dim: number of input columns P.
    :param latent_dim: number of processes Q.
    :param num_nearest: T; all inducing points if there are fewer.  "Nearest" are those with the highest prior correlation.
    :param hidden_dims: sizes of the hidden layers.
    :raises ValueError: for a size below 1, or an encoder of another number of processes.

    >>> from pyro_lvgp.networks import IndexNet
    >>> net = NeighbourNet(IndexNet(4, 2), input_dim=1, latent_dim=2, num_nearest=5)
    >>> loc, scale = net(torch.randn(10, 4), torch.randn(10, 5, 1))
    >>> loc.shape
    torch.Size([10, 5, 2])

    Source: eq. 3.43 of the GP-VAE thesis, with the conditional of the prior in place of what the network must learn there.
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
        """Loc and scale of the sites on f, one for each inducing point to tell.

        :param y: data, NaN where missing.
        :param offset: z_m − x_n for the inducing points m to speak to.
        :raises ValueError: if the encoder is for another number of processes.
        """
        loc, scale = self.encoder(y)
        if loc.shape[-1] != self.latent_dim:
            raise ValueError(f"expected an encoder of latent_dim={self.latent_dim} processes, got one of {loc.shape[-1]}")
        shift, log_factor = self.net(_pairs(offset, loc, _known(scale))).chunk(2, -1)
        told = offset.shape[-2] ** 0.5 * scale.unsqueeze(-2) * log_factor.exp()
        return loc.unsqueeze(-2) + shift, told.clamp_min(smallest_scale(scale))


def _known(scale: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
    """How much is known, ½ log(1 + s⁻²): 0 where nothing is, where log s would dwarf a network's other inputs."""
    return 0.5 * torch.log1p(scale.square().reciprocal())


def _pairs(
    offset: Float[Tensor, "*#batch N T P"], *features: Float[Tensor, "*#batch N F"]
) -> Float[Tensor, "*batch N T P_and_all_F"]:
    """Offsets, and beside each the features of its datum."""
    of_datum = torch.cat(features, -1).unsqueeze(-2)
    lead = torch.broadcast_shapes(of_datum.shape[:-1], offset.shape[:-1])
    return torch.cat([offset.expand(*lead, -1), of_datum.expand(*lead, -1)], -1)
