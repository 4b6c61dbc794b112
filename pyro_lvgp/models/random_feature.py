"""The random-feature latent variable model: its kernel is learned with its latents."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._compile.recording import assume
from pyro_lvgp._utils.seeding import normal_draws, seeded
from pyro_lvgp._utils.validation import check_data
from pyro_lvgp.conjugate.feature_regression import gaussian_sites
from pyro_lvgp.distributions.diagonal_mixture import DiagonalMixture
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, ObservedRows
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.infer.elbo.handlers import sample_moments
from pyro_lvgp.kernels.spectral import mixture_kernel, random_features, spectral_density
from pyro_lvgp.likelihoods import Gaussian, Likelihood, Logistic
from pyro_lvgp.likelihoods import polya_gamma as polyagamma
from pyro_lvgp.models._row_model import RowModel
from pyro_lvgp.models.initialization import InitialLatents
from pyro_lvgp.models.latent_variable_model import Guide
from pyro_lvgp.ops.linalg import function_variance

__all__ = ["RandomFeatureLVM"]

_REACH, _NUM_DRAWS = 3.0, 100


class RandomFeatureLVM(RowModel):
    r"""Latent variable model whose functions are linear in random Fourier features, for data with missing entries.

    .. math::

        \alpha \sim \mathrm{Gamma}(a_0, b_0), \quad v_c \sim \mathrm{Beta}(1, \alpha), \quad
        \pi_c = v_c \prod_{j<c} (1 - v_j), \quad
        \omega_l \sim \sum_{c=1}^C \pi_c\, N(\mu_c, \mathrm{diag}\,\sigma_c^2),

    .. math::

        x_n \sim N(0, I_Q), \quad a_d \sim N(0, I_L), \quad
        f_{nd} = c_d + \sigma_k\, \varphi(x_n)^T a_d, \quad y_{nd} \sim p(y \mid f_{nd})

    with the L = 2F features φ of F frequencies ω (:func:`~pyro_lvgp.kernels.random_features`).  Given ω the functions are
    Gaussian processes with kernel :math:`\sigma_k^2 \varphi(x)^T \varphi(x')`; the mixture of frequencies, a truncated
    Dirichlet process, learns which.  The assignments of frequencies to components are summed out.

    Sites: ``alpha``; ``v`` [C − 1]; ``omega`` [F, Q]; ``X`` [N, Q] in plate ``data``; ``a`` [D, L] in plate ``outputs``;
    ``y`` [N, D], observed, in plate ``data``.

    :param num_data: number of rows N.
    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param num_frequencies: F, half the number of features L; the paper calls it L/2.
    :param num_components: truncation C of the Dirichlet process.
    :param likelihood: p(y | f); ``Gaussian()`` by default.
    :param concentration: shape a₀ and rate b₀ of the prior of α.
    :param lengthscale: about the lengthscale :math:`1 / (2\pi\sigma_c)` of all components at first; √Q by default, as for
        :class:`~pyro_lvgp.models.BayesianGPLVM`.  Their means start at zero.
    :param seed: seed of the components' first scales, which differ by some 30 %, and of places to look for new rows' latents.
    :raises ValueError: if a size, the concentration or the lengthscale is not positive.

    >>> from pyro_lvgp.guides import RandomFeatureGuide
    >>> from pyro_lvgp.infer import BlockCoordinateVI
    >>> Y = torch.randn(20, 3)
    >>> model = RandomFeatureLVM(20, 3, latent_dim=2, num_frequencies=10, num_components=4).initialize(Y)
    >>> guide = RandomFeatureGuide(model)
    >>> loss = BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    >>> model.impute(guide, Y, num_samples=4).mean.shape
    torch.Size([20, 3])
    >>> X = guide.latents().mean
    >>> model.kernel(guide, X, X[:5]).shape, model.spectral_density(guide, torch.zeros(1, 2)).shape
    (torch.Size([20, 5]), torch.Size([1]))

    References: Li et al., "Scalable random feature latent variable models"; Gundersen, Zhang and Engelhardt (2021), "Latent
    variable modeling with random features".
    """

    local_sites = frozenset({"X"})

    def __init__(
        self,
        num_data: int,
        data_dim: int,
        latent_dim: int,
        *,
        num_frequencies: int = 50,
        num_components: int = 20,
        likelihood: Likelihood | None = None,
        concentration: tuple[float, float] = (1.0, 1.0),
        lengthscale: float | None = None,
        seed: int = 0,
    ):
        super().__init__(num_data, data_dim, latent_dim, likelihood, num_frequencies=num_frequencies)
        if num_components < 2:
            raise ValueError(f"expected num_components of 2 or more, got {num_components}; unneeded ones empty themselves")
        lengthscale = latent_dim**0.5 if lengthscale is None else lengthscale
        for name, value in {"lengthscale": lengthscale, "concentration": min(concentration)}.items():
            if not value > 0.0:
                raise ValueError(f"expected a positive {name}, got {value}")
        self.num_frequencies, self.num_components = num_frequencies, num_components
        noise = normal_draws(num_components, latent_dim, seed=seed, like=self.mean)
        self.component_locs: Any = PyroParam(torch.zeros(num_components, latent_dim), constraints.real)
        self.component_scales: Any = PyroParam((0.3 * noise).exp() / (2.0 * math.pi * lengthscale), constraints.positive)
        self.kernel_variance: Any = PyroParam(torch.ones(()), constraints.positive)
        self.register_buffer("concentration", torch.tensor(concentration, dtype=self.mean.dtype))
        self.candidates: Tensor
        self.register_buffer("candidates", normal_draws(min(num_data, 100), latent_dim, seed=seed, like=self.mean))
        self.event_dims = {
            "v": ("component",),
            "omega": ("frequency", "latent"),
            "X": ("latent",),
            "a": ("feature",),
            "y": ("output",),
        }

    def forward(
        self, y: Float[Tensor, "B D"] | None = None, idx: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "*particles B D"]:
        """The generative model of all rows, or of the rows ``idx``.

        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the rows in y; None for all rows.
        """
        observed = None if y is None else self._observed(y, idx)
        alpha = pyro.sample("alpha", dist.Gamma(*self.concentration))
        ones = torch.ones_like(self.mean[:1]).expand(self.num_components - 1)
        v = pyro.sample("v", dist.Beta(ones, alpha[..., None]).to_event(1))
        omega = pyro.sample("omega", self.spectral_points(_stick_log_weights(v).unsqueeze(-2)).to_event(1))
        rows = self.data_plate(y, idx)
        with rows:
            X = pyro.sample("X", dist.Normal(self.mean.new_zeros(self.latent_dim), 1.0).to_event(1))
        with pyro.plate("outputs", self.data_dim, dim=-1):
            weights = dist.Normal(self.mean.new_zeros(2 * self.num_frequencies), 1.0).to_event(1)
            a, a_scale_tril = sample_moments("a", weights, infer={"covariance": "full"})
        f_mean, f_variance = self._function_moments(X, omega, a, a_scale_tril)
        params = self.likelihood.params()

        def entries() -> LikelihoodPredictive:
            if f_variance is None:  # the weights are drawn: the likelihood at f itself
                return LikelihoodPredictive(self.likelihood, f_mean, torch.zeros_like(f_mean), "sampled", params)
            return LikelihoodPredictive(self.likelihood, f_mean, f_variance, "svgp", params)

        with rows:
            if y is None or observed is None:
                return pyro.sample("y", entries().to_event(1))
            value = y if assume(observed.all()) else torch.nan_to_num(y, self.likelihood.fill_value)
            log_prob = self.likelihood.log_prob_of_rows(value, observed, f_mean, f_variance, params)
            return pyro.sample("y", ObservedRows(value, log_prob, lambda: entries().mask(observed)), obs=value)

    def spectral_points(self, logits: Float[Tensor, "*#batch C"]) -> DiagonalMixture:
        """Distribution of the F frequencies, given the weights of the components for all of them or for each.

        :param logits: logarithms of the weights ``[..., F or 1, C]``.
        """
        # Draws of components with a prior have a dimension for the frequencies too.
        locs, scales = (x if x.dim() == 2 else x.unsqueeze(-3) for x in (self.component_locs, self.component_scales))
        mixture = DiagonalMixture(logits, locs, scales)
        return mixture.expand((*mixture.batch_shape[:-1], self.num_frequencies))

    def features(self, X: Float[Tensor, "*#batch N Q"], omega: Float[Tensor, "*#batch F Q"]) -> Float[Tensor, "*batch N L"]:
        """Features of variance σ_k²: ``σ_k φ(x)``.

        :param X: latents.
        :param omega: frequencies.
        """
        return self.kernel_variance.sqrt()[..., None, None] * random_features(X, omega)

    def _function_moments(
        self, X: Tensor, omega: Tensor, a: Tensor, a_scale_tril: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mean of f, and its variance if the weights are known by their moments only."""
        # The data are a batch for Pyro and the rows of a matrix here: [*S, N, Q] -> [*S, 1, N, Q].
        features = self.features(X.unsqueeze(-3), omega)
        f_mean = self.mean + (features @ a.unsqueeze(-3).mT).squeeze(-3)
        if a_scale_tril is None:
            return f_mean, None
        return f_mean, function_variance(features, a_scale_tril.unsqueeze(-4)).squeeze(-3).expand_as(f_mean)

    @property
    def is_conjugate(self) -> bool:
        """Whether the weights have a Gaussian posterior given X and ω: exactly, or by a bound that touches the likelihood."""
        return isinstance(self.likelihood, (Gaussian, Logistic))

    def weight_sites(
        self, y: Float[Tensor, "B D"], f_mean: Float[Tensor, "*#batch D"], f_variance: Float[Tensor, "*#batch #D"]
    ) -> tuple[Float[Tensor, "*#batch D"], Float[Tensor, "*#batch #D"]]:
        r"""Quadratic sites ``h g − ½ w g²`` of :math:`g = f - c_d` that stand for the likelihood.

        For Gaussian noise they are exact.  For logistic likelihoods they are the Pólya-gamma bound that is best where f has
        the moments given.  For any other they have the mean slope and curvature of log p(y | f) there, or more curvature
        if the parabola would peak more than 3 beyond ``likelihood.inverse_link(y)``.

        :param y: data, NaN where missing.
        :param f_mean: means of f.
        :param f_variance: variances of f.
        :returns: h and w, zero where y is missing.

        Source: eqs. 29 and 30 of the SRFLVM paper; Khan and Lin (2017), "Conjugate-computation variational inference".
        """
        observed, y, params = ~torch.isnan(y), torch.nan_to_num(y, self.likelihood.fill_value), self.likelihood.params()
        if isinstance(self.likelihood, Gaussian):
            assert params is not None
            return gaussian_sites(y - self.mean, observed, params)
        if isinstance(self.likelihood, Logistic):
            a, b = (torch.where(observed, exponent, 0.0) for exponent in self.likelihood.exponents(y, params))
            precision = polyagamma.precision(b, polyagamma.variational_parameter(f_mean, f_variance))
            return a - 0.5 * b - precision * self.mean, precision
        with torch.enable_grad():
            mean, variance = (x.detach().expand(f_mean.shape).requires_grad_() for x in (f_mean, f_variance))
            expected = self.likelihood.expected_log_prob(y, mean, variance, params)
            slope, half_curvature = torch.autograd.grad(torch.where(observed, expected, 0.0).sum(), (mean, variance))
        # Where f is far below what y asks for, curvature is small and the parabola peaks far above: keep the peak in reach.
        reach = _REACH + torch.nan_to_num(self.likelihood.inverse_link(y) - f_mean).abs()
        precision = torch.maximum(-2.0 * half_curvature, slope.abs() / reach)
        return slope + precision * (f_mean - self.mean), precision

    def initialize(
        self,
        Y: Float[Tensor, "N D"],
        *,
        method: InitialLatents = "pca",
        latents: Float[Tensor, "N Q"] | None = None,
        seed: int = 0,
    ) -> "RandomFeatureLVM":
        """Start from the latents of a linear model of the data; guides made afterwards start there too.

        ``kernel_variance`` starts at the mean square of the centred data on the scale of f, unless it is frozen
        (``requires_grad_(False)``); if it has a prior, guides start there.

        :param Y: all data, NaN where missing.
        :param method: ``"pca"`` or ``"factor-analysis"``.
        :param latents: start from these instead, such as a layout of neighbours; columns are standardised.
        :param seed: seed of the linear model and of the choice of rows whose latents are :meth:`latent_candidates`.
        :returns: the model itself.
        :raises ValueError: for data that cannot be used, or latents of another shape, not finite or with constant columns.
        """
        with torch.no_grad():
            X, function = self._start(Y, method, latents, seed)
            self.initial_values = {"X": X}
            variance = function.square().mean()
            self._start_parameter("kernel_variance", variance if variance > 0.0 else torch.ones_like(variance))  # of one row
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed), device="cpu")
        self.candidates = X[order[: len(self.candidates)].to(X.device)]
        return self

    def latent_candidates(self) -> Float[Tensor, "M Q"]:
        return self.candidates

    def kernel(self, guide: Guide, X: Float[Tensor, "N Q"], X2: Float[Tensor, "M Q"] | None = None) -> Float[Tensor, "N M"]:
        """The learned kernel ``σ_k² E φ(x)ᵀ φ(x′)`` under the guide's distribution of frequencies.

        Of a σ_k² with a prior it has the mean over draws from the guide.

        :param guide: a fitted guide, whose ``omega`` is a Gaussian or a :class:`~pyro_lvgp.distributions.DiagonalMixture`.
        :param X: inputs.
        :param X2: other inputs; X itself if omitted.
        :raises ValueError: for inputs of other dimensions.
        :raises TypeError: for inputs of another dtype than the model's, or a guide of another kind.
        """
        X2 = X if X2 is None else X2
        for inputs in (X, X2):
            check_data(inputs, self.latent_dim, like=self.mean, name="X")
        with torch.no_grad():
            points, variance = self._learned_spectrum(guide)
            return variance * mixture_kernel(X, X2, *points)

    def spectral_density(self, guide: Guide, omega: Float[Tensor, "K Q"]) -> Float[Tensor, " K"]:
        """Density of the frequencies of the learned kernel.

        :param guide: a fitted guide, as for :meth:`kernel`.
        :param omega: frequencies, in cycles per unit of X.
        :raises ValueError: for frequencies of other dimensions.
        :raises TypeError: for frequencies of another dtype than the model's, or a guide of another kind.
        """
        check_data(omega, self.latent_dim, like=self.mean, name="omega")
        with torch.no_grad():
            points, _ = self._learned_spectrum(guide)
            return spectral_density(omega, *points)

    def _learned_spectrum(self, guide: Guide) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Weights, means and scales of the guide's distributions of all frequencies taken together, and the mean of σ_k²."""
        row, idx = self.mean.new_full((1, self.data_dim), torch.nan), torch.zeros(1, dtype=torch.long, device=self.mean.device)
        has_prior = "kernel_variance" in self._pyro_samples
        with seeded(0):
            traces: list[Any] = [poutine.trace(guide).get_trace(row, idx) for _ in range(_NUM_DRAWS if has_prior else 1)]
            draws = [trace.nodes["kernel_variance"]["value"] for trace in traces] if has_prior else [self.kernel_variance]
        return self._mixture_of(traces[0].nodes["omega"]["fn"]), torch.stack(draws).mean(0)

    @staticmethod
    def _mixture_of(omega: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and scales of the distributions of all frequencies taken together."""
        points = without_independent(omega)
        if isinstance(points, DiagonalMixture):
            return points.weights.mean(0), points.locs, points.scales
        if not isinstance(points, torch.distributions.Normal):
            raise TypeError(
                "expected a guide whose omega is a Normal or a DiagonalMixture, got one that samples a "
                f"{type(points).__name__}; a RandomFeatureGuide or a MeanFieldGuide will do"
            )
        loc, scale = points.loc, points.scale
        return loc.new_full((len(loc),), 1.0 / len(loc)), loc, scale


def _stick_log_weights(v: Tensor) -> Tensor:
    """``log π_c = log v_c + Σ_{j<c} log(1 − v_j)``, with v_C = 1."""
    v = v.clamp(torch.finfo(v.dtype).tiny, 1.0 - torch.finfo(v.dtype).eps)
    return pad(v.log(), (0, 1)) + pad((-v).log1p().cumsum(-1), (1, 0))
