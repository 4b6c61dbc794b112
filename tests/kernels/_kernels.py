"""Every kernel by name, and a Gaussian process with it."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule

from pyro_lvgp.kernels import RBF, Linear, Matern, Periodic, RationalQuadratic, SpectralMixture


def _linear(Q, lengthscale=1.0, **kwargs):
    return Linear(Q, **kwargs)


def _spectral_mixture(Q, lengthscale=1.0, **kwargs):
    scales = torch.as_tensor(1.0 / (2.0 * torch.pi * lengthscale))
    return SpectralMixture(Q, 2, scales=scales if scales.dim() == 0 else scales[..., None, :], **kwargs)


KERNELS = {
    "rbf": RBF,
    "matern12": lambda Q, **k: Matern(Q, 0.5, **k),
    "matern32": Matern,
    "matern52": lambda Q, **k: Matern(Q, 2.5, **k),
    "periodic": lambda Q, **k: Periodic(Q, 2.0, **k),
    "rational quadratic": lambda Q, **k: RationalQuadratic(Q, 0.7, **k),
    "spectral mixture": _spectral_mixture,
    "linear": _linear,
    "sum": lambda Q, **k: RBF(Q, **k) + 0.3 * _linear(Q, **k),
    "product": lambda Q, **k: Matern(Q, 2.5, **k) * Periodic(Q, **k) + 1.0,
}


class GPModel(PyroModule):
    def __init__(self, kernel, X, y):
        super().__init__()
        self.kernel, self.X, self.y = kernel, X, y

    def forward(self):
        K = self.kernel(self.X)
        torch.testing.assert_close(self.kernel.diagonal(self.X), K.diagonal(dim1=-2, dim2=-1))  # the same draw
        cov = K + 0.1 * torch.eye(K.shape[-1], dtype=K.dtype)
        return pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(self.y), cov), obs=self.y)
