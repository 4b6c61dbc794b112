"""Latent variable models of inputs and targets, as a scikit-learn regressor and classifier."""

from abc import abstractmethod
from copy import deepcopy
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from numpy.random import RandomState
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, MultiOutputMixin, RegressorMixin, TransformerMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import numeric_table
from pyro_lvgp._utils.validation import check_sizes, check_values
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import FitResult
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Likelihood, LikelihoodName
from pyro_lvgp.models import MultiViewGPLVM, RowArguments
from pyro_lvgp.sklearn._posterior_points import posterior_points
from pyro_lvgp.sklearn._pyro_state import own_parameters
from pyro_lvgp.sklearn._rows import RowsEstimator, as_device, chunks, fit_gplvm, scaled_rows

__all__ = ["GPLVMClassifier", "GPLVMRegressor"]

_CHUNK_SIZE = 200  # rows, which bounds the memory
_NUM_POINTS = 64  # of the latents of a row


class _SupervisedGPLVM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, RowsEstimator):
    """Base of estimators whose latents are those of a :class:`~pyro_lvgp.models.MultiViewGPLVM` of inputs and targets.

    A subclass implements :meth:`_fit_targets` and :meth:`_target_likelihood`.
    """

    embedding_: Float[np.ndarray, "N Q"]
    model_: MultiViewGPLVM
    guide_: MeanFieldGuide
    history_: FitResult
    scaler_: StandardScaler

    def __init__(
        self,
        n_components: int | None = None,
        *,
        likelihood: Likelihood | LikelihoodName | None = None,
        n_inducing: int = 50,
        max_iter: int = 2000,
        batch_size: int | None = 256,
        learning_rate: float = 0.02,
        device: str | torch.device | None = None,
        random_state: int | RandomState | None = None,
        verbose: bool | int = False,
    ):
        self.n_components = n_components
        self.likelihood = likelihood
        self.n_inducing = n_inducing
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    @abstractmethod
    def _fit_targets(self, y: Any, X: Float[np.ndarray, "N D"]) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, " T"]]:
        """Check targets; return them as columns of the precision of X, NaN where missing, and the scales of the columns."""

    @abstractmethod
    def _target_likelihood(self, num_columns: int) -> Likelihood:
        """Return the likelihood of the columns of targets."""

    def fit(self, X: Any, y: Any, rows: RowArguments | None = None) -> Any:
        """Fit the latents of all rows, and the functions that map latents to inputs and targets.

        :param X: inputs [N, D], NaN where missing.
        :param y: targets of the rows; rows without a target are used for the inputs.
        :param rows: known quantities of the rows (:class:`~pyro_lvgp.models.RowArguments`), with standard errors of the
            columns of X and then of y, in their units; None for nothing.
        :raises ValueError: for columns without observed entries, fewer than two rows with observed entries, infinite entries,
            targets that cannot be used, entries outside the support of the likelihood, sizes that are not positive, or a
            device that torch does not know.
        :raises TypeError: for ``rows`` that are no ``RowArguments``, or that the likelihoods cannot account for.
        """
        check_sizes(max_iter=self.max_iter, n_inducing=self.n_inducing)
        device = as_device(self.device)
        X = self._validated(X, ensure_min_samples=2, **({"y": None} if y is None else {}))
        target, target_scale = self._fit_targets(y, X)
        check_values(torch.tensor(X), rows=False, name="X")
        is_observed = ~(np.isnan(X).all(1) & np.isnan(target).all(1))
        if is_observed.sum() < 2:
            raise ValueError(f"expected two rows or more with an observed entry, got {is_observed.sum()}; add rows")
        standardised = self.likelihood is None
        self.scaler_ = StandardScaler(with_mean=standardised, with_std=standardised)
        views = {
            name: torch.tensor(table[is_observed]).to(device)
            for name, table in (("inputs", self.scaler_.fit_transform(X)), ("target", target))
        }
        scale = np.ones(X.shape[1]) if self.scaler_.scale_ is None else self.scaler_.scale_
        self._scale = np.concatenate([scale, target_scale])
        known = scaled_rows(rows, self._scale, views["inputs"], len(X))
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        self._local = pyro.settings.get("module_local_params")
        with own_parameters(self._local), seeded(self._seed):
            self._fit_model(views, None if known is None else known[torch.as_tensor(is_observed).to(device)])
            self.embedding_ = self._prior_mean(known, len(X)).numpy(force=True).copy()
            self.embedding_[is_observed] = self.guide_.median(self.model_.table(views))["X"].numpy(force=True)
        self.n_iter_ = len(self.history_.losses)
        return self

    def _fit_model(self, views: dict[str, Tensor], known: RowArguments | None) -> None:
        likelihood: dict[str, Likelihood | LikelihoodName] = {"target": self._target_likelihood(views["target"].shape[1])}
        if self.likelihood is not None:
            likelihood["inputs"] = deepcopy(self.likelihood)
        number = min(self.n_inducing, len(views["inputs"]))
        options: Any = {"num_inducing": number, "likelihood": likelihood, "rows": known, "seed": self._seed}
        self.model_ = MultiViewGPLVM.from_data(views, self.n_components, **options)
        self.guide_, self.history_ = fit_gplvm(
            self.model_,
            self.model_.table(views),
            max_iter=self.max_iter,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            seed=self._seed,
            verbose=bool(self.verbose),
        )

    def fit_transform(self, X: Any, y: Any, rows: RowArguments | None = None) -> Any:
        """Fit the latents of all rows, and return those of :meth:`transform`, which do not depend on the targets of the rows.

        :param X: inputs [N, D], NaN where missing.
        :param y: as for :meth:`fit`.
        :param rows: as for :meth:`fit`.
        """
        return self.fit(X, y, rows).transform(X, rows)

    def transform(self, X: Any, rows: RowArguments | None = None) -> Float[np.ndarray, "N Q"]:
        """Compute the posterior means of the latents of new or training rows from their inputs.

        A row without observed inputs has the mean of the prior.

        :param X: inputs [N, D], NaN where missing.
        :param rows: known quantities of these rows, if the training rows have them, as for :meth:`fit`.
        """
        Y, known = self._scaled(X, rows)
        with own_parameters(self._local):
            latents = self._prior_mean(known, len(Y)).clone()
            is_observed = ~Y.isnan().all(1)
            for idx in chunks(is_observed, _CHUNK_SIZE):
                latents[idx] = self._infer(Y[idx], None if known is None else known[idx]).mean
        return latents.numpy(force=True)

    def _scaled(self, X: Any, rows: RowArguments | None) -> tuple[Float[Tensor, "N D"], RowArguments | None]:
        """Check new rows, and scale them and what is known of them."""
        check_is_fitted(self)
        X = self._validated(X, reset=False)
        check_values(torch.tensor(X), rows=False, columns=False, name="X")
        Y = torch.tensor(self.scaler_.transform(X)).to(self.model_.mean)
        return Y, scaled_rows(rows, self._scale, Y, len(Y))

    def _infer(self, Y: Float[Tensor, "B D"], known: RowArguments | None) -> Any:
        """Posterior of the latents of rows with observed inputs."""
        return self.model_.infer_from_views(self.guide_, {"inputs": Y}, rows=known, seed=self._seed)

    def _prior_mean(self, known: RowArguments | None, num_rows: int) -> Float[Tensor, "N Q"]:
        if known is None or known.prior is None:
            return self.model_.mean.new_zeros(num_rows, self.model_.latent_dim)
        return known.prior[0]

    def _points(self, Y: Float[Tensor, "B D"], known: RowArguments | None) -> Float[Tensor, "S B Q"]:
        """Points of the posterior of the latents of rows, or of the prior for rows without observed inputs."""
        is_observed = ~Y.isnan().all(1)
        loc = self._prior_mean(known, len(Y))
        scale = torch.ones_like(loc) if known is None or known.prior is None else known.prior[1]
        points = posterior_points(dist.MultivariateNormal(loc, scale_tril=torch.diag_embed(scale)), _NUM_POINTS)
        if is_observed.any():
            q = self._infer(Y[is_observed], None if known is None else known[is_observed])
            points[:, is_observed] = posterior_points(q, _NUM_POINTS)
        return points

    def _predict_targets(self, X: Any, rows: RowArguments | None) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "N T"]]:
        """Predictive means and standard deviations of the columns of targets, noise included."""
        Y, known = self._scaled(X, rows)
        with own_parameters(self._local), torch.no_grad(), seeded(self._seed):
            every = torch.arange(len(Y)).split(_CHUNK_SIZE)
            parts = [self._moments(Y[idx], None if known is None else known[idx]) for idx in every]
        mean, variance = (torch.cat(part).numpy(force=True) for part in zip(*parts, strict=True))
        return mean, np.sqrt(variance)

    def _moments(self, Y: Tensor, known: RowArguments | None) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Means and variances of targets, over points of the latents, by the laws of total expectation and variance."""
        points = self._points(Y, known)
        every = None if known is None else known[torch.arange(len(Y), device=Y.device).repeat(_NUM_POINTS)]
        moments = self.model_.predictive(self.guide_, points.flatten(0, 1), rows=every).moments()
        mean, variance = (x[:, self.model_.columns["target"]].unflatten(0, (_NUM_POINTS, -1)) for x in moments)
        return mean.mean(0), variance.mean(0) + mean.var(0, correction=0)

    @property
    def _n_features_out(self) -> int:
        return self.embedding_.shape[1]


class GPLVMRegressor(RegressorMixin, MultiOutputMixin, _SupervisedGPLVM):
    r"""Regression by latents that inputs and targets share, for inputs with missing entries and rows without targets.

    The estimator fits a :class:`~pyro_lvgp.models.MultiViewGPLVM` of two views, inputs and targets, with a
    :class:`~pyro_lvgp.guides.MeanFieldGuide`:

    .. math::

        z_n \sim N(0, I_Q), \qquad x_{nd} \sim p\big(x \mid f_d(z_n)\big), \qquad
        y_{nt} \sim N\big(g_t(z_n),\, \sigma_t^2\big), \qquad f_d \sim GP(0, k_x), \quad g_t \sim GP(0, k_y).

    Predictions are :math:`p(y_* \mid x_*) = \int p(y_* \mid z)\, q(z \mid x_*)\, dz`, with the posterior of the latents of a
    row by Laplace's approximation from five starts, at 64 points.  Lengthscales of each kernel tell which latents matter to
    the targets (``model_.relevance("target")``).

    NaN marks a missing entry of X or y, in training data, and of X in new rows.  Rows without a target are used too.  Targets,
    and with the default likelihood inputs, are standardised.  The fit has the floating-point precision of X.

    :param n_components: number Q of latent dimensions; by default that of Kaiser's rule for the columns of X and y, but at
        most 8.
    :param likelihood: likelihood p(x | f) of the inputs (:mod:`pyro_lvgp.likelihoods`), or its name
        (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`); a Gaussian with a noise variance for each column by default.
    :param n_inducing: number of inducing points; it is reduced to the number of rows if there are fewer.
    :param max_iter: number of steps of Adam.
    :param batch_size: number of rows in a mini-batch; None for all rows.
    :param learning_rate: initial learning rate of Adam, which falls to zero along a cosine.
    :param device: device of the fit, such as ``"cuda"``; None for torch's default device.
    :param random_state: seed of initial values, mini-batches and draws.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes

    - ``embedding_``: fitted means [N, Q] of the latents of the training rows, which depend on their targets too;
    - ``model_``, ``guide_`` and ``history_``: the model, with the views ``"inputs"`` and ``"target"``, its guide, and the
      bounds of the fit;
    - ``scaler_`` and ``target_scaler_``: scalers of the columns;
    - ``n_iter_``: number of steps taken;
    - ``n_features_in_``, and ``feature_names_in_`` if columns have names.

    Source: Damianou, Ek, Titsias and Lawrence (2012), "Manifold relevance determination"; Titsias and Lawrence (2010),
    "Bayesian Gaussian process latent variable model".

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> regressor = GPLVMRegressor(2, max_iter=20, random_state=0).fit(X[:100], y[:100])
    >>> mean, stddev = regressor.predict(X[100:103], return_std=True)
    >>> mean.shape, stddev.shape, regressor.transform(X[100:103]).shape
    ((3,), (3,), (3, 2))
    """

    target_scaler_: StandardScaler

    def _fit_targets(self, y, X):
        y = check_array(numeric_table(y, "y"), ensure_2d=False, dtype=X.dtype, ensure_all_finite="allow-nan", input_name="y")
        check_consistent_length(X, y)
        self._is_vector = y.ndim == 1
        columns = y.reshape(len(y), -1)
        check_values(torch.tensor(columns), rows=False, name="y")
        self.target_scaler_ = StandardScaler()
        return self.target_scaler_.fit_transform(columns), self.target_scaler_.scale_

    def _target_likelihood(self, num_columns: int) -> Likelihood:
        return Gaussian(data_dim=num_columns)

    def predict(
        self, X: Any, return_std: bool = False, rows: RowArguments | None = None
    ) -> Float[np.ndarray, "N *T"] | tuple[Float[np.ndarray, "N *T"], Float[np.ndarray, "N *T"]]:
        """Compute predictive means of the targets of new rows, and their standard deviations, noise included.

        :param X: inputs [N, D], NaN where missing; a row without inputs has the prediction of the prior.
        :param return_std: whether to return the standard deviations too.
        :param rows: known quantities of these rows, if the training rows have them, as for :meth:`fit`.
        :returns: vectors if y was one, and else columns.
        """
        mean, stddev = self._predict_targets(X, rows)
        mean, stddev = self.target_scaler_.inverse_transform(mean), stddev * self.target_scaler_.scale_
        if self._is_vector:
            mean, stddev = mean[:, 0], stddev[:, 0]
        return (mean, stddev) if return_std else mean

    def score(self, X: Any, y: Any, sample_weight: Any = None, rows: RowArguments | None = None) -> float:
        """Compute the coefficient of determination :math:`R^2` of the predictive means.

        :param X: inputs [N, D], NaN where missing.
        :param y: targets of the rows.
        :param sample_weight: weights of the rows in the score.
        :param rows: as for :meth:`predict`.
        """
        return float(r2_score(y, self.predict(X, rows=rows), sample_weight=sample_weight))


class GPLVMClassifier(ClassifierMixin, _SupervisedGPLVM):
    r"""Classification by latents that inputs and classes share, for inputs with missing entries and rows without a class.

    The model, its parameters and its attributes are those of :class:`GPLVMRegressor`, with a view of binary columns
    :math:`y_{nc} \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(g_c(z_n)))`: one for the second of two classes, or one for each of
    several.  The probabilities of several classes are

    .. math::

        P(c \mid x_*) = p_c \Big/ \sum_j p_j, \qquad
        p_c = \int \mathrm{sigmoid}(g_c)\, q(g_c \mid z)\, q(z \mid x_*)\, dg_c\, dz.

    NaN, None or ``pandas.NA`` marks a row without a class, which is used for the inputs.  Fitted estimators have the attribute
    ``classes_``, and no ``target_scaler_``.

    Source: as :class:`GPLVMRegressor`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = GPLVMClassifier(2, max_iter=20, random_state=0).fit(X[::3], y[::3])
    >>> classifier.predict_proba(X[1:4]).shape, classifier.predict(X[1:4]).shape
    ((3, 3), (3,))
    """

    classes_: np.ndarray

    def _fit_targets(self, y, X):
        import pandas as pd  # imported where it is used, since it takes half a second

        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        is_given = ~pd.isna(y)
        labels = y[is_given]
        if len(labels):
            check_classification_targets(labels)
        self.classes_, index = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected two classes or more in y, got {len(self.classes_)} class; add rows of another class")
        columns = np.full((len(y), len(self.classes_)), np.nan, X.dtype)
        columns[is_given] = np.eye(len(self.classes_))[index]
        columns = columns[:, 1:] if len(self.classes_) == 2 else columns
        return columns, np.ones(columns.shape[1])

    def _target_likelihood(self, num_columns: int) -> Likelihood:
        return Bernoulli()

    def predict_proba(self, X: Any, rows: RowArguments | None = None) -> Float[np.ndarray, "N classes"]:
        """Compute the probabilities of the classes of new rows.

        :param X: inputs [N, D], NaN where missing; a row without inputs has the probabilities of the prior.
        :param rows: known quantities of these rows, if the training rows have them, as for :meth:`fit`.
        :returns: a column for each of ``classes_``.
        """
        mean, _ = self._predict_targets(X, rows)
        if len(self.classes_) == 2:
            return np.concatenate([1.0 - mean, mean], 1)
        return mean / mean.sum(1, keepdims=True)

    def predict(self, X: Any, rows: RowArguments | None = None) -> np.ndarray:
        """Predict the most probable class of each row.

        :param X: inputs [N, D], NaN where missing.
        :param rows: as for :meth:`predict_proba`.
        """
        index = self.predict_proba(X, rows).argmax(1)
        return self.classes_[index]

    def score(self, X: Any, y: Any, sample_weight: Any = None, rows: RowArguments | None = None) -> float:
        """Compute the accuracy of the predicted classes.

        :param X: inputs [N, D], NaN where missing.
        :param y: classes of the rows.
        :param sample_weight: weights of the rows in the score.
        :param rows: as for :meth:`predict_proba`.
        """
        return float(accuracy_score(y, self.predict(X, rows), sample_weight=sample_weight))
