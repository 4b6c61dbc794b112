"""Every kernel by name, and a Gaussian process with it."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule

from pyro_lvgp.kernels import RBF, Linear, Matern, Periodic


def _linear(Q, lengthscale=1.0, **kwargs):
    return Linear(Q, **kwargs)


KERNELS = {
    "rbf": RBF,
    "matern12": lambda Q, **k: Matern(Q, 0.5, **k),
    "matern32": Matern,
    "matern52": lambda Q, **k: Matern(Q, 2.5, **k),
    "periodic": lambda Q, **k: Periodic(Q, 2.0, **k),
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
