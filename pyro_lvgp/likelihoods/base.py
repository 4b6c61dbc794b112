"""Base classes of likelihoods."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp._utils.standalone import StandaloneModule
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.ops.expected_log_likelihood import Quadratic
from pyro_lvgp.ops.quadrature import gauss_hermite, log_expectation_at_mode, log_expectation_derivatives

__all__ = ["Likelihood", "LogConcaveLikelihood", "QuadraticLikelihood", "WithParameter"]


class Likelihood(StandaloneModule):
    """Likelihood p(y | f, θ) of independent entries.

    Derive from :class:`~pyro_lvgp.likelihoods.RowLikelihood` if the entries of a row are dependent given f.

    A subclass implements

    - :meth:`distribution`, a univariate distribution of the shape of ``f`` [..., N, D] with a mean and a variance;
    - :meth:`inverse_link`, an approximate inverse of its link;
    - :meth:`params`, if it has a parameter;
    - :attr:`fill_value`, if 0 is not in its support.

    Expectations over a Gaussian f are computed by Gauss–Hermite quadrature.  Override :meth:`expected_log_prob`,
    :meth:`log_predictive_density` or :meth:`moments` where they have a closed form.  If log p(y | f) is concave in f, derive
    from :class:`LogConcaveLikelihood` for quadrature of higher accuracy.

    Called outside any model, guide or Pyro handler, a likelihood is a plain function of its own parameters and leaves Pyro's
    global parameter store alone.

    :param num_points: number of quadrature nodes per entry; 20 by default.
    :raises ValueError: if ``num_points`` is less than 1.

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

    #: Number in the support that models put in place of missing entries, before they mask them.
    fill_value: float = 0.0

    #: Whether f is the logarithm of a factor of y, so that the logarithm of an exposure is added to f.
    has_log_link: bool = False

    #: Whether :meth:`add_variance` is defined, so that entries may have known standard errors.
    has_gaussian_noise: bool = False

    _num_points = 20  # by default

    def __init__(self, *, num_points: int | None = None):
        super().__init__()
        num_points = self._num_points if num_points is None else num_points
        check_sizes(num_points=num_points)
        self.num_points = num_points

    def params(self) -> Tensor | None:
        """Read the current parameter θ, in a shape that broadcasts against [..., N, D]; None if there is none.

        Call it once in a model, since a prior draws a value at each read.
        """
        return None

    def add_variance(self, params: Tensor, variance: Float[Tensor, "N #D"]) -> Tensor:
        """Return the parameter of rows with further Gaussian noise of known variances.

        :param params: the tensor that :meth:`params` returns.
        :param variance: variances of each row, such as squares of standard errors.
        :returns: a value of ``params`` for these rows.
        :raises NotImplementedError: unless ``has_gaussian_noise``.
        """
        raise NotImplementedError(
            f"expected a likelihood with Gaussian noise for known variances, got {type(self).__name__}; use Gaussian() or "
            "LowRankGaussian()"
        )

    @abstractmethod
    def distribution(self, f: Float[Tensor, "*batch"], params: Tensor | None) -> TorchDistributionMixin:
        """Construct the distribution p(y | f, θ); to be implemented by subclasses.

        :param f: function values.
        :param params: the tensor that :meth:`params` returns.
        """

    @abstractmethod
    def inverse_link(self, y: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Compute an approximate function value of each y, for initialisation; to be implemented by subclasses.

        :param y: data in the support.
        """

    def initial_function(self, y: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Compute the function values from which models are initialised; by default :meth:`inverse_link` of the data.

        An override may return NaN for outliers too, which then have no influence on the initial linear model.

        :param y: data, NaN where missing.
        """
        return self.inverse_link(y)

    def init_from_data(self, y: Float[Tensor, "N D"], f: Float[Tensor, "N D"]) -> None:
        """Set initial parameters from data and approximate function values; by default parameters stay as they are.

        :param y: data, NaN where missing.
        :param f: function values, fitted by a linear model to :meth:`initial_function` of the data.
        """

    def bound_noise(self, y: Float[Tensor, "N D"], columns: Int[Tensor, " D"] | None = None) -> None:
        """Bound noise of each output from below, relative to the scale of its column; by default nothing is bounded.

        :param y: training data, NaN where missing.
        :param columns: indices of the columns among those of all data, for messages.
        """

    def forward(self, f: Float[Tensor, "*batch"]) -> TorchDistributionMixin:
        """Construct the distribution p(y | f) at the current parameter.

        :param f: function values.
        """
        return self.distribution(f, self.params())

    def expected_log_prob(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        params: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        """Compute the expected log likelihood ``E[log p(y | f, θ)]`` of each entry for ``f ~ N(mean, variance)``.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        """
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)  # quadrature nodes are a new leading dimension
        return self._expect(lambda p: p.log_prob(y), mean, variance, params)

    def log_prob_of_rows(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"] | None,
        params: Tensor | None,
    ) -> Float[Tensor, "*batch N"]:
        """Compute :meth:`expected_log_prob` summed over the observed entries of each row.

        :param y: data, any number in the support where missing.
        :param observed: mask of the observed entries.
        :param mean: means of f.
        :param variance: variances of f; None if f is known.
        :param params: the tensor that :meth:`params` returns.
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
        """Compute the log predictive density ``log E[p(y | f, θ)]`` of each entry for ``f ~ N(mean, variance)``.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        """
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)
        return gauss_hermite(self._log_prob_of(y, params), mean, variance, num_points=self.num_points, log=True)

    def log_predictive_derivatives(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        params: Tensor | None,
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        r"""Compute :meth:`log_predictive_density` and its first and second derivative in the mean of f, without gradients.

        Its derivative in the variance of f is half of :math:`\partial_m^2 \log p + (\partial_m \log p)^2`, since a Gaussian
        density N(f; m, v) solves the heat equation :math:`2\, \partial_v N = \partial_m^2 N`.  By default derivatives are
        those of automatic differentiation; Laplace approximations of latents need them in each step.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        :returns: the log density and the derivatives.
        """
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)
        with torch.enable_grad():
            mean = mean.detach().clone().requires_grad_()
            density = self.log_predictive_density(y, mean, variance, params)
            (first,) = torch.autograd.grad(density.sum(), mean, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), mean)
        return density.detach(), first.detach(), second

    def moments(
        self, mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"], params: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Compute mean and variance of y for ``f ~ N(mean, variance)``, by the laws of total expectation and variance.

        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        :raises NotImplementedError: if p(y | f) has no mean or no variance.
        """
        try:
            y_mean = self._expect(lambda p: p.mean, mean, variance, params)
            # A sum of terms ≥ 0.  E y² − (E y)² would cancel all digits where y hardly varies.
            return y_mean, self._expect(lambda p: p.variance + (p.mean - y_mean).square(), mean, variance, params)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"expected a distribution with mean and variance from {type(self).__name__}, got "
                f"{type(self.distribution(mean, params)).__name__}; override moments(mean, variance, params)"
            ) from error

    def check_outputs(self, data_dim: int, params: Tensor | None) -> None:
        """Raise a ``ValueError`` if the parameter has entries for another number of outputs.

        :param data_dim: number of outputs.
        :param params: the tensor that :meth:`params` returns.
        """
        if params is not None and params.shape[-1:] not in ((), (1,), (data_dim,)):
            raise ValueError(
                f"expected a likelihood of {data_dim} outputs, got one with {params.shape[-1]} parameters; pass "
                f"data_dim={data_dim} to it"
            )

    def support_text(self) -> str:
        """Describe the support of y, for error messages."""
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

    def _log_prob_of(self, y: Tensor, params: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Function f ↦ log p(y | f, θ)."""
        return lambda f: self.distribution(f, params).log_prob(y)

    def _expect(self, of: Callable[[Any], Tensor], mean: Tensor, variance: Tensor, params: Tensor | None) -> Tensor:
        """Compute the expectation of a function of the distribution p(y | f, θ)."""
        return gauss_hermite(lambda f: of(self.distribution(f, params)), mean, variance, num_points=self.num_points)


class LogConcaveLikelihood(Likelihood):
    """Likelihood whose log p(y | f, θ) is concave in f.

    A subclass also implements :meth:`log_prob_derivatives`.  :meth:`log_predictive_density` then clusters its quadrature nodes
    at the mode of p(y | f) N(f; mean, variance), which Newton's method finds, and at the inverse link of y.  The result stays
    accurate where y determines f much better than N(mean, variance) does, and where f has a large variance.

    :param num_points: number of quadrature nodes per entry; 48 by default.
    :raises ValueError: if ``num_points`` is less than 1.

    See :class:`Logistic` for an example.
    """

    _num_points = 48

    @abstractmethod
    def log_prob_derivatives(
        self, y: Float[Tensor, "*#batch"], f: Float[Tensor, "*#batch"], params: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Compute the first and second derivative of log p(y | f, θ) in f; to be implemented by subclasses.

        :param y: data.
        :param f: function values.
        :param params: the tensor that :meth:`params` returns.
        """

    def log_predictive_density(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        params: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        return log_expectation_at_mode(*self._integrand(y, mean, variance, params), num_points=self.num_points)

    def log_predictive_derivatives(self, y, mean, variance, params):
        return log_expectation_derivatives(*self._integrand(y, mean, variance, params), num_points=self.num_points)

    def _integrand(self, y: Tensor, mean: Tensor, variance: Tensor, params: Tensor | None) -> tuple[Any, ...]:
        """Log density as a function of f, its derivatives, the moments of f, and where the log density bends."""
        y, mean, variance = torch.broadcast_tensors(y, mean, variance)
        derivatives = partial(self.log_prob_derivatives, y, params=params)
        return self._log_prob_of(y, params), derivatives, mean, variance, self._bend(y, params)

    def _bend(self, y: Tensor, params: Tensor | None) -> Tensor:
        """Function value near which log p(y | f, θ) bends, where quadrature nodes cluster."""
        return self.inverse_link(y)


class QuadraticLikelihood(Likelihood):
    """Likelihood with Gaussian noise, whose expected log density of a row of a sparse process is a quadratic form."""

    has_gaussian_noise = True

    @abstractmethod
    def quadratic_form(
        self,
        residual: Float[Tensor, "*#batch N D"],
        observed: Bool[Tensor, "N D"] | None,
        u: Float[Tensor, "*#batch D M"],
        u_scale_tril: Float[Tensor, "D M M"] | None,
        params: Tensor,
        incomplete: Int[Tensor, " R"] | None,
        variance: Float[Tensor, "N #D"] | None = None,
    ) -> Quadratic:
        """Compute the coefficients of the form (:mod:`~pyro_lvgp.ops.expected_log_likelihood`).

        :param residual: y − c, any finite number where missing.
        :param observed: mask of the observed entries; None if all are observed.
        :param u: whitened inducing outputs, or their means.
        :param u_scale_tril: Cholesky factors of their covariances.
        :param params: the tensor that :meth:`params` returns.
        :param incomplete: indices of the rows with missing entries; None for all rows.
        :param variance: variances of each row that are added to those of the noise.
        """


class WithParameter(Likelihood):
    """Likelihood with one positive parameter, shared by all outputs or one for each.

    :param name: attribute name of the parameter.
    :param value: its initial value.
    :param data_dim: number of outputs, for a parameter of each output; None shares one.
    :param num_points: number of quadrature nodes per entry, by default that of the base class.
    :raises ValueError: for a value that is not positive, or another number of values than ``data_dim``.
    """

    noise_floor: Tensor | None

    def __init__(self, name: str, value: float | Tensor, data_dim: int | None, *, num_points: int | None = None):
        super().__init__(num_points=num_points)
        self.register_buffer("noise_floor", None, persistent=False)
        if isinstance(value, bool):
            raise TypeError(f"expected a number as {name}, got {value}")
        value = value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.get_default_dtype())
        if not ((value > 0) & (value < torch.inf)).all():
            bad = value[~((value > 0) & (value < torch.inf))]
            raise ValueError(f"expected a positive {name}, and a finite one, got {bad[0].item():g}")
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
        if self.noise_floor is not None:
            value = torch.maximum(value, self.noise_floor.to(value))
        # [D] broadcasts against [..., N, D] as it is; a scalar, or a plate's [..., 1], needs a new last dimension.
        return value if self._per_output else value[..., None]
