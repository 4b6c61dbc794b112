"""Likelihood of data whose columns are of different types, such as reals, counts and binary numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float, Shaped
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModuleList
from torch import Tensor, nn

from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp.likelihoods.base import Likelihood
from pyro_lvgp.likelihoods.rows import check_independent_entries

__all__ = ["Heterogeneous"]


class Heterogeneous(Likelihood):
    r"""Likelihood of columns of different types: each group of columns has a likelihood of its own.

    .. math::

        p(y_n \mid f_n) = \prod_k \prod_{d \in D_k} p_k(y_{nd} \mid f_{nd}, \theta_{kd})

    :param parts: pairs of a likelihood and the indices :math:`D_k` of its columns; each column is in exactly one pair.
    :raises ValueError: if a column is in no part or in several, a part has none or parameters for another number of them, or
        no part's ``fill_value`` is in the support of all.
    :raises TypeError: for a part that is no pair of a likelihood and whole numbers, or whose likelihood is one of whole rows.

    The attribute ``parts`` is the list of likelihoods, with their parameters, such as ``likelihood.parts[0].variance``.  A
    decoder that returns the parameter returns a number for each column; numbers of columns whose likelihood has none are
    ignored.

    >>> from pyro_lvgp.likelihoods import Bernoulli, Gaussian
    >>> kinds = Heterogeneous([(Gaussian(0.5, data_dim=2), [0, 2]), (Bernoulli(), [1])])
    >>> y = kinds(torch.zeros(5, 3))
    >>> y.mean[0].detach(), y.variance[0].detach()
    (tensor([0.0000, 0.5000, 0.0000]), tensor([0.5000, 0.2500, 0.5000]))

    Source: Moreno-Muñoz, Artés and Álvarez (2018), "Heterogeneous multi-output Gaussian process prediction", eq. 1.
    """

    parts: Any

    def __init__(self, parts: Sequence[tuple[Likelihood, Sequence[int]]]):
        super().__init__()
        likelihoods, groups = _checked(parts)
        self._check_kinds(likelihoods)
        params_of_parts = [part.params() for part in likelihoods]
        for part, group, params in zip(likelihoods, groups, params_of_parts, strict=True):
            part.check_outputs(len(group), params)
        self.parts = PyroModuleList(likelihoods)
        self._columns = _Columns(groups)
        self._has_params = [params is not None for params in params_of_parts]
        # distribution() is called, not the part itself: Pyro cannot rename a module once it has run.
        functions = [torch.zeros(group.shape) for group in groups]
        entries = [
            part.distribution(f, params) for part, f, params in zip(likelihoods, functions, params_of_parts, strict=True)
        ]
        self.has_log_link = all(part.has_log_link for part in likelihoods)
        self.has_gaussian_noise = all(part.has_gaussian_noise for part in likelihoods)
        self.fill_value = _common_fill_value([part.fill_value for part in likelihoods], [y.support for y in entries])

    def _check_kinds(self, likelihoods: Sequence[Likelihood]) -> None:
        """Raise if a part cannot be used beside the others."""
        for likelihood in likelihoods:
            check_independent_entries(likelihood, "Heterogeneous")

    def by_part(self, params: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Any, Tensor | None, tuple[Tensor, ...]]]:
        """Iterate over the parts, with the parameter of each and its columns of the tensors.

        :param params: the tensor that :meth:`params` returns.
        :param tensors: tensors ``[*batch, D or 1]``.
        """
        values = [None] * len(self.parts) if params is None else self._split_params(params)
        columns = zip(*(self._columns.split(x) for x in tensors), strict=True)
        for part, has_params, value, inputs in zip(self.parts, self._has_params, values, columns, strict=True):
            yield part, value if has_params else None, inputs

    def params(self):
        return self.join_params([part.params() for part in self.parts])

    def _split_params(self, params: Tensor) -> Sequence[Tensor]:
        """Split the parameter into values of the parts; any number for a part without a parameter."""
        return self._columns.split(params)

    def join_params(self, own: Sequence[Tensor | None]) -> Tensor | None:
        """Join the parameters of the parts to a value of :meth:`params`.

        :param own: parameter of each part, None for a part without one.
        """
        like = next((params for params in own if params is not None), None)
        if like is None:
            return None
        return self._columns.join(self._aligned([like.new_ones(1) if params is None else params for params in own]))

    def _aligned(self, own: list[Tensor]) -> list[Tensor]:
        """Give the parameters of the parts shapes that broadcast, but for their columns."""
        return own

    def add_variance(self, params, variance):
        parts = self.by_part(params, variance)
        return self.join_params([part.add_variance(own, *inputs) for part, own, inputs in parts])

    def distribution(self, f, params):
        return _ByColumn(self._columns, [part.distribution(*inputs, own) for part, own, inputs in self.by_part(params, f)])

    def inverse_link(self, y):
        return self._columns.join([part.inverse_link(*inputs) for part, _, inputs in self.by_part(None, y)])

    def initial_function(self, y):
        return self._columns.join([part.initial_function(*inputs) for part, _, inputs in self.by_part(None, y)])

    def init_from_data(self, y, f):
        for part, _, inputs in self.by_part(None, y, f):
            part.init_from_data(*inputs)

    def expected_log_prob(self, y, mean, variance, params):
        parts = self.by_part(params, y, mean, variance)
        return self._columns.join([part.expected_log_prob(*inputs, own) for part, own, inputs in parts])

    def log_predictive_density(self, y, mean, variance, params):
        parts = self.by_part(params, y, mean, variance)
        return self._columns.join([part.log_predictive_density(*inputs, own) for part, own, inputs in parts])

    def log_predictive_derivatives(self, y, mean, variance, params):
        parts = [part.log_predictive_derivatives(*x, own) for part, own, x in self.by_part(params, y, mean, variance)]
        density, first, second = (self._columns.join(values) for values in zip(*parts, strict=True))
        return density, first, second

    def moments(self, mean, variance, params):
        parts = [part.moments(*inputs, own) for part, own, inputs in self.by_part(params, mean, variance)]
        y_mean, y_variance = (self._columns.join(values) for values in zip(*parts, strict=True))
        return y_mean, y_variance

    def check_outputs(self, data_dim, params):
        if data_dim != self._columns.number:
            raise ValueError(
                f"expected a likelihood of {data_dim} outputs, got parts with {self._columns.number} columns; give each "
                "column to one of them"
            )
        super().check_outputs(data_dim, params)

    def bound_noise(self, y, columns=None):
        columns = torch.arange(y.shape[-1], device=y.device) if columns is None else columns
        for part, _, inputs in self.by_part(None, y, columns):
            part.bound_noise(*inputs)

    def check(self, y):
        for part, _, inputs in self.by_part(None, y):
            part.check(*inputs)


class _Columns(nn.Module):
    """Partition of the last dimension of tensors into groups.

    :param groups: column indices of each group.
    """

    grouped: Tensor
    order: Tensor

    def __init__(self, groups: Sequence[Tensor]):
        super().__init__()
        self.sizes = [len(group) for group in groups]
        self.number = sum(self.sizes)
        grouped = torch.cat(list(groups))
        self.register_buffer("grouped", grouped, persistent=False)
        self.register_buffer("order", grouped.argsort(), persistent=False)

    def split(self, x: Shaped[Tensor, "..."]) -> tuple[Shaped[Tensor, "*batch group"], ...]:
        """Split a tensor [*batch, D or 1], or a scalar, into the columns of each group."""
        x = torch.atleast_1d(x)
        if x.shape[-1] not in (1, self.number):
            raise ValueError(f"expected {self.number} columns, those of all parts, got a tensor of shape {list(x.shape)}")
        return x.expand(*x.shape[:-1], self.number).index_select(-1, self.grouped).split(self.sizes, -1)

    def join(self, values: Sequence[Shaped[Tensor, "*#batch _"]]) -> Shaped[Tensor, "*batch D"]:
        """Join the columns of all groups in the order of the data."""
        batch = torch.broadcast_shapes(*(x.shape[:-1] for x in values))
        columns = [x.expand(*batch, size) for x, size in zip(values, self.sizes, strict=True)]
        return torch.cat(columns, -1).index_select(-1, self.order)


class _ByColumn(dist.TorchDistribution):
    """Joint distribution of independent columns, each of which follows the distribution of its part."""

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(self, columns: _Columns, parts: Sequence[TorchDistributionMixin]):
        batch = torch.broadcast_shapes(*(part.batch_shape[:-1] for part in parts))
        self._columns = columns
        self._parts = [part.expand((*batch, part.batch_shape[-1])) for part in parts]
        super().__init__(torch.Size((*batch, columns.number)), validate_args=False)

    @property
    def support(self):
        return _SupportByColumn(self._columns, [part.support for part in self._parts])

    @property
    def mean(self):
        return self._columns.join([part.mean for part in self._parts])

    @property
    def variance(self):
        return self._columns.join([part.variance for part in self._parts])

    def expand(self, batch_shape, _instance=None):
        parts = [part.expand((*batch_shape[:-1], part.batch_shape[-1])) for part in self._parts]
        return _ByColumn(self._columns, parts)

    def sample(self, sample_shape=()):
        return self._columns.join([part.sample(sample_shape) for part in self._parts])

    def log_prob(self, value):
        pairs = zip(self._parts, self._columns.split(value), strict=True)
        return self._columns.join([part.log_prob(columns) for part, columns in pairs])


@log_prob_limit.register
def _limit_by_column(fn: _ByColumn, value: Tensor) -> Tensor:
    pairs = zip(fn._parts, fn._columns.split(value), strict=True)
    return fn._columns.join([log_prob_limit(part, columns) for part, columns in pairs])


class _SupportByColumn(constraints.Constraint):
    def __init__(self, columns: _Columns, supports: Sequence[constraints.Constraint]):
        self._columns, self._supports = columns, supports
        self.is_discrete = all(support.is_discrete for support in supports)
        super().__init__()

    def check(self, value: Float[Tensor, "*batch D"]) -> Tensor:
        pairs = zip(self._supports, self._columns.split(value), strict=True)
        return self._columns.join([support.check(columns) for support, columns in pairs])


def _checked(parts: Sequence[tuple[Likelihood, Sequence[int]]]) -> tuple[list[Likelihood], list[Tensor]]:
    """Return the likelihoods and the column indices of each, or raise an error."""
    likelihoods: list[Likelihood] = []
    groups: list[Tensor] = []
    for part in parts:
        try:
            likelihood, columns = part
            group = torch.as_tensor(list(columns), dtype=torch.float64)
            if not isinstance(likelihood, Likelihood) or group.dim() != 1 or not torch.equal(group, group.round()):
                raise TypeError(f"{part!r} is no such pair")
        except (TypeError, ValueError) as error:
            raise TypeError(f"expected pairs of a likelihood and a list of columns as parts, got {part!r}") from error
        if not len(group):
            raise ValueError(f"expected columns for each likelihood, got none for {type(likelihood).__name__}; leave it out")
        likelihoods.append(likelihood)
        groups.append(group.long())
    found = sorted(column for group in groups for column in group.tolist())
    if not found or found != list(range(len(found))):
        raise ValueError(f"expected each column, from 0 to the last, in one part, got the columns {found}")
    return likelihoods, groups


def _common_fill_value(values: Sequence[float], supports: Sequence[constraints.Constraint]) -> float:
    """Find a fill value of one part that is in the support of all parts."""
    for value in values:
        if all(support.check(torch.full((1,), value)).all() for support in supports):
            return value
    raise ValueError(
        f"expected a fill_value that is in the support of every part, got {list(values)}; derive a likelihood with another "
        "fill_value"
    )
