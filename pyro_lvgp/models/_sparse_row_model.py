"""Base class of models of rows whose columns are sparse Gaussian processes of the latents."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import pyro
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.tables import Table
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm, ObservedRows
from pyro_lvgp.kernels import Kernel, as_kernel
from pyro_lvgp.models._known_rows import KnownRows
from pyro_lvgp.models._row_model import RowModel
from pyro_lvgp.models._sparse_columns import default_kernel
from pyro_lvgp.models.initialization import InitialLatents
from pyro_lvgp.models.row_arguments import RowArguments

_Model = TypeVar("_Model", bound="SparseRowModel")


class SparseRowModel(RowModel):
    """:class:`RowModel` whose functions are sparse Gaussian processes given inducing values.

    A subclass implements the methods that read what rows share, and that compute log densities of rows from it.
    """

    local_sites = frozenset({"X"})
    likelihood_term: LikelihoodTerm

    def _set_term(self, term: LikelihoodTerm) -> None:
        """Set the likelihood term; raise for another name."""
        if term not in get_args(LikelihoodTerm):
            raise ValueError(f"expected likelihood_term in {get_args(LikelihoodTerm)}, got {term!r}")
        self.likelihood_term = term

    def _checked_kernel(self, kernel: Kernel | None) -> Any:
        """Return a kernel of latents and covariates, the default one for None; raise for a batch or other columns."""
        kernel = as_kernel(default_kernel(self.latent_dim, self._covariate_dim) if kernel is None else kernel)
        if kernel.batch_shape:
            raise ValueError(
                f"expected one kernel for all outputs, got a kernel of batch shape {list(kernel.batch_shape)}; leave "
                "out batch_shape"
            )
        kernel.check_columns(self.latent_dim + self._covariate_dim)
        return kernel

    @property
    @abstractmethod
    def _is_quadratic(self) -> bool:
        """Whether log densities of rows are quadratic forms, which cost less than the distributions of the entries."""

    @abstractmethod
    def _read_shared(self) -> Any:
        """Read the parameters, and sample the sites, that rows share."""

    @abstractmethod
    def _function(self, X: Tensor, shared: Any, known: KnownRows) -> LikelihoodPredictive:
        """Return the distribution p(y | x, shared) of each entry."""

    @abstractmethod
    def _statistics(self, y: Tensor, observed: Tensor, shared: Any, known: KnownRows) -> Any:
        """Compute the tensors of :meth:`_log_likelihood`, which have the attribute ``rows``."""

    @abstractmethod
    def _with_score(self, statistics: Any) -> Any:
        """Add the tensors of the score to statistics, where it has a closed form."""

    @abstractmethod
    def _log_likelihood(self, X: Tensor, statistics: Any) -> Tensor:
        """Compute ``log p(y_n | x_n, u)`` of each row."""

    @abstractmethod
    def _initialize_functions(self, inputs: Tensor, function: Tensor, ridge: float, seed: int) -> None:
        """Initialize inducing points and inducing values from the inputs and values of the functions."""

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
            X = pyro.sample("X", known.prior_of_latents(self.latent_dim, self.mean))
            if y is None or observed is None:
                return pyro.sample("y", self._function(X, shared, known).rows())
            value = torch.nan_to_num(y, self.likelihood.fill_value)
            if not self._is_quadratic:
                return pyro.sample("y", self._function(X, shared, known).rows(observed), obs=value)
            log_prob = self._log_likelihood(X, self._statistics(y, observed, shared, known))
            entries = ObservedRows(value, log_prob, lambda: self._function(X, shared, known).rows(observed))
            return pyro.sample("y", entries, obs=value)

    log_joint_forward = forward  # the method whose log density log_joint returns, see infer.protocols.HasLogJoint

    def statistics(
        self, y: Float[Tensor, "B D"], idx: Int[Tensor, " B"] | None = None, rows: RowArguments | None = None
    ) -> Any:
        """Compute the tensors of :meth:`log_joint` from the parameters and the sites outside the plate ``data``.

        :param y: observations, NaN where missing.
        :param idx: indices of the rows in y; None for all rows.
        :param rows: what is known of rows that are not training rows.
        """
        observed = self._observed(y, idx)
        known = KnownRows.of(self.rows_at(idx, rows))
        with self._pyro_context:
            shared = self._read_shared()
        return self._with_score(self._statistics(y, observed, shared, known))

    def log_joint(self, latents: Mapping[str, Tensor], statistics: Any) -> Float[Tensor, "*particles B"]:
        r"""Compute ``log p(y_n | x_n, u) + log p(x_n)`` of each row, as a pure function of tensors.

        The value is the log density of the sites ``X`` and ``y`` in the plate ``data``, without the scale of a mini-batch.
        The likelihood term ``"sampled"`` is random, and is replaced by its expectation, ``"svgp"``.

        :param latents: ``{"X": [*particles, B, Q]}``.
        :param statistics: result of :meth:`statistics`.
        """
        X = latents["X"]
        return self._log_likelihood(X, statistics) + statistics.rows.log_prior(X)

    @names_types
    @pyro_lock
    def initialize(
        self: _Model,
        Y: Table,
        *,
        method: InitialLatents = "pca",
        latents: Float[Tensor, "N Q"] | None = None,
        ridge: float = 0.1,
        seed: int = 0,
    ) -> _Model:
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
            self._initialize_functions(KnownRows.of(self.rows).inputs(X), function, ridge, seed)
        return self
