"""Random-feature latent variable model, with a learned kernel."""

import math
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import normal_draws, seeded
from pyro_lvgp._utils.tables import Table, as_tensor
from pyro_lvgp._utils.validation import check_data, check_sizes
from pyro_lvgp.conjugate.feature_regression import gaussian_sites
from pyro_lvgp.distributions.diagonal_mixture import DiagonalMixture
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, ObservedRows
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.infer.elbo.handlers import sample_moments
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels.spectral import mixture_kernel, random_features, spectral_density
from pyro_lvgp.likelihoods import Gaussian, Likelihood, LikelihoodName, Logistic, likelihood_by_name
from pyro_lvgp.likelihoods import polya_gamma as polyagamma
from pyro_lvgp.models._known_rows import KnownRows
from pyro_lvgp.models._latent_rows import Guide
from pyro_lvgp.models._layout import best_lengthscale, default_lengthscale, likelihood_of
from pyro_lvgp.models._row_model import RowModel, as_rows, warn_unless_scaled
from pyro_lvgp.models.initialization import InitialLatents, linear_latents, tsne_layout
from pyro_lvgp.models.row_arguments import RowArguments
from pyro_lvgp.ops.linalg import function_variance

__all__ = ["RandomFeatureLVM"]

_MAX_OVERSHOOT, _NUM_DRAWS = 3.0, 100


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
    Gaussian processes with kernel :math:`\sigma_k^2 \varphi(x)^T \varphi(x')`, whose spectral density is learned as a
    truncated Dirichlet process mixture of Gaussians.  The assignments of frequencies to components are marginalised.

    With ``rows`` (:class:`RowArguments`) the latents have the priors :math:`N(m_n, \mathrm{diag}\, s_n^2)`, and rows have
    exposures, standard errors and weights.  P covariates are further features, so that L = 2F + P: their effects are additive,
    with weights that have the prior N(0, 1).

    Sites: ``alpha``; ``v`` [C − 1]; ``omega`` [F, Q]; ``X`` [N, Q] in plate ``data``; ``a`` [D, L] in plate ``outputs``;
    ``y`` [N, D], observed, in plate ``data``.

    :param num_data: number of rows N.
    :param data_dim: number of outputs D.
    :param latent_dim: number of latent dimensions Q.
    :param num_frequencies: number of frequencies F, half the number of features L.
    :param num_components: truncation C of the Dirichlet process.
    :param likelihood: p(y | f); ``Gaussian()`` by default.
    :param concentration: shape a₀ and rate b₀ of the prior of α.
    :param lengthscale: approximate initial lengthscale :math:`1 / (2\pi\sigma_c)` of all components; √(Q/8) by default, 0.5
        for two latent dimensions, since functions that vary quickly preserve neighbourhoods of rows.  The initial means of
        the components are zero.
    :param rows: known quantities of the training rows; None for nothing.
    :param seed: seed of the initial scales of the components, which differ by about 30 %, and of :meth:`latent_candidates`.
    :raises ValueError: if a size, the concentration or the lengthscale is not positive, or ``rows`` are of another number of
        rows, outputs or latent dimensions.
    :raises TypeError: if the likelihood has no log link for exposures, or no Gaussian noise for standard errors.

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
        num_frequencies: int = 100,
        num_components: int = 20,
        likelihood: Likelihood | None = None,
        concentration: tuple[float, float] = (1.0, 1.0),
        lengthscale: float | None = None,
        rows: RowArguments | None = None,
        seed: int = 0,
    ):
        super().__init__(num_data, data_dim, latent_dim, likelihood, rows, num_frequencies=num_frequencies)
        if num_components < 2:
            raise ValueError(f"expected num_components of 2 or more, got {num_components}; unused ones get weights near zero")
        lengthscale = default_lengthscale(latent_dim) if lengthscale is None else lengthscale
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

    @classmethod
    @names_types
    def from_data(
        cls,
        Y: Table,
        latent_dim: int | None = None,
        *,
        layout: Literal["tsne"] | Float[Tensor, "N Q"] | Table | None = None,
        num_frequencies: int = 100,
        num_components: int = 20,
        lengthscale: float | None = None,
        likelihood: Likelihood | LikelihoodName | None = None,
        rows: RowArguments | None = None,
        seed: int = 0,
    ) -> "RandomFeatureLVM":
        r"""Create a model of the sizes, dtype and device of the data, and initialize it from the data, or at a layout of rows.

        With a layout X₀, the initial latents are its columns with mean 0 and variance 1, and the initial lengthscale is the
        one of nine, from twice the constructor's default down to an eighth of it in steps of √2, under which the data have the
        highest log density at X₀, with optimal variances and F frequencies drawn from the spectral density of ℓ:

        .. math::

            \hat\ell = \arg\max_\ell\, \max_{\rho, \sigma}\, \sum_d
            \log N(\tilde f_d;\, 0,\, \sigma^2 (I + \rho\, \Phi_\ell(X_0)\, \Phi_\ell(X_0)^T)).

        :math:`\tilde f` are the centred data, or their inverse link under another likelihood than a Gaussian, with missing
        entries imputed by a linear model (:func:`~pyro_lvgp.models.linear_latents`).  Each of the nine takes O(N L² + L³).

        Real-valued data should have columns of about unit variance: standardise them first.  A warning says so if the root
        mean square of their standard deviations is below 0.1 or above 10.

        :param Y: all data, NaN where missing: a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`), which has the
            precision of the model, and labels of columns that further tables must have too.
        :param latent_dim: number of latent dimensions; by default that of a layout, or of the priors of ``rows``, or 2.
        :param layout: None for principal components; ``"tsne"`` for scikit-learn's t-SNE of :math:`\tilde f`
            (:func:`~pyro_lvgp.models.tsne_layout`); or a table [N, Q] of positions of rows, of any unit.
        :param num_frequencies: number of frequencies F.
        :param num_components: truncation of the Dirichlet process.
        :param lengthscale: initial lengthscale; None for the one above with a layout, and else the constructor's default.
        :param likelihood: p(y | f), or its name (:func:`~pyro_lvgp.likelihoods.likelihood_by_name`); by default
            :class:`~pyro_lvgp.likelihoods.NegativeBinomial` with a dispersion for each column, if all entries are whole
            numbers from 0 and some exceed 1, and else :class:`~pyro_lvgp.likelihoods.Gaussian`.  Standardise grey levels,
            which are whole too.
        :param rows: what is known of each row; None for nothing.
        :param seed: seed of the layout, of the frequencies and of the initial values.
        :raises ValueError: for data or a layout that cannot be used, sizes that are not positive or do not fit, t-SNE in more
            than three dimensions or of fewer than five rows, or a layout with priors, covariates or exposures of rows.
        :raises TypeError: for a tensor of integers.

        >>> model = RandomFeatureLVM.from_data(torch.randn(40, 6), layout="tsne")
        >>> model.latent_dim, model.initial_values["X"].std(0, correction=0)
        (2, tensor([1., 1.]))
        >>> type(RandomFeatureLVM.from_data(torch.randn(40, 6).exp().round()).likelihood).__name__
        'NegativeBinomial'
        """
        table, Y = Y, as_rows(Y)
        positions = _checked_layout(layout, rows)
        if latent_dim is None:
            prior = None if rows is None else rows.prior
            latent_dim = next((x.shape[1] for x in (positions, prior and prior[0]) if x is not None), 2)
        check_sizes(latent_dim=latent_dim)
        N, D = Y.shape
        if likelihood is None:
            likelihood = likelihood_of(Y)
            if type(likelihood) is Gaussian:
                warn_unless_scaled(Y)
        likelihood = likelihood_by_name(likelihood, Y)
        sizes: Any = {"num_frequencies": num_frequencies, "num_components": num_components}
        model = cls(N, D, latent_dim, lengthscale=lengthscale, likelihood=likelihood, rows=rows, seed=seed, **sizes).to(Y)
        if layout is None:
            return model.initialize(table, seed=seed)
        with torch.no_grad():
            _, filled = linear_latents(model.likelihood.initial_function(Y), latent_dim, seed=seed)
            positions = tsne_layout(filled, latent_dim, seed=seed) if positions is None else positions
            if lengthscale is None:
                best = best_lengthscale(model._checked_latents(positions), filled, num_frequencies, seed=seed)
                model.component_scales = model.component_scales * (default_lengthscale(latent_dim) / best)
        return model.initialize(table, latents=positions, seed=seed)

    def forward(
        self,
        y: Float[Tensor, "B D"] | None = None,
        idx: Int[Tensor, " B"] | None = None,
        rows: RowArguments | None = None,
    ) -> Float[Tensor, "*particles B D"]:
        """Sample all sites of all rows, or of the rows ``idx``.

        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the rows in y; None for all rows.
        :param rows: known quantities of rows that are not training rows.
        """
        row_arguments = self.rows_at(idx, rows)
        known = KnownRows.of(row_arguments)
        observed = None if y is None else self._observed(y, idx)
        alpha = pyro.sample("alpha", dist.Gamma(*self.concentration))
        ones = torch.ones_like(self.mean[:1]).expand(self.num_components - 1)
        v = pyro.sample("v", dist.Beta(ones, alpha[..., None]).to_event(1))
        omega = pyro.sample("omega", self.spectral_points(_stick_log_weights(v).unsqueeze(-2)).to_event(1))
        data = self.data_plate(y, idx, rows)
        with data:
            X = pyro.sample("X", known.prior_of_latents(self.latent_dim, self.mean))
        with pyro.plate("outputs", self.data_dim, dim=-1):
            weights = dist.Normal(self.mean.new_zeros(2 * self.num_frequencies + self._covariate_dim), 1.0).to_event(1)
            a, a_scale_tril = sample_moments("a", weights, infer={"covariance": "full"})
        f_mean, f_variance = self._function_moments(X, omega, a, a_scale_tril, row_arguments)
        params = self.likelihood_params(row_arguments)

        def entries() -> LikelihoodPredictive:
            if f_variance is None:  # the weights are sampled, so that f is known
                return LikelihoodPredictive(self.likelihood, f_mean, torch.zeros_like(f_mean), "sampled", params)
            return LikelihoodPredictive(self.likelihood, f_mean, f_variance, "svgp", params)

        with data:
            if y is None or observed is None:
                return pyro.sample("y", entries().rows())
            value = y if holds(observed.all()) else torch.nan_to_num(y, self.likelihood.fill_value)
            log_prob = self.likelihood.log_prob_of_rows(value, observed, f_mean, f_variance, params)
            return pyro.sample("y", ObservedRows(value, log_prob, lambda: entries().rows(observed)), obs=value)

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the transformations of latents and frequencies under which the model is the same.

        Columns can be permuted, and change sign, together with the means and scales of the components, which are diagonal.
        There are none if these are frozen or have priors, with priors of rows, or if a subclass overrides ``forward``.
        """
        learned = [part for name, part in self.named_parameters() if name.startswith("component_") and part.requires_grad]
        is_free = len(learned) == 2 and type(self).forward is RandomFeatureLVM.forward
        if (rows := self.rows) is not None:
            is_free = is_free and rows.prior is None
        return LatentSymmetry("signed permutations" if is_free else "none", {"X": -1, "omega": -1})

    def spectral_points(self, logits: Float[Tensor, "*#batch C"]) -> DiagonalMixture:
        """Construct the distribution of the F frequencies, given the weights of the components.

        :param logits: logarithms of the weights ``[..., F or 1, C]``, for each frequency or for all.
        """
        # Draws of components with a prior have a dimension for the frequencies too.
        locs, scales = (x if x.dim() == 2 else x.unsqueeze(-3) for x in (self.component_locs, self.component_scales))
        mixture = DiagonalMixture(logits, locs, scales)
        return mixture.expand((*mixture.batch_shape[:-1], self.num_frequencies))

    def features(
        self, X: Float[Tensor, "*#batch N Q"], omega: Float[Tensor, "*#batch F Q"], rows: RowArguments | None = None
    ) -> Float[Tensor, "*batch N L"]:
        """Compute the features ``σ_k φ(x)``, of squared norm σ_k², and append the covariates.

        :param X: latents.
        :param omega: frequencies.
        :param rows: known quantities of the rows; None for nothing.
        """
        return KnownRows.of(rows).inputs(self.kernel_variance.sqrt()[..., None, None] * random_features(X, omega))

    def offsets(self, rows: RowArguments | None = None) -> Float[Tensor, " D"] | Float[Tensor, "N D"]:
        """Return the constants c_d of the functions, plus the logarithms of the exposures of rows.

        :param rows: known quantities of the rows; None for nothing.
        """
        return KnownRows.of(rows).shift(self.mean)

    def likelihood_params(self, rows: RowArguments | None = None) -> Tensor | None:
        """Read the parameter of the likelihood, to whose noise variances squares of standard errors of rows are added.

        :param rows: known quantities of the rows; None for nothing.
        """
        return KnownRows.of(rows).params_of(self.likelihood, self.likelihood.params())

    def _function_moments(
        self, X: Tensor, omega: Tensor, a: Tensor, a_scale_tril: Tensor | None, rows: RowArguments | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mean of f, and variance of f if the weights are marginalised, or else None."""
        # Rows are a batch dimension for Pyro, and a matrix dimension here: [*S, N, Q] -> [*S, 1, N, Q].
        features = self.features(X.unsqueeze(-3), omega, rows)
        f_mean = self.offsets(rows) + (features @ a.unsqueeze(-3).mT).squeeze(-3)
        if a_scale_tril is None:
            return f_mean, None
        return f_mean, function_variance(features, a_scale_tril.unsqueeze(-4)).squeeze(-3).expand_as(f_mean)

    @property
    def is_conjugate(self) -> bool:
        """Whether the weights have a Gaussian posterior given X and ω, exactly or by the Pólya-gamma bound."""
        return isinstance(self.likelihood, (Gaussian, Logistic))

    def weight_sites(
        self,
        y: Float[Tensor, "B D"],
        f_mean: Float[Tensor, "*#batch D"],
        f_variance: Float[Tensor, "*#batch #D"],
        rows: RowArguments | None = None,
    ) -> tuple[Float[Tensor, "*#batch D"], Float[Tensor, "*#batch #D"]]:
        r"""Compute quadratic sites ``h g − ½ w g²`` of :math:`g = f - c_d` that approximate the log likelihood.

        With exposures g is :math:`f - c_d - \log e_{nd}`, and h and w are multiplied by the weights of rows.

        For Gaussian noise the sites are exact.  For logistic likelihoods they are the Pólya-gamma bound that is optimal for
        the given moments of f.  For any other likelihood they have the expected slope and curvature of log p(y | f) under
        these moments.  Those of a :class:`~pyro_lvgp.likelihoods.RowLikelihood` are for fixed functions of the other outputs,
        so that steps for all outputs at once need damping.

        The curvature is increased where the maximum of the site would be farther from the mean of f than
        ``likelihood.inverse_link(y)`` by more than 3.

        :param y: data, NaN where missing.
        :param f_mean: means of f.
        :param f_variance: variances of f.
        :param rows: known quantities of the rows; None for nothing.
        :returns: h and w, zero where y is missing.

        Source: eqs. 29 and 30 of the SRFLVM paper; Khan and Lin (2017), "Conjugate-computation variational inference".
        """
        linear, precision = self._sites_of_entries(y, f_mean, f_variance, rows)
        if rows is None or rows.weight is None:
            return linear, precision
        weight = rows.weight[:, None]
        return weight * linear, weight * precision

    def _sites_of_entries(
        self, y: Tensor, f_mean: Tensor, f_variance: Tensor, rows: RowArguments | None
    ) -> tuple[Tensor, Tensor]:
        """Sites without the weights of rows."""
        observed, y = ~torch.isnan(y), torch.nan_to_num(y, self.likelihood.fill_value)
        offsets, params = self.offsets(rows), self.likelihood_params(rows)
        if isinstance(self.likelihood, Gaussian):
            assert params is not None
            return gaussian_sites(y - offsets, observed, params)
        if isinstance(self.likelihood, Logistic):
            a, b = (torch.where(observed, exponent, 0.0) for exponent in self.likelihood.exponents(y, params))
            precision = polyagamma.precision(b, polyagamma.variational_parameter(f_mean, f_variance))
            return a - 0.5 * b - precision * offsets, precision
        with torch.enable_grad():
            mean, variance = (x.detach().expand(f_mean.shape).requires_grad_() for x in (f_mean, f_variance))
            expected = self.likelihood.log_prob_of_rows(y, observed, mean, variance, params)
            slope, half_curvature = torch.autograd.grad(expected.sum(), (mean, variance))
        # Where f is far from the inverse link of y, the curvature can be so small that the site's maximum is far beyond it.
        max_distance = _MAX_OVERSHOOT + torch.nan_to_num(self.likelihood.inverse_link(y) - f_mean).abs()
        precision = torch.maximum(-2.0 * half_curvature, slope.abs() / max_distance)
        return slope + precision * (f_mean - offsets), precision

    @names_types
    @pyro_lock
    def initialize(
        self,
        Y: Table,
        *,
        method: InitialLatents = "pca",
        latents: Float[Tensor, "N Q"] | None = None,
        seed: int = 0,
    ) -> "RandomFeatureLVM":
        """Initialize the latents by a linear model of the data; guides created afterwards have these initial values.

        The initial ``kernel_variance`` is the mean square of the centred data on the scale of f, unless it is frozen
        (``requires_grad_(False)``).  If it has a prior, this is the initial value in guides.

        :param Y: all data, NaN where missing: a tensor or a table (:func:`~pyro_lvgp.tables.as_tensor`).
        :param method: ``"pca"`` or ``"factor-analysis"``.
        :param latents: initial latents instead, such as a neighbour embedding; columns are standardised.
        :param seed: seed of the linear model and of the choice of rows whose latents are :meth:`latent_candidates`.
        :returns: the model itself.
        :raises ValueError: for data that cannot be used, or latents of another shape, not finite or with constant columns.
        """
        with torch.no_grad():
            X, function = self._initialize_linear(Y, method, latents, seed)
            self.initial_values = {"X": X}
            mean_square = function.square().mean()
            variance = torch.where(mean_square > 0.0, mean_square, 1.0)  # the centred data of a single row are zero
            self._initialize_parameter("kernel_variance", variance)
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed), device="cpu")
        self.candidates = X[order[: len(self.candidates)].to(X.device)]
        return self

    def latent_candidates(self) -> Float[Tensor, "M Q"]:
        return self.candidates

    @names_types
    @pyro_lock
    def kernel(self, guide: Guide, X: Float[Tensor, "N Q"], X2: Float[Tensor, "M Q"] | None = None) -> Float[Tensor, "N M"]:
        """Compute the learned kernel ``σ_k² E φ(x)ᵀ φ(x′)`` under the guide's distribution of frequencies.

        A σ_k² with a prior is averaged over draws from the guide.

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

    @names_types
    @pyro_lock
    def spectral_density(self, guide: Guide, omega: Float[Tensor, "K Q"]) -> Float[Tensor, " K"]:
        """Compute the spectral density of the learned kernel.

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
        """Mixture of the guide's distributions of all frequencies, as weights, means and scales, and the mean of σ_k²."""
        row, idx = self.mean.new_full((1, self.data_dim), torch.nan), torch.zeros(1, dtype=torch.long, device=self.mean.device)
        has_prior = "kernel_variance" in self._pyro_samples
        with seeded(0):
            traces: list[Any] = [poutine.trace(guide).get_trace(row, idx) for _ in range(_NUM_DRAWS if has_prior else 1)]
            draws = [trace.nodes["kernel_variance"]["value"] for trace in traces] if has_prior else [self.kernel_variance]
        return self._mixture_of(traces[0].nodes["omega"]["fn"]), torch.stack(draws).mean(0)

    @staticmethod
    def _mixture_of(omega: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and scales of the mixture of the distributions of all frequencies."""
        points = without_independent(omega)
        if isinstance(points, DiagonalMixture):
            return points.weights.mean(0), points.locs, points.scales
        if not isinstance(points, torch.distributions.Normal):
            raise TypeError(
                "expected a guide whose omega is a Normal or a DiagonalMixture, got one that samples a "
                f"{type(points).__name__}; use RandomFeatureGuide or MeanFieldGuide"
            )
        loc, scale = points.loc, points.scale
        return loc.new_full((len(loc),), 1.0 / len(loc)), loc, scale


def _stick_log_weights(v: Tensor) -> Tensor:
    """Compute ``log π_c = log v_c + Σ_{j<c} log(1 − v_j)``, with v_C = 1."""
    v = v.clamp(torch.finfo(v.dtype).tiny, 1.0 - torch.finfo(v.dtype).eps)
    return pad(v.log(), (0, 1)) + pad((-v).log1p().cumsum(-1), (1, 0))


def _checked_layout(layout: Any, rows: RowArguments | None) -> Float[Tensor, "N Q"] | None:
    """Return the layout as a tensor; None for one to compute, or for none."""
    if layout is None:
        return None
    if rows is not None and not (rows.prior is None and rows.covariates is None and rows.exposure is None):
        raise ValueError(
            "expected no layout with priors, covariates or exposures of rows, which its lengthscale does not account for, got "
            "both; pass latents to initialize(Y, latents=...)"
        )
    if isinstance(layout, str):
        if layout != "tsne":
            raise ValueError(f'expected layout="tsne", a table of positions [N, Q] or None, got {layout!r}')
        return None
    positions = as_tensor(layout, name="layout")
    if positions.dim() != 2:
        raise ValueError(f"expected a layout of shape [rows, latent dimensions], got {list(positions.shape)}")
    return positions
