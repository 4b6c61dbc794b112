"""Known quantities of the rows of a data table: priors of latents, covariates, exposures, standard errors and weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_lvgp._utils.tables import Table, as_tensor

__all__ = ["RowArguments"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowArguments:
    r"""Known quantities of rows, each of which a model of rows takes into account.

    .. math::

        x_n \sim N(m_n, \mathrm{diag}\, s_n^2), \qquad f_{nd} = f_d(x_n, c_n) + \log e_{nd}, \qquad
        \log L = \sum_n w_n \log p(y_n), \qquad y_{nd} \mid f_{nd} \sim N(f_{nd}, \sigma_d^2 + \tau_{nd}^2)

    - ``prior_loc`` :math:`m_n` and ``prior_scale`` :math:`s_n`: mean and standard deviations of the prior of the latents of
      each row, such as a capture time; 0 and 1 if one of them is left out.
    - ``covariates`` :math:`c_n`: further inputs of the functions, such as batches, one-hot, or treatments.
    - ``exposure`` :math:`e_{nd}`: factors of the mean of each entry, such as library sizes, for likelihoods with a log link.
    - ``standard_error`` :math:`\tau_{nd}`: known standard deviations of errors that the noise has besides, for likelihoods
      with Gaussian noise.
    - ``weight`` :math:`w_n`: factors of all terms of a row in every bound.  A weight of 2 is the row twice, a weight of 0
      leaves it out.

    Those of training rows are arguments of :class:`~pyro_lvgp.models.BayesianGPLVM` and
    :class:`~pyro_lvgp.models.RandomFeatureLVM`.  Those of other rows are arguments of ``predict``, ``predictive``,
    ``infer_latents`` and ``impute``, where one row of them stands for all.

    Each is a tensor or a table, such as columns of a data frame (:func:`~pyro_lvgp.tables.as_tensor`).

    :param prior_loc: prior means [N, Q].
    :param prior_scale: prior standard deviations [N, Q], or one number.
    :param covariates: covariates [N, P].
    :param exposure: exposures [N] or [N, D].
    :param standard_error: standard errors [N] or [N, D], 0 for none.
    :param weight: weights [N], 0 or more.
    :raises TypeError: for tensors of integers.
    :raises ValueError: for another shape, numbers of rows that differ, or entries that are infinite, NaN or out of range.

    >>> time = torch.linspace(-1.0, 1.0, 5)
    >>> rows = RowArguments(prior_loc=time[:, None], prior_scale=0.1, weight=torch.ones(5))
    >>> rows.num_rows, rows[torch.tensor([0, 4])].prior_loc
    (5, tensor([[-1.],
            [ 1.]]))

    Source: Reid and Wernisch (2016), "Pseudotime estimation: deconfounding single cell time series", for priors of latents;
    Lalchand et al. (2022), "Modelling technical and biological effects in scRNA-seq data with scalable GPLVMs", for
    covariates.
    """

    prior_loc: Float[Tensor, "N Q"] | Table | None = None
    prior_scale: Float[Tensor, "N Q"] | float | Table | None = None
    covariates: Float[Tensor, "N P"] | Table | None = None
    exposure: Float[Tensor, " N"] | Float[Tensor, "N D"] | Table | None = None
    standard_error: Float[Tensor, " N"] | Float[Tensor, "N D"] | Table | None = None
    weight: Float[Tensor, " N"] | Table | None = None

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and not (name == "prior_scale" and isinstance(value, float | int)):
                self._set(name, as_tensor(value, name=name))
        scale, loc = self.prior_scale, self.prior_loc
        if isinstance(scale, float | int) and not isinstance(scale, bool) and isinstance(loc, Tensor):
            self._set("prior_scale", torch.full_like(loc, scale))
        for name in _NAMES:
            if getattr(self, name) is not None:
                self._set(name, _checked(name, getattr(self, name)))
        prior: Any = (self.prior_loc, self.prior_scale)
        if self.prior_loc is None and self.prior_scale is not None:
            self._set("prior_loc", torch.zeros_like(prior[1]))
        elif self.prior_scale is None and self.prior_loc is not None:
            self._set("prior_scale", torch.ones_like(prior[0]))
        elif self.prior_loc is not None and self.prior_loc.shape != prior[1].shape:
            raise ValueError(
                f"expected prior_scale of the shape of prior_loc, {list(self.prior_loc.shape)}, got {list(prior[1].shape)}; "
                "pass a number for all, or expand it"
            )
        sizes = {name: len(value) for name, value in self.parts().items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"expected arguments of the same rows, got numbers of rows {sizes}; select the same rows of each")

    def _set(self, name: str, value: Tensor | None) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of_checked(cls, parts: Mapping[str, Tensor]) -> "RowArguments":
        """Return arguments from the :meth:`parts` of others, without another check.

        :param parts: tensors by name.
        """
        new = object.__new__(cls)
        for name in _NAMES:
            new._set(name, parts.get(name))
        return new

    def parts(self) -> dict[str, Tensor]:
        """Return the arguments that are given, by name."""
        return {name: getattr(self, name) for name in _NAMES if getattr(self, name) is not None}

    @property
    def prior(self) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"]] | None:
        """Means and standard deviations of the priors of the latents; None without priors."""
        loc, scale = self.prior_loc, self.prior_scale
        return (loc, scale) if isinstance(loc, Tensor) and isinstance(scale, Tensor) else None

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None without arguments."""
        return next((len(value) for value in self.parts().values()), None)

    def __getitem__(self, idx: Int[Tensor, " B"] | Bool[Tensor, " N"] | slice) -> "RowArguments":
        """Select rows.

        :param idx: their indices, or a mask.
        """
        return self._map(lambda value: value[idx])

    def to(self, *args: Any, **kwargs: Any) -> "RowArguments":
        """Convert dtype and device, as ``torch.Tensor.to``."""
        return self._map(lambda value: value.to(*args, **kwargs))

    def expand(self, num_rows: int) -> "RowArguments":
        """Return these arguments for a number of rows; a single row of them stands for all.

        :param num_rows: number of rows.
        :raises ValueError: for another number of rows.
        """
        if self.num_rows not in (None, 1, num_rows):
            raise ValueError(f"expected arguments of {num_rows} rows, or of one for all, got {self.num_rows}; select the rows")
        return self._map(lambda value: value.expand(num_rows, *value.shape[1:]))

    def replace(self, other: "RowArguments") -> "RowArguments":
        """Return these arguments with the parts that another object has.

        :param other: arguments of the same rows.
        """
        return RowArguments(**{**self.parts(), **other.parts()})

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RowArguments":
        """Apply a function to each argument, without another check."""
        return self.of_checked({name: function(value) for name, value in self.parts().items()})


_NAMES = tuple(field.name for field in fields(RowArguments))
_BY_ENTRY = ("exposure", "standard_error")  # one number for each row, or one for each entry
_MATRICES = ("prior_loc", "prior_scale", "covariates")


def _checked(name: str, value: Any) -> Tensor:
    """Return an argument as a matrix, weights as a vector; raise if it cannot be used."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"expected {name} to be a table of numbers, got {value!r} of type {type(value).__name__}; pass prior_loc too, of "
            "whose shape one number becomes a table"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"expected {name} of a floating-point dtype, torch.float32 or torch.float64, got {value.dtype}; use .to(Y.dtype)"
        )
    dims = {"weight": (1,), **dict.fromkeys(_BY_ENTRY, (1, 2)), **dict.fromkeys(_MATRICES, (2,))}[name]
    if value.dim() not in dims or not value.numel():
        shapes = {(1,): "[rows]", (2,): "[rows, columns]", (1, 2): "[rows] or [rows, columns]"}[dims]
        advice = "; one column is a matrix too: use [:, None]" if dims == (2,) else ""
        raise ValueError(f"expected {name} of shape {shapes}, got {list(value.shape)}{advice}")
    in_range, text = {
        "prior_scale": (value > 0.0, "positive"),
        "exposure": (value > 0.0, "positive"),
        "standard_error": (value >= 0.0, "0 or more"),
        "weight": (value >= 0.0, "0 or more"),
    }.get(name, (torch.ones_like(value, dtype=torch.bool), "numbers"))
    if not (ok := in_range & value.isfinite()).all():
        bad = (~ok).nonzero()[0].tolist()
        raise ValueError(
            f"expected finite entries of {name} that are {text}, got {value[tuple(bad)].item():g} at {name}{bad}; replace it, "
            "or leave out the row"
        )
    return value[:, None] if name in _BY_ENTRY and value.dim() == 1 else value
