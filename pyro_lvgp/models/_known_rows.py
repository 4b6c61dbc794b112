"""Tensors that a model of rows makes of the known quantities of its rows, and initial values that account for them."""

import math
from typing import NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp.likelihoods import Likelihood
from pyro_lvgp.models.initialization import InitialLatents, kaiser_dim, linear_latents
from pyro_lvgp.models.row_arguments import RowArguments

ON_NEW_ROWS = ("covariates", "exposure", "standard_error")  # on which predictions depend


class KnownRows(NamedTuple):
    """Known quantities of the rows of a batch; None where nothing is known.

    :param prior: mean and standard deviations of the priors of the latents.
    :param covariates: further inputs of the functions.
    :param offset: logarithms of exposures.
    :param variance: squares of standard errors.
    """

    prior: tuple[Float[Tensor, "B Q"], Float[Tensor, "B Q"]] | None = None
    covariates: Float[Tensor, "B P"] | None = None
    offset: Float[Tensor, "B #D"] | None = None
    variance: Float[Tensor, "B #D"] | None = None

    @classmethod
    def of(cls, rows: RowArguments | None) -> "KnownRows":
        """Compute the tensors from the arguments of rows."""
        if rows is None:
            return _NOTHING
        exposure, error = rows.exposure, rows.standard_error
        return cls(
            rows.prior,
            rows.covariates,
            None if exposure is None else exposure.log(),
            None if error is None else error.square(),
        )

    def prior_of_latents(self, latent_dim: int, like: Tensor) -> TorchDistributionMixin:
        """Return the prior of the latents.

        :param latent_dim: number Q of latent dimensions.
        :param like: a tensor of the dtype and device of the latents.
        """
        if self.prior is None:
            return dist.Normal(like.new_zeros(latent_dim), 1.0).to_event(1)
        return dist.Normal(*self.prior).to_event(1)

    def log_prior(self, X: Float[Tensor, "*particles B Q"]) -> Float[Tensor, "*particles B"]:
        """Compute the log prior density of latents."""
        if self.prior is None:
            return -0.5 * (X.square() + math.log(2.0 * math.pi)).sum(-1)
        loc, scale = self.prior
        return -0.5 * (((X - loc) / scale).square() + (2.0 * math.pi * scale.square()).log()).sum(-1)

    def prior_score(self, X: Float[Tensor, "*particles B Q"]) -> Float[Tensor, "*particles B Q"]:
        """Compute the gradient of the log prior density of latents."""
        if self.prior is None:
            return -X
        loc, scale = self.prior
        return (loc - X) / scale.square()

    def of_columns(self, columns: slice) -> "KnownRows":
        """Return the quantities of some columns, without the priors of the latents."""
        offset, variance = (x if x is None or x.shape[-1] == 1 else x[..., columns] for x in (self.offset, self.variance))
        return self._replace(prior=None, offset=offset, variance=variance)

    def inputs(self, X: Float[Tensor, "*particles B Q"]) -> Float[Tensor, "*particles B columns"]:
        """Append the covariates to latents, as inputs of the functions."""
        if self.covariates is None:
            return X
        return torch.cat([X, self.covariates.expand(*X.shape[:-1], self.covariates.shape[-1])], -1)

    def shift(self, f_mean: Float[Tensor, "*#particles D"]) -> Float[Tensor, "*particles D"]:
        """Add the logarithms of exposures to means of functions."""
        return f_mean if self.offset is None else f_mean + self.offset

    def params_of(self, likelihood: Likelihood, params: Tensor | None) -> Tensor | None:
        """Add the squares of standard errors to the noise variances in the parameter of a likelihood."""
        return params if self.variance is None or params is None else likelihood.add_variance(params, self.variance)


_NOTHING = KnownRows()


def check_training_rows(rows: RowArguments, num_data: int, data_dim: int, latent_dim: int, likelihood: Likelihood) -> None:
    """Raise unless the arguments are of the rows of a model, and its likelihood can account for them."""
    check_shapes(rows, data_dim, latent_dim)
    if rows.num_rows != num_data:
        raise ValueError(
            f"expected arguments of {num_data} rows, those of the training data, got {rows.num_rows}; give each row its own"
        )
    if rows.exposure is not None and not likelihood.has_log_link:
        raise TypeError(
            f"expected a likelihood with a log link for exposures, such as Poisson() or NegativeBinomial(), got "
            f"{type(likelihood).__name__}; leave out exposure, or divide the data by it"
        )
    if rows.standard_error is not None and not likelihood.has_gaussian_noise:
        raise TypeError(
            f"expected a likelihood with Gaussian noise for standard errors, Gaussian() or LowRankGaussian(), got "
            f"{type(likelihood).__name__}; leave out standard_error"
        )


def check_shapes(rows: RowArguments, data_dim: int, latent_dim: int) -> None:
    """Raise if the arguments have columns for another number of outputs or of latent dimensions."""
    for name, value in rows.parts().items():
        columns = {"prior_loc": (latent_dim,), "prior_scale": (latent_dim,)}.get(name, (1, data_dim))
        if name in ("covariates", "weight") or value.shape[-1] in columns:
            continue
        of = "latent dimensions" if len(columns) == 1 else "outputs, or one for all"
        raise ValueError(f"expected {name} with {columns[-1]} columns, those of the {of}, got {value.shape[-1]}")


def check_new_rows(rows: RowArguments, training: RowArguments) -> None:
    """Raise unless rows that are not training rows have the arguments that training rows have."""
    given, needed = rows.parts(), training.parts()
    for name in ON_NEW_ROWS:
        if name in needed and name not in given:
            raise ValueError(
                f"expected the {name} of these rows, since the training rows have one, got none; pass "
                f"rows=RowArguments({name}=...), of one row for all or of each"
            )
        if name in given and name not in needed:
            raise ValueError(
                f"expected no {name}, since the training rows have none, got one; leave it out, or fit a model with it"
            )
    covariates, known = given.get("covariates"), needed.get("covariates")
    if covariates is not None and known is not None and covariates.shape[-1] != known.shape[-1]:
        raise ValueError(
            f"expected {known.shape[-1]} columns of covariates, as of the training rows, got {covariates.shape[-1]}; encode "
            "categories alike"
        )


def check_like(rows: RowArguments, like: Tensor) -> None:
    """Raise unless the arguments have the dtype and the device of a tensor of the model."""
    for name, value in rows.parts().items():
        if value.dtype != like.dtype:
            raise TypeError(
                f"expected {name} of the model's dtype {like.dtype}, got {value.dtype}; use rows.to({like.dtype}), or convert "
                "model and data"
            )
        if value.device != like.device:
            raise ValueError(f"expected {name} on the model's device {like.device}, got {value.device}; use rows.to(...)")


def function_of_data(likelihood: Likelihood, Y: Float[Tensor, "N D"], known: KnownRows) -> Float[Tensor, "N D"]:
    """Compute the function values from which a model is initialised, for an exposure of 1.

    The data are divided by exposures relative to their geometric mean, so that the inverse link of small counts does not
    depend on the exposure.
    """
    if known.offset is None:
        return likelihood.initial_function(Y)
    centre = known.offset.mean()
    return likelihood.initial_function(Y / (known.offset - centre).exp()) - centre


def initial_latents(
    f: Float[Tensor, "N D"], latent_dim: int, known: KnownRows, method: InitialLatents, seed: int
) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N D"]]:
    """Compute latents by a linear model of what covariates and prior means do not explain, and impute missing entries of f.

    Latents of a dimension whose prior means m vary more than the prior scales s are m: a component of arbitrary sign beside m
    would lead to worse optima.  Those of other dimensions with a prior are m + s z, with the leading components z for the
    dimensions with the largest s.
    """
    columns = [x for x in (known.covariates, None if known.prior is None else known.prior[0]) if x is not None]
    if not columns:
        return linear_latents(f, latent_dim, method=method, seed=seed)
    effect = _linear_effect(torch.cat(columns, -1), f)
    X, filled = linear_latents(f - effect, latent_dim, method=method, seed=seed)
    if known.prior is not None:
        loc, scale = known.prior
        is_informative = loc.std(0, correction=0) > scale.mean(0)
        width = torch.where(is_informative, 0.0, scale.mean(0))
        order = width.argsort(descending=True, stable=True).argsort()
        X = torch.where(is_informative, loc, loc + scale * X[:, order])
    return X, filled + effect


def default_latent_dim(likelihood: Likelihood, Y: Float[Tensor, "N D"], rows: RowArguments | None, *, most: int) -> int:
    """Return the number of latent dimensions of the priors of rows, or else that of Kaiser's rule without covariates.

    :param most: largest result of the rule.
    """
    known = KnownRows.of(None if rows is None else rows.expand(len(Y)))
    if known.prior is not None:
        return known.prior[0].shape[-1]
    f = function_of_data(likelihood, Y, known)
    return kaiser_dim(f if known.covariates is None else f - _linear_effect(known.covariates, f), most=most)


def _linear_effect(x: Float[Tensor, "N columns"], f: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Fit a linear function of x to values of f, with means of columns in place of missing values."""
    filled = torch.where(f.isnan(), f.nanmean(0), f)
    return linear_fit(x, filled - filled.mean(0))


def linear_fit(x: Float[Tensor, "N columns"], f: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Fit a linear function of centred x, whose columns may be dependent, to centred values by least squares."""
    design = x - x.mean(0)
    return design @ (torch.linalg.pinv(design) @ f)
