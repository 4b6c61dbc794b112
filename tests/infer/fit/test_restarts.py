"""Fits from several seeds."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import Callback, JointAdam, StructuredELBO, fit, fit_restarts
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet

N, D = 12, 3
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
T = torch.linspace(0.0, 1.0, N)[:, None]


def gplvm(seed):
    model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=4).initialize(Y, latents=torch.randn(N, 2))
    return model, MeanFieldGuide(model)


def test_each_restart_is_the_fit_of_its_own_seed():
    optim = JointAdam(lr=0.03)
    restarts = fit_restarts(gplvm, Y, num_restarts=3, seed=5, num_steps=20, optim=optim, progress=False)
    assert sorted(restart.seed for restart in restarts) == [5, 6, 7]
    assert list(restarts.bounds) == sorted(restarts.bounds, reverse=True)
    assert restarts.best is restarts.fits[0]
    for restart in restarts:
        torch.manual_seed(restart.seed)
        model, guide = gplvm(restart.seed)
        alone = fit(model, guide, Y, num_steps=20, optim=JointAdam(lr=0.03), seed=restart.seed, progress=False)
        assert alone.losses == restart.history.losses
        assert restart.bound == pytest.approx(-(alone.losses[-1] + alone.losses[-2]) / 2)
    assert not optim.optim_objs  # each restart has a copy


def test_restarts_do_not_change_the_global_random_state_and_have_different_networks():
    def make(seed):
        model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D, [4]))
        return model, StructuredGPGuide(model, encoders={"f": IndexNet(D, 2)})

    state = torch.get_rng_state()
    restarts = fit_restarts(make, T, Y, num_restarts=2, num_steps=2, loss=StructuredELBO(), progress=False)
    assert torch.equal(state, torch.get_rng_state())
    first, second = (restart.model.decoder[0].weight for restart in restarts)
    assert not torch.equal(first, second)


def test_arguments_of_fit_may_depend_on_the_guide():
    def make(seed):
        model = RandomFeatureLVM(N, D, latent_dim=2, num_frequencies=4, num_components=2, seed=seed).initialize(Y)
        guide = RandomFeatureGuide(model)
        return model, guide, {"optim": guide.blocks(), "num_steps": 3 + seed}

    restarts = fit_restarts(make, Y, num_restarts=2, num_steps=2, progress=False)
    assert {restart.seed: len(restart.history.losses) for restart in restarts} == {0: 3, 1: 4}
    _, _, options = make(0)
    with pytest.raises(TypeError, match="a list of blocks, which belong to one guide"):
        fit_restarts(make, Y, optim=options["optim"])


def location(y):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def test_restarts_that_share_parameters_are_refused():
    pair = gplvm(0)
    with pytest.raises(ValueError, match="of an earlier one; create model and guide in"):
        fit_restarts(lambda seed: pair, Y, num_steps=2, progress=False)
    # Two guides of Pyro have the same names in the param store.
    with pytest.raises(ValueError, match=r"got \['guide.locs.loc', 'guide.scales.loc'\] of an earlier one"):
        fit_restarts(lambda seed: (location, AutoNormal(location)), Y[:, 0], num_steps=2, progress=False)

    def guide(y):
        pyro.sample("loc", dist.Normal(pyro.param("place", torch.zeros(())), 1.0))

    with pytest.raises(ValueError, match=r"got \['place'\] of an earlier one"):
        fit_restarts(lambda seed: (location, guide), Y[:, 0], num_steps=2, progress=False)


def test_guides_of_pyro_with_local_parameters(local_params):
    make = lambda seed: (location, AutoNormal(location))  # noqa: E731
    restarts = fit_restarts(make, Y[:, 0], num_restarts=2, num_steps=2, loss=Trace_ELBO(num_particles=2), progress=False)
    assert len(restarts) == 2


class StopAt(Callback):
    def __init__(self):
        self.starts = 0

    def on_start(self, state):
        self.starts += 1

    def on_step(self, state):
        if self.starts == 2 and state.step == 3:
            raise KeyboardInterrupt


def test_after_an_interrupt_no_restart_begins():
    callback = StopAt()
    restarts = fit_restarts(gplvm, Y, num_restarts=4, num_steps=5, callbacks=[callback], progress=False)
    assert callback.starts == 2
    assert {restart.seed: len(restart.history.losses) for restart in restarts} == {0: 5, 1: 3}


@pytest.mark.usefixtures("unchecked")
def test_other_results_of_make_are_refused():
    with pytest.raises(TypeError, match=r"expected make to return \(model, guide\)"):
        fit_restarts(lambda seed: gplvm(seed)[0], Y)
    with pytest.raises(ValueError, match="num_restarts"):
        fit_restarts(gplvm, Y, num_restarts=0)
