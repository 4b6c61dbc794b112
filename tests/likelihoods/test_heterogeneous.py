"""Data whose columns are of several kinds."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import (
    Bernoulli,
    Gaussian,
    Heterogeneous,
    Likelihood,
    LogNormal,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import IndexNet

pytestmark = pytest.mark.usefixtures("float64")
N, COLUMNS = 60, ([4, 0], [2], [3, 1])


def parts() -> tuple[Likelihood, ...]:
    """Two lengths, with a variance each, one answer of yes or no, and two counts."""
    return Gaussian(torch.tensor([0.3, 0.7]), data_dim=2), Bernoulli(), NegativeBinomial(4.0)


@pytest.fixture
def kinds() -> Heterogeneous:
    return Heterogeneous(list(zip(parts(), COLUMNS, strict=True)))


def five_columns() -> torch.Tensor:
    """Rows that one latent tells all of."""
    x = torch.randn(N, 1)
    f = x * torch.tensor([1.0, 0.8, 3.0, -0.8, -1.0]) + torch.tensor([0.0, 2.0, 0.0, 2.0, 0.0])
    y = f + 0.2 * torch.randn(N, 5)
    y[:, 2] = dist.Bernoulli(logits=f[:, 2]).sample()
    y[:, [1, 3]] = dist.Poisson(f[:, [1, 3]].exp()).sample()
    return y


def test_each_column_has_what_its_part_says(kinds):
    y, mean, variance = five_columns(), torch.randn(N, 5), torch.rand(N, 5)
    entries, params = kinds(mean), kinds.params()
    for part, columns in zip(parts(), COLUMNS, strict=True):
        mine, own = (x[:, columns] for x in (y, mean, variance)), part.params()
        y_part, mean_part, variance_part = mine
        expected = {
            "log_prob": part(mean_part).log_prob(y_part),
            "mean": part(mean_part).mean,
            "expected": part.expected_log_prob(y_part, mean_part, variance_part, own),
            "marginal": part.log_predictive_density(y_part, mean_part, variance_part, own),
            "derivatives": torch.stack(part.log_predictive_derivatives(y_part, mean_part, variance_part, own)),
            "moments": torch.stack(part.moments(mean_part, variance_part, own)),
            "function": part.inverse_link(y_part),
        }
        found = {
            "log_prob": entries.log_prob(y),
            "mean": entries.mean,
            "expected": kinds.expected_log_prob(y, mean, variance, params),
            "marginal": kinds.log_predictive_density(y, mean, variance, params),
            "derivatives": torch.stack(kinds.log_predictive_derivatives(y, mean, variance, params)),
            "moments": torch.stack(kinds.moments(mean, variance, params)),
            "function": kinds.inverse_link(y),
        }
        for name, value in expected.items():
            torch.testing.assert_close(found[name][..., columns], value, msg=name)


def test_kinds_without_parameters_have_none():
    assert Heterogeneous([(Bernoulli(), [1]), (Poisson(), [0])]).params() is None


def test_a_prior_of_one_part_lines_up_with_particles():
    kinds = Heterogeneous([(Gaussian(), [1]), (Bernoulli(), [0])])
    kinds.parts[0].variance = PyroSample(dist.LogNormal(torch.zeros(3, 1), 1.0))  # as under a plate of 3 particles
    y = kinds(torch.zeros(400, 2))
    assert y.batch_shape == (3, 400, 2)
    answers = y.sample()[..., 0]
    assert not torch.equal(answers[0], answers[1])


def test_wild_entries_of_a_part_are_left_out_of_the_start():
    y = torch.randn(50, 3)
    y[7, 0] = 1000.0
    start = Heterogeneous([(StudentT(), [0, 1]), (Gaussian(), [2])]).initial_function(y)
    torch.testing.assert_close(start, y.index_put((torch.tensor(7), torch.tensor(0)), torch.tensor(torch.nan)), equal_nan=True)


def test_what_stands_in_for_missing_entries_is_in_all_supports():
    assert Heterogeneous([(Poisson(), [0]), (LogNormal(), [1])]).fill_value == 1.0

    class FarAway(Likelihood):
        fill_value = 2.5

        def distribution(self, f, params):
            return dist.Uniform(2.0 * torch.ones_like(f), 3.0)

        def inverse_link(self, y):
            return y

    with pytest.raises(ValueError, match=r"in the support of every part, got \[0.0, 2.5\]; derive a likelihood with another"):
        Heterogeneous([(Poisson(), [0]), (FarAway(), [1])])


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (
            [(Gaussian(), [0]), (Bernoulli(), [2])],
            ValueError,
            r"each column, .* in one part, got .* \[0, 2\]",
        ),
        ([(Gaussian(), [0, 1]), (Bernoulli(), [1])], ValueError, r"in one part, got the columns \[0, 1, 1\]"),
        ([], ValueError, r"in one part, got the columns \[\]"),
        ([(Gaussian(), [0]), (Bernoulli(), [])], ValueError, "expected columns for each likelihood, got none for Bernoulli"),
        ([(Gaussian(data_dim=3), [0, 1])], ValueError, "pass data_dim=2 to it"),
        ([Gaussian()], TypeError, "expected pairs of a likelihood and a list of columns as parts, got Gaussian"),
        ([(Gaussian, [0])], TypeError, "expected pairs of a likelihood"),
        ([(Gaussian(), [0.5])], TypeError, "expected pairs of a likelihood"),
        ([(Gaussian(), 0)], TypeError, "expected pairs of a likelihood"),
    ],
)
def test_parts_that_do_not_fit_are_refused(wrong, error, match, unchecked):
    with pytest.raises(error, match=match):
        Heterogeneous(wrong)


def test_data_that_do_not_fit_are_refused(kinds):
    with pytest.raises(ValueError, match="expected a likelihood of 4 outputs, got parts with 5 columns"):
        BayesianGPLVM(N, 4, 1, num_inducing=5, likelihood=kinds)
    Y = five_columns()
    Y[3, 2] = 0.5
    with pytest.raises(ValueError, match=r"Bernoulli likelihood: expected 0 or 1, got 0.5 \(1 such entries\)"):
        BayesianGPLVM(N, 5, 1, num_inducing=5, likelihood=kinds).initialize(Y)


def test_functions_of_other_columns_are_refused(kinds):
    with pytest.raises(ValueError, match=r"expected 5 columns, those of all parts, got a tensor of shape \[6, 4\]"):
        kinds(torch.zeros(6, 4))


def fitted(name: str, kinds: Heterogeneous, Y: torch.Tensor):
    """A model of the rows, its guide, and how to fit it."""
    if name == "random features":
        model = RandomFeatureLVM(N, 5, 1, num_frequencies=10, lengthscale=1.0, likelihood=kinds).initialize(Y)
        guide = RandomFeatureGuide(model)
        return model, guide, {"optim": guide.blocks(lr=0.1), "num_steps": 120}
    model = BayesianGPLVM(N, 5, 1, num_inducing=10, likelihood=kinds).initialize(Y)
    how = {"loss": MeanFieldELBO(num_samples=1), "optim": JointAdam(lr=0.1)}
    if name == "annealed":
        return model, AutoAnnealedLangevin(model, num_steps=2), how | {"num_steps": 20}
    return model, MeanFieldGuide(model), how | {"num_steps": 40}


@pytest.mark.parametrize("name", ["mean field", "annealed", "random features"])
def test_rows_of_several_kinds_tell_what_is_hidden(kinds, name):
    """Of every column some entries; a column by itself is predicted by its mean."""
    Y = five_columns()
    hidden = torch.rand(Y.shape) < 0.2
    seen = Y.masked_fill(hidden, torch.nan)
    model, guide, how = fitted(name, kinds, seen)
    fit(model, guide, seen, seed=0, progress=False, **how)
    found, column_means = model.impute(guide, seen), seen.nanmean(0)
    for d in range(5):
        mine = hidden[:, d]
        scale = torch.log1p if d in (1, 3) else torch.positive  # a large count would decide all
        guesses = found.mean, column_means.expand_as(Y)
        error, plain = ((scale(guess) - scale(Y))[mine, d].square().mean() for guess in guesses)
        assert error < 0.6 * plain, f"column {d}: {error:.3f} for {plain:.3f}"
    assert ((found.mean[:, 2] >= 0.0) & (found.mean[:, 2] <= 1.0)).all()
    assert (kinds.parts[0].variance < 0.3).all()  # learned
    new = model.infer_latents(guide, seen[:4], num_steps=20)
    assert model.predictive(guide, new.mean).sample().shape == (4, 5)


def test_a_decoder_may_give_the_parameter_of_each_entry():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.function, self.spread = nn.Linear(1, 3), nn.Linear(1, 3)

        def forward(self, f):
            return self.function(f), nn.functional.softplus(self.spread(f))

    t = torch.linspace(0.0, 1.0, 20)[:, None]
    y = torch.cat([t.sin(), (t > 0.5).double(), t.cos()], 1)
    model = GPVAE(RBF(1, batch_shape=(1,)), Decoder(), Heterogeneous([(Gaussian(), [0, 2]), (Bernoulli(), [1])]))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 1)})
    history = fit(model, guide, t, y, loss=StructuredELBO(), num_steps=3, progress=False)
    assert history.losses[-1] < history.losses[0]
    params = torch.rand(20, 3)
    entries = model.likelihood.distribution(torch.zeros(20, 3), params)
    torch.testing.assert_close(entries.variance[:, [0, 2]], params[:, [0, 2]])


def test_draws_of_all_columns_go_to_arviz(kinds):
    Y = five_columns()
    Y[:5, 2] = torch.nan
    model = BayesianGPLVM(N, 5, 1, num_inducing=5, likelihood=kinds).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    tree = to_arviz(model, guide, Y, num_samples=5, seed=0)
    answers = tree.posterior_predictive["y"].isel(output=2)
    assert set(answers.to_numpy().ravel()) == {0.0, 1.0}
    assert tree.log_likelihood["y_observed"].sizes["y_entry"] == Y.numel() - 5


def test_copies_and_saved_states_hold_all_parts(kinds):
    other = Heterogeneous(list(zip((Gaussian(data_dim=2), Bernoulli(), NegativeBinomial()), COLUMNS, strict=True)))
    other.load_state_dict(copy.deepcopy(kinds).state_dict())
    pyro.clear_param_store()
    torch.testing.assert_close(other.params(), kinds.params())
    assert kinds.float()(torch.zeros(2, 5, dtype=torch.float32)).mean.dtype == torch.float32
