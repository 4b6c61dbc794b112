"""A Gaussian process for each output, which shares nothing with the others."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import biject_to

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models.initialization import column_moments
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.ops import gaussian_sites, state_space

_FIRST_NOISE, _LEAST_NOISE = 0.1, 1e-6  # variances, in units of the variance of an output
_PRIOR_SCALE = 2.0  # of the logarithms of parameters


class SeparateProcesses:
    r"""Independent Gaussian processes, one for each output, with their own parameters.

    .. math:: y_{nd} = m_d + s_d\, (f_{nd} + \epsilon_{nd}), \quad f_d \sim GP(0, k_d), \quad \epsilon_{nd} \sim N(0, \psi_d)

    with means m and standard deviations s of the observed entries.  Parameters of the kernels and noise variances maximise
    the evidence times :math:`\prod_\theta \mathrm{LogNormal}(\theta; \log \theta_0, 2^2)` around their initial values.
    Each output has the one of several kernels with the largest evidence.  Missing entries are NaN.  Computations are in double
    precision, and linear in N for Markov kernels of one input.

    :param kernels: for each of several groups of outputs, in their order, the covariances to choose from, with a batch
        dimension over the outputs.  Their parameters that require gradients are learned, those of one kernel together: fits of
        single outputs need fewest evaluations of the evidence, and evaluations for many short outputs cost little more than
        for one.

    Source: Rasmussen and Williams (2006), "Gaussian processes for machine learning", section 5.4.1.

    >>> from pyro_lvgp.kernels import Matern
    >>> t = torch.linspace(0.0, 1.0, 30, dtype=torch.float64)[:, None]
    >>> model = SeparateProcesses([[Matern(1, nu, lengthscale=0.2, batch_shape=(2,)) for nu in (0.5, 1.5)]])
    >>> model.fit(t, torch.sin(9.0 * t + torch.arange(2)))
    >>> model.predict(torch.tensor([[1.1]], dtype=torch.float64)).mean.shape
    torch.Size([1, 2])
    """

    x: Float[Tensor, "N P"]
    centre: Float[Tensor, " D"]
    scale: Float[Tensor, " D"]
    groups: "list[_Group]"
    dtype: torch.dtype

    def __init__(self, kernels: Sequence[Sequence[Kernel]]):
        self.kernels = [[kernel.double() for kernel in of_group] for of_group in kernels]

    @torch.inference_mode(False)
    @pyro_lock
    def fit(self, x: Float[Tensor, "N P"], y: Float[Tensor, "N D"], *, num_steps: int = 100, tolerance: float = 1e-5) -> None:
        """Maximise the posterior density of the parameters by L-BFGS.

        :param x: inputs.
        :param y: data, NaN where missing, with an observation of each output.
        :param num_steps: maximum number of steps for the outputs of one kernel.
        :param tolerance: gain of a step, in nats per observed entry, below which their fit ends.
        """
        check_sizes(num_steps=num_steps)
        self.x, self.dtype, y = x.double().clone(), y.dtype, y.double().clone()
        self.centre, self.scale = column_moments(y)
        parts = ((y - self.centre) / self.scale).mT.split([of_group[0].batch_shape.numel() for of_group in self.kernels])
        self.groups = [_Group(of_group, self.x, part) for of_group, part in zip(self.kernels, parts, strict=True)]
        for group in self.groups:
            group.fit(num_steps, tolerance)

    @torch.inference_mode(False)
    @torch.no_grad()
    @pyro_lock
    def predict(self, x_new: Float[Tensor, "M P"] | None = None, *, num_samples: int = 1) -> Prediction:
        """Predict y, whose entries are Gaussian.

        :param x_new: inputs; those of the data by default.
        :param num_samples: number of equal components, for :meth:`Prediction.pool` with predictions of as many.
        """
        moments = [group.moments(None if x_new is None else x_new.double()) for group in self.groups]
        f_mean, f_variance, noise = (torch.cat(part) for part in zip(*moments, strict=True))
        mean, variance = self.centre + self.scale * f_mean.mT, self.scale.square() * f_variance.mT
        noise = self.scale.square() * noise
        f_mean, f_variance, params = (x.to(self.dtype).expand(num_samples, *mean.shape) for x in (mean, variance, noise))
        return Prediction(
            [LikelihoodPredictive(Gaussian(), f_mean, f_variance, "fitc", params)],
            dims=("points", "output"),
            coords={"x": (("points", "input"), self.x if x_new is None else x_new)},
        )


class _Moments(NamedTuple):
    """Means and variances of the processes of some outputs at inputs, and noise variances."""

    mean: Float[Tensor, "D M"]
    variance: Float[Tensor, "D M"]
    noise: Float[Tensor, " D"]


class _Group:
    """Some outputs, of which each has the one of several kernels with the largest evidence."""

    choice: Int[Tensor, " D"]

    def __init__(self, kernels: Sequence[Kernel], x: Float[Tensor, "N P"], y: Float[Tensor, "D N"]):
        self.alternatives = [_Processes(kernel, x, y) for kernel in kernels]

    def fit(self, num_steps: int, tolerance: float) -> None:
        """Learn the parameters of all kernels, and choose one for each output."""
        for processes in self.alternatives:
            processes.fit(num_steps, tolerance)
        with torch.no_grad():
            evidence = torch.stack([processes.log_evidence() for processes in self.alternatives])
            self.choice = evidence.nan_to_num(-torch.inf).argmax(0)

    def moments(self, x: Float[Tensor, "M P"] | None) -> _Moments:
        """Moments of each output under its kernel, as those of :class:`_Processes`."""
        parts = zip(*(processes.moments(x) for processes in self.alternatives), strict=True)
        return _Moments(*(torch.stack(part)[self.choice, torch.arange(len(self.choice))] for part in parts))


class _Processes:
    """Gaussian processes of outputs whose observed entries have mean 0 and variance 1."""

    def __init__(self, kernel: Kernel, x: Float[Tensor, "N P"], y: Float[Tensor, "D N"]):
        self.kernel, self.x, self.y = kernel, x, y
        self.noise = y.new_full(y.shape[:1], _FIRST_NOISE)

    def fit(self, num_steps: int, tolerance: float) -> None:
        """Maximise the posterior density of noise and kernel parameters."""
        to_value = biject_to(constraints.softplus_positive)
        noise: Any = to_value.inv(self.noise.clone()).requires_grad_()
        parameters = [noise, *(part for part in self.kernel.parameters() if part.requires_grad)]
        start = [to_value(part).log().detach() for part in parameters]
        options: Any = {"max_iter": num_steps, "tolerance_change": tolerance, "line_search_fn": "strong_wolfe"}
        optim, num_observed = torch.optim.LBFGS(parameters, **options), int((~self.y.isnan()).sum())

        def loss() -> Tensor:
            optim.zero_grad()
            log_prior = -0.5 * sum(
                ((to_value(part).log() - first) / _PRIOR_SCALE).square().sum()
                for part, first in zip(parameters, start, strict=True)
            )
            self.noise = _LEAST_NOISE + to_value(noise)
            value = -(self.log_evidence().sum() + log_prior) / num_observed
            value.backward()
            return value

        optim.step(loss)
        self.noise = (_LEAST_NOISE + to_value(noise)).detach()

    def log_evidence(self) -> Float[Tensor, " D"]:
        """Log density of the observed entries of each output."""
        prior, (W, c) = GaussianProcess(self.kernel, self.x), self._sites()
        if prior.prefers_state_space:
            log_normaliser = state_space.log_normaliser(prior.series, W, c)
        else:
            log_normaliser = gaussian_sites.log_normaliser(self.posterior().posterior)
        constants = 0.5 * (self.noise.log() + math.log(2.0 * math.pi))
        return log_normaliser - constants * (~self.y.isnan()).sum(-1)

    def moments(self, x: Float[Tensor, "M P"] | None) -> _Moments:
        """Moments of the processes at inputs; at those of the data if None."""
        q = self.posterior() if x is None else self.posterior().at(x)
        return _Moments(q.mean, q.variance, self.noise)

    def posterior(self) -> StructuredPosterior:
        """Posterior of the processes given the observed entries."""
        prior, (W, _) = GaussianProcess(self.kernel, self.x), self._sites()
        kind = StateSpacePosterior if prior.prefers_state_space else StructuredPosterior
        return kind(prior, self.y.nan_to_num(), W.square())

    def _sites(self) -> tuple[Float[Tensor, "D N"], Float[Tensor, "D N"]]:
        """Square roots of the precisions of the observations, zero where missing, and times the observations."""
        W = torch.where(self.y.isnan(), 0.0, self.noise.rsqrt()[:, None])
        return W, W * self.y.nan_to_num()
