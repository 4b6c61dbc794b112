"""Sparse Gaussian processes of columns that share a kernel, inducing points and a likelihood."""

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp._utils.control_flow import holds, is_recording
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm
from pyro_lvgp.infer.elbo.handlers import Moments, sample_moments
from pyro_lvgp.kernels import RBF, Kernel, Linear
from pyro_lvgp.kernels._additive import as_additive_rbf
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LowRankGaussian
from pyro_lvgp.models._known_rows import KnownRows
from pyro_lvgp.ops.expected_log_likelihood import Quadratic, evaluate, with_offset
from pyro_lvgp.ops.linalg import invert_lower, solve_lower, sparse_conditional
from pyro_lvgp.ops.rbf_score import RBFScore, rbf_score, score


class Shared(NamedTuple):
    """Values of the sites and parameters that all rows share.

    :param mean: offsets c_d.
    :param u_scale_tril: Cholesky factor of the covariance of u if a bound marginalises u, whose mean is then ``u``; else None.
    """

    mean: Float[Tensor, " D"]
    inducing_points: Float[Tensor, "M Q"]
    kernel: KernelParams
    Luu: Float[Tensor, "*batch M M"]
    u: Float[Tensor, "*batch D M"]
    u_scale_tril: Float[Tensor, "D M M"] | None
    likelihood: Tensor | None


class Statistics(NamedTuple):
    """Tensors on which the log density of rows depends besides the latents.

    :param shared: values of the sites and parameters that all rows share.
    :param Luu_inv: L_uu⁻¹.
    :param likelihood: quadratic form of the likelihood, or the data and the mask of the observed entries.
    :param score: tensors of the closed-form gradient; None if there is no closed form.
    :param rows: known quantities of the rows.
    """

    shared: Shared
    Luu_inv: Float[Tensor, "*batch M M"]
    likelihood: Quadratic | tuple[Float[Tensor, "B D"], Bool[Tensor, "B D"]]
    score: RBFScore | None = None
    rows: KnownRows = KnownRows()


@dataclass(frozen=True)
class SparseColumns:
    r"""Sparse Gaussian processes of D columns, and the likelihood of their data.

    .. math:: u_d \sim N(0, I_M), \qquad f_{nd} \mid u, x_n \sim N(c_d + A_n^T u_d,\; k(x_n, x_n) - A_n^T A_n)

    :param kernel: covariance function of the columns.
    :param likelihood: p(y | f).
    :param term: the likelihood term.
    :param num_inducing: number of inducing points M.
    :param data_dim: number of columns D.
    :param site: name of the site of the inducing values.
    :param plate: name of the plate over columns.
    """

    kernel: Kernel
    likelihood: Likelihood
    term: LikelihoodTerm
    num_inducing: int
    data_dim: int
    site: str
    plate: str

    @property
    def is_quadratic(self) -> bool:
        """Whether the likelihood of a row is a quadratic form, whose cost does not grow with D."""
        return type(self.likelihood) in (Gaussian, LowRankGaussian) and self.term == "svgp"

    def read(self, mean: Tensor, inducing_points: Tensor) -> Shared:
        """Read the parameters, and sample the inducing values."""
        kernel = self.kernel.params()
        Kuu = self.kernel.covariance(inducing_points, inducing_points, kernel)
        Luu = safe_cholesky(Kuu, name="Kuu", describe=self.kernel.parameters_text)
        likelihood = self.likelihood.params()
        with pyro.plate(self.plate, self.data_dim, dim=-1):
            u = self._sample_inducing_values(inducing_points)
        return Shared(mean, inducing_points, kernel, Luu, *u, likelihood)

    def _sample_inducing_values(self, like: Tensor) -> Moments:
        prior = dist.Normal(like.new_zeros(self.num_inducing), 1.0).to_event(1)
        infer: Any = {"covariance": "full"}
        if self.term == "fitc":  # its expectation over u has no closed form
            return Moments(pyro.sample(self.site, prior, infer=infer), None)
        return sample_moments(self.site, prior, infer=infer)

    def function(
        self, X: Tensor, shared: Shared, known: KnownRows, term: LikelihoodTerm | None = None
    ) -> LikelihoodPredictive:
        """Return the distribution p(y | x, shared) of each entry."""
        # Rows are a batch dimension for Pyro, and a matrix dimension for the kernel: [*S, N, Q] -> [*S, 1, N, Q].
        points = known.inputs(X).unsqueeze(-3)
        Kuf = self.kernel.covariance(shared.inducing_points, points, shared.kernel)
        Kff = self.kernel.diagonal(points, shared.kernel)
        f_mean, f_variance = sparse_conditional(shared.Luu, Kuf, Kff, shared.u.unsqueeze(-3), shared.u_scale_tril)
        f_mean, params = known.shift(shared.mean + f_mean.squeeze(-3)), known.params_of(self.likelihood, shared.likelihood)
        return LikelihoodPredictive(self.likelihood, f_mean, f_variance.squeeze(-3), term or self.term, params)

    def statistics(self, y: Tensor, observed: Tensor, shared: Shared, known: KnownRows) -> Statistics:
        """Compute the tensors of :meth:`log_likelihood`, without those of the score."""
        Luu_inv = invert_lower(shared.Luu)
        if not self.is_quadratic:
            data = torch.nan_to_num(y, self.likelihood.fill_value), observed
            return Statistics(shared, Luu_inv, data, rows=known)
        likelihood: Any = self.likelihood
        residual = torch.nan_to_num(y) - shared.mean
        mask, incomplete = _missing_entries(observed)
        u = beside_batches(shared.u, shared)
        params = shared.u_scale_tril, shared.likelihood, incomplete, known.variance
        form = likelihood.quadratic_form(residual, mask, u, *params)
        return Statistics(shared, Luu_inv, form, rows=known)

    def with_score(self, statistics: Statistics) -> Statistics:
        """Add the tensors of the score of the latents, if it has a closed form."""
        form, shared, known = statistics.likelihood, statistics.shared, statistics.rows
        latent_dim = shared.inducing_points.shape[-1] - (0 if known.covariates is None else known.covariates.shape[-1])
        kernel = as_additive_rbf(self.kernel, shared.kernel, latent_dim)
        if not isinstance(form, Quadratic) or kernel is None:
            return statistics
        if kernel.others:
            num_rows = 1 if known.covariates is None else len(known.covariates)
            points = beside_batches(known.inputs(form.linear.new_zeros(num_rows, latent_dim)), shared)
            parts = [part.covariance(points, shared.inducing_points, params) for part, params in kernel.others]
            form = with_offset(form, reduce(add, parts) @ statistics.Luu_inv.mT)
        Z = shared.inducing_points[..., :latent_dim]
        own = rbf_score(form, statistics.Luu_inv, Z, *kernel.params, prior=known.prior)
        return statistics._replace(score=own)

    def log_likelihood(self, X: Tensor, statistics: Statistics) -> Float[Tensor, "*particles B"]:
        """Compute ``log p(y_n | x_n, u)`` of each row; the random term ``"sampled"`` is replaced by its expectation."""
        shared = statistics.shared
        if isinstance(statistics.likelihood, Quadratic):
            points = beside_batches(statistics.rows.inputs(X), shared)
            Kfu = self.kernel.covariance(points, shared.inducing_points, shared.kernel)
            Kff = self.kernel.diagonal(points, shared.kernel)
            return evaluate(statistics.likelihood, Kfu @ statistics.Luu_inv.mT, Kff).view(X.shape[:-1])
        y, observed = statistics.likelihood
        term: LikelihoodTerm | None = "svgp" if self.term == "sampled" else None
        return self.function(X, shared, statistics.rows, term).rows(observed).log_prob(y)

    def initial_inducing_values(
        self, Z: Float[Tensor, "M P"], inputs: Float[Tensor, "N P"], function: Float[Tensor, "N D"], ridge: float, seed: int
    ) -> Float[Tensor, "D M"]:
        """Compute inducing values by ridge regression on the inputs, ``u = (A Aᵀ + ridge I)⁻¹ A (f − c)``."""
        with seeded(seed):  # one draw of parameters with a prior for both covariances
            params = self.kernel.params()
        Kuu, Kuf = self.kernel.covariance(Z, Z, params), self.kernel.covariance(Z, inputs, params)
        A = solve_lower(safe_cholesky(Kuu), Kuf)
        gram = A @ A.mT + ridge * torch.eye(self.num_inducing, dtype=A.dtype, device=A.device)
        return torch.linalg.solve(gram, A @ function).mT.contiguous()


def score_of_latents(statistics: Statistics, X: Float[Tensor, "*particles B Q"]) -> Float[Tensor, "*particles B Q"]:
    """Evaluate the score of the latents, for statistics that have its tensors."""
    assert statistics.score is not None
    return score(statistics.score, beside_batches(X, statistics.shared)).view(X.shape)


def has_batches(shared: Shared) -> bool:
    """Return whether there are several draws of u or of the kernel."""
    return shared.u.dim() > 2 or shared.Luu.dim() > 2


def beside_batches(x: Float[Tensor, "*particles rows columns"], shared: Shared) -> Tensor:
    """Give rows a dimension beside the batches of u or of the kernel; without these, make one draw of the rows a matrix."""
    if has_batches(shared):
        return x.unsqueeze(-3)
    return x.reshape(x.shape[-2:]) if x.dim() > 2 and x.shape[:-2].numel() == 1 else x


def default_kernel(latent_dim: int, covariate_dim: int) -> Kernel:
    """Return a kernel of the latents, plus one of additive effects of covariates."""
    if not covariate_dim:
        return RBF(latent_dim, lengthscale=latent_dim**0.5)
    latents, covariates = range(latent_dim), range(latent_dim, latent_dim + covariate_dim)
    nonlinear = RBF(latent_dim, lengthscale=latent_dim**0.5, active_dims=list(latents))
    return nonlinear + Linear(covariate_dim, active_dims=list(covariates))


def _missing_entries(observed: Bool[Tensor, "N D"]) -> tuple[Bool[Tensor, "N D"] | None, Int[Tensor, " R"] | None]:
    """Mask of the observed entries, or None for complete data, and the indices of incomplete rows.

    The indices are None for complete data, and while a graph is recorded.
    """
    if holds(observed.all()):
        return None, None
    # The shapes of a recorded graph must not depend on values.
    return observed, None if is_recording() else (~observed.all(-1)).nonzero().squeeze(-1)
