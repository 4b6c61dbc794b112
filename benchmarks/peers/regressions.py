"""Regressions that impute the hidden entries of a table: on inputs, on observed outputs, and on both."""

from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from jaxtyping import Bool, Float
from linear_operator import to_linear_operator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded

NUM_STARTS = 3
Filled = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]


def _fill(Y: Tensor, hidden: Tensor, column: Callable[[int, Tensor], tuple]) -> Filled:
    """Means and standard deviations, column by column; the truth and 1 for columns without hidden entries."""
    mean, stddev = Y.clone(), torch.ones_like(Y)
    for d, rows in enumerate(hidden.T):
        if rows.any():
            mean[rows, d], stddev[rows, d] = map(torch.as_tensor, column(d, rows))
    return mean, stddev


def independent_processes(
    x: Float[Tensor, "N P"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"], lengthscale: float
) -> Filled:
    """A Gaussian process for each column, over the inputs alone (scikit-learn)."""

    def column(d: int, rows: Tensor) -> tuple:
        prior = ConstantKernel(1.0) * RBF(lengthscale) + WhiteKernel(0.1)
        model = GaussianProcessRegressor(prior, normalize_y=True, n_restarts_optimizer=2, random_state=0)
        return model.fit(x[~rows].numpy(), Y[~rows, d].numpy()).predict(x[rows].numpy(), return_std=True)

    return _fill(Y, hidden, column)


def ridge(x: Float[Tensor, "N P"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"], lengthscale: float) -> Filled:
    """Bayesian ridge regression of each hidden column on the columns never hidden (scikit-learn)."""
    inputs = Y[:, ~hidden.any(0)].numpy()

    def column(d: int, rows: Tensor) -> tuple:
        model = BayesianRidge().fit(inputs[(~rows).numpy()], Y[~rows, d].numpy())
        return model.predict(inputs[rows.numpy()], return_std=True)

    return _fill(Y, hidden, column)


class _LinearModel(gpytorch.models.ExactGP):
    """``k((x, d), (x', d')) = Σ_r k_r(x, x') w_rd·w_rd'``: two RBF kernels, each for two latents.

    :param inputs: x, and in the last column the output d.
    """

    def __init__(
        self, inputs: Float[Tensor, "n P1"], y: Float[Tensor, " n"], likelihood: object, num_outputs: int, lengthscale: float
    ):
        super().__init__(inputs, y, likelihood)
        self.mean = gpytorch.means.ZeroMean()
        self.kernels = torch.nn.ModuleList(gpytorch.kernels.RBFKernel() for _ in range(2))
        self.loadings = torch.nn.ParameterList(torch.randn(num_outputs, 2) for _ in range(2))
        for factor, kernel in zip((1.0, 0.2), self.kernels, strict=True):
            kernel.lengthscale = factor * lengthscale  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> gpytorch.distributions.MultivariateNormal:
        x, d = inputs[..., :-1], inputs[..., -1].long()
        covariances = [k(x).to_dense() * (W[d] @ W[d].mT) for k, W in zip(self.kernels, self.loadings, strict=True)]
        return gpytorch.distributions.MultivariateNormal(self.mean(x), to_linear_operator(covariances[0] + covariances[1]))


def linear_coregionalisation(
    x: Float[Tensor, "N P"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"], lengthscale: float
) -> Filled:
    """Linear model of coregionalisation over all entries, two kernels and a noise variance for each output (GPyTorch).

    Keeps the best evidence of three starts, each by L-BFGS.
    """
    observed = Y.masked_fill(hidden, torch.nan)
    centre = observed.nanmean(0)
    scale = (observed - centre).square().nanmean(0).sqrt()
    y = ((Y - centre) / scale)[~hidden]

    def entries(which: Tensor) -> Tensor:
        rows, columns = which.nonzero(as_tuple=True)
        return torch.cat([x[rows], columns[:, None]], -1)

    with gpytorch.settings.cholesky_max_tries(6), gpytorch.settings.fast_computations(False, False, False):
        fits = [_linear_model(entries(~hidden), y, Y.shape[1], lengthscale, seed=seed) for seed in range(NUM_STARTS)]
        _, model, likelihood = max(fits, key=lambda fitted: fitted[0])
        mean, stddev = Y.clone(), torch.ones_like(Y)
        if hidden.any():
            columns = hidden.nonzero()[:, 1]
            with torch.no_grad():
                predicted = likelihood(model(entries(hidden)), entries(hidden))
            mean[hidden] = centre[columns] + scale[columns] * predicted.mean
            stddev[hidden] = scale[columns] * predicted.variance.sqrt()
    return mean, stddev


def _linear_model(inputs: Tensor, y: Tensor, num_outputs: int, lengthscale: float, *, seed: int) -> tuple[float, Any, Any]:
    """Evidence, fitted model and its likelihood."""
    with seeded(seed):
        likelihood: Any = gpytorch.likelihoods.HadamardGaussianLikelihood(num_tasks=num_outputs, task_feature_index=-1)
        likelihood.noise = torch.full_like(likelihood.noise, 0.01)
        model = _LinearModel(inputs, y, likelihood, num_outputs, lengthscale).to(y.dtype)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optim = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_change=1e-7, line_search_fn="strong_wolfe")

    def negative_evidence() -> float:
        optim.zero_grad()
        loss = -objective(model(inputs), y, inputs)
        loss.backward()
        return loss.item()

    optim.step(negative_evidence)
    return -negative_evidence(), model.eval(), likelihood.eval()


PEERS = {
    "independent GPs (scikit-learn)": independent_processes,
    "linear multi-output GP (GPyTorch)": linear_coregionalisation,
    "Bayesian ridge on observed columns": ridge,
}
EXPENSIVE = frozenset({"linear multi-output GP (GPyTorch)"})  # hours, for three fits by L-BFGS; `--quick` leaves it out
