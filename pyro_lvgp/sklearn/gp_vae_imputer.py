"""Predictions of missing entries of series by GP-VAEs as a scikit-learn transformer."""

from datetime import timedelta
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from pyro_lvgp._utils.tables import labels_of
from pyro_lvgp.sklearn._rows import RowsEstimator, fill_missing
from pyro_lvgp.sklearn.gp_vae import GPVAERegressor

__all__ = ["GPVAEImputer"]


class GPVAEImputer(OneToOneFeatureMixin, TransformerMixin, RowsEstimator):
    """Predictions of missing entries of a table of series, one in each column, over the index of its rows.

    The estimator fits a :class:`GPVAERegressor` to the columns as functions of the index: dates or numbers of a data frame,
    and the numbers of the rows of an array.  ``transform`` replaces missing entries by predictive means; observed entries
    stay.

    In the table of the fit, predictions use the observed entries of their own row too.  Another table is predicted at its
    index from the table of the fit alone, as in a forecast: its own observed entries are kept, but have no effect.

    :param period: length of a cycle in units of the index; for dates a duration, such as ``pandas.Timedelta(days=1)``.
    :param n_folds: number of folds by which models are selected.
    :param max_iter: maximum number of sweeps of a fit.
    :param n_jobs: number of processes for the fits, which are independent; by default one, -1 for all processors.
    :param verbose: whether to show a progress bar.

    A fitted estimator has the attributes

    - ``regressor_``: the fitted :class:`GPVAERegressor`, whose ``predict`` has quantiles and densities;
    - ``n_iter_``: largest number of sweeps of each fit;
    - ``n_features_in_``, and ``feature_names_in_`` if columns have names.

    Source: Ashman (2020) for the model.

    >>> import pandas as pd
    >>> days = pd.date_range("2024-01-01", periods=40)
    >>> series = pd.DataFrame({"a": np.sin(np.arange(40) / 5.0), "b": np.cos(np.arange(40) / 5.0)}, index=days)
    >>> series.iloc[20:25, 0] = np.nan
    >>> imputer = GPVAEImputer(n_folds=2, max_iter=5).set_output(transform="pandas")
    >>> filled = imputer.fit_transform(series)
    >>> int(filled.isna().sum().sum()), filled.index.equals(days)
    (0, True)
    """

    regressor_: GPVAERegressor

    def __init__(
        self,
        *,
        period: float | timedelta | np.timedelta64 | None = None,
        n_folds: int = 3,
        max_iter: int = 100,
        n_jobs: int | None = None,
        verbose: bool = False,
    ):
        self.period = period
        self.n_folds = n_folds
        self.max_iter = max_iter
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> "GPVAEImputer":
        """Fit the models of the regressor.

        :param X: rows [N, D], NaN where missing: a data frame with an index of dates or numbers, or an array.
        :param y: ignored.
        :raises ValueError: for columns without observed entries, infinite entries, an index that is neither dates nor numbers,
            or fewer rows than folds need.
        """
        index = labels_of(X).index
        X = self._validated(X, ensure_min_samples=2)
        inputs = np.arange(len(X)) if index is None else index
        options: Any = {"n_folds": self.n_folds, "max_iter": self.max_iter, "n_jobs": self.n_jobs, "verbose": self.verbose}
        self.regressor_ = GPVAERegressor(period=self.period, **options).fit(inputs, X)
        self._table = inputs, X.copy()
        self.n_iter_ = self.max_iter
        return self

    def transform(
        self, X: Any, return_std: bool = False
    ) -> Float[np.ndarray, "N D"] | tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N D"]]:
        """Replace missing entries by their predictive means.

        :param X: rows [N, D], NaN where missing.
        :param return_std: whether to return the predictive standard deviations too, zero for observed entries.
        """
        check_is_fitted(self)
        index = labels_of(X).index
        X = self._validated(X, reset=False)
        inputs = np.arange(len(X)) if index is None else index
        points = None if self._is_fitted_table(inputs, X) else inputs
        rows = np.full(len(X), np.isnan(X).any())  # the regressor predicts all rows
        return fill_missing(X, rows, lambda: self.regressor_.predict(points), return_std=return_std)

    def _is_fitted_table(self, inputs: Any, X: np.ndarray) -> bool:
        fitted_inputs, fitted = self._table
        is_same = np.array_equal(np.asarray(inputs), np.asarray(fitted_inputs))
        return is_same and np.array_equal(X, fitted, equal_nan=True)
