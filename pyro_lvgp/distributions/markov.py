"""Posterior of a Gauss–Markov process under Gaussian sites as a Pyro distribution, in linear time."""

from functools import cached_property
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.cholesky import FIRST_JITTER
from pyro_lvgp.distributions._function_values import FunctionValues
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.ops import state_space
from pyro_lvgp.ops.gaussian_sites import Posterior

__all__ = ["StateSpacePosterior"]


class StateSpacePosterior(StructuredPosterior):
    """Posterior of a Gauss–Markov process under Gaussian sites, in linear time.

    The distribution is that of :class:`StructuredPosterior`.  A Kalman filter and smoother computes it by parallel scans, with
    O(N) work and memory and a depth of O(log N).

    :param prior: a :class:`GaussianProcess` with :attr:`~GaussianProcess.is_markov`: one column of inputs, and Matérn kernels
        or sums and products of them.
    :param site_mean: means μ of the sites.
    :param site_precision: precisions 1/v of the sites, zero for points without one.
    :raises ValueError: if the prior is no such process.

    Source: Särkkä and García-Fernández (2021), "Temporal parallelization of Bayesian smoothers"; see
    :mod:`pyro_lvgp.ops.state_space`.

    >>> from pyro_lvgp.kernels import Matern
    >>> prior = GaussianProcess(Matern(1, 1.5), torch.linspace(0.0, 1000.0, 10_000)[:, None])
    >>> StateSpacePosterior(prior, torch.zeros(10_000), torch.ones(10_000)).rsample((2,)).shape
    torch.Size([2, 10000])
    """

    @checks_types
    def __init__(
        self,
        prior: torch.distributions.Distribution,
        site_mean: Float[Tensor, "*#batch N"],
        site_precision: Float[Tensor, "*#batch N"],
        validate_args: bool | None = None,
    ):
        if not (isinstance(prior, GaussianProcess) and prior.is_markov):
            got = prior.kernel if isinstance(prior, GaussianProcess) else prior
            raise ValueError(
                "expected a GaussianProcess over one column of inputs, with a Matérn kernel without active_dims or sums and "
                f'products of them, for linear time, got {type(got).__name__}; use method="dense" or method="auto"'
            )
        super().__init__(prior, site_mean, site_precision, validate_args)

    @cached_property
    def posterior(self) -> Posterior:
        if self._unexpanded is not self:
            return self._unexpanded.posterior
        return state_space.condition(self.prior.series, self.site_mean, self._bounded_precision())

    @property
    def _joint(self) -> Posterior:
        return self.posterior  # draws have no jitter

    def rsample(self, sample_shape=()):
        drawn = self.prior.expand(self.batch_shape).rsample_state_space(sample_shape)
        return state_space.sample_posterior(self.prior.series, self.posterior, drawn, torch.randn_like(drawn))

    def at(self, X: Float[Tensor, "*#batch M P"], *, joint: bool = False) -> Any:
        """Compute the posterior of the process at other inputs.

        These are appended to the inputs of the prior, without sites.

        :param X: inputs.
        :param joint: whether to return the joint distribution instead of the marginals.
        :returns: ``Normal`` with the marginals, or the joint distribution.
        """
        num_new, prior = X.shape[-2], self.prior
        batch = torch.broadcast_shapes(prior.X.shape[:-2], X.shape[:-2])
        both = torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (prior.X, X)], -2)
        site_mean, site_precision = (F.pad(part, (0, num_new)) for part in (self.site_mean, self.site_precision))
        last = _LastValues(StateSpacePosterior(prior.at(both), site_mean, site_precision), num_new)
        return last if joint else dist.Normal(last.mean, last.variance.sqrt())


class _LastValues(FunctionValues):
    """Joint distribution of the last M function values of a posterior, which have no sites.

    :param whole: posterior of all function values.
    :param num: number M of the last values.
    """

    def __init__(self, whole: StateSpacePosterior, num: int):
        self._whole, self._num = whole, num
        self._unexpanded = self
        super().__init__(whole.batch_shape, torch.Size([num]), validate_args=False)

    @property
    def mean(self):
        return self._whole.mean[..., -self._num :].expand(self._full_shape)

    @property
    def variance(self):
        return self._whole.variance[..., -self._num :].expand(self._full_shape)

    def rsample(self, sample_shape=()):
        return self._whole.expand(self.batch_shape).rsample(sample_shape)[..., -self._num :]

    def log_prob(self, value):
        whole, value = self._whole, value.expand(torch.broadcast_shapes(value.shape, self._full_shape))
        return state_space.log_prob(whole.prior.series, value, whole.posterior, jitter=FIRST_JITTER[value.dtype])
