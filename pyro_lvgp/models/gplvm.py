"""The Bayesian Gaussian process latent variable model with inducing points."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Table
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.kernels._symmetry import is_rotation_invariant, symmetry_of_columns
from pyro_lvgp.likelihoods import Likelihood, LikelihoodName, LowRankGaussian, likelihood_by_name
from pyro_lvgp.models._given_latents import as_kwargs
from pyro_lvgp.models._known_rows import KnownRows, default_latent_dim
from pyro_lvgp.models._row_model import as_rows, warn_unless_scaled
from pyro_lvgp.models._sparse_columns import Shared, SparseColumns, Statistics, has_batches, score_of_latents
from pyro_lvgp.models._sparse_row_model import SparseRowModel
from pyro_lvgp.models.initialization import cluster_centres
from pyro_lvgp.models.row_arguments import RowArguments
from pyro_lvgp.ops.rbf_score import RBFScore

__all__ = ["BayesianGPLVM"]

_MAX_DEFAULT_DIM = 5


class BayesianGPLVM(SparseRowModel):
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
    :raises TypeError: if the likelihood has no log link for exposures, or no Gaussian noise for standard errors.

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
        self._set_term(likelihood_term)
        self.num_inducing = num_inducing
        self.kernel = self._checked_kernel(kernel)
        self.inducing_points: Any = PyroParam(torch.randn(num_inducing, latent_dim + self._covariate_dim), constraints.real)
        self.event_dims = {"X": ("latent",), "u": ("inducing",), "y": ("output",), "kernel.lengthscale": ("latent",)}

    @classmethod
    @names_types
    def from_data(
        cls,
        Y: Table,
        latent_dim: int | None = None,
        kernel: Kernel | None = None,
        *,
        rank: int | None = None,
        num_inducing: int | None = None,
        likelihood: Likelihood | LikelihoodName | None = None,
        rows: RowArguments | None = None,
        seed: int = 0,
    ) -> "BayesianGPLVM":
        """Create a model of the sizes, dtype and device of the data, and initialize it from the data.

        The default kernel and noise are for columns of about unit variance: standardise real-valued data first, or use
        :class:`pyro_lvgp.sklearn.GPLVM`, which does.  A warning says so if the root mean square of the columns' standard
        deviations is below 0.1 or above 10.

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
        :param likelihood: p(y | f), or its name (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`), such as ``"poisson"``;
            :class:`~pyro_lvgp.likelihoods.LowRankGaussian` by default, with a noise variance for each column.
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
        table, Y = Y, as_rows(Y)
        N, D = Y.shape
        if likelihood is not None and rank is not None:
            raise ValueError(f"expected a rank for the default likelihood alone, got rank={rank} and {likelihood}")
        if likelihood is None:
            if kernel is None:
                warn_unless_scaled(Y)
            likelihood = LowRankGaussian(min(8, D // 3) if rank is None else rank, D)
        likelihood = likelihood_by_name(likelihood, Y)
        if latent_dim is None:
            with torch.no_grad(), seeded(seed):
                latent_dim = default_latent_dim(likelihood.to(Y), Y, rows, most=_MAX_DEFAULT_DIM)
        if num_inducing is None:
            num_inducing = min(max(20, min(10 * latent_dim, 50)), N)
        model = cls(N, D, latent_dim, kernel, num_inducing=num_inducing, likelihood=likelihood, **as_kwargs(rows))
        return model.to(Y).initialize(table, seed=seed)

    @property
    def _columns(self) -> SparseColumns:
        sizes = self.num_inducing, self.data_dim
        return SparseColumns(self.kernel, self.likelihood, self.likelihood_term, *sizes, site="u", plate="outputs")

    @property
    def _is_quadratic(self) -> bool:
        return self._columns.is_quadratic

    def _read_shared(self) -> Shared:
        return self._columns.read(self.mean, self.inducing_points)

    def _function(self, X: Tensor, shared: Shared, known: KnownRows) -> LikelihoodPredictive:
        return self._columns.function(X, shared, known)

    def _statistics(self, y: Tensor, observed: Tensor, shared: Shared, known: KnownRows) -> Statistics:
        return self._columns.statistics(y, observed, shared, known)

    def _with_score(self, statistics: Statistics) -> Statistics:
        return self._columns.with_score(statistics)

    def _log_likelihood(self, X: Tensor, statistics: Statistics) -> Tensor:
        return self._columns.log_likelihood(X, statistics)

    def _initialize_functions(self, inputs: Tensor, function: Tensor, ridge: float, seed: int) -> None:
        Z = self._initialize_parameter("inducing_points", cluster_centres(inputs, self.num_inducing, seed=seed))
        self.initial_values["u"] = self._columns.initial_inducing_values(Z, inputs, function, ridge, seed)

    def score(self, latents: Mapping[str, Tensor], statistics: Statistics) -> dict[str, Tensor]:
        """Compute gradients of the summed :meth:`log_joint`.

        They have a closed form for Gaussian likelihoods and an RBF kernel of the latents, also in a sum with kernels of the
        covariates.

        :param latents: ``{"X": [*particles, B, Q]}``.
        :param statistics: result of :meth:`statistics`.
        :returns: gradient in each of the latents.
        """
        X = latents["X"]
        if statistics.score is None:
            return torch.func.grad(lambda latents: self.log_joint(latents, statistics).sum())({"X": X})
        return {"X": score_of_latents(statistics, X)}

    def score_tensors(self, statistics: Statistics) -> RBFScore | None:
        """Return the score of X as a tuple of tensors; None without a closed form, or for batches of kernels or of u.

        :param statistics: result of :meth:`statistics`.
        """
        return None if has_batches(statistics.shared) else statistics.score

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the orthogonal transformations of latents and inducing points under which the model is the same.

        The prior of latents is invariant under all of them; the kernel may be under signed permutations alone.  There are none
        under frozen inducing points, with priors or covariates of rows, or if a subclass overrides ``forward``.
        """
        is_free = is_rotation_invariant(self, "inducing_points") and type(self).forward is SparseRowModel.forward
        if (rows := self.rows) is not None:
            is_free = is_free and rows.prior is None and rows.covariates is None
        group, scales = symmetry_of_columns(self.kernel)
        return LatentSymmetry(group if is_free else "none", {"X": -1, "inducing_points": -1}, scales)

    def latent_candidates(self) -> Float[Tensor, "M Q"]:
        return self.inducing_points[..., : self.latent_dim].detach()
