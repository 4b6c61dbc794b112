"""Encoders that multiply what each observed output says."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyro_lvgp.networks._encoder import Encoder, loc_and_scale, smallest_scale
from pyro_lvgp.networks._layers import network_per_output


class FactorNet(Encoder):
    r"""Encoder that multiplies Gaussians, one from each observed output.

    .. math::

        N(m_n, \sigma_n^2) \propto \prod_{p \in O_n} N\big(\mu_p(y_{np}),\, \lambda_p(y_{np})^{-1}\big), \qquad
        \sigma_n^{-2} = \sum_{p \in O_n} \lambda_p, \qquad m_n = \sigma_n^2 \sum_{p \in O_n} \lambda_p \mu_p

    where :math:`O_n` are the observed outputs of row n, the rest being missing (NaN).  Each output that is observed makes the
    scale smaller.  With none, loc is 0 and the scale ``finfo(dtype).tiny ** -0.2``, 4e7 in float32: 1 / scale² and its
    gradient neither vanish nor overflow.

    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param hidden_dims: sizes of the hidden layers of the network of each output.
    :param init_scale: the scale with all outputs observed where their networks give zero, and so about the initial one.
    :param activation: class of the activation between layers.
    :param loadings: weights W ``[D, Q]`` of a linear decoder to start from: each factor is at first what
        :math:`N(y_{np};\, W_{pq} f_{nq},\, s^2)` says of :math:`f_{nq}`, with s the ``init_scale``, and stays without
        a factor where :math:`W_{pq} = 0`.  An encoder that starts there need not learn first what the decoder does.
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
        super().__init__(data_dim, latent_dim, hidden_dims, init_scale)
        self.factors = network_per_output(data_dim, 2 * latent_dim, hidden_dims, activation)
        self.loadings_inverse = None
        if loadings is not None:
            self._start_from(loadings)

    def _start_from(self, loadings: Float[Tensor, "D Q"]) -> None:
        """Factors of a linear decoder, beside which the networks start at zero."""
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
        values, observed = self._observed(y)
        values = values[..., None]
        locs, scales = loc_and_scale(self.factors(values), self.init_scale * self.data_dim**0.5)
        told = observed[..., None]
        if self.loadings_inverse is not None:
            told = told & (self.relative_scale > 0.0)
            locs = locs + values * self.loadings_inverse
            scales = torch.where(told, scales * self.relative_scale, 1.0)
        precisions = torch.where(told, scales.square().reciprocal(), 0.0)
        precision = precisions.sum(-2).clamp_min(smallest_scale(y) ** 2)
        return (precisions * locs).sum(-2) / precision, precision.rsqrt()
