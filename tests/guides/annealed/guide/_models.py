"""Models of annealed guides, and their evidence."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM


def standard_error(x):
    return x.std(0) / len(x) ** 0.5


def gplvm(latent_dim, **kwargs):
    """Four rows of three entries, one missing, and a u to be given."""
    torch.manual_seed(3)
    Y = torch.randn(4, 3)
    Y[1, 2] = torch.nan
    return BayesianGPLVM(4, 3, latent_dim, num_inducing=4, **kwargs), torch.randn(3, 4), Y


class Traced:
    """The model without its log joint, so that the guide has to trace it."""

    def __init__(self, model):
        self.model = model
        self.num_calls = 0
        # From Python 3.12 on, protocols see no attributes of __getattr__.
        for name in ("local_plate", "create_plates", "init_loc_fn"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        return self.model(*args, **kwargs)

    def __getattr__(self, name):
        if name in ("log_joint", "score", "statistics"):
            raise AttributeError(name)
        return getattr(self.model, name)


LOSSES = {
    "drawn": lambda: Trace_ELBO(max_plate_nesting=1),
    "analytic": lambda: TraceMeanField_ELBO(max_plate_nesting=1),
    "vectorised": lambda: Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
    "integrated": lambda: MeanFieldELBO(max_plate_nesting=1),
    "weighted": lambda: ImportanceWeightedELBO(num_samples=3, max_plate_nesting=1),
}


def value_and_gradients(model, guide, loss, *args):
    torch.manual_seed(5)
    value = loss.differentiable_loss(model, guide, *args)
    parameters = [p for module in (getattr(model, "model", model), guide) for p in module.parameters()]
    return value, torch.autograd.grad(value, parameters)


def at_its_start(make, target, Y, loss, *args):
    """Value and gradients under a guide of a model, from the same start each time."""
    pyro.clear_param_store()
    guide = make(target)
    torch.manual_seed(4)
    guide(Y)
    return value_and_gradients(target, guide, loss, *args)


def assert_paths_agree(make, model, Y, loss, *args):
    """Whether scores come from the model's log joint or from tracing it."""
    (pure, pure_gradients), (traced, traced_gradients) = (
        at_its_start(make, target, Y, loss, *args) for target in (model, Traced(model))
    )
    assert torch.allclose(pure, traced, rtol=1e-10)
    for a, b in zip(pure_gradients, traced_gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


def regression(y, idx=None):
    """A global site behind a subsampled plate."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10, subsample=idx):
        pyro.sample("y", dist.Normal(slope, 1.0), obs=y)


def hierarchy(y):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(level, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)
