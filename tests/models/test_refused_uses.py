"""Priors at sites of the model's own, new rows in place of training rows, and predictions that are not finite."""

import copy

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import LogNormal, NegativeBinomial
from pyro_lvgp.models import GPVAE, BayesianGPLVM, MultiViewGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet

Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
NEW = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def make_gplvm():
    return BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4)


MODELS = {
    "gplvm": make_gplvm,
    "random features": lambda: RandomFeatureLVM(12, 3, latent_dim=2, num_frequencies=4, num_components=3),
    "series": lambda: GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 3)),
}


@pytest.mark.parametrize("kind", [BayesianGPLVM, MultiViewGPLVM, RandomFeatureLVM])
@pytest.mark.usefixtures("unchecked")
def test_dimensions_of_another_type_are_named(kind):
    with pytest.raises(TypeError, match=r"expected latent_dim to be (int|an integer).*, got '2'"):
        kind.from_data({"view": Y} if kind is MultiViewGPLVM else Y, "2")


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_prior_at_a_site_of_the_model_s_own_is_refused(make):
    model = make()
    for name in model.event_dims.keys() - {name for name, _ in model.named_parameters()}:
        if not hasattr(model, name):
            with pytest.raises(ValueError, match=f"got a PyroSample at '{name}'"):
                setattr(model, name, PyroSample(dist.Normal(0.0, 1.0)))


def test_priors_of_parameters_are_accepted():
    model = make_gplvm()
    model.kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    model.inducing_points = PyroSample(dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))


@pytest.mark.parametrize("call", ["impute", "reconstruct"])
def test_new_rows_in_place_of_training_rows_are_refused(call):
    model = make_gplvm()
    guide = MeanFieldGuide(model)
    fit(model, guide, Y, loss=MeanFieldELBO(), num_steps=2, progress=False)
    use = getattr(model, call)
    with pytest.raises(ValueError, match="expected training rows, got 12 rows of which 12 differ"):
        use(guide, NEW)
    with pytest.raises(ValueError, match="expected training rows"):
        use(guide, Y[:5], torch.arange(5, 10))
    with_gaps = Y.clone()
    with_gaps[:, 0] = torch.nan
    for rows, idx in ((Y, None), (with_gaps, None), (Y[5:], torch.arange(5, 12)), (torch.full_like(Y, torch.nan), None)):
        assert use(guide, rows, idx).mean.isfinite().all()
    assert getattr(copy.deepcopy(model), "_training_rows", None) is None


def test_rows_of_a_guide_with_an_encoder_have_latents_of_their_own():
    model = make_gplvm()
    guide = MeanFieldGuide(model, encoders={"X": IndexNet(3, 2)})
    fit(model, guide, Y, loss=MeanFieldELBO(), num_steps=2, progress=False)
    assert model.reconstruct(guide, NEW).mean.isfinite().all()


@pytest.mark.parametrize("likelihood", [LogNormal(), NegativeBinomial()], ids=["lognormal", "negative binomial"])
def test_predictions_that_are_not_finite_come_with_a_warning(likelihood):
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 3), likelihood)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 2)})
    t, y = torch.linspace(0.0, 1.0, 5)[:, None], torch.ones(5, 3)
    assert model.predict(guide, t, y, num_samples=5).mean.isfinite().all()
    with torch.no_grad():
        model.decoder[-1].bias.fill_(200.0)
    predicted = model.predict(guide, t, y, num_samples=5)
    for name in ("mean", "variance"):
        with pytest.warns(RuntimeWarning, match=f"the predictive {name} is not finite at 15 of 15 entries"):
            getattr(predicted, name)
