"""Independent Gaussian processes in GPyTorch, one for each output, with hyperparameters shared by all groups."""

from collections.abc import Callable, Sequence

import gpytorch
import torch
from jaxtyping import Float
from torch import Tensor

Start = tuple[float, float | Sequence[float]]
KernelMaker = Callable[..., gpytorch.kernels.Kernel]


class _Process(gpytorch.models.ExactGP):
    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: gpytorch.likelihoods.GaussianLikelihood,
        make_kernel: KernelMaker,
        kernels: Sequence[Start],
    ):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        parts = []
        for variance, lengthscale in kernels:
            part = gpytorch.kernels.ScaleKernel(make_kernel(ard_num_dims=x.shape[-1])).to(x)
            part.outputscale, part.base_kernel.lengthscale = variance, torch.as_tensor(lengthscale, dtype=x.dtype)
            parts.append(part)
        self.covar_module = gpytorch.kernels.AdditiveKernel(*parts)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class GroupedProcess:
    """Gaussian process with a sum of kernels for each of several groups, which share hyperparameters only.

    :param x: inputs of every group.
    :param y: one output, NaN where missing.
    :param make_kernel: class of the kernels.
    :param kernels: initial variance and lengthscales of each kernel.
    """

    def __init__(
        self,
        x: Float[Tensor, "N P"],
        y: Float[Tensor, "B N"],
        *,
        make_kernel: KernelMaker = gpytorch.kernels.RBFKernel,
        kernels: Sequence[Start] = ((1.0, 1.0),),
    ):
        self.x = x
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
        seen = self._seen(next(row for row in y if not torch.isnan(row).all()))
        self.model = _Process(*seen, likelihood, make_kernel, kernels).to(x)

    def fit(self, y: Float[Tensor, "B N"], num_epochs: int, *, seed: int, learning_rate: float = 0.02) -> None:
        """Maximise the marginal likelihood of one group at a time."""
        marginal = gpytorch.mlls.ExactMarginalLogLikelihood(self.model.likelihood, self.model)
        optim = torch.optim.Adam(self.model.parameters(), learning_rate)
        self.model.train()
        generator = torch.Generator().manual_seed(seed)
        for group in torch.cat([torch.randperm(len(y), generator=generator) for _ in range(num_epochs)]).tolist():
            x, seen = self._seen(y[group])
            if len(seen):
                self.model.set_train_data(x, seen, strict=False)
                optim.zero_grad()
                (-marginal(self.model(x), seen)).backward()
                optim.step()

    @torch.no_grad()
    def predict(self, y: Float[Tensor, "B N"]) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Compute mean and standard deviation of observations at all inputs, group by group."""
        self.model.eval()
        moments = []
        for row in y:
            self.model.set_train_data(*self._seen(row), strict=False)
            # In debug mode GPyTorch warns if the inputs are the training inputs, as they are for a complete group.
            with gpytorch.settings.debug(False):
                predicted = self.model.likelihood(self.model(self.x))
            moments.append(torch.stack([predicted.mean, predicted.stddev]))
        mean, stddev = torch.stack(moments, 1)
        return mean, stddev

    def _seen(self, row: Tensor) -> tuple[Tensor, Tensor]:
        seen = ~torch.isnan(row)
        return self.x[seen], row[seen]
