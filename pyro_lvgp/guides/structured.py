"""Guides that multiply a Gaussian-process prior by sites from an encoder."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_args

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyro_lvgp._utils.inference_mode import outside_inference_mode
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_init_scale, check_positional, check_sizes, position_of_data
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.guides._encodings import align_encoding, check_layout, gaussian_prior
from pyro_lvgp.guides._handlers import AllDrawn, HideObserved, ReplacePriors, StopAfterLatents
from pyro_lvgp.guides._model_guide import ModelGuide, plates_of
from pyro_lvgp.guides._site_factors import Factor, PointFactor, expand_to
from pyro_lvgp.guides._site_updates import update_sites
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.infer._sites import max_plate_nesting
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians
from pyro_lvgp.infer.protocols import (
    HasConditionalSite,
    HasInitialValues,
    HasPointLikelihood,
    HasProcessSite,
    SubsamplesPoints,
)
from pyro_lvgp.ops.gaussian_sites import bounded_precision
from pyro_lvgp.ops.site_updates import NaturalSites

__all__ = ["StructuredGPGuide"]

Method = Literal["auto", "dense", "state-space"]


class StructuredGPGuide(ModelGuide):
    r"""Guide that multiplies the prior of a Gaussian-process site by Gaussian sites from an encoder.

    .. math::

        q(f) = \frac{1}{Z} \, p(f) \prod_{n,k} N\big(f_{nk};\, \mu_k(y_n),\, v_k(y_n)\big)

    where p(f) is the model's prior at that site, with the present kernel parameters and inputs.  The guide takes any Pyro
    model with a Gaussian-process site: a :class:`~pyro_lvgp.distributions.GaussianProcess` or a ``MultivariateNormal``,
    whose last dimension runs over the points.  A row without observed entries has no Gaussian site.  To predict at new inputs,
    call the guide with these inputs and rows of NaN as their data.  All other sites of the model have mean-field Gaussians.

    Several series ``[series, points, outputs]`` may share one process ``[points]``.  Its Gaussian sites are then free
    parameters, or come from an encoder that takes all series together.

    The prior may also be a ``Normal``, for latents that are independent from point to point.

    Under :class:`~pyro_lvgp.infer.StructuredELBO` only the marginals of q(f) are computed.  ``Trace_ELBO`` uses joint draws,
    and ``TraceMeanField_ELBO`` the analytic KL divergence.

    :param model: a Pyro model.
    :param encoders: encoders by Gaussian-process site, ``{"rate": encoder}``: modules that map data ``[*, N, D]``, NaN
        where missing, to loc and scale ``[*, N, Q]`` of the Gaussian sites (see :mod:`pyro_lvgp.networks`).  With None in
        place of a module, loc and scale of each datum are free parameters.  By default ``{model.gp_site: None}``, as for the
        site ``f`` of a ``GPVAE``.
    :param method: ``"dense"`` takes O(N³) operations for N points.  ``"state-space"`` gives the same result in linear time
        and memory, for one column of inputs under Matérn kernels, their sums and products.  ``"auto"`` is ``"state-space"``
        for such priors with more than 200 points, else ``"dense"``.
    :param init_loc_fn: initial values of the mean-field sites, as for :class:`~pyro_lvgp.guides.MeanFieldGuide`.
    :param init_scale: initial scale of Gaussian sites without an encoder, and of mean-field Gaussians.
    :param create_plates: as for Pyro's autoguides, for the mean-field sites.
    :param num_site_updates: number of updates of encoded Gaussian sites in training mode, through which gradients flow.
    :param num_eval_site_updates: their number in evaluation mode, in which ``predict``, ``impute`` and ``forecast`` run; 0
        takes the sites of the encoder.  There are no updates for a model that is no
        :class:`~pyro_lvgp.infer.protocols.HasPointLikelihood`, or with latents of points that are not in ``encoders``.
    :param site_step_size: largest step size ρ of an update.
    :raises ValueError: for an unknown site, a site with another prior, an encoding of the wrong shape, a prior without a
        linear-time method under ``method="state-space"``, a negative number of updates, a step size that is not above 0 and at
        most 1, ``num_site_updates`` with latents of points that are not in ``encoders``, or a call without the data.
    :raises TypeError: for data of an integer dtype, an encoder that does not return a pair, or ``num_site_updates`` with a
        model that is no ``HasPointLikelihood`` or without an encoder.

    An update is a natural-gradient step on the bound :math:`L - KL(q \| p)` of each series, where
    :math:`L = E_q[\log p(y \mid f)]`.  With the means m and variances v of q, the precisions Λ of the sites and h = Λμ,

    .. math::

        \Lambda \leftarrow (1 - \rho) \Lambda + \rho C, \qquad h \leftarrow (1 - \rho) h + \rho (g + C m), \qquad
        g = \frac{\partial L}{\partial m}, \qquad C = 2 \Big|\frac{\partial L}{\partial v}\Big|

    with expectations over fixed draws.  A step that would lower the bound of a series is rejected, and the next one is half
    as long.  In evaluation mode updates start from sites without information if these have a higher bound than those of the
    encoder, so that an encoder that extrapolates badly does not decide a prediction.  One update is exact for one latent, a
    linear decoder and Gaussian noise.

    The data are the last floating-point tensor among the positional arguments of the model: inputs, exposures and the like
    come before it.  Every call of the guide needs the data, also in ``Predictive``.

    Source: eqs. 3.5 and 3.28 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders";
    Khan and Lin (2017), "Conjugate-computation variational inference", for the updates.

    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> from pyro_lvgp.models import GPVAE
    >>> model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 4))
    >>> guide = StructuredGPGuide(model, encoders={"f": IndexNet(4, 2)})
    >>> t, y = torch.linspace(0.0, 1.0, 10)[:, None], torch.randn(10, 4)
    >>> guide(t, y)["f"].shape
    torch.Size([2, 10])
    """

    _data_position: int | None = None  # of the data among the arguments; set by the first call
    _updates_sites = False  # whether Gaussian sites can be updated; set by the first call

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        encoders: Mapping[str, nn.Module | None] | None = None,
        method: Method = "auto",
        init_loc_fn: Callable[[dict], Tensor] | None = None,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
        num_site_updates: int = 0,
        num_eval_site_updates: int = 20,
        site_step_size: float = 1.0,
    ):
        if encoders is None:
            if not isinstance(model, HasProcessSite):
                raise ValueError(
                    f"expected encoders={{<name of a Gaussian-process site>: encoder}}, got none for {type(model).__name__}"
                )
            if isinstance(model, HasConditionalSite):
                raise ValueError(
                    f"expected a model of processes at the data, got {type(model).__name__}, which has inducing points; take "
                    "a SparseStructuredGPGuide"
                )
            encoders = {model.gp_site: None}
        if method not in get_args(Method):
            raise ValueError(f"expected method in {get_args(Method)}, got {method!r}")
        check_init_scale(init_scale)
        check_sizes(least=0, num_site_updates=num_site_updates, num_eval_site_updates=num_eval_site_updates)
        if not 0.0 < site_step_size <= 1.0:
            raise ValueError(f"expected site_step_size above 0 and at most 1, got {site_step_size}; 1 replaces the sites")
        amortised = [name for name, encoder in encoders.items() if encoder is not None]
        if num_site_updates and not (isinstance(model, HasPointLikelihood) and amortised):
            raise TypeError(
                "expected a model with log_prob_of_points(latents, *args) and an encoder for num_site_updates="
                f"{num_site_updates}, got {type(model).__name__} and encoders of {amortised}; see "
                "pyro_lvgp.infer.protocols.HasPointLikelihood"
            )
        # The mean-field part uses the plates of this guide.
        super().__init__(model, encoders=encoders, create_plates=create_plates or plates_of(model))
        self._process_sites = tuple(encoders)
        self._method, self._init_scale = method, init_scale
        self.num_site_updates, self.num_eval_site_updates = num_site_updates, num_eval_site_updates
        self.site_step_size = site_step_size
        self.mean_field = MeanFieldGuide(
            poutine.block(model, hide=list(encoders)),
            init_loc_fn=init_loc_fn or (model.init_loc_fn if isinstance(model, HasInitialValues) else None),
            init_scale=init_scale,
            create_plates=self.create_plates,
        )

    def _make_parameters(self, *args, **kwargs) -> None:
        latents = dict(self.prototype_trace.iter_stochastic_nodes())
        self._check_sites(latents, args, kwargs)
        self._updates_sites = self._can_update_sites(latents)
        self.mean_field._setup_prototype(*args, **kwargs)
        self.locs, self.scales = PyroModule(), PyroModule()
        self._has_latent_dim: dict[str, bool] = {}  # False for a process with one value per point
        self._num_shared_dims: dict[str, int] = {}  # leading dimensions of the data that share one process
        if not self._process_sites:
            return
        self._data_position = position_of_data(args)
        y = args[self._data_position]
        if after := [arg for arg in args[self._data_position + 1 :] if torch.is_tensor(arg)]:
            self._check_unobserved(after, args, kwargs)
        for name in self._process_sites:
            prior = gaussian_prior(name, latents[name]["fn"])
            shape = prior.batch_shape + prior.event_shape
            check_layout(name, shape, y)
            num_dims = len(shape)
            self._has_latent_dim[name], self._num_shared_dims[name] = num_dims >= y.dim(), max(y.dim() - 1 - num_dims, 0)
            if name not in self._encoded:
                self._add_parameters(name, latents[name], prior)

    def _check_sites(self, latents: Mapping[str, Any], args: tuple, kwargs: dict) -> None:
        """Raise for an unknown site, or a site without an encoder in a mini-batch of points."""
        for name in self._process_sites:
            if name not in latents:
                raise ValueError(f"expected the name of a latent site, one of {sorted(latents)}, got {name!r}")
        if not (isinstance(self.model, SubsamplesPoints) and self.model.shows_some_points(*args, **kwargs)):
            return
        for name, site in latents.items():
            if name not in self._encoded and site["scale"] != 1.0:
                raise ValueError(
                    f"expected an encoder for site {name!r}, or all points at every step, got a mini-batch of points of one "
                    "series: free sites belong to points; pass encoders={" + repr(name) + ": <encoder>}"
                )

    def _can_update_sites(self, latents: Mapping[str, Any]) -> bool:
        """Whether encoded Gaussian sites can be updated, which must not depend on draws of other latents of points."""
        others = [
            name
            for name, site in latents.items()
            if name not in self._process_sites and any(frame.dim == -1 for frame in site["cond_indep_stack"])
        ]
        if self.num_site_updates and others:
            raise ValueError(
                f"expected all latents of the points among the encoders for num_site_updates={self.num_site_updates}, got "
                f"none for {others}; add them to encoders, with None for sites without a network"
            )
        is_encoded = any(name in self._encoded for name in self._process_sites)
        return is_encoded and not others and isinstance(self.model, HasPointLikelihood)

    def _add_parameters(self, name: str, site: Any, prior: Any) -> None:
        """Make loc and scale of the Gaussian sites of all data, also if a plate is subsampled."""
        shape = list(prior.batch_shape + prior.event_shape)
        event_dim = site["fn"].event_dim
        for frame in site["cond_indep_stack"]:
            shape[frame.dim - event_dim] = frame.full_size or frame.size
        loc = prior.mean.new_zeros(shape)
        deep_setattr(self.locs, name, PyroParam(loc, constraints.real, event_dim))
        scale = torch.full_like(loc, self._init_scale)
        deep_setattr(self.scales, name, PyroParam(scale, constraints.positive, event_dim))

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        check_positional(kwargs)
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        updated, others = self._update_sites(lambda name, prior: self._posterior(name, prior, args), args, kwargs)
        values = self._run_model(lambda name, prior: self._posterior(name, prior, args, updated), others, args, kwargs)
        return {name: values[name] for name, _ in self.prototype_trace.iter_stochastic_nodes()}

    def _run_model(
        self, posterior: Callable[[str, Any], Any], given: Mapping[str, Tensor], args: tuple, kwargs: dict
    ) -> dict[str, Tensor]:
        """Run the model up to the last latent site, with posteriors in place of priors, and return the values of all sites.

        :param posterior: maps the name of a site and its prior to a distribution.
        :param given: values of sites, which outer handlers do not see.
        """
        drawn = StopAfterLatents([name for name, _ in self.prototype_trace.iter_stochastic_nodes()])
        with ReplacePriors(posterior), HideObserved(), suppress(AllDrawn):
            drawn(poutine.condition(self.model, dict(given)))(*args, **kwargs)
        return drawn.values

    def _update_sites(
        self, posterior_of_others: Callable[[str, Any], Any], args: tuple, kwargs: dict
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Update the Gaussian sites of encoders given draws of all other sites, which outer handlers see.

        :param posterior_of_others: maps the name of another site and its prior to a distribution.
        :returns: updated Gaussian sites, and the values of all other sites; none if there is nothing to update.
        """
        num_updates = self.num_site_updates if self.training else self.num_eval_site_updates
        if not (num_updates and self._updates_sites):
            return {}, {}
        priors: dict[str, Any] = {}

        def at_mean(name: str, prior: Any) -> Any:
            if name not in self._process_sites:
                return posterior_of_others(name, prior)
            priors[name] = prior
            return dist.Delta(prior.mean, event_dim=prior.event_dim)

        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            args, kwargs = tree_map(outside_inference_mode, (args, kwargs))
            with poutine.block(hide=list(self._process_sites)):
                values = self._run_model(at_mean, {}, args, kwargs)
            others = {name: value for name, value in values.items() if name not in priors}
            # Draws of the other sites have the plates outside the guide.
            has_others = any(name in others for name, _ in self.prototype_trace.iter_stochastic_nodes())
            plates = {frame.dim: frame.size for frame in get_plates() if has_others and frame.dim is not None}
            factors = self._factors(priors, args, plates)
            if not factors:
                return {}, others
            outermost = max([max_plate_nesting(self.prototype_trace.nodes.values()), *(-dim for dim in plates)])

            def log_prob(latents: dict[str, Tensor]) -> Tensor:
                with poutine.block():
                    return self.model.log_prob_of_points({**others, **latents}, *args, **kwargs)

            # In training the bound has to depend on the encoder.
            updated, _ = update_sites(
                factors,
                log_prob,
                num_updates=num_updates,
                step_size=self.site_step_size,
                num_plates=outermost,
                try_empty=not self.training,
                weight=self._weight_of_points(priors),
            )
        return updated, others

    def _weight_of_points(self, priors: Mapping[str, Any]) -> float | Tensor:
        """Return the number of data that each point of a mini-batch represents in q."""
        return 1.0

    def _factors(self, priors: Mapping[str, Any], args: tuple, plates: Mapping[int, int]) -> dict[str, Factor]:
        """Return the factors of q, by the site of the latents of points; none for data whose sites are not updated.

        :param priors: priors of all encoded sites.
        :param plates: sizes of the plates outside the guide, by dimension.
        """
        return {name: self._point_factor(name, expand_to(prior, plates), args) for name, prior in priors.items()}

    def _point_factor(self, name: str, prior: Any, args: tuple) -> PointFactor:
        """Return the factor of q at a site with one Gaussian site for each latent of a point."""
        loc, scale, has_data = (x.expand(prior.shape()) for x in self._sites(name, gaussian_prior(name, prior), args))
        precision = torch.where(has_data, bounded_precision(scale.square().reciprocal(), prior.variance), 0.0)
        sites = NaturalSites(precision * loc, precision)
        return PointFactor(prior, sites, has_data, partial(self._multiply, name, prior), name in self._encoded)

    def _posterior(self, name: str, prior: Any, args: tuple, updated: Mapping[str, Any] | None = None) -> Any:
        """Return the distribution of a site in the guide.

        :param updated: Gaussian sites, by name, that take the place of those of the encoder.
        """
        if updated and name in updated:
            return self._multiply(name, prior, updated[name].mean, updated[name].precision)
        if name not in self._process_sites:
            posterior, transform = self.mean_field._posterior(name, args), self.mean_field.coordinates[name].transform
            return posterior if transform is None else dist.TransformedDistribution(posterior, transform)
        loc, scale, has_data = self._sites(name, gaussian_prior(name, prior), args)
        return self._multiply(name, prior, loc, torch.where(has_data, scale.square().reciprocal(), 0.0))

    def _multiply(self, name: str, prior: Any, loc: Tensor, precision: Tensor) -> Any:
        """Multiply the prior of a site by Gaussian sites."""
        base: Any = gaussian_prior(name, prior)
        if isinstance(base, torch.distributions.Normal):
            # The natural parameters of a product of Gaussians are sums.
            total = base.variance.reciprocal() + precision
            posterior = dist.Normal((base.mean / base.variance + precision * loc) / total, total.rsqrt())
        elif self._uses_state_space(base):
            posterior = StateSpacePosterior(base, loc, precision)
        else:
            posterior = StructuredPosterior(base, loc, precision)
        return posterior.to_event(prior.event_dim - posterior.event_dim)

    def _uses_state_space(self, prior: Any) -> bool:
        if self._method == "auto":
            return isinstance(prior, GaussianProcess) and prior.prefers_state_space
        return self._method == "state-space"

    def _check_unobserved(self, after: list[Tensor], args: tuple, kwargs: dict) -> None:
        """Raise if the model observes a tensor after the last floating-point one, where only indices are expected."""
        with seeded(0), torch.no_grad(), poutine.block():
            trace = poutine.trace(self.model).get_trace(*args, **kwargs)
        values = [trace.nodes[name]["value"] for name in trace.observation_nodes]
        for arg in after:
            if any(value is arg for value in values):
                raise TypeError(
                    f"expected data of a floating-point dtype, got {arg.dtype} of shape {list(arg.shape)}, which is observed; "
                    "use y.to(torch.get_default_dtype())[:, None], or pass tensors that no encoder takes before the data"
                )

    def _data(self, args: tuple) -> Tensor:
        """Return the data among the arguments of the model; raise unless their position is that of the first call."""
        position = position_of_data(args)
        if self._data_position not in (None, position):
            raise ValueError(
                f"expected data as argument {self._data_position} of the model, as at the first call, got the last "
                f"floating-point tensor as argument {position}; pass the data in the same place, with NaN for missing entries"
            )
        return args[position]

    def _sites(self, name: str, prior: Any, args: tuple) -> tuple[Tensor, Tensor, Tensor]:
        """Compute loc and scale of the Gaussian sites, in the layout of the prior, and a mask of the sites with data."""
        y = self._data(args)
        # Normal priors have the layout of encoders, [..., points, latent dimensions]; processes have the points last.
        by_point = isinstance(prior, torch.distributions.Normal)
        shape = prior.batch_shape + prior.event_shape

        def align(x: Tensor) -> Tensor:
            return align_encoding(x if by_point else x.mT, shape, name, self._has_latent_dim[name])

        has_data = (~torch.isnan(y)).any(-1, keepdim=True)
        if num_shared := self._num_shared_dims[name]:
            has_data = has_data.flatten(0, num_shared - 1).any(0)
        if name not in self._encoded:
            self._check_order_of_rows()
            loc, scale = attrgetter(name)(self.locs), attrgetter(name)(self.scales)
            if loc.shape != shape[-loc.dim() :]:
                raise ValueError(
                    f"expected all points that the free sites of {name!r} belong to, {list(loc.shape)}, got {list(shape)}; "
                    "give the site an encoder for other data and for mini-batches of points"
                )
            return loc, scale, align(has_data)
        loc, scale = self._encode(name, y)
        return align(loc), align(scale), align(has_data)

    def __getstate__(self):
        # The prototype contains priors, and these contain parameters of the model.
        return super().__getstate__() | {"prototype_trace": None}

    @torch.no_grad()
    @pyro_lock
    def quantiles(self, quantiles: list[float] | Tensor, *args, **kwargs) -> dict[str, Tensor]:
        """Compute marginal posterior quantiles by site, along a new first dimension.

        Quantiles of Gaussian-process sites are those given the medians of all other sites.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model.
        :raises ValueError: before the first call of the guide.
        """
        self._check_is_called()
        result = self.mean_field.quantiles(quantiles, *args, **kwargs)
        medians = self.mean_field.median(*args, **kwargs)

        def at_median(name: str, prior: Any) -> Any:
            is_marginalized = self._is_marginalized(prior)
            if name in medians and not is_marginalized:
                return dist.Delta(medians[name], event_dim=prior.event_dim)
            posterior = self._posterior(name, prior, args, updated)
            q = torch.as_tensor(quantiles, dtype=posterior.mean.dtype, device=posterior.mean.device)
            normal = torch.distributions.Normal(posterior.mean, posterior.variance.sqrt())
            result[name] = normal.icdf(q.reshape(-1, *(1,) * normal.mean.dim()))
            return posterior if is_marginalized else dist.Delta(posterior.mean, event_dim=prior.event_dim)

        # The results do not depend on draws of the marginalised sites.
        with seeded(0), poutine.block(), MarginalizeOwnGaussians():
            updated, _ = self._update_sites(at_median, args, kwargs)
            with ReplacePriors(at_median):
                self.model(*args, **kwargs)
        return result

    def _is_marginalized(self, prior: Any) -> bool:
        """Return whether quantiles of other sites marginalise the site with this prior; else it is fixed at its median."""
        return False
