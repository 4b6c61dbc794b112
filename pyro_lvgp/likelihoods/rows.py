"""Base class of likelihoods of rows whose entries are dependent."""

from abc import abstractmethod

from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp.likelihoods.base import Likelihood

__all__ = ["RowLikelihood", "check_independent_entries"]


class RowLikelihood(Likelihood):
    r"""Likelihood p(y_n | f_n, θ) of rows whose entries are dependent given f.

    A subclass implements :meth:`inverse_link` and

    - :meth:`distribution`, a distribution of event shape [D] for ``f`` [..., N, D];
    - :meth:`log_prob_of_rows` and :meth:`log_predictive_density_of_rows`, which marginalise the missing entries of each row;
    - :meth:`condition`, the parameter given the observed entries of each row;
    - :meth:`log_predictive_density` and :meth:`moments`, the marginal distributions of the entries.

    :meth:`params` may return a tensor of any shape; override :meth:`check_outputs` if its last dimension is not that of the
    outputs.  log p(y_n | f_n) must be concave in f for Laplace approximations of latents.  Functions given the latents are
    independent over outputs, :math:`f_{nd} \sim N(m_{nd}, v_{nd})`.

    Models of rows accept such a likelihood; models of series and :class:`~pyro_lvgp.likelihoods.Heterogeneous` raise an error.
    """

    @abstractmethod
    def log_prob_of_rows(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"] | None,
        params: Tensor | None,
    ) -> Float[Tensor, "*batch N"]:
        """Compute the expected log density ``E[log p(y_o | f, θ)]`` of the observed entries of each row.

        :param y: data, any number in the support where missing.
        :param observed: mask of the observed entries.
        :param mean: means of f.
        :param variance: variances of f; None if f is known.
        :param params: the tensor that :meth:`params` returns.
        """

    @abstractmethod
    def log_predictive_density_of_rows(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"],
        params: Tensor | None,
    ) -> Float[Tensor, "*batch N"]:
        """Compute the log predictive density ``log E[p(y_o | f, θ)]`` of the observed entries of each row.

        :param y: data, any number in the support where missing.
        :param observed: mask of the observed entries.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        """

    @abstractmethod
    def condition(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"],
        params: Tensor | None,
    ) -> Tensor:
        """Compute the parameter of each row under which missing entries have the distribution p(y_m | y_o).

        :param y: data, any number in the support where missing.
        :param observed: mask of the observed entries.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        :returns: a value of ``params``, for the same moments of f.
        """

    @abstractmethod
    def log_predictive_density(self, y: Tensor, mean: Tensor, variance: Tensor, params: Tensor | None) -> Tensor:
        """Compute the log density of the marginal distribution of each entry for ``f ~ N(mean, variance)``.

        :param y: data in the support.
        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        """

    @abstractmethod
    def moments(self, mean: Tensor, variance: Tensor, params: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of the marginal distribution of each entry for ``f ~ N(mean, variance)``.

        :param mean: means of f.
        :param variance: variances of f.
        :param params: the tensor that :meth:`params` returns.
        """

    def expected_log_prob(self, y: Tensor, mean: Tensor, variance: Tensor, params: Tensor | None) -> Tensor:
        """Raise an error, since the log density of a row is no sum over its entries.

        :raises NotImplementedError: always; call :meth:`log_prob_of_rows`.
        """
        raise NotImplementedError(
            f"expected a likelihood of independent entries, got {type(self).__name__}, whose entries of a row are dependent; "
            "call log_prob_of_rows"
        )


def check_independent_entries(likelihood: Likelihood, user: str) -> None:
    """Raise a ``TypeError`` if the entries of a row are dependent given f.

    :param likelihood: a likelihood.
    :param user: name of the class that needs independent entries.

    >>> from pyro_lvgp.likelihoods import LowRankGaussian
    >>> check_independent_entries(LowRankGaussian(1, 3), "GPVAE")
    Traceback (most recent call last):
        ...
    TypeError: expected a likelihood of independent entries for GPVAE, got LowRankGaussian, ...
    """
    if isinstance(likelihood, RowLikelihood):
        raise TypeError(
            f"expected a likelihood of independent entries for {user}, got {type(likelihood).__name__}, whose entries of a "
            "row are dependent; use it in BayesianGPLVM, RandomFeatureLVM or MultiViewGPLVM, or take one such as Gaussian()"
        )
