"""Errors of the random-feature model and its guide."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.nn import PyroSample

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.networks import IndexNet, ZeroImputation
from tests.helpers.random_features import C, D, F, N, Q, make_pair

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    def test_choices(self, Y):
        model = RandomFeatureLVM(N, D, Q, likelihood=Poisson())
        with pytest.raises(ValueError, match='weights="explicit"'):
            RandomFeatureGuide(model, weights="collapsed")
        with pytest.raises(ValueError, match="expected a Gaussian likelihood"):
            RandomFeatureGuide(model, weights="filled")
        with pytest.raises(ValueError, match='expected frequencies="gaussian"'):
            RandomFeatureGuide(model, weights="explicit", frequencies="mixture")
        with pytest.raises(ValueError, match="expected frequencies in"):
            RandomFeatureGuide(model, frequencies="normal")
        for init_scale in (0.0, math.inf):
            with pytest.raises(ValueError, match="positive and finite init_scale"):
                RandomFeatureGuide(model, init_scale=init_scale)
        guide = RandomFeatureGuide(RandomFeatureLVM(N, D, Q), weights="filled")
        with pytest.raises(ValueError, match="expected weights in"):
            guide.weights = "colapsed"
        with pytest.raises(ValueError, match='expected frequencies="gaussian"'):
            guide.weights = "explicit"
        guide.weights = "collapsed"
        guide = RandomFeatureGuide(model)
        for other in ("filled", "collapsed"):
            with pytest.raises(ValueError, match=r"expected a Gaussian.* got Poisson"):
                guide.weights = other

    def test_inputs_of_the_kernel(self, Y):
        model, guide = make_pair(Y)
        with pytest.raises(ValueError, match=r"X of shape \[rows, 2\], got \[5, 3\]"):
            model.kernel(guide, torch.randn(5, 3))
        with pytest.raises(TypeError, match="dtype"):
            model.kernel(guide, torch.randn(5, Q), torch.randn(5, Q, dtype=torch.float32))

    @pytest.mark.parametrize("autoguide", [AutoNormal, AutoDelta])
    def test_guides_without_a_density_of_frequencies(self, Y, autoguide):
        model = RandomFeatureLVM(N, D, Q, num_frequencies=F, num_components=C)
        guide = autoguide(model, create_plates=model.create_plates)
        guide(Y)
        for call in (model.kernel, model.spectral_density):
            with pytest.raises(TypeError, match="omega is a Normal or a DiagonalMixture, got one that samples a Delta"):
                call(guide, torch.randn(5, Q))

    def test_components_in_use_need_a_guide_that_has_run(self):
        with pytest.raises(RuntimeError, match="expected a guide that has run once"):
            RandomFeatureGuide(RandomFeatureLVM(N, D, Q)).num_components_in_use()

    def test_encoder_wants_data(self, Y):
        _, guide = make_pair(Y, encoders={"X": IndexNet(D, Q)})
        with pytest.raises(ValueError, match="expected data for the encoder"):
            guide()

    @pytest.mark.parametrize(
        ("encoder", "shape"),
        [
            (IndexNet(D, Q + 1, (4,)), r"\[12, 3\]"),
            (ZeroImputation(D, Q, (4,), covariance="full"), r"\[12, 2, 2\]"),
        ],
    )
    def test_encoder_of_other_latents(self, Y, encoder, shape):
        with pytest.raises(ValueError, match=rf"loc and scale of shape \[12, 2\] from the encoder, got .*{shape}; give it"):
            make_pair(Y, encoders={"X": encoder.double()})

    def test_sizes(self):
        with pytest.raises(ValueError, match="num_components of 2 or more"):
            RandomFeatureLVM(N, D, Q, num_components=1)
        with pytest.raises(ValueError, match="num_frequencies of 1 or more"):
            RandomFeatureLVM(N, D, Q, num_frequencies=0)
        with pytest.raises(ValueError, match="positive lengthscale"):
            RandomFeatureLVM(N, D, Q, lengthscale=0.0)
        with pytest.raises(ValueError, match="positive concentration"):
            RandomFeatureLVM(N, D, Q, concentration=(1.0, -1.0))

    def test_data(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        with pytest.raises(ValueError, match=r"shape \[rows, 3\], got \[12, 2\]"):
            model(Y[:, :2])
        with pytest.raises(ValueError, match="mini-batch with its indices"):
            model(Y[:5])

    def test_collapsed_weights_want_all_data_first(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        with pytest.raises(ValueError, match="has seen all data"):
            RandomFeatureGuide(model)(Y[:2], torch.arange(2))

    def test_priors_on_parameters(self, Y):
        model = RandomFeatureLVM(N, D, Q)
        model.kernel_variance = PyroSample(dist.LogNormal(0.0, 1.0))
        with pytest.raises(ValueError, match=r"got \['kernel_variance'\] too"):
            RandomFeatureGuide(model)(Y)


@pytest.mark.usefixtures("unchecked")
def test_spectral_density_wants_frequencies_of_its_dimensions(Y):
    model, guide = make_pair(Y)
    for omega in (torch.linspace(-1.0, 1.0, 5), torch.randn(5, 1)):
        with pytest.raises(ValueError, match=r"expected omega of shape \[rows, 2\]"):
            model.spectral_density(guide, omega)
    with pytest.raises(TypeError, match="dtype"):
        model.spectral_density(guide, torch.randn(5, 2, dtype=torch.float32))
