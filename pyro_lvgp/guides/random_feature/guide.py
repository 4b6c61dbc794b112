"""Guide of the random-feature latent variable model."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_lvgp import conjugate
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import normal_draws
from pyro_lvgp._utils.validation import check_init_scale
from pyro_lvgp.distributions.normal import PrecisionNormal, PrecisionNormalAtMean
from pyro_lvgp.guides._sampled import SampledGuide
from pyro_lvgp.guides.random_feature._frequencies import GaussianFrequencies, MixtureFrequencies
from pyro_lvgp.guides.random_feature._weights import CollapsedWeights, ExplicitWeights
from pyro_lvgp.infer import Block
from pyro_lvgp.infer.elbo.handlers import is_in_bound
from pyro_lvgp.infer.protocols import RandomFeatureModel
from pyro_lvgp.likelihoods import Gaussian

__all__ = ["RandomFeatureGuide"]

Frequencies = Literal["mixture", "gaussian"]
Weights = Literal["collapsed", "filled", "explicit", "shared"]
_EXPLICIT = ("explicit", "shared")  # weights that are parameters
_DAMPING_OF_EXPLICIT = 0.1
_MAX_VALUES = 1_000_000  # of weights and features of draws made at once


class RandomFeatureGuide(SampledGuide):
    r"""Guide of a :class:`~pyro_lvgp.models.RandomFeatureLVM`, for ``SVI`` or block coordinate ascent.

    .. math::

        q = \mathrm{Gamma}(\alpha)\, \prod_c \mathrm{Beta}(v_c)\, \prod_l q(\omega_l)\,
        \prod_n N(x_n;\, m_n, \mathrm{diag}\, s_n^2)\, \prod_d N(a_d;\, m_d, P_d^{-1})

    :param model: the model.
    :param frequencies: ``"mixture"``, :math:`q(\omega_l) = \sum_c \phi_{lc} N(\mu_c, \sigma_c^2)` with the components of the
        prior and assignments φ, as in the paper; or ``"gaussian"``, a Gaussian for each frequency, whose draws
        change little from step to step, with the optimal assignments in closed form.  By default ``"gaussian"`` with explicit
        or shared weights, else ``"mixture"``.
    :param weights: posterior of the weights; by default ``"collapsed"`` if the likelihood allows it, else ``"explicit"``.

        - ``"collapsed"``: the exact :math:`q(a_d \mid X, \omega, y)` of a Gaussian likelihood, or for logistic likelihoods
          that of their Pólya-gamma bound.  It needs a pass over all rows at each step, and with missing entries an L × L
          Cholesky factor for each output.
        - ``"filled"``: the same for Gaussian data whose missing entries are filled by variational parameters, with one factor
          for all outputs, and a looser bound.  After the fit, ``guide.weights = "collapsed"`` predicts with the exact weights
          given the fitted latents, and ``guide.weights = "filled"`` reverses this.  No other choice can be changed after the
          first call of the guide.
        - ``"explicit"``: a Gaussian for each output, for mini-batches and all likelihoods.  It needs ``"gaussian"``
          frequencies.
        - ``"shared"``: explicit with one covariance for all outputs, one factor instead of D.  The bound is the same for
          Gaussian data with one variance and no missing entries, and looser otherwise.
    :param encoders: ``{"X": encoder}`` amortises the latents by a module that maps data [B, D], NaN where missing, to loc and
        scale [B, Q], such as an :class:`~pyro_lvgp.networks.IndexNet`.  Every step then changes the latents of all rows, which
        mini-batches of many rows need, and latents of new rows need no fit.  The model's initial latents are not used.  The
        module is turned into a ``PyroModule`` in place.
    :param init_scale: initial standard deviation of the latents, without an encoder.
    :param freeze_latents: whether the means of the latents stay at the initial values of the model, such as the layout of
        :meth:`~pyro_lvgp.models.RandomFeatureLVM.from_data`; their standard deviations are learned.
    :param seed: seed of the initial assignments or frequencies.
    :raises ValueError: for an unknown choice, or one that the likelihood or the other choice excludes; for an encoder of
        another site than X; for a call without the data that the encoder needs, or an encoding of another shape than the
        latents; for frozen latents with an encoder, or of a model that has not been initialized.
    :raises TypeError: for an encoder that does not return a pair.

    Parameters are grouped by site: ``alpha.shape``, ``alpha.rate``; ``v.a``, ``v.b``; ``omega.logits`` [F, C], or
    ``omega.loc`` and ``omega.scale`` [F, Q]; ``X.loc``, ``X.scale`` [N, Q], or those of the encoder; for collapsed weights of
    logistic likelihoods the variational parameters ``a.c`` [N, D]; for filled weights the function values at missing entries
    ``a.gaps`` [N, D]; for explicit weights the natural parameters ``a.linear`` [D, L] and ``a.precision`` [D, L, L], or
    [1, L, L] for shared ones.

    Collapsed and filled weights depend on all data.  The guide stores the data of its last call without ``idx``.  Later calls
    on some of the rows, as for predictions, condition the weights on all stored rows, and a bound on a mini-batch is unbiased.

    Source: eqs. 20 to 42 of the SRFLVM paper.

    >>> from pyro.infer import SVI, TraceMeanField_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_lvgp.models import RandomFeatureLVM
    >>> Y = torch.randn(20, 3)
    >>> model = RandomFeatureLVM(20, 3, latent_dim=2, num_frequencies=10).initialize(Y)
    >>> guide = RandomFeatureGuide(model)
    >>> loss = SVI(model, guide, Adam({"lr": 0.01}), TraceMeanField_ELBO()).step(Y)
    >>> guide.median()["X"].shape
    torch.Size([20, 2])
    >>> guide.latents(Y[:3], torch.arange(3)).mean.shape, guide.assignments().shape
    (torch.Size([3, 2]), torch.Size([10, 20]))
    >>> 1.0 <= guide.num_components_in_use() <= 10.0
    True
    """

    a: Any
    omega: Any

    def __init__(
        self,
        model: RandomFeatureModel,
        *,
        frequencies: Frequencies | None = None,
        weights: Weights | None = None,
        encoders: Mapping[str, nn.Module | None] | None = None,
        init_scale: float = 0.1,
        freeze_latents: bool = False,
        seed: int = 0,
    ):
        weights = weights or ("collapsed" if model.is_conjugate else "explicit")
        frequencies = frequencies or ("gaussian" if weights in _EXPLICIT else "mixture")
        _check_choice("frequencies", frequencies, Frequencies)
        _check_weights(weights, model, frequencies)
        check_init_scale(init_scale)
        for name in encoders or {}:
            if name != "X":
                raise ValueError(f"expected an encoder of the site 'X', got one of {name!r}; no other site is amortised")
        super().__init__(model, encoders=encoders)
        if freeze_latents and self.encoder_of("X") is not None:
            raise ValueError("expected freeze_latents=False with an encoder, got True; leave out one of the two")
        if freeze_latents and "X" not in model.initial_values:
            raise ValueError("expected a model with initial latents to freeze, got none; call initialize(Y) first")
        self.frequencies, self._weights, self._init_scale, self._seed = frequencies, weights, init_scale, seed
        self._freeze_latents = freeze_latents

    @property
    def weights(self) -> Weights:
        """Posterior of the weights; after a fit with filled weights, it can be set to ``"collapsed"`` and back.

        :raises ValueError: if it is set to a value that the constructor refuses, or, after the first call, to one whose
            parameters the guide does not have.
        """
        return self._weights

    @weights.setter
    def weights(self, value: Weights) -> None:
        _check_weights(value, self.model, self.frequencies)
        if self.prototype_trace is not None and value != self.weights:
            if value in _EXPLICIT or not (isinstance(self.a, CollapsedWeights) and self.a.has_gaps):
                raise ValueError(
                    f'expected weights="{self.weights}" of a guide that has run with them, got {value!r}; make a new guide, '
                    "since only filled weights can be changed later, to collapsed ones and back"
                )
            self.a.fill(value == "filled")
        self._weights = value

    def _make_parameters(self, y: Tensor | None = None, idx: Tensor | None = None) -> None:
        if self.weights not in _EXPLICIT and idx is not None:
            raise _data_not_seen()
        known = {"alpha", "v", "omega", "X", "a"}
        if others := {name for name, _ in self.prototype_trace.iter_stochastic_nodes()} - known:
            raise ValueError(f"expected the sites {sorted(known)} only, got {sorted(others)} too; learn these as parameters")
        model, like = self.model, self.model.mean
        F, C = model.num_frequencies, model.num_components
        noise = normal_draws(F, max(C, model.latent_dim), seed=self._seed, like=like)
        self.alpha, self.v = PyroModule(), PyroModule()
        self.omega = MixtureFrequencies(model, noise) if self.frequencies == "mixture" else GaussianFrequencies(model, noise)
        self.X = PyroModule()
        self.alpha.shape, self.alpha.rate = (_positive(x.clone()) for x in model.concentration)
        if self.encoder_of("X") is None:
            X = model.initial_values.get("X")
            X = like.new_zeros(model.num_data, model.latent_dim) if X is None else X.to(like, copy=True)
            self.X.loc = PyroParam(X, constraints.real)
            self.X.loc_unconstrained.requires_grad_(not self._freeze_latents)
            self.X.scale = _positive(torch.full_like(X, self._init_scale))
        if self.weights in _EXPLICIT:
            if y is None:
                y, idx = like.new_full((1, model.data_dim), torch.nan), torch.zeros_like(like[:1]).long()
            with torch.no_grad():
                features, rows = self._draw_features(y, idx), model.rows_at(idx)
                self.a = ExplicitWeights(model, y, features, shared=self.weights == "shared", rows=rows)
        else:
            self.register_buffer("data", like.new_full((model.num_data, model.data_dim), torch.nan))
            self.a = CollapsedWeights(model, y, filled=self.weights == "filled")
        a, b = conjugate.stick_breaking(like.new_full((F, C), 1.0 / C), model.concentration[0] / model.concentration[1])
        self.v.a, self.v.b = _positive(a), _positive(b)

    def forward(self, y: Float[Tensor, "B D"] | None = None, idx: Int[Tensor, " B"] | None = None) -> dict[str, Tensor]:
        """Draw all sites.

        :param y: observations, NaN where missing.
        :param idx: indices of the rows in y; None for all rows.
        """
        if self.prototype_trace is None:
            self._setup_prototype(y, idx)
        if y is not None and idx is None and self.weights not in _EXPLICIT:
            self.data = y.detach().clone()  # later changes of y in place must not change the posterior
        values = self._sample_spectrum()
        with self.model.data_plate(y, idx):
            values["X"] = pyro.sample("X", self.latents(y, idx).to_event(1))
        X = None if self.weights in _EXPLICIT else self._all_latents(values["X"], y, idx)
        return values | self._sample_weights(values["omega"], X, has_all=y is not None and idx is None)

    def sample_globals(self, *args, local_plate: str) -> dict[str, Tensor]:
        """Draw the sites that rows share; collapsed weights are drawn given new draws of the latents of all rows.

        :param args: arguments of the model, which are used only if the guide was not called before.
        :param local_plate: name of the plate over rows, ``"data"``.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args)
        with self._pyro_context:
            values = self._sample_spectrum()
            X = None if self.weights in _EXPLICIT else self._latents_of_data().rsample()
            return values | self._sample_weights(values["omega"], X, has_all=False)

    def _sample_spectrum(self) -> dict[str, Tensor]:
        return {
            "alpha": pyro.sample("alpha", dist.Gamma(self.alpha.shape, self.alpha.rate)),
            "v": pyro.sample("v", dist.Beta(self.v.a, self.v.b).to_event(1)),
            "omega": pyro.sample("omega", dist.Independent(self.omega.posterior(self.model), 1)),
        }

    def _sample_weights(self, omega: Tensor, X: Tensor | None, *, has_all: bool) -> dict[str, Tensor]:
        """Draw the weights from explicit posteriors, or given the latents of all rows."""
        posterior = self.a.distribution() if X is None else self._collapsed_weights(omega, X, has_all)
        with pyro.plate("outputs", self.model.data_dim, dim=-1):
            return {"a": pyro.sample("a", posterior)}

    def latents(self, y: Float[Tensor, "B D"] | None = None, idx: Int[Tensor, " B"] | None = None) -> dist.Normal:
        """Return the posterior ``q(X)`` of all rows or of those in ``idx``, entry by entry, without draws of other sites.

        :param y: observations, which an encoder needs, NaN where missing.
        :param idx: indices of the rows in y; None for all rows.
        :raises ValueError: if the guide has an encoder and y is None, if it has none and y has other rows than all or those
            in ``idx``, or if the encoding has another shape than the latents.
        :raises TypeError: if the encoder does not return a pair.
        :raises RuntimeError: before the first call of the guide.
        """
        self._check_has_run()
        if "X" in self._encoded:
            if y is None:
                raise ValueError("expected data for the encoder, got none; call the guide with the data")
            loc, scale = self._encode("X", y)
            expected = (*y.shape[:-1], self.model.latent_dim)
            if not loc.shape == scale.shape == expected:
                raise ValueError(
                    f"expected loc and scale of shape {list(expected)} from the encoder, got {list(loc.shape)} and "
                    f'{list(scale.shape)}; give it latent_dim={self.model.latent_dim} and covariance="diagonal"'
                )
            return dist.Normal(loc, scale)
        loc, scale = self.X.loc, self.X.scale
        if y is not None and idx is None and len(y) != len(loc):
            raise ValueError(
                f"expected all {len(loc)} rows, or the indices of some in training, got {len(y)} rows; for latents of new "
                "rows use model.infer_latents(guide, Y)"
            )
        return dist.Normal(loc, scale) if idx is None else dist.Normal(loc[idx], scale[idx])

    def stored_posterior(self, site: str) -> dist.Normal | None:
        """Return the posterior of the latents X of all rows; None for another site, with an encoder, or before the first call.

        :param site: name of the site.
        """
        return None if site != "X" or "X" in self._encoded or self.prototype_trace is None else self.latents()

    def _check_has_run(self) -> None:
        if self.prototype_trace is None:
            raise RuntimeError("expected a guide that has run once, got a new one, without parameters; call guide(Y) first")

    def _all_latents(self, X: Tensor, y: Tensor | None, idx: Tensor | None) -> Tensor:
        """Complete the drawn latents X of the rows ``idx`` by draws of the latents of all other rows."""
        if idx is None:
            return X
        q = self._latents_of_data()
        all_latents = q.expand((*X.shape[:-2], *q.batch_shape)).rsample()
        if y is not None:  # rows without an observed entry take the latents of the training row
            X = torch.where(torch.isnan(y).all(-1, keepdim=True), all_latents[..., idx, :], X)
        return all_latents.index_copy(-2, idx, X)

    def _latents_of_data(self) -> dist.Normal:
        """Return q(X) of all stored rows."""
        if torch.isnan(self.data).all():
            raise _data_not_seen()
        return self.latents(self.data, None)

    def _collapsed_weights(self, omega: Tensor, X: Tensor, has_all: bool) -> PrecisionNormal:
        """Return q(a | X, ω), with the batch shape of the plate of the outputs.

        If it is exact, the bound of all rows does not depend on the draw of a.
        """
        features = self.model.features(X.unsqueeze(-3), omega, self.model.rows_at())
        mean, precision_tril = self.a.posterior(self.model, self.data, features)
        is_exact = self.weights == "collapsed" and isinstance(self.model.likelihood, Gaussian)
        family = PrecisionNormalAtMean if is_exact and has_all and is_in_bound() else PrecisionNormal
        return family(mean.squeeze(-3), precision_tril.squeeze(-4), validate_args=False)

    def assignments(self) -> Float[Tensor, "F C"]:
        """Return the probability φ of each frequency to belong to each component."""
        return self.omega.assignments(self.model, conjugate.stick_log_weights(self.v.a, self.v.b))

    @torch.no_grad()
    def num_components_in_use(self) -> float:
        """Compute the expected number of components with a frequency, ``Σ_c [1 − Π_l (1 − φ_lc)]``.

        :raises RuntimeError: before the first call of the guide.
        """
        self._check_has_run()
        return float((1.0 - (1.0 - self.assignments()).prod(0)).sum())

    @pyro_lock
    def blocks(
        self,
        *,
        lr: float = 0.02,
        num_steps: int = 1,
        damping: float | Any = None,
    ) -> list[Block]:
        """Return blocks for :func:`~pyro_lvgp.infer.fit` or :class:`~pyro_lvgp.infer.BlockCoordinateVI`, in their order.

        - ``"gradient"``: latents, frequencies with their components or assignments, and parameters of kernel and likelihood,
          by Adam.
        - ``"sticks"`` and ``"concentration"``, in closed form.  With Gaussian frequencies the closed forms are those of a
          lower bound in which each frequency has one assignment.
        - ``"variational-parameters"`` (collapsed weights of a logistic likelihood), by a fixed point; ``"gaps"`` (filled
          weights), at their means; or ``"weights"`` (explicit or shared), by natural gradients.

        Natural-gradient steps for likelihoods that are not Gaussian are halved for each output whose bound they would lower.
        Steps on mini-batches are not halved, because that would bias them.

        :param lr: learning rate of Adam.
        :param num_steps: gradient steps in a sweep.
        :param damping: ρ of the last block; by default 1, but 0.1 for explicit or shared weights, which averages over draws
            of latents and frequencies.  With mini-batches pass a function of the sweep t, such as (t + delay)^−κ with κ in
            (½, 1]; a delay of 10 or more limits the influence of the first batches.
        """
        if damping is None:
            damping = _DAMPING_OF_EXPLICIT if self.weights in _EXPLICIT else 1.0
        latents = "guide.X.*" if self.encoder_of("X") is None else "guide.encoders.*"
        patterns, adam = ["model.*", "guide.omega.*", latents], partial(torch.optim.Adam, lr=lr)
        blocks = [
            Block("gradient", params=patterns, optimizer=adam, num_steps=num_steps),
            Block("sticks", params=["guide.v.*"], update=self._update_sticks),
            Block("concentration", params=["guide.alpha.*"], update=self._update_concentration),
        ]
        if self.weights in _EXPLICIT:
            name = "weights"
        elif self.weights == "filled":
            name = "gaps"
        elif isinstance(self.model.likelihood, Gaussian):
            return blocks
        else:
            name = "variational-parameters"
        return [*blocks, Block(name, params=["guide.a.*"], update=self._update_weights, damping=damping)]

    def _update_sticks(self, *args, **kwargs) -> dict[str, Tensor]:
        a, b = conjugate.stick_breaking(self.assignments(), self.alpha.shape / self.alpha.rate)
        return {"guide.v.a": a, "guide.v.b": b}

    def _update_concentration(self, *args, **kwargs) -> dict[str, Tensor]:
        prior_shape, prior_rate = self.model.concentration
        shape, rate = conjugate.concentration(prior_shape, prior_rate, self.v.a, self.v.b)
        return {"guide.alpha.shape": shape, "guide.alpha.rate": rate}

    def _update_weights(self, y: Tensor, idx: Tensor | None = None) -> dict[str, Tensor]:
        if self.weights in _EXPLICIT:
            features, rows = self._draw_features(y, idx), self.model.rows_at(idx)
            new = self.a.updated(self.model, y, features, is_whole=idx is None, rows=rows)
        else:
            new = self.a.updated(self.model, self.data, self._draw_features(self.data, None))
        return {f"guide.a.{name}": value for name, value in new.items()}

    def _draw_features(self, y: Tensor, idx: Tensor | None) -> Tensor:
        """Features [B, L] at one draw of latents and frequencies."""
        X, omega = self.latents(y, idx).sample(), self.omega.posterior(self.model).sample()
        return self.model.features(X, omega, self.model.rows_at(idx))

    @pyro_lock
    def sample_posterior(self, num_samples: int, *args, chunk_size: int | None = None, **kwargs) -> dict[str, Tensor]:
        """Draw all sites from the guide, along a new first dimension.

        :param num_samples: number of draws.
        :param args: arguments of the model.
        :param chunk_size: number of draws in memory at once; each has a weight for every output and feature, and a feature
            for every row.  By default as many as have a million of both, and at most 100.
        """
        if chunk_size is None:
            num_values = 2 * self.model.num_frequencies * (self.model.data_dim + self.model.num_data)
            chunk_size = min(max(_MAX_VALUES // num_values, 1), 100)
        return super().sample_posterior(num_samples, *args, chunk_size=chunk_size, **kwargs)

    @torch.no_grad()
    @pyro_lock
    def quantiles(self, quantiles: list[float] | Tensor, *args, **kwargs) -> dict[str, Tensor]:
        """Compute marginal posterior quantiles by site, along a new first dimension: exact for X, from draws for others.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model.
        """
        result = super().quantiles(quantiles, *args, **kwargs)
        y, idx = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("y", "idx")))
        result["X"] = self.latents(y, idx).icdf(torch.as_tensor(quantiles).to(self.model.mean)[:, None, None])
        return result

    def __getstate__(self):
        # The prototype contains priors, and these contain parameters of the model.
        return super().__getstate__() | {"prototype_trace": None}


def _data_not_seen() -> ValueError:
    return ValueError(
        "expected a guide that has seen all data, on which collapsed weights depend, got one that has not; call guide(Y) "
        'first, or use weights="explicit"'
    )


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"expected {name} in {get_args(choices)}, got {value!r}")


def _check_weights(weights: Weights, model: RandomFeatureModel, frequencies: Frequencies) -> None:
    _check_choice("weights", weights, Weights)
    if weights == "collapsed" and not model.is_conjugate:
        raise ValueError(
            "expected a Gaussian or logistic likelihood (Bernoulli, binomial, negative binomial) for collapsed weights, got "
            f'{type(model.likelihood).__name__}; use weights="explicit"'
        )
    if weights == "filled" and not isinstance(model.likelihood, Gaussian):
        raise ValueError(f'expected a Gaussian likelihood for weights="filled", got {type(model.likelihood).__name__}')
    if weights in _EXPLICIT and frequencies == "mixture":
        raise ValueError(
            f'expected frequencies="gaussian" with {weights} weights, got "mixture", whose draws jump between components from '
            "step to step, so that weights of one step do not fit the next"
        )


def _positive(value: Tensor) -> PyroParam:
    return PyroParam(value, constraints.positive)
