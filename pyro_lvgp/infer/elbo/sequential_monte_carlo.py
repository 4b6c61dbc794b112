"""Bound by sequential Monte Carlo: chains of a datum that are resampled between their transitions."""

import math
from typing import Any

from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp.infer.elbo._resampling import RequestResampling, Resampling
from pyro_lvgp.infer.elbo.importance_weighted import ImportanceWeightedELBO

__all__ = ["SequentialMonteCarloELBO"]


class SequentialMonteCarloELBO(ImportanceWeightedELBO):
    r"""Importance-weighted bound of an annealed guide whose S chains of a datum are resampled between transitions.

    .. math::

        E_{g \sim q}\Big[ \tfrac{N}{B} \sum_{n \in \text{batch}} E \log \hat Z_n \Big] - KL(q(g) \,\|\, p(g)), \qquad
        \hat Z_n = \prod_j \frac{1}{S} \sum_{s=1}^S \frac{w_s(k_{j+1})}{w_s(k_j)}, \qquad E[\hat Z_n] = p(y_n \mid g),

    with :math:`w_s(k)` the weight of the path of chain s after k transitions, for the bridging density :math:`q_k`, and
    resampling after the transitions :math:`k_1 < k_2 < \dots`, between :math:`k_0 = 0` and the last transition.  The chains of
    a datum are resampled if the effective sample size of their weights since the last resampling is below a share τ of S.
    Chains that have lost their weight then continue from the states of others.  Only chains of one datum are exchanged, so
    that mini-batches are exact.

    The value needs the log density at the K − 1 intermediate states, without gradients.  The gradient is that of
    :math:`\sum_s W_s \log w_s` over the paths of the surviving chains, with constant weights W, as without resampling.  It is
    the gradient of the bound for resampling probabilities that are constant functions of the noise, which is a bound as well.
    The dependence of these probabilities on parameters, and so the score of the discrete ancestors, is left out.

    :param local_plate: name of the plate over data.
    :param num_samples: number S of chains of each datum, at least 2.
    :param resampling_threshold: τ between 0 and 1; 0 never resamples, and is :class:`ImportanceWeightedELBO`.
    :param marginalize: as for :class:`ImportanceWeightedELBO`.
    :param num_particles: as for :class:`ImportanceWeightedELBO`.
    :param max_plate_nesting: as for Pyro's bounds; found by running model and guide once if omitted.
    :raises ValueError: for a threshold out of range, one sample, or a guide that does not resample: one other than
        :class:`~pyro_lvgp.guides.AutoAnnealedLangevin`, with one transition, without a local plate or with another one, or
        with latent sites in the plate that are not annealed; and as :class:`ImportanceWeightedELBO` does.

    :meth:`log_weights` and posterior draws are of independent chains.

    >>> import pyro, pyro.distributions as dist, torch
    >>> from pyro_lvgp.guides import AutoAnnealedLangevin
    >>> def model(y):
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 0.1), obs=y)
    >>> guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=4)
    >>> SequentialMonteCarloELBO(num_samples=8)(model, guide)(torch.zeros(5)).shape
    torch.Size([])

    References: Del Moral, Doucet and Jasra (2006), "Sequential Monte Carlo samplers"; Maddison et al. (2017), "Filtering
    variational objectives"; Naesseth et al. (2018), "Variational sequential Monte Carlo"; Le et al. (2018), "Auto-encoding
    sequential Monte Carlo"; Ścibior and Wood (2021), "Differentiable particle filtering without modifying the forward pass".
    """

    @checks_types
    def __init__(
        self,
        local_plate: str = "data",
        num_samples: int = 10,
        *,
        resampling_threshold: float = 0.5,
        marginalize: bool = True,
        num_particles: int = 1,
        max_plate_nesting: int | float = math.inf,
    ):
        if not 0.0 <= resampling_threshold <= 1.0:
            raise ValueError(f"expected a resampling_threshold between 0 and 1, got {resampling_threshold}")
        if num_samples == 1:
            raise ValueError("expected num_samples of 2 or more to resample, got 1; take ImportanceWeightedELBO for one chain")
        super().__init__(
            local_plate,
            num_samples,
            marginalize=marginalize,
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
        )
        self.resampling_threshold = resampling_threshold

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute minus an estimate of the bound, to differentiate."""
        if self.max_plate_nesting == math.inf:
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        outermost = -1 - int(self.max_plate_nesting)
        with RequestResampling(Resampling(self.local_plate, outermost, self.resampling_threshold)) as request:
            loss = super().differentiable_loss(model, guide, *args, **kwargs)
        if not request.is_read:
            raise ValueError(
                "expected a guide with transitions to resample between, AutoAnnealedLangevin, got "
                f"{type(guide).__name__}; use ImportanceWeightedELBO"
            )
        return loss
