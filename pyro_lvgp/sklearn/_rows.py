"""Checks and imputation of rows, what is known of them, and the fit of a Bayesian GPLVM, for the estimators of tables."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils import Tags
from sklearn.utils.validation import validate_data
from torch import Tensor

from pyro_lvgp._utils.tables import Table, numeric_table
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import FitResult, JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM, MultiViewGPLVM, Prediction, RowArguments

CHECKS: dict[str, Any] = {"dtype": [np.float64, np.float32], "ensure_all_finite": "allow-nan"}


class RowsEstimator(BaseEstimator):
    """Base of estimators of rows in either precision, NaN where missing."""

    def _validated(self, X: Table, **settings: Any) -> Float[np.ndarray, "N D"]:
        """Check a table and the names of its columns, and return it as an array, NaN where missing.

        :param X: the table (:func:`~pyro_lvgp.tables.as_tensor`).
        :param settings: arguments of ``sklearn.utils.validation.validate_data``.
        """
        return validate_data(self, numeric_table(X), **settings, **CHECKS)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        if tags.transformer_tags is not None:
            tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def as_device(device: Any) -> torch.device:
    """Return a device; raise if torch does not know it.

    :param device: a device or its name; None for torch's default device.
    """
    try:
        return torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'expected a device such as "cpu" or "cuda:0", or None, got {device!r}') from error


def scaled_rows(
    rows: RowArguments | None, scale: np.ndarray | Tensor | None, like: Tensor, num_rows: int
) -> RowArguments | None:
    """Convert the known quantities of rows to the dtype and device of a tensor, and standard errors to scaled columns.

    :param rows: known quantities of the rows, or one row for all; None for nothing.
    :param scale: factors that the columns were divided by; None for none.
    :param like: a tensor of the dtype and device.
    :param num_rows: number of rows.
    :raises TypeError: for anything else than ``RowArguments``.
    :raises ValueError: for another number of rows.
    """
    if rows is None:
        return None
    if not isinstance(rows, RowArguments):
        raise TypeError(f"expected rows to be RowArguments(...), got {type(rows).__name__}; import it from pyro_lvgp.models")
    rows = rows.to(like).expand(num_rows)
    if rows.standard_error is None or scale is None:
        return rows
    return rows.replace(RowArguments(standard_error=rows.standard_error / torch.as_tensor(scale).to(like)))


def chunks(is_observed: Bool[Tensor, " N"], size: int = 1000) -> list[Int[Tensor, " B"]]:
    """Return the indices of the rows with observed entries, in parts that bound the memory.

    :param is_observed: rows with observed entries.
    :param size: largest number of rows of a part.
    """
    return [rows for rows in is_observed.nonzero().squeeze(-1).split(size) if len(rows)]


def fill_missing(
    X: Float[np.ndarray, "N D"], rows: Bool[np.ndarray, " N"], predict: Callable[[], Prediction], *, return_std: bool
) -> Float[np.ndarray, "N D"] | tuple[Float[np.ndarray, "N D"], Float[np.ndarray, "N D"]]:
    """Replace missing entries by their predictive means.

    :param X: all rows, NaN where missing.
    :param rows: mask of the rows to predict, which include those with missing entries.
    :param predict: function that returns the prediction of these rows, called if there are any.
    :param return_std: whether to return the predictive standard deviations too, zero for observed entries.
    """
    filled, stddev = X.copy(), np.zeros_like(X)
    if rows.any():
        prediction, missing = predict(), np.isnan(X[rows])
        filled[rows] = np.where(missing, prediction.mean.numpy(force=True), X[rows])
        stddev[rows] = np.where(missing, prediction.stddev.numpy(force=True), 0.0)
    return (filled, stddev) if return_std else filled


def fit_gplvm(
    model: BayesianGPLVM | MultiViewGPLVM,
    Y: Float[Tensor, "N D"],
    *,
    max_iter: int,
    batch_size: int | None,
    learning_rate: float,
    seed: int,
    verbose: bool,
    guide: MeanFieldGuide | None = None,
) -> tuple[MeanFieldGuide, FitResult]:
    """Fit a model by a mean-field guide, with a learning rate that falls to zero along a cosine.

    :param model: model of the rows.
    :param Y: all rows, NaN where missing.
    :param max_iter: number of steps.
    :param batch_size: number of rows in a mini-batch, but at most all; None for all.
    :param learning_rate: initial learning rate of Adam.
    :param seed: seed of mini-batches and draws.
    :param verbose: whether to show a progress bar.
    :param guide: guide to fit further; a new one by default.
    """
    guide = MeanFieldGuide(model) if guide is None else guide
    history = fit(
        model,
        guide,
        Y,
        loss=MeanFieldELBO(max_plate_nesting=1),
        num_steps=max_iter,
        batch_size=None if batch_size is None else min(batch_size, len(Y)),
        optim=JointAdam(lr=learning_rate),
        callbacks=[LRSchedule("cosine")],
        seed=seed,
        progress=verbose,
    )
    return guide, history
