"""Ordinal likelihood, for ordered levels such as answers from "never" to "always"."""

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions import constraints
from torch import Tensor
from torch.special import ndtr, ndtri

from pyro_lvgp._utils.validation import check_data, check_not_empty, check_values
from pyro_lvgp.likelihoods.base import WithParameter
from pyro_lvgp.ops.ordered_probit import expected_log_interval, log_interval

__all__ = ["Ordinal"]

_MAX_INFERRED_LEVELS = 100  # for data with fewer rows than levels


class Ordinal(WithParameter):
    r"""Ordered probit likelihood of levels 0, …, K − 1: y is the number of edges below a noisy f.

    .. math::

        p(y = k \mid f) = \Phi\Big(\frac{e_{k+1} - f}{s}\Big) - \Phi\Big(\frac{e_k - f}{s}\Big), \qquad
        e_0 = -\infty,\; e_K = \infty

    :param edges: :math:`e_1 < \dots < e_{K-1}`, common to all outputs [K − 1] or of each output [D, K − 1].  They are not
        learned, except that the mean of f and the scale s are equivalent to a shift and a stretch of the edges.
    :param scale: initial s, in units of f.
    :param data_dim: number of outputs, for a scale of each output; None shares one.
    :raises ValueError: for edges that do not increase, a scale that is not positive, or a wrong shape of either.

    The attribute ``scale`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> Ordinal(torch.tensor([-1.0, 0.0, 1.0]), 0.5)(torch.tensor([0.0, 0.5])).probs.detach()
    tensor([[0.0228, 0.4772, 0.4772, 0.0228],
            [0.0013, 0.1573, 0.6827, 0.1587]])

    Source: McCullagh (1980), "Regression models for ordinal data"; Chu and Ghahramani (2005), "Gaussian processes for ordinal
    regression".
    """

    edges: Tensor

    def __init__(self, edges: Tensor, scale: float | Tensor = 0.5, *, data_dim: int | None = None):
        super().__init__("scale", scale, data_dim)
        edges = torch.as_tensor(edges, dtype=torch.get_default_dtype())
        if edges.dim() not in (1, 2) or not edges.numel() or not edges.isfinite().all() or not (edges.diff() > 0).all():
            raise ValueError(
                f"expected increasing edges, one fewer than levels, of shape [K − 1] or [D, K − 1], got {edges.tolist()}"
            )
        self.register_buffer("edges", edges)

    @classmethod
    def from_data(cls, Y: Float[Tensor, "N D"], num_levels: int | None = None, scale: float | Tensor = 0.5) -> "Ordinal":
        """Create the likelihood with edges at the normal quantiles of the cumulative frequencies of each column.

        Half an entry is added to the count of each level, so that levels that do not occur have a positive probability.

        :param Y: levels, NaN where missing; use :class:`~pyro_lvgp.likelihoods.Heterogeneous` for columns with different
            numbers of levels.
        :param num_levels: K; by default one more than the highest level in the data.
        :param scale: initial s of each output.
        :raises ValueError: if Y is empty or not a matrix, an entry is no level, or, without ``num_levels``, a level exceeds
            both 100 and the number of rows.
        :raises TypeError: if Y is no tensor of floats.

        >>> Ordinal.from_data(torch.tensor([[0.0], [1.0], [1.0], [2.0]])).edges
        tensor([[-0.6046,  0.6046]])
        """
        check_not_empty(Y, "Y")
        check_data(Y, Y.shape[-1], like=Y, name="Y")
        check_values(Y, rows=False, columns=False, name="Y")
        K = int(Y.nan_to_num().max()) + 1 if num_levels is None else num_levels
        if num_levels is None and max(len(Y), _MAX_INFERRED_LEVELS) < K:
            raise ValueError(
                f"expected levels 0, 1, …, no more of them than the {len(Y)} rows, got level {K - 1}; number them by "
                "torch.unique(column, return_inverse=True)[1], or give num_levels"
            )
        levels = torch.arange(K).to(Y)
        counts = (Y[..., None] == levels).sum(0) + 0.5
        share = counts.cumsum(-1) / counts.sum(-1, keepdim=True)
        likelihood = cls(ndtri(share[:, :-1]), scale, data_dim=Y.shape[-1])
        likelihood.check(Y)
        return likelihood

    def support_text(self):
        return f"levels, integers from 0 to {self.edges.shape[-1]}"

    def distribution(self, f, params):
        return _Levels(f, params, self.edges)

    def inverse_link(self, y):
        ends = 2.0 * torch.atleast_1d(self.params().detach())[..., None]
        bounds = torch.cat([self.edges[..., :1] - ends, self.edges + torch.zeros_like(ends), self.edges[..., -1:] + ends], -1)
        middles = 0.5 * (bounds[..., 1:] + bounds[..., :-1])
        level = torch.nan_to_num(y).clamp(0, self.edges.shape[-1])
        return torch.where(torch.isnan(y), y, _pick(middles, level.floor()).lerp(_pick(middles, level.ceil()), level.frac()))

    def expected_log_prob(self, y, mean, variance, params):
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)
        low, high = _Levels(mean, params, self.edges).interval(y)
        return expected_log_interval(low, high, variance / params.square())

    def log_predictive_density(self, y, mean, variance, params):
        return _Levels(mean, (variance + params.square()).sqrt(), self.edges).log_prob(y)

    def moments(self, mean, variance, params):
        y = _Levels(mean, (variance + params.square()).sqrt(), self.edges)
        return y.mean, y.variance

    def check_outputs(self, data_dim, params):
        super().check_outputs(data_dim, params)
        if self.edges.dim() == 2 and len(self.edges) not in (1, data_dim):
            raise ValueError(
                f"expected edges common to all outputs, or for each of {data_dim}, got {len(self.edges)} rows of them; create "
                "the likelihood from as many columns as the model has"
            )


class _Levels(dist.TorchDistribution):
    """Distribution of the number of edges [*, K − 1] below a normal variable."""

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(self, loc: Tensor, scale: Tensor, edges: Tensor):
        self._loc, self._scale = torch.broadcast_tensors(loc, scale)
        self._edges = edges
        super().__init__(self._loc.shape, validate_args=False)

    @property
    def support(self):
        return constraints.integer_interval(0, self._edges.shape[-1])

    @property
    def probs(self) -> Float[Tensor, "*batch K"]:
        """Probability of each level."""
        K = self._edges.shape[-1] + 1
        each = torch.arange(K).to(self._loc).view(-1, *(1 for _ in self.batch_shape))
        return self.log_prob(each).exp().movedim(0, -1)

    @property
    def mean(self):
        return ndtr(self._above()).sum(-1)

    @property
    def variance(self):
        # Σⱼₖ cov(y ≥ j, y ≥ k), all of whose terms are positive: nothing cancels where y hardly varies.
        above = self._above()
        p, q = ndtr(above), ndtr(-above)
        return (p * (2.0 * q.cumsum(-1) - q)).sum(-1)

    def _above(self) -> Float[Tensor, "*batch edges"]:
        """Standardised distances (f − e) / s from the edges."""
        return (self._loc[..., None] - self._edges) / self._scale[..., None]

    def expand(self, batch_shape, _instance=None):
        return _Levels(self._loc.expand(batch_shape), self._scale, self._edges)

    def sample(self, sample_shape=()):
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            noisy = torch.normal(self._loc.expand(shape), self._scale.expand(shape))
            return (noisy[..., None] > self._edges).sum(-1).to(noisy)

    def log_prob(self, value):
        return log_interval(*self.interval(value))

    def interval(self, level: Float[Tensor, "*#batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Standardised distances of the edges below and above a level, −∞ below the first and ∞ above the last."""
        last = self._edges.shape[-1] - 1
        low = (_pick(self._edges, (level - 1.0).clamp_min(0.0)) - self._loc) / self._scale
        high = (_pick(self._edges, level.clamp_max(last)) - self._loc) / self._scale
        return torch.where(level < 0.5, -torch.inf, low), torch.where(level > last + 0.5, torch.inf, high)


def _pick(edges: Float[Tensor, "*outputs edges"], level: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Select for each level the edge of that index in its column."""
    shape = torch.broadcast_shapes(level.shape, edges.shape[:-1])
    return edges.expand(*shape, -1).gather(-1, level.expand(shape).long()[..., None]).squeeze(-1)
