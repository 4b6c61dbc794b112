"""Guides that multiply a Gaussian-process prior by sites from an encoder."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, Literal, get_args

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_init_scale, check_positional, position_of_data
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.guides._handlers import AllDrawn, HideObserved, ReplacePriors, StopAfterLatents
from pyro_lvgp.guides._model_guide import ModelGuide, plates_of
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.guides.site_updates import Factor, SiteUpdates, update
from pyro_lvgp.infer._sites import max_plate_nesting
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians
from pyro_lvgp.infer.protocols import HasConditionalSite, HasInitialValues, HasPointLikelihood, HasProcessSite, SubsamplesPoints
from pyro_lvgp.ops import gaussian_sites
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
    :raises ValueError: for an unknown site, a site with another prior, an encoding of the wrong shape, a prior without a
        linear-time method under ``method="state-space"``, or a call without the data.
    :raises TypeError: for data of an integer dtype, or an encoder that does not return a pair.

    The data are the last floating-point tensor among the positional arguments of the model: inputs, exposures and the like
    come before it.  Every call of the guide needs the data, also in ``Predictive``.

    Source: eqs. 3.5 and 3.28 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders".

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

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        encoders: Mapping[str, nn.Module | None] | None = None,
        method: Method = "auto",
        init_loc_fn: Callable[[dict], Tensor] | None = None,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
        site_updates: SiteUpdates | None = SiteUpdates(),
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
        # The mean-field part uses the plates of this guide.
        super().__init__(model, encoders=encoders, create_plates=create_plates or plates_of(model))
        self._process_sites = tuple(encoders)
        self._method, self._init_scale = method, init_scale
        self.site_updates = site_updates
        self.mean_field = MeanFieldGuide(
            poutine.block(model, hide=list(encoders)),
            init_loc_fn=init_loc_fn or (model.init_loc_fn if isinstance(model, HasInitialValues) else None),
            init_scale=init_scale,
            create_plates=self.create_plates,
        )

    def _make_parameters(self, *args, **kwargs) -> None:
        latents = dict(self.prototype_trace.iter_stochastic_nodes())
        self._check_sites(latents, args, kwargs)
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
            prior = _gaussian_prior(name, latents[name]["fn"])
            shape = prior.batch_shape + prior.event_shape
            _check_layout(name, shape, y)
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
        num = 0
        if self.site_updates is not None and isinstance(self.model, HasPointLikelihood) and self._encoded.intersection(self._process_sites):
            num = self.site_updates.num_train if self.training else self.site_updates.num_predict
        updated, first = {}, Trace()
        if num:
            updated, first = self._updated(num, args, kwargs)
        def posterior(name, prior):
            if name in updated:
                h, precision = updated[name]
                base = _gaussian_prior(name, prior)
                q = self._multiply(base, h / precision.clamp_min(torch.finfo(h.dtype).tiny), precision)
                return q.to_event(prior.event_dim - q.event_dim)
            return self._posterior(name, prior, args)
        latents = [name for name, _ in self.prototype_trace.iter_stochastic_nodes()]
        drawn = StopAfterLatents(latents)
        with ReplacePriors(posterior), HideObserved(), suppress(AllDrawn):
            drawn(poutine.replay(self.model, trace=first))(*args, **kwargs)
        return {name: drawn.values[name] for name in latents}

    def _updated(self, num, args, kwargs):
        priors = {}
        def posterior(name, prior):
            if name in self._process_sites:
                priors[name] = prior
                return dist.Delta(prior.mean, event_dim=prior.event_dim)
            return self._posterior(name, prior, args)
        latents = [name for name, _ in self.prototype_trace.iter_stochastic_nodes()]
        with poutine.block(hide_fn=lambda msg: msg["type"] == "sample"):
            tracer = poutine.trace()
            with tracer, ReplacePriors(posterior), HideObserved(), suppress(AllDrawn):
                StopAfterLatents(latents)(self.model)(*args, **kwargs)
            first = tracer.trace
            num_plates = max(max_plate_nesting(t.nodes.values()) for t in (self.prototype_trace, first))
            for name in self._process_sites:
                first.remove_node(name)
            values = {name: site["value"] for name, site in first.iter_stochastic_nodes()}
            factors = {}
            for name, prior in priors.items():
                base = _gaussian_prior(name, prior)
                shape = base.batch_shape + base.event_shape
                loc, scale, has_data = self._sites(name, base, args)
                precision = gaussian_sites.bounded_precision(scale.square().reciprocal(), base.variance).expand(shape)
                by_point = isinstance(base, torch.distributions.Normal)
                factors[name] = Factor(base, NaturalSites(precision * loc, precision), has_data.expand(shape),
                    lambda m, p, base=base: self._multiply(base, m, p),
                    (-1 if by_point else -2) if prior.event_dim == (1 if by_point else 2) else None, prior.event_dim, name in self._encoded)
            self.bounds = []
            updated = update(factors, lambda draws: self.model.log_prob_of_points({**values, **draws}, *args), num, self.site_updates, num_plates, self.bounds)
            for name in updated:
                updated[name] = NaturalSites(*(torch.where(factors[name].has_data, x, 0.0) for x in updated[name]))
        return updated, first

    def _posterior(self, name: str, prior: Any, args: tuple) -> Any:
        """Return the distribution of a site in the guide."""
        if name not in self._process_sites:
            posterior, transform = self.mean_field._posterior(name, args), self.mean_field.coordinates[name].transform
            return posterior if transform is None else dist.TransformedDistribution(posterior, transform)
        base = _gaussian_prior(name, prior)
        loc, scale, has_data = self._sites(name, base, args)
        posterior = self._multiply(base, loc, torch.where(has_data, scale.square().reciprocal(), 0.0))
        return posterior.to_event(prior.event_dim - posterior.event_dim)

    def _multiply(self, prior: Any, loc: Tensor, precision: Tensor) -> Any:
        """Multiply a prior by Gaussian sites."""
        if isinstance(prior, torch.distributions.Normal):
            # The natural parameters of a product of Gaussians are sums.
            total = prior.variance.reciprocal() + precision
            return dist.Normal((prior.mean / prior.variance + precision * loc) / total, total.rsqrt())
        if self._uses_state_space(prior):
            return StateSpacePosterior(prior, loc, precision)
        return StructuredPosterior(prior, loc, precision)

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
            return _align(x if by_point else x.mT, shape, name, self._has_latent_dim[name])

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
            posterior = self._posterior(name, prior, args)
            q = torch.as_tensor(quantiles, dtype=posterior.mean.dtype, device=posterior.mean.device)
            normal = torch.distributions.Normal(posterior.mean, posterior.variance.sqrt())
            result[name] = normal.icdf(q.reshape(-1, *(1,) * normal.mean.dim()))
            return posterior if is_marginalized else dist.Delta(posterior.mean, event_dim=prior.event_dim)

        # The results do not depend on draws of the marginalised sites.
        with seeded(0), poutine.block(), MarginalizeOwnGaussians(), ReplacePriors(at_median):
            self.model(*args, **kwargs)
        return result

    def _is_marginalized(self, prior: Any) -> bool:
        """Return whether quantiles of other sites marginalise the site with this prior; else it is fixed at its median."""
        return False


def _gaussian_prior(name: str, prior: Any) -> Any:
    """Return the prior of one latent dimension, without ``Independent``."""
    prior = without_independent(prior)
    if not isinstance(prior, GaussianProcess | MultivariateNormal | torch.distributions.Normal):
        raise ValueError(
            f"expected a GaussianProcess, MultivariateNormal or Normal prior at site {name!r}, got {type(prior).__name__}; "
            "leave the site out of encoders to give it a mean-field Gaussian"
        )
    return prior


def _check_layout(name: str, shape: torch.Size, y: Tensor) -> None:
    """Raise if the shape of a process and that of the data do not match."""
    if y.dim() < 2:
        raise ValueError(f"expected data [..., points, outputs], got {list(y.shape)}; a single output needs [:, None]")
    if len(shape) == y.dim() - 1 and shape[:-1] != y.shape[:-2] and shape[:-1].numel() > 1:
        raise ValueError(
            f"expected site {name!r} to be one process of all series, [points], or processes of each, [series, latent "
            f"dimensions, points], for data of shape {list(y.shape)}, got {list(shape)}; "
            "give each process that the series share a site of its own"
        )


def _align(x: Tensor, shape: torch.Size, name: str, has_latent_dim: bool) -> Tensor:
    """Reshape an encoding to the layout of a site, with dimensions of size 1 where the plates of the site have them."""
    event_dim = 2 if has_latent_dim else 1
    laid_out = x if has_latent_dim else x.flatten(-2)
    lead, result = list(laid_out.shape[:-event_dim]), list(laid_out.shape[-event_dim:])
    for size in reversed(shape[: len(shape) - event_dim]):
        result.insert(0, lead.pop() if lead and lead[-1] == size else 1)
    if lead or len(result) != len(shape) or any(size not in (1, whole) for size, whole in zip(result, shape, strict=True)):
        raise ValueError(
            f"expected an encoding that lines up with site {name!r} of shape {list(shape)} [..., latent dimensions, points], "
            f"got {list(x.shape)}; encoders return loc and scale [..., points, latent dimensions]"
        )
    return laid_out.reshape(result)
