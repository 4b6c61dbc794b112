"""Likelihoods by name, of the sizes of data."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.likelihoods.base import Likelihood
from pyro_lvgp.likelihoods.continuous import Gaussian, LogNormal, StudentT
from pyro_lvgp.likelihoods.counts import Bernoulli, NegativeBinomial, Poisson
from pyro_lvgp.likelihoods.ordinal import Ordinal

__all__ = ["LikelihoodName", "likelihood_by_name"]

LikelihoodName = Literal["bernoulli", "gaussian", "log_normal", "negative_binomial", "ordinal", "poisson", "student_t"]


@names_types
def likelihood_by_name(likelihood: Likelihood | LikelihoodName, Y: Float[Tensor, "N D"]) -> Likelihood:
    """Create the likelihood of a name, with a parameter for each column of the data; return a likelihood as it is.

    :param likelihood: a likelihood, or one of ``"bernoulli"``, ``"gaussian"``, ``"log_normal"``, ``"negative_binomial"``,
        ``"ordinal"`` (:meth:`Ordinal.from_data`), ``"poisson"`` and ``"student_t"``, with the defaults of their classes.
    :param Y: data, NaN where missing.
    :raises ValueError: for another name, or, for ``"ordinal"``, entries that are no levels.

    >>> import torch
    >>> likelihood_by_name("student_t", torch.randn(5, 2))
    StudentT(scale=[0.5, 0.5], data_dim=2)
    """
    if not isinstance(likelihood, str):
        return likelihood
    if likelihood not in _FROM_DATA:
        raise ValueError(
            f"expected likelihood in {get_args(LikelihoodName)}, got {likelihood!r}; for others pass an object, such as "
            "Binomial(total_count=10)"
        )
    return _FROM_DATA[likelihood](Y)


_FROM_DATA: dict[str, Callable[[Tensor], Likelihood]] = {
    "bernoulli": lambda Y: Bernoulli(),
    "gaussian": lambda Y: Gaussian(data_dim=Y.shape[1]),
    "log_normal": lambda Y: LogNormal(data_dim=Y.shape[1]),
    "negative_binomial": lambda Y: NegativeBinomial(data_dim=Y.shape[1]),
    "ordinal": Ordinal.from_data,
    "poisson": lambda Y: Poisson(),
    "student_t": lambda Y: StudentT(data_dim=Y.shape[1]),
}
