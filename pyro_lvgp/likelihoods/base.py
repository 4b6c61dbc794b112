"""What every likelihood is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_lvgp.ops.quadrature import gauss_hermite, log_gauss_hermite_at_mode


class Likelihood(PyroModule):
    """p(y | f, θ), elementwise over entries.

    You implement ``distribution(f, params)``, a univariate distribution of the shape of ``f`` [..., N, D] with a mean and a
    variance, and ``inverse_link(y)``, a rough inverse of its link; with a parameter of its own, also ``params()``; with a
    support that 0 is not in, ``fill_value``.  You get expectations over a Gaussian f by quadrature; override what has a
    closed form.

    :param num_points: quadrature nodes per entry.
    :raises ValueError: if there are none.

    >>> import pyro.distributions as dist
    >>> class Laplace(Likelihood):
    ...     def distribution(self, f, params):
    ...         return dist.Laplace(f, 1.0)
    ...
    ...     def inverse_link(self, y):
    ...         return y
    >>> Laplace().moments(torch.zeros(1), torch.ones(1), None)
    (tensor([0.]), tensor([3.0000]))
    """

    fill_value: float = 0.0  # what models put where y is missing, before they mask it

    def __init__(self, *, num_points: int = 20):
        super().__init__()
        if num_points < 1:
            raise ValueError(f"expected num_points of 1 or more, got {num_points}; 20 is plenty for smooth likelihoods")
        self.num_points = num_points

    def params(self) -> Tensor | None:
        """The likelihood's parameter, lined up with [..., N, D]; read it once in a model, since a prior draws at each read."""
        return None

    def distribution(self, f: Float[Tensor, "*batch"], params: Tensor | None) -> TorchDistributionMixin:
        """p(y | f, θ).

        :param f: functions.
        :param params: what :meth:`params` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement distribution(f, params)")

    def inverse_link(self, y: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """A rough f for each y, to start from.

        :param y: data in the support.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement inverse_link(y), a rough inverse of its link")

    def initial_function(self, y: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """:meth:`inverse_link` of all data, NaN too where it would lead a linear model astray; by default nowhere else.

        :param y: data, NaN where missing.
        """
        return self.inverse_link(y)

    def log_prob_derivatives(
        self, y: Float[Tensor, "*#batch"], f: Float[Tensor, "*#batch"], params: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """First and second derivative of log p(y | f, θ) in f, where that is concave: quadrature then looks where y is.

        Where it is not implemented, quadrature looks where f is, which is enough for a y that tells little of f.

        :param y: data.
        :param f: functions.
        :param params: what :meth:`params` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log_prob_derivatives(y, f, params)")

    def init_from_data(self, y: Float[Tensor, "N D"], f: Float[Tensor, "N D"]) -> None:
        """Set what cannot be learned from a poor start, given data and a rough f of each; nothing by default.

        :param y: data, NaN where missing.
        :param f: that of each entry, by a linear model of what :meth:`inverse_link` makes of y.
        """

    def forward(self, f: Float[Tensor, "*batch"]) -> TorchDistributionMixin:
        """p(y | f) at the present parameter.

        :param f: functions.
        """
        return self.distribution(f, self.params())

    def expected_log_prob(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        params: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        """``E[log p(y | f, θ)]`` for ``f ~ N(mean, variance)``, entry by entry.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: what :meth:`params` returned.
        """
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)  # nodes of quadrature go left of all dimensions
        return self._expect(lambda p: p.log_prob(y), mean, variance, params)

    def log_prob_of_rows(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"] | None,
        params: Tensor | None,
    ) -> Float[Tensor, "*batch N"]:
        """:meth:`expected_log_prob` summed over what is observed of each row.

        :param y: data, anything in the support where missing.
        :param observed: which entries are observed.
        :param mean: means of f.
        :param variance: variances of f; None where f is known.
        :param params: what :meth:`params` returned.
        """
        if variance is None:
            entries = self.distribution(mean, params).log_prob(y)
        else:
            entries = self.expected_log_prob(y, mean, variance, params)
        return torch.where(observed, entries, 0.0).sum(-1)

    def log_predictive_density(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        params: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        """``log E[p(y | f, θ)]`` for ``f ~ N(mean, variance)``, entry by entry.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: what :meth:`params` returned.
        """
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)

        def log_prob(f: Tensor) -> Tensor:
            return self.distribution(f, params).log_prob(y)

        if type(self).log_prob_derivatives is Likelihood.log_prob_derivatives:
            return gauss_hermite(log_prob, mean, variance, num_points=self.num_points, log=True)
        slopes = partial(self.log_prob_derivatives, y, params=params)
        return log_gauss_hermite_at_mode(log_prob, slopes, mean, variance, num_points=self.num_points)

    def moments(
        self, mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"], params: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Mean and variance of y for ``f ~ N(mean, variance)``, by the laws of total expectation and variance.

        :param mean: means of f.
        :param variance: variances of f.
        :param params: what :meth:`params` returned.
        :raises NotImplementedError: if p(y | f) has no mean or no variance.
        """
        try:
            y_mean = self._expect(lambda p: p.mean, mean, variance, params)
            # A sum of what is not negative: differences of squares would lose all digits of counts that hardly vary.
            return y_mean, self._expect(lambda p: p.variance + (p.mean - y_mean).square(), mean, variance, params)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"expected a distribution with mean and variance from {type(self).__name__}, got "
                f"{type(self.distribution(mean, params)).__name__}; override moments(mean, variance, params)"
            ) from error

    def check_outputs(self, data_dim: int, params: Tensor | None) -> None:
        """Raise a ``ValueError`` if the parameter is that of another number of outputs.

        :param data_dim: number of outputs.
        :param params: what :meth:`params` returned.
        """
        if params is not None and params.shape[-1:] not in ((), (1,), (data_dim,)):
            raise ValueError(
                f"expected a likelihood of {data_dim} outputs, got one with {params.shape[-1]} parameters; pass "
                f"data_dim={data_dim} to it"
            )

    def support_text(self) -> str:
        """The support of y in words, for errors."""
        return "real numbers"

    def check(self, y: Tensor) -> None:
        """Raise a ``ValueError`` if an observed entry lies outside the support.

        :param y: data, NaN where missing.
        """
        missing = torch.isnan(y)
        bad = ~(self(torch.zeros_like(y)).support.check(torch.nan_to_num(y, self.fill_value)) | missing)
        if bad.any():
            raise ValueError(
                f"{type(self).__name__} likelihood: expected {self.support_text()}, got {y[bad][0].item():g} "
                f"({int(bad.sum())} such entries); recode the data, mark the entries as missing (NaN), or choose "
                "another likelihood"
            )

    def _expect(self, of: Callable[[Any], Tensor], mean: Tensor, variance: Tensor, params: Tensor | None) -> Tensor:
        return gauss_hermite(lambda f: of(self.distribution(f, params)), mean, variance, num_points=self.num_points)


class WithParameter(Likelihood):
    """A likelihood with one positive parameter, shared by all outputs or one for each.

    :param name: of the parameter, the attribute that holds it.
    :param value: where it starts.
    :param data_dim: number of outputs, to have one for each; None shares one.
    :param num_points: quadrature nodes per entry.
    :raises ValueError: for a value that is not positive, or values of another number than ``data_dim``.
    """

    def __init__(self, name: str, value: float | Tensor, data_dim: int | None, *, num_points: int = 20):
        super().__init__(num_points=num_points)
        value = value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.get_default_dtype())
        if not (value > 0).all():
            raise ValueError(f"expected a positive {name}, got {value.min().item():g}")
        shape = () if data_dim is None else (data_dim,)
        if (value.dim() and value.shape not in ((1,), shape)) or value.dim() > len(shape):
            raise ValueError(
                f"expected one {name}, or data_dim of them, got {list(value.shape)} and data_dim={data_dim}; pass the number "
                "of outputs as data_dim"
            )
        self._param_name, self._per_output = name, data_dim is not None
        setattr(self, name, PyroParam(value.expand(shape).clone(), constraints.softplus_positive))

    def params(self) -> Tensor:
        value = getattr(self, self._param_name)
        # [D] lines up with [..., N, D] as it is; a scalar, or a plate's [..., 1], gains the last dimension.
        return value if self._per_output else value[..., None]
