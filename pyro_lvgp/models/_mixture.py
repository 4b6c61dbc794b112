"""Moments and weights of finite mixtures: tensor functions."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp.ops.resampling import systematic_ancestors

__all__ = ["MixtureMoments", "pooled_weights", "systematic_counts"]


class MixtureMoments:
    r"""Running mean and variance of each entry of a mixture, by the law of total variance.

    .. math::

        m = \sum_s w_s m_s, \qquad v = \sum_s w_s \big(v_s + (m_s - m)^2\big), \qquad \sum_s w_s = 1

    Groups of components are merged pairwise, because sums of squares would cancel.

    Source: Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance".

    >>> moments = MixtureMoments()
    >>> for mean in (-1.0, 1.0):
    ...     moments.add(torch.tensor([[mean]]), torch.ones(1, 1))
    >>> moments.mean, moments.variance
    (tensor([0.]), tensor([2.]))
    """

    def __init__(self) -> None:
        self._mass = 0.0
        self.mean = self.variance = torch.zeros(())

    def add(
        self,
        mean: Float[Tensor, "draws *shape"],
        variance: Float[Tensor, "draws *shape"],
        weights: Float[Tensor, " draws"] | None = None,
    ) -> None:
        """Merge further components.

        :param mean: their means.
        :param variance: their variances.
        :param weights: their weights, up to a common factor; 1 each if None.
        """
        mass = float(len(mean)) if weights is None else weights.sum().item()
        if not mass:
            return
        shares = None if weights is None else weights.to(mean) / mass
        average = _average(mean, shares)
        within = _average(variance + (mean - average).square(), shares)
        self._mass += mass
        share, step = mass / self._mass, average - self.mean
        self.variance = (1.0 - share) * self.variance + share * within + share * (1.0 - share) * step.square()
        self.mean = self.mean + share * step


def _average(values: Float[Tensor, "draws *shape"], shares: Float[Tensor, " draws"] | None) -> Float[Tensor, "*shape"]:
    return values.mean(0) if shares is None else torch.tensordot(shares, values, 1)


def systematic_counts(weights: Float[Tensor, " draws"], num_samples: int) -> Int[Tensor, " draws"]:
    r"""Numbers of samples from each component of a mixture, by systematic resampling.

    .. math::

        c_s = \lfloor n W_s + u \rfloor - \lfloor n W_{s - 1} + u \rfloor, \qquad
        W_s = \sum_{r \le s} w_r, \quad u \sim U(0, 1)

    The mean of :math:`c_s` is :math:`n w_s`, from which :math:`c_s` differs by less than 1.

    :param weights: :math:`w_s`, up to a common factor.
    :param num_samples: number n of samples.

    >>> systematic_counts(torch.tensor([1.0, 0.0, 3.0]), 8)
    tensor([2, 0, 6])

    Source: Kitagawa (1996), "Monte Carlo filter and smoother for non-Gaussian nonlinear state space models", appendix.
    """
    log_weights, uniform = weights.detach().cpu().double().log(), 1.0 - torch.rand((), dtype=torch.double, device="cpu")
    return systematic_ancestors(log_weights, uniform, num_samples).bincount(minlength=len(weights))


def pooled_weights(
    num_draws: int,
    weights_of_draws: Sequence[Float[Tensor, " draws"] | None],
    weights: Iterable[float] | Float[Tensor, " mixtures"] | None,
) -> Float[Tensor, " all_draws"] | None:
    """Weights of the components of several mixtures in a mixture of these.

    :param num_draws: number of components of each mixture.
    :param weights_of_draws: for each mixture the weights of its components, None if they are equal.
    :param weights: weights of the mixtures, up to a common factor; equal weights if None.
    :returns: the components' weights, None if all are equal.
    :raises ValueError: if there is not one weight for each mixture, a weight is negative, or all weights are zero.
    :raises TypeError: for weights by name.

    >>> pooled_weights(2, [None, torch.tensor([0.0, 1.0])], [3.0, 1.0])
    tensor([0.3750, 0.3750, 0.0000, 0.2500], dtype=torch.float64)
    """
    number = len(weights_of_draws)
    if isinstance(weights, Mapping):
        raise TypeError(
            f"expected weights in the order of the predictions, got them by the names {list(weights)}; pass "
            "weights.values() if that is the order"
        )
    if weights is None and all(each is None for each in weights_of_draws):
        return None
    if not torch.is_tensor(weights):
        weights = [1.0] * number if weights is None else list(weights)
    shares = torch.as_tensor(weights, dtype=torch.double, device="cpu")
    if shares.shape != (number,) or not (shares >= 0.0).all() or not shares.sum() > 0.0:
        raise ValueError(f"expected {number} weights from zero up, one or more of them positive, got {weights}")
    equal = torch.full_like(shares[:1], 1.0 / num_draws).expand(num_draws)
    own = [equal if each is None else each.cpu() for each in weights_of_draws]
    return torch.cat([share * each for share, each in zip(shares / shares.sum(), own, strict=True)])
