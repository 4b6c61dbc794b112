"""Models of rows of observations that scatter around functions of latents."""

import warnings
from typing import Any

import pyro
import torch
from jaxtyping import Float
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Table, as_tensor, labels_of
from pyro_lvgp._utils.validation import check_data, check_index, check_sizes, check_tensors, check_values
from pyro_lvgp.infer._row_weights import WeightedPlate
from pyro_lvgp.likelihoods import Likelihood, as_likelihood
from pyro_lvgp.models._known_rows import (
    KnownRows,
    check_like,
    check_new_rows,
    check_shapes,
    check_training_rows,
    function_of_data,
    initial_latents,
    linear_fit,
)
from pyro_lvgp.models.initialization import InitialLatents, column_moments
from pyro_lvgp.models.latent_variable_model import LatentVariableModel
from pyro_lvgp.models.row_arguments import RowArguments

_PREFIX = "row_"  # of the buffers that hold the arguments of training rows


class RowModel(LatentVariableModel):
    """:class:`LatentVariableModel` with a likelihood p(y | f) and constant offsets c_d of the functions.

    The class checks data, and computes initial values by a linear model of the data.

    :param likelihood: p(y | f); ``Gaussian()`` if None.
    :param rows: what is known of each training row; None for nothing.
    :param sizes: further sizes to check.
    :raises ValueError: if a size is not positive, the likelihood has parameters or counts of another number of outputs, or
        ``rows`` are of another number of rows, outputs or latent dimensions.
    :raises TypeError: if the likelihood does not take the exposures or the standard errors of ``rows``.
    """

    def __init__(
        self,
        num_data: int,
        data_dim: int,
        latent_dim: int,
        likelihood: Likelihood | None,
        rows: RowArguments | None = None,
        **sizes: int,
    ):
        check_sizes(num_data=num_data, data_dim=data_dim, latent_dim=latent_dim, **sizes)
        super().__init__(num_data, data_dim, latent_dim)
        self.likelihood = as_likelihood(likelihood)
        self.likelihood.check_outputs(data_dim, self.likelihood.params())
        self.register_buffer("mean", torch.zeros(data_dim))
        if rows is not None:
            check_training_rows(rows, num_data, data_dim, latent_dim, self.likelihood)
        parts = {} if rows is None else rows.parts()
        self._row_parts = tuple(parts)
        self._covariate_dim = parts["covariates"].shape[-1] if "covariates" in parts else 0
        for name, value in parts.items():
            self.register_buffer(f"{_PREFIX}{name}", value.detach().clone())
        if "prior_loc" in parts:
            self.initial_values["X"] = parts["prior_loc"].detach().clone()

    @property
    def rows(self) -> RowArguments | None:
        """Known quantities of the training rows; None for nothing."""
        if not self._row_parts:
            return None
        return RowArguments.of_checked({name: getattr(self, f"{_PREFIX}{name}") for name in self._row_parts})

    def rows_at(self, idx: Tensor | None = None, rows: RowArguments | None = None) -> RowArguments | None:
        """Return known quantities of the rows of a batch.

        :param idx: indices of training rows; None for all.
        :param rows: those of rows that are not training rows, which are returned as they are.
        """
        if rows is not None or not self._row_parts:
            return rows
        training = self.rows
        return training if training is None or idx is None else training[idx]

    def data_plate(self, y: Tensor | None = None, idx: Tensor | None = None, rows: RowArguments | None = None) -> pyro.plate:
        """Create the plate over rows, for the model and its guides, with the weights of the rows.

        :param y: rows, which have no effect; guides pass all arguments of the model.
        :param idx: indices of the rows; None for all rows.
        :param rows: what is known of rows that are not training rows.
        """
        known = self.rows_at(idx, rows)
        if known is None or known.weight is None:
            return super().data_plate(y, idx)
        return WeightedPlate(known.weight, "data", self.num_data, subsample=idx, dim=-1)

    create_plates = data_plate

    def _checked_rows(self, rows: RowArguments | None, num_rows: int) -> RowArguments | None:
        training = self.rows
        if rows is None and training is None:
            return None
        given = RowArguments() if rows is None else rows
        check_shapes(given, self.data_dim, self.latent_dim)
        check_new_rows(given, RowArguments() if training is None else training)
        check_like(given, self.mean)
        return given.expand(num_rows)

    def _replaced_rows(self, idx: Tensor, rows: RowArguments) -> RowArguments | None:
        training, rows = self.rows_at(idx), rows.expand(len(idx))
        return self._checked_rows(rows if training is None else training.replace(rows), len(idx))

    def check(self, Y: Float[Tensor, "N D"]) -> None:
        """Raise if the training data cannot be used: shape, dtype, device, support, a row or column all missing."""
        check_data(Y, self.data_dim, like=self.mean)
        check_index(None, len(Y), self.num_data)
        if (rows := self.rows) is not None:
            check_like(rows, self.mean)
        self._check_entries(Y)
        check_values(Y)
        self.likelihood.bound_noise(Y)
        self._training_rows = Y.detach()

    def _observed(self, y: Tensor, idx: Tensor | None) -> Tensor:
        """Mask of the observed entries of a batch; raise if the batch cannot be used."""
        check_data(y, self.data_dim, like=self.mean)
        if is_validation_enabled():
            check_index(idx, len(y), self.num_data)
            self._check_entries(y)
        return ~torch.isnan(y)

    def _initialize_linear(self, Y: Table, method: InitialLatents, latents: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
        """Initial latents, and the values of f in a linear model of the data, less their column means.

        The column means become ``mean``, and the likelihood is initialised from the linear model.  The latents are those of
        the linear model if none are given.
        """
        self._column_labels = None
        labels, (Y,) = labels_of(Y), self.as_data(Y)
        self.check(Y)
        self._column_labels = None if labels.columns is None else tuple(labels.columns)
        given = None if latents is None else self._checked_latents(latents)
        known = KnownRows.of(self.rows)
        with seeded(seed):  # the same draw of a parameter with a prior as below
            f = function_of_data(self.likelihood, Y, known)
        X, filled = self._linear_latents(f, known, method, seed)
        centre = f.nanmean(0)
        fitted = centre + _linear_fit(known, X, filled - centre)
        self.likelihood.init_from_data(Y, known.shift(fitted))
        with seeded(seed):
            self.mean = function_of_data(self.likelihood, Y, known).nanmean(0)
        return X if given is None else given, filled - centre

    def _linear_latents(
        self, f: Tensor, known: KnownRows, method: InitialLatents, seed: int
    ) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N D"]]:
        """Compute latents by a linear model of values of f, whose missing entries it imputes."""
        return initial_latents(f, self.latent_dim, known, method, seed)

    def _initialize_parameter(self, name: str, value: Tensor, owner: Any = None, prefix: str = "") -> Tensor:
        """Set the initial value of a parameter, unless the parameter is frozen, or of the site of a parameter with a prior.

        :param owner: module of the parameter; the model by default.
        :param prefix: path of the module in the model, with a dot at its end.
        :returns: the initial value, that of the frozen parameter included.
        """
        owner = self if owner is None else owner
        if name in owner._pyro_samples:
            self.initial_values[f"{prefix}{name}"] = value
            return value
        if getattr(owner, f"{name}_unconstrained").requires_grad:
            setattr(owner, name, value)
        return getattr(owner, name)

    def _checked_latents(self, latents: Tensor) -> Tensor:
        """Scale given latents to the mean and variance of their prior; those of rows with a prior each stay as they are."""
        check_tensors([latents])
        X = latents.to(self.mean)
        if X.shape != (self.num_data, self.latent_dim):
            raise ValueError(
                f"expected latents [{self.num_data}, {self.latent_dim}], a row for each datum, got {list(X.shape)}"
            )
        if "prior_loc" not in self._row_parts:
            X = (X - X.mean(0)) / X.std(0, correction=0)
        if not torch.isfinite(X).all():
            raise ValueError(
                "expected finite latents with columns that vary, got NaN, infinite or constant ones; drop these columns"
            )
        return X


def as_rows(Y: Table) -> Float[Tensor, "N D"]:
    """Convert a table to a tensor of rows from which a model can be made.

    :param Y: all data, NaN where missing.
    :raises ValueError: for data of another shape, without rows or columns, or with entries that cannot be used.
    """
    rows = as_tensor(Y, name="Y")
    if rows.dim() != 2:
        raise ValueError(f"expected data of shape [rows, columns], got {list(rows.shape)}; flatten images to rows")
    check_values(rows, name="Y")
    return rows


def warn_unless_scaled(Y: Float[Tensor, "N D"], of: str = "") -> None:
    """Warn if the columns are far from the unit variance that initial kernels and noise variances are for.

    :param Y: data, NaN where missing.
    :param of: whose columns they are, for the warning.
    """
    spread = column_moments(Y)[1].square().mean().sqrt().item()
    if not 0.1 <= spread <= 10.0:
        warnings.warn(
            f"expected columns{of} of about unit variance, which the initial kernel and noise are for, got {spread:.2g} as "
            "root mean square of their standard deviations; standardise them, as the estimators of pyro_lvgp.sklearn do",
            stacklevel=4,  # the caller of from_data, which names_types wraps
        )


def _linear_fit(known: KnownRows, X: Float[Tensor, "N Q"], f: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Fit a linear function of centred latents and covariates to centred values."""
    if known.prior is None and known.covariates is None:
        return X @ torch.linalg.lstsq(X, f).solution
    return linear_fit(known.inputs(X), f)
