"""GPyTorch's Bayesian GPLVM, with parameters copied from and to one of our models."""

import time

import gpytorch
import numpy as np
import torch
from gpytorch.models.gplvm import BayesianGPLVM as _GPyTorchBase
from gpytorch.models.gplvm import VariationalLatentVariable
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import BayesianGPLVM

# In float64 that of our models, in float32 the default of GPyTorch.
_JITTER = {torch.float64: 1e-8, torch.float32: 1e-4}


class GPyTorchGPLVM:
    """Model, guide and bound of ``BayesianGPLVM`` with ``MeanFieldGuide``, in GPyTorch's own classes.

    Whitened ``VariationalStrategy`` with inducing points shared by all outputs, ``CholeskyVariationalDistribution`` for each
    output, one noise, zero mean, and ``VariationalLatentVariable``.  The training loop is that of GPyTorch's
    tutorial, which draws all latents at every step, and uses those of a mini-batch.

    :param Y: all data, with columns of mean 0; steps are of their dtype, float64 or float32.
    :param model: model with the initial inducing points, RBF kernel and noise.
    :param guide: guide with the initial q(X) and q(u).
    :param batch_size: rows in a mini-batch.
    :param learning_rate: learning rate of Adam.
    :raises ValueError: if a column of Y has a mean other than 0, which is the mean of f in this model.
    """

    def __init__(
        self, Y: Float[Tensor, "N D"], model: BayesianGPLVM, guide: MeanFieldGuide, *, batch_size: int, learning_rate: float
    ):
        if Y.mean(0).abs().max() > 1e-6:
            raise ValueError(f"expected columns of Y with mean 0, got means {Y.mean(0).tolist()}; subtract them")
        self._Y, self._batch_size = Y, batch_size
        self._model = _Model(model.num_data, model.data_dim, model.latent_dim, model.num_inducing, _JITTER[Y.dtype]).to(Y)
        self._likelihood = gpytorch.likelihoods.GaussianLikelihood().to(Y)
        self._start_from(model, guide)
        self._bound = gpytorch.mlls.VariationalELBO(self._likelihood, self._model, num_data=len(Y))
        parameters = [*self._model.parameters(), *self._likelihood.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)

    @torch.no_grad()
    def _start_from(self, model: BayesianGPLVM, guide: MeanFieldGuide) -> None:
        strategy, q_u, q_x = self._model.variational_strategy, self._model.q_u, self._model.X
        strategy.inducing_points.copy_(model.inducing_points)
        self._model.covar_module.outputscale = model.kernel.variance
        self._model.covar_module.base_kernel.lengthscale = model.kernel.lengthscale
        self._likelihood.noise = model.likelihood.variance
        q_x.q_mu.copy_(guide.locs.X)
        q_x.q_log_sigma.copy_(guide.scales.X.expm1().log())  # GPyTorch applies softplus
        q_u.variational_mean.copy_(guide.locs.u)
        q_u.chol_variational_covar.copy_(guide.scales.u)
        # Otherwise the first call sets q(u) to the prior.
        strategy.variational_params_initialized.fill_(1)

    @torch.no_grad()
    def copy_to(self, model: BayesianGPLVM, guide: MeanFieldGuide) -> None:
        """Set the parameters of our model and guide, which have run once, to those learned here."""
        q_u, q_x = self._model.q_u, self._model.X
        model.inducing_points = self._model.variational_strategy.inducing_points.clone()
        model.mean.zero_()
        model.kernel.variance = self._model.covar_module.outputscale
        model.kernel.lengthscale = self._model.covar_module.base_kernel.lengthscale.squeeze(-2)
        model.likelihood.variance = self._likelihood.noise.squeeze(-1)
        guide.locs.X = q_x.q_mu.clone()
        guide.scales.X = torch.nn.functional.softplus(q_x.q_log_sigma)
        guide.locs.u = q_u.variational_mean.clone()
        # L Lᵀ stays the same when a column of L changes sign; ours has a positive diagonal.
        L = q_u.chol_variational_covar.tril()
        guide.scales.u = L * L.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]

    def train(self, num_steps: int, *, seed: int) -> list[float]:
        """Take Adam steps on shuffled mini-batches; return the wall seconds of each."""
        self._model.train()
        with seeded(seed):
            times = [time.perf_counter()]
            while len(times) <= num_steps:
                for idx in torch.randperm(len(self._Y)).split(self._batch_size)[: num_steps + 1 - len(times)]:
                    self._optimizer.zero_grad()
                    loss = self._negative_bound(idx)
                    loss.backward()
                    self._optimizer.step()
                    times.append(time.perf_counter())
        return np.diff(times).tolist()

    def _negative_bound(self, idx: Tensor) -> Tensor:
        X = self._model.sample_latent_variable()
        return -self._bound(self._model(X[idx]), self._Y[idx].mT).sum()

    @torch.no_grad()
    def negative_bound(self, *, num_evaluations: int, seed: int = 0) -> float:
        """Compute minus the bound on all data per datum by GPyTorch's own code, averaged over draws of the latents."""
        self._model.train()
        rows = torch.arange(len(self._Y))
        with seeded(seed):
            return torch.stack([self._negative_bound(rows) for _ in range(num_evaluations)]).mean().item()

    @torch.no_grad()
    def predict(self) -> Float[Tensor, "N D"]:
        """Compute the predictive mean at the posterior-mean latents, by GPyTorch's own code."""
        self._model.eval()
        return self._model(self._model.X.q_mu).mean.mT


class _Model(_GPyTorchBase):
    def __init__(self, num_data: int, data_dim: int, latent_dim: int, num_inducing: int, jitter: float):
        outputs = torch.Size([data_dim])
        prior = gpytorch.priors.NormalPrior(torch.zeros(num_data, latent_dim), torch.ones(num_data, latent_dim))
        q_x = VariationalLatentVariable(num_data, data_dim, latent_dim, torch.zeros(num_data, latent_dim), prior)
        q_u = CholeskyVariationalDistribution(num_inducing, batch_shape=outputs)
        points = torch.zeros(num_inducing, latent_dim)
        super().__init__(q_x, VariationalStrategy(self, points, q_u, jitter_val=jitter))
        self.q_u = q_u
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=latent_dim))

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))
