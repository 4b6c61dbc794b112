"""Gaussian-process regression of the missing entries of a row on its observed entries."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import biject_to

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.kernels import Linear, Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models.initialization import column_moments
from pyro_lvgp.models.prediction import Prediction

_FIRST_NOISE, _LEAST_NOISE = 0.1, 1e-6  # variances, in units of the variance of an output
_NOISE_OF_OBSERVED = 0.01
_PRIOR_SCALE = 2.0  # of the logarithms of parameters
_NUM_STEPS = 30


class RowRegression:
    r"""Nonlinear regression of missing outputs on those observed in the same row, whatever the inputs.

    For each pattern of observed outputs O, the outputs d that are missing have the model

    .. math::

        y_{nd} = m_d + s_d\, (g_{d}(z_n) + \epsilon_{nd}), \quad g_{d} \sim GP(0, k), \quad \epsilon_{nd} \sim N(0, \psi),
        \quad z_n = \big((y_{nc} - m_c) / s_c\big)_{c \in O} \big/ \sqrt{|O|}

    with means m and standard deviations s of the observed entries, and the sum k of a Matérn-3⁄2 and a linear kernel: far from
    the data it is ridge regression.  It is conditioned on the rows in which d and all of O are observed.  Variances and
    lengthscale of k and the noise variance :math:`\psi` belong to the pattern and to the outputs that are observed in the same
    of these rows; they maximise the evidence times
    :math:`\prod_\theta \mathrm{LogNormal}(\theta; \log \theta_0, 2^2)` around their initial values.

    Rows without data, new inputs, and outputs with fewer than two such rows are predicted by :math:`N(m_d, s_d^2)`.  An
    observed entry is predicted by itself, with a hundredth of the variance of the output.  The cost is cubic in the number of
    rows for each pattern.

    Source: Rasmussen and Williams (2006), "Gaussian processes for machine learning", sections 2.2 and 5.4.1.

    >>> angle = torch.linspace(0.0, 6.0, 40, dtype=torch.float64)[:, None]
    >>> y = torch.cat([angle.cos(), angle.sin(), (2.0 * angle).sin()], 1)
    >>> gapped = y.clone()
    >>> gapped[10:14, 2] = torch.nan
    >>> model = RowRegression()
    >>> model.fit(angle, gapped)
    >>> bool((model.predict().mean - y)[10:14, 2].abs().max() < 0.2)
    True
    """

    x: Float[Tensor, "N P"]
    y: Float[Tensor, "N D"]
    centre: Float[Tensor, " D"]
    scale: Float[Tensor, " D"]
    dtype: torch.dtype

    @torch.inference_mode(False)
    @pyro_lock
    def fit(self, x: Float[Tensor, "N P"], y: Float[Tensor, "N D"], *, num_steps: int = _NUM_STEPS) -> None:
        """Learn the parameters of each pattern by L-BFGS, and predict the missing entries.

        :param x: inputs, which are stored.
        :param y: data, NaN where missing, with an observation of each output.
        :param num_steps: maximum number of steps for each pattern; never more than 30.
        """
        check_sizes(num_steps=num_steps)
        self.x, self.dtype, y = x.double().clone(), y.dtype, y.double().clone()
        self.centre, self.scale = column_moments(y)
        self.y = (y - self.centre) / self.scale
        missing = self.y.isnan()
        self.mean = self.y.nan_to_num()
        self.variance = torch.where(missing, 1.0, _NOISE_OF_OBSERVED).to(self.y)
        for observed in patterns(self.y):
            target = (missing == ~observed).all(1)
            rows = ~missing[:, observed].any(1)
            for outputs in _groups(missing[rows], ~observed):
                train = rows & ~missing[:, outputs[0]]
                if train.sum() < 2:
                    continue
                z = self.y[:, observed] / math.sqrt(int(observed.sum()))
                mean, variance = _regression(z[train], self.y[train][:, outputs], z[target], min(num_steps, _NUM_STEPS))
                where = target.nonzero(), outputs[None]
                self.mean[where], self.variance[where] = mean, variance[:, None].expand_as(mean)

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict(self, x_new: Float[Tensor, "M P"] | None = None, *, num_samples: int = 1) -> Prediction:
        """Predict y, whose entries are Gaussian.

        :param x_new: inputs; those of the data by default.
        :param num_samples: number of equal components, for :meth:`Prediction.pool` with predictions of as many.
        """
        mean, variance = self.mean, self.variance
        if x_new is not None:
            mean = mean.new_zeros(len(x_new), mean.shape[1])
            variance = torch.ones_like(mean)
        mean, variance = self.centre + self.scale * mean, self.scale.square() * variance
        noise = _LEAST_NOISE * self.scale.square().expand_as(mean)
        f_mean, f_variance, params = (
            part.to(self.dtype).expand(num_samples, *mean.shape) for part in (mean, variance - noise, noise)
        )
        return Prediction(
            [LikelihoodPredictive(Gaussian(), f_mean, f_variance, "fitc", params)],
            dims=("points", "output"),
            coords={"x": (("points", "input"), self.x if x_new is None else x_new)},
        )


def patterns(y: Float[Tensor, "N D"]) -> Bool[Tensor, "K D"]:
    """Patterns of observed outputs of the rows with observed and with missing entries.

    :param y: data, NaN where missing.
    """
    observed = ~y.isnan()
    return observed[observed.any(1) & ~observed.all(1)].unique(dim=0)


def _groups(missing: Bool[Tensor, "R D"], wanted: Bool[Tensor, " D"]) -> Iterator[Tensor]:
    """Indices of wanted outputs, together if they are missing in the same rows."""
    indices = wanted.nonzero().squeeze(1)
    kinds, group = missing[:, indices].unique(dim=1, return_inverse=True)
    for number in range(kinds.shape[1]):
        yield indices[group == number]


def _regression(
    z: Float[Tensor, "R P"], y: Float[Tensor, "R G"], z_new: Float[Tensor, "M P"], num_steps: int
) -> tuple[Float[Tensor, "M G"], Float[Tensor, " M"]]:
    """Means and variances of new observations, after a fit of the parameters."""
    kernel = (Matern(z.shape[1], 1.5, lengthscale=1.0, ard=False) + Linear(z.shape[1], ard=False)).double()
    to_value = biject_to(constraints.softplus_positive)
    raw: Any = to_value.inv(torch.tensor(_FIRST_NOISE, dtype=z.dtype)).requires_grad_()
    parameters = [raw, *kernel.parameters()]
    start = [to_value(part).log().detach() for part in parameters]
    options: Any = {"max_iter": num_steps, "tolerance_change": 1e-5, "line_search_fn": "strong_wolfe"}
    optim = torch.optim.LBFGS(parameters, **options)

    def factor() -> Tensor:
        return torch.linalg.cholesky(kernel(z) + (_LEAST_NOISE + to_value(raw)) * torch.eye(len(z), dtype=z.dtype))

    def loss() -> Tensor:
        optim.zero_grad()
        L = factor()
        whitened = torch.linalg.solve_triangular(L, y, upper=False)
        log_evidence = -0.5 * whitened.square().sum() - y.shape[1] * L.diagonal().log().sum()
        log_prior = -0.5 * sum(
            ((to_value(part).log() - first) / _PRIOR_SCALE).square().sum()
            for part, first in zip(parameters, start, strict=True)
        )
        value = -(log_evidence + log_prior) / y.numel()
        value.backward()
        return value

    with torch.enable_grad():
        optim.step(loss)
    with torch.no_grad():
        L = factor()
        whitened = torch.linalg.solve_triangular(L, torch.cat([y, kernel(z, z_new)], 1), upper=False)
        data, cross = whitened.split([y.shape[1], len(z_new)], 1)
        noise = _LEAST_NOISE + to_value(raw)
        return cross.mT @ data, kernel.diagonal(z_new) - cross.square().sum(0) + noise
