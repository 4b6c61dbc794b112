"""Likelihood of rows of groups of columns, in some of which the entries of a row are dependent."""

from collections.abc import Sequence

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp.likelihoods.base import Likelihood
from pyro_lvgp.likelihoods.continuous import StudentT
from pyro_lvgp.likelihoods.heterogeneous import Heterogeneous, _Columns
from pyro_lvgp.likelihoods.rows import RowLikelihood


class HeterogeneousRows(Heterogeneous, RowLikelihood):
    r"""Likelihood of rows of groups of columns, which are independent of each other given the functions.

    .. math:: p(y_n \mid f_n) = \prod_k p_k(y_{n D_k} \mid f_{n D_k}, \theta_k)

    Unlike those of :class:`~pyro_lvgp.likelihoods.Heterogeneous`, groups may have a
    :class:`~pyro_lvgp.likelihoods.RowLikelihood`, under which the entries of a row are dependent.

    The parameter is a tensor [..., P, D], with the largest number P of rows that the parameter of a group has.  The parameter
    of independent entries is one row.

    :param parts: pairs of a likelihood and the indices of its columns, as for ``Heterogeneous``.
    :raises ValueError: as ``Heterogeneous``.
    :raises TypeError: as ``Heterogeneous``; for a :class:`~pyro_lvgp.likelihoods.StudentT`, since Laplace approximations of
        latents need a concave log density of rows with dependent entries; or for a ``RowLikelihood`` whose parameter has no
        column for each output.

    >>> from pyro_lvgp.likelihoods import Bernoulli, LowRankGaussian
    >>> kinds = HeterogeneousRows([(LowRankGaussian(1, 2), [0, 1]), (Bernoulli(), [2])])
    >>> y = kinds(torch.zeros(4, 3))
    >>> y.batch_shape, y.event_shape, kinds.params().shape
    (torch.Size([4]), torch.Size([3]), torch.Size([3, 3]))
    """

    def _check_kinds(self, likelihoods: Sequence[Likelihood]) -> None:
        self._num_rows = []  # of the parameter of each part; 0 for independent entries
        for likelihood in likelihoods:
            if isinstance(likelihood, StudentT):
                raise TypeError(
                    "expected likelihoods whose log density is concave beside one of rows with dependent entries, got "
                    "StudentT; take Gaussian(), or independent entries for all columns"
                )
            params = likelihood.params() if isinstance(likelihood, RowLikelihood) else None
            if params is not None and params.dim() < 2:
                raise TypeError(
                    f"expected a parameter of shape [rows, columns] from {type(likelihood).__name__}, got "
                    f"{list(params.shape)}; return a row for each quantity"
                )
            self._num_rows.append(0 if params is None else params.shape[-2])

    def _split_params(self, params: Tensor) -> Sequence[Tensor]:
        columns = self._columns.split(params)
        return [x[..., :rows, :] if rows else x[..., 0, :] for x, rows in zip(columns, self._num_rows, strict=True)]

    def _aligned(self, own: list[Tensor]) -> list[Tensor]:
        tables = []
        for params, rows, size in zip(own, self._num_rows, self._columns.sizes, strict=True):
            table = params if rows else torch.atleast_1d(params).unsqueeze(-2)
            table = table.expand(*table.shape[:-1], size)
            tables.append(pad(table, (0, 0, 0, max(self._num_rows) - table.shape[-2])))
        return tables

    def distribution(self, f, params):
        parts = [part.distribution(*inputs, own) for part, own, inputs in self.by_part(params, f)]
        return _Rows(self._columns, [part if part.event_shape else part.to_event(1) for part in parts])

    def log_prob_of_rows(self, y, observed, mean, variance, params):
        known = variance is None
        parts = self.by_part(params, y, observed, mean, *(() if known else (variance,)))
        return _sum([part.log_prob_of_rows(*inputs, *((None,) if known else ()), own) for part, own, inputs in parts])

    def log_predictive_density_of_rows(self, y, observed, mean, variance, params):
        terms = []
        for part, own, (value, seen, f_mean, f_variance) in self.by_part(params, y, observed, mean, variance):
            if isinstance(part, RowLikelihood):
                terms.append(part.log_predictive_density_of_rows(value, seen, f_mean, f_variance, own))
            else:
                entries = part.log_predictive_density(value, f_mean, f_variance, own)
                terms.append(torch.where(seen, entries, 0.0).sum(-1))
        return _sum(terms)

    def condition(self, y, observed, mean, variance, params):
        conditioned = []
        for part, own, (value, seen, f_mean, f_variance) in self.by_part(params, y, observed, mean, variance):
            has_rows = isinstance(part, RowLikelihood)
            conditioned.append(part.condition(value, seen, f_mean, f_variance, own) if has_rows else own)
        return self.join_params(conditioned)


class _Rows(dist.TorchDistribution):
    """Joint distribution of rows, of event shape [D], whose groups of columns are independent.

    :param columns: columns of each group.
    :param parts: distributions of each group, of one event dimension.
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(self, columns: _Columns, parts: Sequence[TorchDistributionMixin]):
        batch = torch.broadcast_shapes(*(part.batch_shape for part in parts))
        self._columns, self._parts = columns, [part.expand(batch) for part in parts]
        super().__init__(batch, torch.Size([columns.number]), validate_args=False)

    @property
    def support(self):
        return _SupportOfRows(self._columns, [part.support for part in self._parts])

    def expand(self, batch_shape, _instance=None):
        return _Rows(self._columns, [part.expand(batch_shape) for part in self._parts])

    def sample(self, sample_shape=()):
        return self._columns.join([part.sample(sample_shape) for part in self._parts])

    def log_prob(self, value):
        return _sum([part.log_prob(x) for part, x in zip(self._parts, self._columns.split(value), strict=True)])


class _SupportOfRows(constraints.Constraint):
    event_dim = 1

    def __init__(self, columns: _Columns, supports: Sequence[constraints.Constraint]):
        self._columns, self._supports = columns, supports
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        pairs = zip(self._supports, self._columns.split(value), strict=True)
        return torch.stack([support.check(columns) for support, columns in pairs]).all(0)


@log_prob_limit.register
def _limit_of_rows(fn: _Rows, value: Tensor) -> Tensor:
    return _sum([log_prob_limit(part, x) for part, x in zip(fn._parts, fn._columns.split(value), strict=True)])


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Add terms that broadcast."""
    return torch.stack(torch.broadcast_tensors(*terms)).sum(0)
