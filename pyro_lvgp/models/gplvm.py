"""The Bayesian Gaussian process latent variable model with inducing points."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float, Int
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp._utils.control_flow import holds, is_recording
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Table, as_tensor, labels_of
from pyro_lvgp._utils.validation import check_values
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm, ObservedRows
from pyro_lvgp.infer.elbo.handlers import Moments, sample_moments
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import RBF, Kernel, Linear, as_kernel
from pyro_lvgp.kernels._symmetry import is_rotation_invariant, symmetry_of_columns
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LowRankGaussian
from pyro_lvgp.models._given_latents import as_kwargs
from pyro_lvgp.models._known_rows import KnownRows, default_latent_dim
from pyro_lvgp.models._row_model import RowModel
from pyro_lvgp.models.initialization import InitialLatents, cluster_centres
from pyro_lvgp.models.row_arguments import RowArguments
from pyro_lvgp.ops.expected_log_likelihood import Quadratic, evaluate, heteroscedastic_quadratic
from pyro_lvgp.ops.linalg import invert_lower, solve_lower, sparse_conditional
from pyro_lvgp.ops.rbf_score import RBFScore, rbf_score, score

__all__ = ["BayesianGPLVM", "Statistics"]

_MAX_DEFAULT_DIM = 5


class _Shared(NamedTuple):
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
    """Tensors on which :meth:`BayesianGPLVM.log_joint` depends besides the latents.

    :param shared: values of the sites and parameters that all rows share.
    :param Luu_inv: L_uu⁻¹.
    :param likelihood: quadratic form of the likelihood, or the data and the mask of the observed entries.
    :param score: tensors of the closed-form gradient; None if there is no closed form.
    :param rows: known quantities of the rows.
    """

    shared: _Shared
    Luu_inv: Float[Tensor, "*batch M M"]
    likelihood: Quadratic | tuple[Float[Tensor, "B D"], Bool[Tensor, "B D"]]
    score: RBFScore | None = None
    rows: KnownRows = KnownRows()


class BayesianGPLVM(RowModel):
    r"""Gaussian process latent variable model with inducing points, for data with missing entries.

    .. math::

        x_n \sim N(0, I_Q), \qquad u_d \sim N(0, I_M), \qquad
        f_{nd} \mid u, x_n \sim N(c_d + A_n^T u_d,\; k(x_n, x_n) - A_n^T A_n), \qquad y_{nd} \sim p(y \mid f_{nd})

    with :math:`A_n = L_{uu}^{-1} k(Z, x_n)` and :math:`K_{uu} = L_{uu} L_{uu}^T`.  The likelihood factorises over n, so
    mini-batches are exact.

    The offsets c_d are constants: zero, or the column means on the scale of f after :meth:`initialize`.

    With ``rows`` (:class:`RowArguments`) the latents have the priors :math:`N(m_n, \mathrm{diag}\, s_n^2)`, the functions the
    inputs :math:`(x_n, c_n)`, and rows have exposures, standard errors and weights.

    Sites: ``u`` [D, M] in plate ``outputs``; ``X`` [N, Q] in plate ``data``; ``y`` [N, D], observed, in plate ``data``; and
    parameters with a ``PyroSample`` prior (``model.kernel.lengthscale = PyroSample(...)``).

    :param num_data: number of rows N.
    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param kernel: covariance of f; by default an ``RBF`` with a lengthscale √Q for each dimension, so that the functions at
        two random latents have a correlation of about 1/e.  With P covariates it acts on the Q + P columns (x, c), and is by
        default this ``RBF`` of x plus a ``Linear`` kernel of c, whose effects are additive.
    :param num_inducing: number of inducing points M.
    :param likelihood: p(y | f); ``Gaussian()`` by default.
    :param likelihood_term: ``"svgp"``, ``"fitc"`` or ``"sampled"``, see
        :class:`~pyro_lvgp.distributions.LikelihoodPredictive`.
    :param rows: what is known of each training row; None for nothing.
    :raises ValueError: if there are fewer rows than inducing points, a size is not positive, the kernel has a batch shape or
        another number of columns than the latents and covariates, the likelihood has parameters of another number of outputs,
        or ``rows`` are of another number of rows, outputs or latent dimensions.
    :raises TypeError: if the likelihood has no log link for exposures, or is not Gaussian, for standard errors.

    >>> from pyro.infer import SVI, TraceMeanField_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> svi = SVI(model, MeanFieldGuide(model), Adam({"lr": 0.01}), TraceMeanField_ELBO())
    >>> loss = svi.step(Y)
    >>> batch = torch.tensor([0, 3, 7])
    >>> loss = svi.step(Y[batch], batch)

    References: Titsias and Lawrence (2010), "Bayesian Gaussian process latent variable model"; Lalchand et al. (2022),
    "Generalised GPLVM with stochastic variational inference".
    """

    local_sites = frozenset({"X"})

    def __init__(
        self,
        num_data: int,
        data_dim: int,
        latent_dim: int,
        kernel: Kernel | None = None,
        *,
        num_inducing: int = 50,
        likelihood: Likelihood | None = None,
        likelihood_term: LikelihoodTerm = "svgp",
        rows: RowArguments | None = None,
    ):
        super().__init__(num_data, data_dim, latent_dim, likelihood, rows, num_inducing=num_inducing)
        if num_data < num_inducing:
            raise ValueError(
                f"expected at least as many rows as inducing points, got num_data={num_data} and "
                f"num_inducing={num_inducing}; pass num_inducing={num_data} or fewer"
            )
        if likelihood_term not in get_args(LikelihoodTerm):
            raise ValueError(f"expected likelihood_term in {get_args(LikelihoodTerm)}, got {likelihood_term!r}")
        self.num_inducing = num_inducing
        self.kernel = as_kernel(_default_kernel(latent_dim, self._covariate_dim) if kernel is None else kernel)
        if self.kernel.batch_shape:
            raise ValueError(
                f"expected one kernel for all outputs, got a kernel of batch shape {list(self.kernel.batch_shape)}; leave "
                "out batch_shape"
            )
        self.kernel.check_columns(latent_dim + self._covariate_dim)
        self.likelihood_term = likelihood_term
        self.inducing_points: Any = PyroParam(torch.randn(num_inducing, latent_dim + self._covariate_dim), constraints.real)
        self.event_dims = {"X": ("latent",), "u": ("inducing",), "y": ("output",), "kernel.lengthscale": ("latent",)}

    def forward(
        self,
        y: Float[Tensor, "B D"] | None = None,
        idx: Int[Tensor, " B"] | None = None,
        rows: RowArguments | None = None,
    ) -> Float[Tensor, "*particles B D"]:
        """Sample all sites of all rows, or of the rows ``idx``.

        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the rows in y; None for all rows.
        :param rows: what is known of rows that are not training rows.
        """
        observed = None if y is None else self._observed(y, idx)
        known = KnownRows.of(self.rows_at(idx, rows))
        shared = self._read_shared()
        with self.data_plate(y, idx, rows):
            X = pyro.sample("X", known.prior_of_latents(self.latent_dim, shared.inducing_points))
            if y is None or observed is None:
                return pyro.sample("y", self._function(X, shared, known).rows())
            value = torch.nan_to_num(y, self.likelihood.fill_value)
            if not self._is_quadratic:
                return pyro.sample("y", self._function(X, shared, known).rows(observed), obs=value)
            log_prob = self._log_likelihood(X, self._statistics(y, observed, shared, known))
            entries = ObservedRows(value, log_prob, lambda: self._function(X, shared, known).rows(observed))
            return pyro.sample("y", entries, obs=value)

    @classmethod
    def from_data(
        cls,
        Y: Table,
        latent_dim: int | None = None,
        kernel: Kernel | None = None,
        *,
        rank: int | None = None,
        num_inducing: int | None = None,
        likelihood: Likelihood | None = None,
        rows: RowArguments | None = None,
        seed: int = 0,
    ) -> "BayesianGPLVM":
        """Create a model of the sizes, dtype and device of the data, and initialize it from the data.

        The default kernel and noise are for columns of about unit variance: standardise real-valued data first.

        :param Y: all data, NaN where missing: a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`), which has the
            precision of the model, and labels of columns that further tables must have too.
        :param latent_dim: number of latent dimensions; by default that of the priors of ``rows``, or else as many as
            correlations of the columns, without effects of covariates, have eigenvalues above 1, but at most 5 (Kaiser's
            rule).
        :param kernel: covariance of the functions; the ``RBF`` of the constructor by default.
        :param rank: number of linear factors of the residuals under the default likelihood; by default a third of the
            columns, but at most 8.
        :param num_inducing: number of inducing points; by default ten for each latent dimension, but from 20 to 50, at most
            one for each row.
        :param likelihood: p(y | f); :class:`~pyro_lvgp.likelihoods.LowRankGaussian` by default, with a noise variance for each
            column, or by :class:`~pyro_lvgp.likelihoods.Gaussian` with standard errors.
        :param rows: what is known of each row; None for nothing.
        :param seed: seed of the initial values.
        :raises ValueError: for data that cannot be used, sizes that are not positive or do not fit, or a rank with another
            likelihood than the default one.
        :raises TypeError: for a tensor of integers.

        >>> model = BayesianGPLVM.from_data(torch.randn(40, 6))
        >>> model.num_data, model.data_dim, type(model.likelihood).__name__, model.likelihood.rank
        (40, 6, 'LowRankGaussian', 2)

        Source: Kaiser (1960), "The application of electronic computers to factor analysis".
        """
        columns, Y = labels_of(Y).columns, as_tensor(Y, name="Y")
        if Y.dim() != 2:
            raise ValueError(f"expected data of shape [rows, columns], got {list(Y.shape)}; flatten images to rows")
        check_values(Y, name="Y")
        N, D = Y.shape
        if likelihood is not None and rank is not None:
            raise ValueError(f"expected a rank for the default likelihood alone, got rank={rank} and {likelihood}")
        if likelihood is None and rows is not None and rows.standard_error is not None:
            likelihood = Gaussian(data_dim=D)
        elif likelihood is None:
            likelihood = LowRankGaussian(min(8, D // 3) if rank is None else rank, D)
        if latent_dim is None:
            with torch.no_grad(), seeded(seed):
                latent_dim = default_latent_dim(likelihood.to(Y), Y, rows, most=_MAX_DEFAULT_DIM)
        if num_inducing is None:
            num_inducing = min(max(20, min(10 * latent_dim, 50)), N)
        model = cls(N, D, latent_dim, kernel, num_inducing=num_inducing, likelihood=likelihood, **as_kwargs(rows))
        model = model.to(Y).initialize(Y, seed=seed)
        model._columns = columns
        return model

    log_joint_forward = forward  # the method whose log density log_joint returns, see infer.protocols.HasLogJoint

    @property
    def _is_quadratic(self) -> bool:
        """Whether the likelihood of a row is a quadratic form, whose cost does not grow with D."""
        return type(self.likelihood) in (Gaussian, LowRankGaussian) and self.likelihood_term == "svgp"

    def _read_shared(self) -> _Shared:
        inducing_points, kernel = self.inducing_points, self.kernel.params()
        Kuu = self.kernel.covariance(inducing_points, inducing_points, kernel)
        Luu = safe_cholesky(Kuu, name="Kuu", describe=self.kernel.parameters_text)
        likelihood = self.likelihood.params()
        with pyro.plate("outputs", self.data_dim, dim=-1):
            prior = dist.Normal(inducing_points.new_zeros(self.num_inducing), 1.0).to_event(1)
            u = self._sample_inducing_values(prior)
        return _Shared(self.mean, inducing_points, kernel, Luu, *u, likelihood)

    def _sample_inducing_values(self, prior: TorchDistributionMixin) -> Moments:
        infer: Any = {"covariance": "full"}
        if self.likelihood_term == "fitc":  # its expectation over u has no closed form
            return Moments(pyro.sample("u", prior, infer=infer), None)
        return sample_moments("u", prior, infer=infer)

    def _function(
        self, X: Tensor, shared: _Shared, known: KnownRows, term: LikelihoodTerm | None = None
    ) -> LikelihoodPredictive:
        """Distribution p(y | x, shared) of each entry."""
        # Rows are a batch dimension for Pyro, and a matrix dimension for the kernel: [*S, N, Q] -> [*S, 1, N, Q].
        points = known.inputs(X).unsqueeze(-3)
        Kuf = self.kernel.covariance(shared.inducing_points, points, shared.kernel)
        Kff = self.kernel.diagonal(points, shared.kernel)
        f_mean, f_variance = sparse_conditional(shared.Luu, Kuf, Kff, shared.u.unsqueeze(-3), shared.u_scale_tril)
        f_mean, params = known.shift(shared.mean + f_mean.squeeze(-3)), known.widen(shared.likelihood)
        return LikelihoodPredictive(self.likelihood, f_mean, f_variance.squeeze(-3), term or self.likelihood_term, params)

    def statistics(
        self, y: Float[Tensor, "B D"], idx: Int[Tensor, " B"] | None = None, rows: RowArguments | None = None
    ) -> Statistics:
        """Compute the tensors of :meth:`log_joint` from the parameters and the sites outside the plate ``data``.

        :param y: observations, NaN where missing.
        :param idx: indices of the rows in y; None for all rows.
        :param rows: what is known of rows that are not training rows.
        """
        observed = self._observed(y, idx)
        known = KnownRows.of(self.rows_at(idx, rows))
        with self._pyro_context:
            shared = self._read_shared()
        statistics = self._statistics(y, observed, shared, known)
        has_score = type(self.kernel) is RBF and self.kernel.active_dims is None and known.covariates is None
        if isinstance(statistics.likelihood, Quadratic) and has_score:
            form, Luu_inv = statistics.likelihood, statistics.Luu_inv
            return statistics._replace(
                score=rbf_score(form, Luu_inv, shared.inducing_points, *shared.kernel, prior=known.prior)
            )
        return statistics

    def _statistics(self, y: Tensor, observed: Tensor, shared: _Shared, known: KnownRows) -> Statistics:
        Luu_inv = invert_lower(shared.Luu)
        if not self._is_quadratic:
            data = torch.nan_to_num(y, self.likelihood.fill_value), observed
            return Statistics(shared, Luu_inv, data, rows=known)
        residual = torch.nan_to_num(y) - shared.mean
        mask, incomplete = _missing_entries(observed)
        u = _beside_batches(shared.u, shared)
        if known.variance is not None and shared.likelihood is not None:
            precision = (shared.likelihood.unsqueeze(-2) + known.variance).reciprocal()
            precision = precision.expand(*precision.shape[:-1], self.data_dim)
            form = heteroscedastic_quadratic(residual, mask, precision, u, shared.u_scale_tril)
        else:
            form = self.likelihood.quadratic_form(residual, mask, u, shared.u_scale_tril, shared.likelihood, incomplete)
        return Statistics(shared, Luu_inv, form, rows=known)

    def log_joint(self, latents: Mapping[str, Tensor], statistics: Statistics) -> Float[Tensor, "*particles B"]:
        r"""Compute ``log p(y_n | x_n, u) + log p(x_n)`` of each row, as a pure function of tensors.

        The value is the log density of the sites ``X`` and ``y`` in the plate ``data``, without the scale of a mini-batch.
        The likelihood term ``"sampled"`` is random, and is replaced by its expectation, ``"svgp"``.

        :param latents: ``{"X": [*particles, B, Q]}``.
        :param statistics: result of :meth:`statistics`.
        """
        X = latents["X"]
        return self._log_likelihood(X, statistics) + statistics.rows.log_prior(X)

    def _log_likelihood(self, X: Tensor, statistics: Statistics) -> Tensor:
        shared = statistics.shared
        if isinstance(statistics.likelihood, Quadratic):
            points = _beside_batches(statistics.rows.inputs(X), shared)
            Kfu = self.kernel.covariance(points, shared.inducing_points, shared.kernel)
            Kff = self.kernel.diagonal(points, shared.kernel)
            return evaluate(statistics.likelihood, Kfu @ statistics.Luu_inv.mT, Kff).view(X.shape[:-1])
        y, observed = statistics.likelihood
        term: LikelihoodTerm | None = "svgp" if self.likelihood_term == "sampled" else None
        return self._function(X, shared, statistics.rows, term).rows(observed).log_prob(y)

    def score(self, latents: Mapping[str, Tensor], statistics: Statistics) -> dict[str, Tensor]:
        """Compute gradients of the summed :meth:`log_joint`, in closed form for Gaussian likelihoods and an RBF kernel.

        :param latents: ``{"X": [*particles, B, Q]}``.
        :param statistics: result of :meth:`statistics`.
        :returns: gradient in each of the latents.
        """
        X = latents["X"]
        if statistics.score is None:
            return torch.func.grad(lambda latents: self.log_joint(latents, statistics).sum())({"X": X})
        return {"X": score(statistics.score, _beside_batches(X, statistics.shared)).view(X.shape)}

    def score_tensors(self, statistics: Statistics) -> RBFScore | None:
        """Return the score of X as a tuple of tensors; None without a closed form, or for batches of kernels or of u.

        :param statistics: result of :meth:`statistics`.
        """
        return None if _has_batches(statistics.shared) else statistics.score

    @names_types
    @pyro_lock
    def initialize(
        self,
        Y: Table,
        *,
        method: InitialLatents = "pca",
        latents: Float[Tensor, "N Q"] | None = None,
        ridge: float = 0.1,
        seed: int = 0,
    ) -> "BayesianGPLVM":
        """Initialize parameters and sites by a linear model of the data; guides created afterwards have these initial values.

        Latents are computed by PCA or factor analysis of the data on the scale of f, inducing points by k-means of the
        latents, ``mean`` from the column means, and ``u`` by ridge regression on the latents,
        ``u = (A Aᵀ + ridge I)⁻¹ A (f − c)``.  Frozen inducing points (``requires_grad_(False)``) do not change, and inducing
        points with a prior have their initial value in guides.

        :param Y: all data, NaN where missing: a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`).
        :param method: ``"pca"`` or ``"factor-analysis"``.
        :param latents: initial latents instead, such as a neighbour embedding; columns are standardised.
        :param ridge: noise variance of the ridge regression, relative to the prior variance of f.
        :param seed: seed of the linear model and of k-means.
        :returns: the model itself.
        :raises ValueError: for data that cannot be used, latents of another shape, not finite or with constant columns, or a
            ridge that is negative or not finite.
        """
        if isinstance(ridge, bool) or not 0.0 <= ridge < math.inf:
            raise ValueError(f"expected a ridge of 0 or more, and finite, got {ridge}; 0.1 is a common choice")
        with torch.no_grad():
            X, function = self._initialize_linear(Y, method, latents, seed)
            self.initial_values = {"X": X}
            inputs = KnownRows.of(self.rows).inputs(X)
            Z = self._initialize_parameter("inducing_points", cluster_centres(inputs, self.num_inducing, seed=seed))
            with seeded(seed):  # one draw of parameters with a prior for both covariances
                params = self.kernel.params()
            Kuu, Kuf = self.kernel.covariance(Z, Z, params), self.kernel.covariance(Z, inputs, params)
            A = solve_lower(safe_cholesky(Kuu), Kuf)
            gram = A @ A.mT + ridge * torch.eye(self.num_inducing, dtype=A.dtype, device=A.device)
            u = torch.linalg.solve(gram, A @ function)
        self.initial_values["u"] = u.mT.contiguous()
        return self

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the orthogonal transformations of latents and inducing points under which the model is the same.

        The prior of latents is invariant under all of them; the kernel may be under signed permutations alone.  There are none
        under frozen inducing points, with priors or covariates of rows, or if a subclass overrides ``forward``.
        """
        is_free = is_rotation_invariant(self, "inducing_points") and type(self).forward is BayesianGPLVM.forward
        if (rows := self.rows) is not None:
            is_free = is_free and rows.prior is None and rows.covariates is None
        group, scales = symmetry_of_columns(self.kernel)
        return LatentSymmetry(group if is_free else "none", {"X": -1, "inducing_points": -1}, scales)

    def latent_candidates(self) -> Float[Tensor, "M Q"]:
        return self.inducing_points[..., : self.latent_dim].detach()


def _default_kernel(latent_dim: int, covariate_dim: int) -> Kernel:
    """Return a kernel of the latents, plus one of additive effects of covariates."""
    if not covariate_dim:
        return RBF(latent_dim, lengthscale=latent_dim**0.5)
    latents, covariates = range(latent_dim), range(latent_dim, latent_dim + covariate_dim)
    nonlinear = RBF(latent_dim, lengthscale=latent_dim**0.5, active_dims=list(latents))
    return nonlinear + Linear(covariate_dim, active_dims=list(covariates))


def _has_batches(shared: _Shared) -> bool:
    """Return whether there are several draws of u or of the kernel."""
    return shared.u.dim() > 2 or shared.Luu.dim() > 2


def _beside_batches(x: Float[Tensor, "*particles rows columns"], shared: _Shared) -> Tensor:
    """Give rows a dimension beside the batches of u or of the kernel; without these, make one draw of the rows a matrix."""
    if _has_batches(shared):
        return x.unsqueeze(-3)
    return x.reshape(x.shape[-2:]) if x.dim() > 2 and x.shape[:-2].numel() == 1 else x


def _missing_entries(observed: Bool[Tensor, "N D"]) -> tuple[Bool[Tensor, "N D"] | None, Int[Tensor, " R"] | None]:
    """Mask of the observed entries, or None for complete data, and the indices of incomplete rows.

    The indices are None for complete data, and while a graph is recorded.
    """
    if holds(observed.all()):
        return None, None
    # The shapes of a recorded graph must not depend on values.
    return observed, None if is_recording() else (~observed.all(-1)).nonzero().squeeze(-1)
