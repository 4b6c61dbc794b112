"""Views whose rows have residuals with a low-rank covariance, against dense Gaussians."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LowRankGaussian
from pyro_lvgp.likelihoods._heterogeneous_rows import HeterogeneousRows
from pyro_lvgp.models import MultiViewGPLVM, RowArguments
from tests.models.multi_view._data import DIMS, N, Q, low_rank_model, small_table
from tests.models.multi_view.test_densities import conditional, dense_covariance, dense_rows, sites

pytestmark = pytest.mark.usefixtures("float64")


def correlated(rank, data_dim):
    likelihood = LowRankGaussian(rank, data_dim, variance=0.2 + torch.rand(data_dim))
    likelihood.cov_factor = torch.randn(data_dim, rank)
    return likelihood


@pytest.mark.parametrize("columns", [1, 5])
def test_standard_errors_are_added_to_the_diagonal_of_each_row(columns):
    error, Y, values = torch.rand(N, columns), small_table(binary=False), sites()
    likelihood = {"sensors": correlated(1, 3), "label": Gaussian(0.4)}
    rows = RowArguments(standard_error=error)
    model = MultiViewGPLVM(N, DIMS, Q, num_inducing={"sensors": 5, "label": 4}, likelihood=likelihood, rows=rows)
    with poutine.condition(data=values):
        found = model.log_joint({"X": values["X"]}, model.statistics(Y))
    errors = error.expand(N, 5)
    (m, v), (f_mean, f_variance) = (conditional(model.views[name], values["X"], values[f"u_{name}"]) for name in DIMS)
    noise = 0.4 + errors[:, 3:].square()
    label = dist.Normal(f_mean, noise.sqrt()).log_prob(Y[:, 3:].nan_to_num()) - f_variance / (2.0 * noise)
    want = torch.where(Y[:, 3:].isnan(), 0.0, label).sum(-1) + dist.Normal(0.0, 1.0).log_prob(values["X"]).sum(-1)
    covariance = dense_covariance(likelihood["sensors"])
    for n in range(N):
        own = covariance + errors[n, :3].square().diag()
        want[n] += dense_rows(Y[n : n + 1, :3], m[n : n + 1], v[n : n + 1], own)[0]
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def linear_model():
    """Views that are linear functions of one latent, whose guide knows them: all posteriors are Gaussian."""
    likelihood = {"a": correlated(1, 3), "b": correlated(2, 3), "c": Gaussian(0.3)}
    dims = {"a": 3, "b": 3, "c": 1}
    model = MultiViewGPLVM(N, dims, 1, {name: Linear(1) for name in dims}, num_inducing=1, likelihood=likelihood)
    guide = MeanFieldGuide(model, init_scale=1e-7)
    guide(torch.zeros(N, 7))
    with torch.no_grad():
        f, _ = zip(*(conditional(model.views[k], torch.ones(1, 1), getattr(guide.locs, f"u_{k}")) for k in dims), strict=True)
    noise = torch.block_diag(*(dense_covariance(likelihood[name]) for name in "ab"), torch.tensor([[0.3]])).detach()
    return model, guide, torch.cat(f, 1)[0], noise


def test_latents_of_new_rows_and_predictions_of_their_gaps_are_those_of_the_dense_gaussian():
    model, guide, slope, noise = linear_model()
    Y = torch.randn(4, 7)
    Y[0, 1] = Y[2, 5] = torch.nan
    Y[1, :3] = Y[3, 3:6] = Y[3, 0] = torch.nan  # whole views are missing
    prior = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    q = model.infer_latents(guide, Y, prior=prior, num_starts=1)
    filled = model.impute(guide, Y, latents=torch.zeros(4, 1), num_samples=2, seed=0)
    for n, seen in enumerate(~torch.isnan(Y)):
        S = noise[seen][:, seen]
        precision = 1.0 + slope[seen] @ torch.linalg.solve(S, slope[seen])
        mean = slope[seen] @ torch.linalg.solve(S, Y[n, seen]) / precision
        torch.testing.assert_close(q.mean[n, 0], mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(q.covariance_matrix[n, 0, 0], 1.0 / precision, rtol=1e-4, atol=1e-5)
        gain = torch.linalg.solve(S, noise[seen][:, ~seen]).mT  # at the latent 0, where functions are 0
        torch.testing.assert_close(filled.mean[n, ~seen], gain @ Y[n, seen], rtol=1e-4, atol=1e-5)
        variance = (noise[~seen][:, ~seen] - gain @ noise[seen][:, ~seen]).diagonal()
        torch.testing.assert_close(filled.variance[n, ~seen], variance, rtol=1e-4, atol=1e-5)
    view = model.predict_view(guide, "b", {"a": Y[[0, 2], :3].nan_to_num()}, num_samples=2, seed=0)
    assert view.log_prob(torch.zeros(2, 3)).isfinite().all()


def test_rows_are_drawn_from_their_density():
    kinds = HeterogeneousRows([(correlated(1, 2), [0, 2]), (Bernoulli(), [1])])
    f, params = torch.randn(1, 3), kinds.params()
    rows = kinds.distribution(f, params)
    y = rows.sample((4000,))[:, 0]
    covariance = dense_covariance(kinds.parts[0]).detach()
    torch.testing.assert_close(y[:, [0, 2]].mT.cov(), covariance, rtol=0.0, atol=5.0 * float(covariance.max()) * 4000**-0.5)
    assert abs(y[:, 1].mean() - f[0, 1].sigmoid()) < 4.0 * (0.25 / 4000) ** 0.5
    dense = dist.MultivariateNormal(f[0, [0, 2]], covariance).log_prob(y[:5, [0, 2]])
    dense = dense + dist.Bernoulli(logits=f[0, 1]).log_prob(y[:5, 1])
    torch.testing.assert_close(rows.log_prob(y[:5, None])[:, 0], dense)
    torch.testing.assert_close(rows.expand([3]).log_prob(y[:3]), dense[:3])
    assert rows.support.check(y[:5, None]).all()
    assert not rows.support.check(torch.full((1, 3), 0.5)).any()


@pytest.mark.parametrize("make_guide", [MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=1)])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_fits_with_gaps_and_missing_views(make_guide):
    Y = small_table()
    model = low_rank_model().initialize(Y)
    guide = make_guide(model)
    loss = MeanFieldELBO(max_plate_nesting=1)
    losses = fit(model, guide, Y, loss=loss, num_steps=20, batch_size=7, progress=False).losses
    assert sum(losses[-5:]) < sum(losses[:5])
    assert model.reconstruct(guide, Y, num_samples=2).mean.isfinite().all()
