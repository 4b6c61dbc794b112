"""Peers that fill hidden entries of a table: regressions on inputs, on what is observed, and on both."""

from collections.abc import Callable

import gpytorch
import torch
from jaxtyping import Bool, Float
from linear_operator import to_linear_operator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from torch import Tensor

Filled = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]


def _fill(Y: Tensor, hidden: Tensor, column: Callable[[int, Tensor], tuple]) -> Filled:
    """Means and standard deviations, column by column; truth and 1 where nothing is hidden."""
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
    """``k((x, d), (x', d')) = Σ_r k_r(x, x') w_rd·w_rd'``: two RBF kernels, each for two latents."""

    def __init__(self, inputs: tuple[Tensor, Tensor], y: Tensor, likelihood: object, num_outputs: int, lengthscale: float):
        super().__init__(inputs, y, likelihood)
        self.mean = gpytorch.means.ZeroMean()
        self.kernels = torch.nn.ModuleList(gpytorch.kernels.RBFKernel() for _ in range(2))
        self.loadings = torch.nn.ParameterList(torch.randn(num_outputs, 2) for _ in range(2))
        for factor, kernel in zip((1.0, 0.2), self.kernels, strict=True):
            kernel.lengthscale = factor * lengthscale  # type: ignore[assignment]

    def forward(self, x: Tensor, d: Tensor) -> gpytorch.distributions.MultivariateNormal:
        loadings = [weights[d.squeeze(-1)] for weights in self.loadings]
        covariances = [k(x).to_dense() * (W @ W.mT) for k, W in zip(self.kernels, loadings, strict=True)]
        return gpytorch.distributions.MultivariateNormal(self.mean(x), to_linear_operator(covariances[0] + covariances[1]))


def linear_coregionalisation(
    x: Float[Tensor, "N P"],
    Y: Float[Tensor, "N D"],
    hidden: Bool[Tensor, "N D"],
    lengthscale: float,
    *,
    num_steps: int = 200,
) -> Filled:
    """An exact Gaussian process over all entries, with two kernels mixed linearly into outputs (GPyTorch), by evidence."""
    observed = Y.masked_fill(hidden, torch.nan)
    centre = observed.nanmean(0)
    scale = (observed - centre).square().nanmean(0).sqrt()
    rows, columns = (~hidden).nonzero(as_tuple=True)
    y = ((Y - centre) / scale)[rows, columns]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = 0.1
        model = _LinearModel((x[rows], columns[:, None]), y, likelihood, Y.shape[1], lengthscale).to(Y.dtype)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        optim = torch.optim.Adam(model.parameters(), lr=0.05)
        with gpytorch.settings.cholesky_max_tries(6), gpytorch.settings.fast_computations(False, False, False):
            for _ in range(num_steps):
                optim.zero_grad()
                loss = -objective(model(x[rows], columns[:, None]), y)
                loss.backward()
                optim.step()
            model.eval(), likelihood.eval()
            mean, stddev = Y.clone(), torch.ones_like(Y)
            if hidden.any():
                at, of = hidden.nonzero(as_tuple=True)
                with torch.no_grad():
                    predicted = likelihood(model(x[at], of[:, None]))
                mean[at, of] = centre[of] + scale[of] * predicted.mean
                stddev[at, of] = scale[of] * predicted.variance.sqrt()
    return mean, stddev


PEERS = {
    "independent GPs (scikit-learn)": independent_processes,
    "linear multi-output GP (GPyTorch)": linear_coregionalisation,
    "Bayesian ridge on observed columns": ridge,
}
