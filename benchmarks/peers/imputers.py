"""Imputation of a table whose rows are points in time: ridge regression by pattern, neighbours, interpolation, processes."""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.interpolate import CubicSpline
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, ExpSineSquared, Kernel, Matern, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.neighbors import KNeighborsRegressor
from torch import Tensor

Filled = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"] | None]
Table = Float[np.ndarray, "N D"]


def ridge(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """Bayesian ridge regression of each hidden output on the outputs that the rows with hidden entries show."""
    mean, stddev = Y.clone(), torch.ones_like(Y)
    for rows, columns in _patterns(hidden):
        inputs = ~hidden[rows][0] & ~Y[rows].isnan().any(0)
        for d in columns:
            train = ~hidden[:, d] & ~Y[:, d].isnan() & ~(hidden | Y.isnan())[:, inputs].any(1)
            if not inputs.any():  # nothing is seen: the moments of the output
                mean[rows, d], stddev[rows, d] = Y[train, d].mean(), Y[train, d].std()
                continue
            model = BayesianRidge().fit(Y[train][:, inputs].numpy(), Y[train, d].numpy())
            predicted = model.predict(Y[rows][:, inputs].numpy(), return_std=True)
            mean[rows, d], stddev[rows, d] = (torch.as_tensor(part) for part in predicted)
    return mean, stddev


def neighbours(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """Mean of the five complete rows that are nearest in the standardised outputs that a row shows."""
    complete = ~(hidden | Y.isnan()).any(1)
    scale = Y[complete].std(0).clamp_min(1e-6)
    mean = Y.clone()
    for rows, columns in _patterns(hidden):
        inputs = ~hidden[rows][0] & ~Y[rows].isnan().any(0)
        features = (Y[:, inputs] / scale[inputs]).numpy()
        model = KNeighborsRegressor(5).fit(features[complete], Y[complete][:, columns].numpy())
        mean[rows[:, None], columns] = torch.as_tensor(model.predict(features[rows.numpy()])).to(Y)
    return mean, None


def _patterns(hidden: Bool[Tensor, "N D"]) -> list[tuple[Tensor, Tensor]]:
    """Rows and hidden columns of each pattern of hidden entries."""
    patterns, of_row = hidden.unique(dim=0, return_inverse=True)
    return [((of_row == i).nonzero().squeeze(1), p.nonzero().squeeze(1)) for i, p in enumerate(patterns) if p.any()]


def _by_column(
    t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"], column: Callable[..., tuple]
) -> tuple[Tensor, Tensor]:
    mean, stddev = Y.clone(), torch.ones_like(Y)
    for d in hidden.any(0).nonzero().squeeze(1):
        train, rows = ~hidden[:, d] & ~Y[:, d].isnan(), hidden[:, d]
        found = column(t[train].numpy(), Y[train, d].numpy(), t[rows].numpy())
        mean[rows, d], stddev[rows, d] = (torch.as_tensor(part).to(Y) for part in found)
    return mean, stddev


def linear_interpolation(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """Linear interpolation of each output over time."""
    return _by_column(t, Y, hidden, lambda t, y, t_new: (np.interp(t_new, t, y), np.ones(len(t_new))))[0], None


def spline(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """Cubic spline of each output over time."""
    return _by_column(t, Y, hidden, lambda t, y, t_new: (CubicSpline(t, y)(t_new), np.ones(len(t_new))))[0], None


def daily_processes(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """A process for each output over hours, with a Matérn-½ and a kernel of period 24 (scikit-learn)."""
    rough = ConstantKernel(0.5) * Matern(24.0, (1.0, 1e3), nu=0.5)
    daily = ConstantKernel(0.5) * ExpSineSquared(1.0, 24.0, (0.1, 10.0), "fixed")
    return _processes(rough + daily, t, Y, hidden)


def smooth_processes(t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    """A process for each output, with a Matérn-3⁄2 kernel whose lengthscale starts at ten steps (scikit-learn)."""
    step = t.diff().median().item()
    return _processes(ConstantKernel(1.0) * Matern(10.0 * step, (step, 10.0 * step * len(t)), nu=1.5), t, Y, hidden)


def _processes(kernel: Kernel, t: Float[Tensor, " N"], Y: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]) -> Filled:
    prior = kernel + WhiteKernel(0.1, (1e-4, 10.0))

    def column(t: np.ndarray, y: np.ndarray, t_new: np.ndarray) -> tuple:
        with warnings.catch_warnings():  # a noise variance may be at its bound
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = GaussianProcessRegressor(prior, normalize_y=True, random_state=0).fit(t[:, None], y)
        return model.predict(t_new[:, None], return_std=True)

    return _by_column(t, Y, hidden, column)
