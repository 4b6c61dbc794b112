"""Candidates of the imputer of tables: sizes of models, and mixtures of Gaussians, whose cost bounds the rows they see."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.sklearn._known_table import KnownTable

__all__ = ["Candidate", "Gaussians", "candidates", "most_rows"]

_SIZES = ((2, 8), (5, 4), (10, 1))  # numbers of latent dimensions, and of linear factors of the residuals
_ROWS_PER_GAUSSIAN, _MAX_GAUSSIANS = 12, 20
_MAX_COST = 2e8  # multiplications of a step, which is some seconds for each fold


@dataclass(frozen=True)
class Gaussians:
    """A candidate: a mixture of Gaussians.

    :param number: number of Gaussians.
    :param power: whether columns have the power transformation, or are standardised alone.
    """

    number: int
    power: bool


Candidate = tuple[int, int] | Gaussians  # numbers of latent dimensions and of factors, or Gaussians


def candidates(table: KnownTable) -> list[Candidate]:
    """Candidates for a table: models that use what is known of its rows, and Gaussians if nothing is known."""
    prior = None if table.known is None else table.known.prior
    num_rows, num_columns = table.values.shape
    dims = [Q if prior is None else prior[0].shape[1] for Q, _ in _SIZES]
    most = num_columns if prior is None else max(dims)
    models = dict.fromkeys((min(Q, most), min(r, num_columns // 2)) for Q, (_, r) in zip(dims, _SIZES, strict=True))
    if table.known is not None:
        return list(models)
    number = min(max(num_rows // _ROWS_PER_GAUSSIAN, 2), _MAX_GAUSSIANS)
    gaussians = Gaussians(1, power=True), Gaussians(number, power=True), Gaussians(number, power=False)
    least = {size: min(num_rows, _ROWS_PER_GAUSSIAN * size.number) for size in gaussians}
    return [*models, *(size for size in gaussians if most_rows(table.values, size.number) >= least[size])]


def most_rows(Y: Float[Tensor, "N D"], number: int) -> int:
    """Number of rows such as these that the largest cost allows a number of Gaussians to be fitted to."""
    num_columns = Y.shape[1]
    cost_of_row = Y.isnan().sum(1).double().pow(3).mean().item() + num_columns**2
    return max(int((_MAX_COST / number - num_columns**3) / cost_of_row), 0)
