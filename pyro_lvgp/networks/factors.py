"""Encoder by a product of Gaussian factors, one for each observed output."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp.networks._layers import network_per_output
from pyro_lvgp.networks.base import Encoder, loc_and_scale, smallest_scale

__all__ = ["FactorNet"]


class FactorNet(Encoder):
    r"""Encoder by a product of Gaussian factors, one for each observed output.

    .. math::

        N(m_n, \sigma_n^2) \propto \prod_{p \in O_n} N\big(\mu_p(y_{np}),\, \lambda_p(y_{np})^{-1}\big), \qquad
        \sigma_n^{-2} = \sum_{p \in O_n} \lambda_p, \qquad m_n = \sigma_n^2 \sum_{p \in O_n} \lambda_p \mu_p

    where :math:`O_n` are the observed outputs of row n, the rest being missing (NaN).  Each observed output
    reduces the scale.  Without observed outputs loc is 0 and the scale ``finfo(dtype).tiny ** -0.2``, 4e7 in float32, for
    which 1 / scale² and its gradient neither vanish nor overflow.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers of the network of each output.
    :param init_scale: scale with all outputs observed where their networks return zero, and so approximately at
        initialisation.
    :param activation: class of the activation between layers.
    :param loadings: weights W ``[D, Q]`` of a linear decoder, for initialisation: each factor is then proportional to
        :math:`N(y_{np};\, W_{pq} f_{nq},\, s^2)` as a function of :math:`f_{nq}`, with s the ``init_scale``.  Where
        :math:`W_{pq} = 0` there is no factor, during training either.
    :raises ValueError: for a size below 1, an ``init_scale`` that is not positive, loadings that are all zero, not finite or
        of another shape, or data with another number of outputs.

    >>> loc, scale = FactorNet(4, 2)(torch.tensor([[1.0, 0.2, 0.5, 2.0], [1.0, torch.nan, 0.5, 2.0]]))
    >>> (scale[0] < scale[1]).tolist()
    [True, True]

    Source: eqs. 3.35 to 3.37 of the GP-VAE thesis; Vedantam et al. (2018), "Generative models of visually grounded
    imagination".
    """

    loadings_inverse: Tensor | None
    relative_scale: Tensor

    def __init__(
        self,
        data_dim: int,
        latent_dim: int,
        hidden_dims: Sequence[int] = (20, 20),
        *,
        init_scale: float = 0.5,
        activation: type[nn.Module] = nn.SiLU,
        loadings: Float[Tensor, "D Q"] | None = None,
    ):
        super().__init__(data_dim, latent_dim, init_scale)
        self.factors = network_per_output(data_dim, 2 * latent_dim, hidden_dims, activation)
        self.loadings_inverse = None
        if loadings is not None:
            self._init_from_loadings(loadings)

    def _init_from_loadings(self, loadings: Float[Tensor, "D Q"]) -> None:
        """Initialise the factors from a linear decoder, and the networks, which are added to them, at zero."""
        shape = (self.data_dim, self.latent_dim)
        if loadings.shape != shape or not (loadings.isfinite().all() and loadings.any()):
            raise ValueError(
                f"expected loadings of shape {list(shape)}, finite and not all zero, got {list(loadings.shape)}: {loadings}; "
                "give the weights of a linear decoder, such as decoder.weight"
            )
        inverse = torch.where(loadings == 0.0, 0.0, loadings.detach().reciprocal())
        self.loadings_inverse = nn.Parameter(inverse)
        self.register_buffer("relative_scale", self.data_dim**-0.5 * inverse.abs())
        for parameter in self.factors[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, y: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, "*batch Q"], Float[Tensor, "*batch Q"]]:
        values, observed = self.split_missing(y)
        values = values[..., None]
        locs, scales = loc_and_scale(self.factors(values), self.init_scale * self.data_dim**0.5)
        has_factor = observed[..., None]
        if self.loadings_inverse is not None:
            has_factor = has_factor & (self.relative_scale > 0.0)
            locs = locs + values * self.loadings_inverse
            scales = torch.where(has_factor, scales * self.relative_scale, 1.0)
        precisions = torch.where(has_factor, scales.square().reciprocal(), 0.0)
        precision = precisions.sum(-2).clamp_min(smallest_scale(y) ** 2)
        return (precisions * locs).sum(-2) / precision, precision.rsqrt()
