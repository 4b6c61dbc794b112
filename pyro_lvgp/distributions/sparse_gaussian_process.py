"""Sparse Gaussian processes: conditionals given values at inducing points, and the prior of these values."""

from collections.abc import Callable

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.distributions.util import eye_like
from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types, names_types
from pyro_lvgp._utils.cholesky import FIRST_JITTER, safe_cholesky
from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.kernels.base import KernelParams, params_in_double
from pyro_lvgp.ops import sparse_sites
from pyro_lvgp.ops.linalg import solve_lower
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["InducingValues", "SparseProcess", "inducing_posterior"]


class SparseProcess:
    r"""Conditional of Q zero-mean Gaussian processes at N inputs, given their values at M inducing points.

    .. math::

        v \sim N(0, I_M), \qquad f_n \mid v \sim N\big(A_n^T v,\; k(x_n, x_n) - A_n^T A_n\big), \qquad
        A = L^{-1} k(Z, X), \quad L L^T = k(Z, Z) + \epsilon I

    Time is O(N M² + M³) and memory O(N M), except for :meth:`trajectories`, the joint samples of all f_n.

    :param kernel: a batch of Q kernels.
    :param Z: inducing points ``[M, P]``, or ``[*batch, 1, Q, M, P]`` if each process has its own.
    :param X: inputs ``[1, N, P]``, or ``[*batch, 1, 1, N, P]`` with dimensions of size 1 for a plate of points and for the
        processes.
    :param params: parameters of the kernel, as read by the model; the current values by default.
    :param jitter: ε, relative to the mean prior variance at the inducing points.
    :param weight: number of data that each input represents in a mini-batch; one number, or one for each input.

    >>> from pyro_lvgp.kernels import RBF
    >>> process = SparseProcess(RBF(1, batch_shape=(2,)), torch.rand(5, 1), torch.rand(1, 100, 1))
    >>> mean, variance = process.marginals(process.prior().sample())
    >>> mean.shape
    torch.Size([2, 100])

    Source: Titsias (2009), "Variational learning of inducing variables in sparse Gaussian processes".
    """

    @checks_types
    def __init__(
        self,
        kernel: Kernel,
        Z: Float[Tensor, "*#batch M P"],
        X: Float[Tensor, "*#batch N P"],
        params: KernelParams | None = None,
        *,
        jitter: float = 1e-5,
        weight: float | Tensor = 1.0,
    ):
        self.kernel, self.Z, self.X, self.params = kernel, Z, X, kernel.params() if params is None else params
        self.jitter, self.weight = jitter, weight
        self.Kuf = kernel.covariance(Z, X, self.params)
        self.Kff = kernel.diagonal(X, self.params)
        Kuu = self._inducing_covariance(Z)
        self.Kuu_diagonal = Kuu.diagonal(dim1=-2, dim2=-1)
        self.L = safe_cholesky(Kuu, jitter=0.0, name="Kuu", describe=kernel.parameters_text)
        self.A = solve_lower(self.L, self.Kuf)

    def _inducing_covariance(self, Z: Tensor) -> Tensor:
        """Compute the covariance of the values at Z and at the inducing points, with jitter where two points are equal."""
        variance = self.kernel.diagonal(self.Z, self.params).mean(-1)[..., None, None]
        same = (Z[..., :, None, :] == self.Z[..., None, :, :]).all(-1)
        return self.kernel.covariance(Z, self.Z, self.params) + self.jitter * variance * same

    def at_inducing_points(self, Z: Float[Tensor, "*#batch K P"]) -> "SparseProcess":
        """Return the process with other inducing points.

        :param Z: inducing points.
        """
        return SparseProcess(self.kernel, Z, self.X, self.params, jitter=self.jitter, weight=self.weight)

    def double(self) -> "SparseProcess":
        """Return the process in double precision."""
        params = params_in_double(self.params)
        return SparseProcess(self.kernel, self.Z.double(), self.X.double(), params, jitter=self.jitter, weight=self.weight)

    def whitened_covariance(self, other: "SparseProcess") -> Float[Tensor, "*batch M K"]:
        """Compute the covariance of the whitened values at these inducing points and at those of another instance.

        :param other: the process with other inducing points, from :meth:`at_inducing_points`.
        """
        return solve_lower(self.L, solve_lower(other.L, other._inducing_covariance(self.Z).mT).mT)

    def offsets(self, index: Int[Tensor, "*batch N T"]) -> Float[Tensor, "*out N T P"]:
        """Compute the differences z − x of each input and some of the inducing points.

        :param index: indices of T inducing points for each input.
        """
        Z, lead = self.Z.expand(*index.shape[:-2], *self.Z.shape[-2:]), index.shape[:-2]
        near = Z.gather(-2, index.flatten(-2)[..., None].expand(*lead, -1, Z.shape[-1])).unflatten(-2, index.shape[-2:])
        return near - self.X[..., None, :]

    def given_single_value(
        self, index: Int[Tensor, "*#batch N T"]
    ) -> tuple[Float[Tensor, "*out N T"], Float[Tensor, "*out N T"]]:
        """Compute gain a and variance c of ``f_n | u_m ~ N(a u_m, c)``, given a single inducing value.

        :param index: indices m of T inducing points for each input.
        """
        index = index.expand(*torch.broadcast_shapes(index.shape[:-2], self.Kuf.shape[:-2]), -1, -1)
        lead = index.shape[:-2]
        Kfu = self.Kuf.mT.expand(*lead, -1, -1).gather(-1, index)
        diagonal = self.Kuu_diagonal[..., None, :].expand(*lead, index.shape[-2], -1).gather(-1, index)
        gain = Kfu / diagonal
        return gain, (self.Kff[..., None] - gain * Kfu).clamp_min(0.0)

    @property
    def num_latents(self) -> int:
        """Number Q of processes."""
        return self.Kff.shape[-2]

    @property
    def num_inducing(self) -> int:
        """Number M of inducing points."""
        return self.Z.shape[-2]

    @property
    def similarity(self) -> Float[Tensor, "*batch q M N"]:
        """Prior correlation of inducing values and f_n, averaged over processes (q = 1) that share their inducing points.

        The correlation with a value of variance zero, such as that of a linear function at zero, is defined as zero.
        """
        scaled = self.Kuf * self.Kuu_diagonal.rsqrt()[..., :, None] * self.Kff.rsqrt()[..., None, :]
        correlation = scaled.detach().nan_to_num(0.0)
        return correlation.mean(-3, keepdim=True) if self.Z.dim() == 2 or self.Z.shape[-3] == 1 else correlation

    def prior(self) -> "InducingValues":
        """Construct the prior p(v) of the whitened inducing values, ``[*batch, Q, M]``."""
        shape = torch.broadcast_shapes(self.A.shape[:-2], self.Kff.shape[:-1])
        return InducingValues(self, shape[:-2] + shape[-1:])

    def marginals(
        self, v: Float[Tensor, "*batch Q M"], scale_tril: Float[Tensor, "*batch Q M M"] | None = None
    ) -> tuple[Float[Tensor, "*out Q N"], Float[Tensor, "*out Q N"]]:
        """Compute means and variances of f given v, or for Gaussian v.

        :param v: whitened inducing values, or their means.
        :param scale_tril: Cholesky factors of the covariances of v; None if v is known.
        """
        factors = None if scale_tril is None else scale_tril.unsqueeze(-4)
        mean, variance = sparse_sites.marginals(self.A, self.Kff, v.unsqueeze(-3), factors)
        return mean.squeeze(-3), variance.squeeze(-3)

    def trajectories(self, v: Float[Tensor, "*batch Q M"]) -> Float[Tensor, "*out Q N"]:
        """Draw f at all inputs jointly, given v, in O(N³) time.

        Unlike draws from the marginals, a joint draw is as smooth as the process.

        :param v: whitened inducing values.
        """
        # Given v the covariance can be smaller than the rounding errors of the prior's in single precision.
        exact = self.double()
        jitter = FIRST_JITTER[torch.float64] * exact.Kff.mean(-1)[..., None, None] * eye_like(exact.A, exact.A.shape[-1])
        covariance = self.kernel.covariance(exact.X, exact.X, exact.params) - exact.A.mT @ exact.A + jitter
        scale_tril = safe_cholesky(covariance, name="Kff given u", describe=self.kernel.parameters_text).to(self.A)
        mean = (v.unsqueeze(-3).unsqueeze(-2) @ self.A).squeeze(-2)
        return (mean + (scale_tril @ torch.randn_like(mean)[..., None]).squeeze(-1)).squeeze(-3)


class InducingValues(dist.Normal):
    """Standard normal prior of whitened inducing values, with a reference to their process.

    :param process: the sparse process.
    :param batch_shape: ``[*batch, Q]``.
    """

    def __init__(self, process: SparseProcess, batch_shape: torch.Size):
        self.process = process
        super().__init__(process.L.new_zeros(*batch_shape, process.num_inducing), 1.0)

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(InducingValues, _instance)
        new.process = self.process
        return super().expand(batch_shape, new)

    def __getstate__(self):
        # A guide copies its prototype trace; the copy must not contain the parameters of the model.
        return self.__dict__ | {"process": None}


@names_types
def inducing_posterior(
    sites: Sites, in_double: Callable[[], Sites] | None = None
) -> tuple[Float[Tensor, "*batch M"], Float[Tensor, "*batch M M"]]:
    """Compute mean and Cholesky factor of the covariance of the whitened inducing values under Gaussian sites.

    :param sites: factor of the data.
    :param in_double: function that returns the same sites in double precision, for a precision matrix that rounding in single
        precision makes indefinite.

    >>> inducing_posterior(Sites(3.0 * torch.eye(1), torch.tensor([2.0])))
    (tensor([0.5000]), tensor([[0.5000]]))
    """
    J = sparse_sites.reversed_precision(sites)
    tril, info = torch.linalg.cholesky_ex(J)
    if not holds(~(info > 0).any()):
        if in_double is not None and J.dtype != torch.float64:
            # Jitter is relative to the diagonal, so that it could exceed the precision I of the prior.
            loc, scale_tril = inducing_posterior(in_double())
            return loc.to(J), scale_tril.to(J)
        tril = safe_cholesky(J, name="I + H")
    return sparse_sites.posterior(sites, tril)
