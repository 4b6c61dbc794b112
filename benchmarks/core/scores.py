"""Scores of fits, with the same estimators for all guides and bounds, and scores of latents of any method."""

import math
import statistics
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float, Shaped
from pyro import poutine
from sklearn.model_selection import KFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from pyro_lvgp.infer import CompiledELBO
from pyro_lvgp.infer.elbo.base import DifferentiableELBO
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.models._latent_rows import Guide


def negative_bound(
    loss: DifferentiableELBO | CompiledELBO, model: BayesianGPLVM, guide: Guide, Y: Float[Tensor, "N D"], *, draws: int = 8
) -> float:
    """Compute the negative bound on all rows, in nats per row, averaged over draws."""
    return statistics.mean(loss.loss(model, guide, Y) for _ in range(draws)) / len(Y)


@torch.no_grad()
def expected_log_likelihood(model: BayesianGPLVM, guide: Guide, Y: Float[Tensor, "N D"], *, draws: int = 8) -> float:
    """Estimate ``E_q[log p(y_n | x_n, u)]`` in nats per row, averaged over draws of all latent variables."""
    total = 0.0
    for _ in range(draws):
        trace = poutine.trace(poutine.replay(model, poutine.trace(guide).get_trace(Y))).get_trace(Y)
        y: Any = trace.nodes["y"]
        total += y["fn"].log_prob(y["value"]).sum().item()
    return total / draws / len(Y)


def reconstruction(
    model: BayesianGPLVM, guide: Guide, Y: Float[Tensor, "N D"], truth: Float[Tensor, "N D"], hidden: Bool[Tensor, "N D"]
) -> tuple[float, float]:
    """Compute the MSE of the posterior mean of f at observed entries, and its RMSE at hidden entries."""
    error = (model.reconstruct(guide, Y, num_samples=16).f_mean - truth).square()
    return error[~hidden].mean().item(), error[hidden].mean().sqrt().item() if hidden.any() else math.nan


def held_out_log_likelihood(
    model: BayesianGPLVM, guide: Guide, Y: Float[Tensor, "N D"], *, draws: int, widen: float = 1.3, prior: float = 0.1
) -> float:
    """Estimate ``log ∫ p(y_n | x) p(x) dx`` in nats per row, for rows outside the training set, by importance sampling.

    The proposal is a mixture of the prior and of a Gaussian fitted to each row, widened.  The estimate is too low if the
    proposal has little mass in a region of high posterior density.

    :param draws: importance samples of each row.
    :param widen: factor on the standard deviations of the Gaussian.
    :param prior: weight of the prior in the mixture.
    """
    standard = dist.Normal(Y.new_zeros(model.latent_dim), 1.0).to_event(1)
    broad = standard.expand((len(Y),))
    fitted = model.infer_latents(guide, Y, method="variational", prior=standard, num_steps=200)
    near = dist.Normal(fitted.mean, widen * fitted.stddev).to_event(1)
    log_weights = []
    for chunk in torch.arange(draws).split(20):
        shape = chunk.shape
        from_prior = torch.rand(*shape, len(Y), 1).to(Y) < prior
        X = torch.where(from_prior, broad.sample(shape), near.sample(shape))
        proposal = torch.logaddexp(broad.log_prob(X) + math.log(prior), near.log_prob(X) + math.log1p(-prior))
        rows = torch.nan_to_num(Y).expand(*shape, *Y.shape).flatten(0, 1)
        with torch.no_grad():
            entries = model.predictive(guide, X.flatten(0, 1)).log_prob(rows).unflatten(0, X.shape[:-1])
        log_weights.append(torch.where(torch.isnan(Y), 0.0, entries).sum(-1) + broad.log_prob(X) - proposal)
    return (torch.cat(log_weights).logsumexp(0) - math.log(draws)).mean().item()


def neighbour_accuracy(X: Float[np.ndarray, "N Q"], classes: Shaped[np.ndarray, " N"], *, seed: int) -> float:
    """Compute the accuracy of one nearest neighbour in the latents, the mean over five folds."""
    neighbours = KNeighborsClassifier(1, algorithm="kd_tree" if X.shape[1] < 8 else "brute")
    return float(cross_val_score(neighbours, X, classes, cv=KFold(5, shuffle=True, random_state=seed)).mean())
