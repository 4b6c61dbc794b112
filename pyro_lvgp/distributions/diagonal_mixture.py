"""Mixtures of diagonal Gaussians with reparameterised samples."""

import torch
from pyro.distributions import Normal, TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Independent, kl_divergence, register_kl

from pyro_lvgp._utils.argument_types import checks_types, names_types

__all__ = ["DiagonalMixture", "assignment_logits"]


class DiagonalMixture(TorchDistribution):
    r"""Mixture of diagonal Gaussians ``Σ_c w_c N(μ_c, diag σ_c²)`` with pathwise gradients of samples in all parameters.

    Gradients are those of implicit reparameterisation, which keeps the conditional distribution functions
    :math:`F_q(z_q \mid z_{<q})` of a sample constant: :math:`dz_q = -dF_q / p(z_q \mid z_{<q})`.

    :param logits: logarithms of the weights up to a constant, ``[*batch, C]``.
    :param locs: means ``[*#batch, C, Q]``.
    :param scales: standard deviations ``[*#batch, C, Q]``.

    The KL of two mixtures is that of the joint distributions with the component z,
    ``Σ_c w_c [log w_c − log w'_c + KL(N_c ‖ N'_c)]``, an upper bound on the KL of the mixtures.  For a single
    Gaussian q it is ``−log Σ_c w'_c exp(−KL(N ‖ N'_c))``, the value at the optimal q(z).

    Source: Figurnov, Mohamed and Mnih (2018), "Implicit reparameterization gradients"; Hershey and Olsen (2007),
    "Approximating the Kullback Leibler divergence between Gaussian mixture models", section 8.

    >>> mixture = DiagonalMixture(torch.zeros(2), torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1))
    >>> mixture.mean, mixture.variance
    (tensor([0.]), tensor([10.]))
    """

    arg_constraints = {  # noqa: RUF012
        "logits": constraints.real_vector,
        "locs": constraints.independent(constraints.real, 2),
        "scales": constraints.independent(constraints.positive, 2),
    }
    support = constraints.real_vector
    has_rsample = True

    @checks_types
    def __init__(self, logits: Tensor, locs: Tensor, scales: Tensor, validate_args: bool | None = None):
        locs, scales = torch.broadcast_tensors(locs, scales)
        batch_shape = torch.broadcast_shapes(logits.shape[:-1], locs.shape[:-2])
        self.logits, self.locs, self.scales = logits.log_softmax(-1), locs, scales
        super().__init__(batch_shape, locs.shape[-1:], validate_args=validate_args)

    @property
    def weights(self) -> Tensor:
        """Weights of the components."""
        return self.logits.exp()

    @property
    def mean(self) -> Tensor:
        return (self.weights[..., None] * self.locs).sum(-2).expand(self.shape())

    @property
    def variance(self) -> Tensor:
        second = (self.weights[..., None] * (self.locs.square() + self.scales.square())).sum(-2)
        return second.expand(self.shape()) - self.mean.square()

    def expand(self, batch_shape, _instance=None):
        batch_shape = torch.Size(batch_shape)
        logits = self.logits.expand(*batch_shape, self.logits.shape[-1])
        # The components are not expanded: their KLs are the same for the whole batch.
        expanded = DiagonalMixture(logits, self.locs, self.scales, validate_args=False)
        expanded._validate_args = self._validate_args
        return expanded

    def log_prob(self, value):
        if self._validate_args:
            self._validate_sample(value)
        return (self.logits + self._components().log_prob(value.unsqueeze(-2)).sum(-1)).logsumexp(-1)

    def rsample(self, sample_shape=()):
        with torch.no_grad():
            fixed = self._draw(torch.Size(sample_shape))
        if not (self.logits.requires_grad or self.locs.requires_grad or self.scales.requires_grad):
            return fixed
        # Log weights of the components given the previous coordinates, with the gradients of these.
        log_weights, z = self.logits, []
        for q in range(self.event_shape[0]):
            component = Normal(self.locs[..., q], self.scales[..., q], validate_args=False)
            value = fixed[..., q : q + 1]
            weights = log_weights.softmax(-1)
            distribution = (weights * component.cdf(value)).sum(-1)
            density = (weights * component.log_prob(value).exp()).sum(-1).detach()
            z_q = fixed[..., q] - (distribution - distribution.detach()) / density.clamp_min(torch.finfo(density.dtype).tiny)
            log_weights = log_weights + component.log_prob(z_q.unsqueeze(-1))
            z.append(z_q)
        return torch.stack(z, -1)

    def _draw(self, sample_shape: torch.Size) -> Tensor:
        shape = sample_shape + self.batch_shape
        which = torch.distributions.Categorical(logits=self.logits.expand(*self.batch_shape, -1)).sample(sample_shape)
        index = which[..., None, None].expand(*shape, 1, *self.event_shape)
        loc, scale = (x.expand(*shape, *x.shape[-2:]).gather(-2, index).squeeze(-2) for x in (self.locs, self.scales))
        return loc + scale * torch.randn_like(loc)

    def _components(self) -> Normal:
        return Normal(self.locs, self.scales, validate_args=False)


@register_kl(DiagonalMixture, DiagonalMixture)
def _kl_mixtures(q, p):
    components = kl_divergence(q._components(), p._components()).sum(-1)
    return torch.xlogy(q.weights, q.weights).sum(-1) + (q.weights * (components - p.logits)).sum(-1)


@register_kl(Independent, DiagonalMixture)
def _kl_gaussian_mixture(q, p):
    if not isinstance(q.base_dist, torch.distributions.Normal) or q.reinterpreted_batch_ndims != 1:
        raise NotImplementedError
    return -assignment_logits(q.base_dist.loc, q.base_dist.scale, p).logsumexp(-1)


@names_types
def assignment_logits(loc: Tensor, scale: Tensor, mixture: DiagonalMixture) -> Tensor:
    """Compute ``log w_c − KL(N(loc, scale²) ‖ N_c)``, the logits of the optimal component probabilities of a Gaussian.

    :param loc: means ``[*batch, Q]`` of the Gaussians.
    :param scale: standard deviations of the Gaussians.
    :param mixture: the mixture.

    >>> two = DiagonalMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1))
    >>> assignment_logits(torch.ones(1), torch.ones(1), two).softmax(-1)  # e⁻² to 1
    tensor([0.1192, 0.8808])
    """
    gaussian = Normal(loc.unsqueeze(-2), scale.unsqueeze(-2), validate_args=False)
    return mixture.logits - kl_divergence(gaussian, mixture._components()).sum(-1)
