"""A model and its guide, and a model of a user's own."""

import pyro
import pyro.distributions as dist

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM

N, D = 20, 3


def make_pair(Y):
    """The same model and guide each time."""
    pyro.clear_param_store()
    model = BayesianGPLVM(N, D, 2, num_inducing=5).initialize(Y)
    return model, MeanFieldGuide(model)


def regression(y, idx=None):
    """A user's own model: a function, with a plate it subsamples itself."""
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", N, subsample=idx):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
