"""Predictions of both kinds of models under every likelihood, and brute-force mixtures to hold them against."""

import math

import torch

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import (
    Bernoulli,
    Binomial,
    Gaussian,
    Heterogeneous,
    LogNormal,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from pyro_lvgp.models import GPVAE, BayesianGPLVM
from pyro_lvgp.networks import MLP, IndexNet

N, D = 5, 3

LIKELIHOODS = {
    "gaussian": lambda: Gaussian(0.2, data_dim=D),
    "log-normal": lambda: LogNormal(0.1),
    "student-t": lambda: StudentT(0.3, df=8.0),
    "bernoulli": Bernoulli,
    "binomial": lambda: Binomial(5),
    "poisson": Poisson,
    "negative-binomial": lambda: NegativeBinomial(4.0, data_dim=D),
    "ordinal": lambda: Ordinal(torch.tensor([-0.7, 0.0, 0.7])),
    "heterogeneous": lambda: Heterogeneous([(Gaussian(0.2), [0]), (Poisson(), [1]), (Ordinal(torch.tensor([0.0])), [2])]),
}


def make(kind, likelihood, dtype):
    """A prediction of the kind of model under a likelihood, data in its support, and a model and its guide."""
    with torch.no_grad():
        y = likelihood()(torch.randn(N, D)).sample().to(dtype)
    likelihood = likelihood()
    if kind == "rows":
        model = BayesianGPLVM(N, D, latent_dim=2, num_inducing=2, likelihood=likelihood).to(dtype).initialize(y)
        guide = MeanFieldGuide(model, init_scale=0.5)
        return model.predict(guide, torch.randn(N, 2, dtype=dtype), num_samples=4), y, model, guide
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2, D, [4]), likelihood).to(dtype)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 2).to(dtype)})
    x = torch.linspace(0.0, 1.0, N, dtype=dtype)[:, None]
    return model.predict(guide, x, y, num_samples=4), y, model, guide


def brute_log_prob(prediction, y, num_nodes=4001):
    """Log density of each entry: the trapezoidal rule over f within each draw, then the mean over draws."""
    densities = []
    for part in prediction.parts:
        if isinstance(part, LikelihoodPredictive):
            z = torch.linspace(-8.0, 8.0, num_nodes, dtype=y.dtype).reshape(-1, 1, 1, 1)
            f = part.f_mean + part.f_variance.sqrt() * z
            given = part.likelihood.distribution(f, part.params).log_prob(y.expand(f.shape)).exp()
            weight = (-0.5 * z.square()).exp() / math.sqrt(2.0 * math.pi)
            densities.append((given * weight).sum(0) * (16.0 / (num_nodes - 1)))
        else:
            densities.append(part.log_prob(y.expand(part.batch_shape)).exp())
    return torch.cat(densities).mean(0).log()


def brute_samples(prediction, num):
    """Samples of each entry, with the draw, f and y of each sample drawn by themselves."""
    columns = []
    for part in prediction.parts:
        if isinstance(part, LikelihoodPredictive):
            noise = torch.randn(num, *part.batch_shape, dtype=part.f_mean.dtype)
            y = part.likelihood.distribution(part.f_mean + part.f_variance.sqrt() * noise, part.params).sample()
        else:
            y = part.sample((num,))
        columns.append(y)
    pooled = torch.cat(columns, 1)  # [num, draws, N, D]
    choice = torch.randint(pooled.shape[1], (num,))
    return pooled[torch.arange(num), choice]
