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

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_init_scale, check_positional, position_of_data
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.guides._handlers import AllDrawn, HideObserved, Replace, StopAfter
from pyro_lvgp.guides._model_guide import ModelGuide, plates_of
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians
from pyro_lvgp.infer.protocols import HasConditionalSite, HasInitialValues, HasProcessSite, SubsamplesPoints
from pyro_lvgp.networks.pyro_module import adopt

__all__ = ["StructuredGPGuide"]

Method = Literal["auto", "dense", "state-space"]


class StructuredGPGuide(ModelGuide):
    r"""Guide that multiplies the prior of a Gaussian-process site by Gaussian sites from an encoder.

    .. math::

        q(f) = \frac{1}{Z} \, p(f) \prod_{n,k} N\big(f_{nk};\, \mu_k(y_n),\, v_k(y_n)\big)

    where p(f) is the prior at that site of the *model*, with its kernels and inputs as they are now.  So it serves any Pyro
    model with a Gaussian-process site: a :class:`~pyro_lvgp.distributions.GaussianProcess` or a ``MultivariateNormal``,
    whose last dimension runs over the points.  A row with nothing observed has no site, which makes the same guide predict at
    new inputs: give them with NaN for their data.  All other sites get mean-field Gaussians.

    Several series ``[series, points, outputs]`` may share a site ``[points]``: it has free sites, or an encoder that takes all
    of them together.

    A site with a ``Normal`` prior, latents that are independent from point to point, is multiplied in the same way.

    Under :class:`~pyro_lvgp.infer.StructuredELBO` only marginals of q(f) are formed; ``Trace_ELBO`` takes joint draws, and
    ``TraceMeanField_ELBO`` the analytic KL, which is registered.

    :param model: a Pyro model.
    :param encoders: for Gaussian-process sites by name, ``{"rate": encoder}``: a module that maps data ``[*, N, D]``, NaN
        where missing, to loc and scale ``[*, N, Q]`` of the Gaussian sites, see :mod:`pyro_lvgp.networks`; or None for free
        parameters of each datum, which is the default for the site ``f`` of a ``GPVAE``.
    :param method: ``"dense"`` takes N³ operations for N points; ``"state-space"`` gives the same in linear time and memory,
        for one column of inputs under Matérn kernels, their sums and products; ``"auto"`` takes it where it can, beyond 200
        points.
    :param init_loc_fn: initial values of the mean-field sites, as for :class:`~pyro_lvgp.guides.MeanFieldGuide`.
    :param init_scale: initial scale of sites that no encoder makes, and of mean-field Gaussians.
    :param create_plates: as for Pyro's autoguides, for the mean-field sites.
    :raises ValueError: for a site that is not there or has another prior, an encoding of the wrong shape, a prior that has
        no linear-time method, or a call without the data.
    :raises TypeError: for data that are whole numbers, or an encoder that does not return a pair.

    Encoders see the last floating-point argument of the model, which is given by its position: inputs, exposures and the like
    come before the data.  They are asked for at every call, also where ``Predictive`` is to draw new data.

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

    prototype_trace: Any
    _position: int | None = None  # of the data among the arguments, known from the first call on

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        encoders: Mapping[str, nn.Module | None] | None = None,
        method: Method = "auto",
        init_loc_fn: Callable[[dict], Tensor] | None = None,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
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
        # The mean-field part asks its owner for the plates.
        super().__init__(model, create_plates=create_plates or plates_of(model))
        self._encoded = {name: encoder is not None for name, encoder in encoders.items()}
        self._method, self._init_scale = method, init_scale
        self.encoders = PyroModule()
        for name, encoder in encoders.items():
            if encoder is not None:
                adopt(self.encoders, name, encoder)
        self.mean_field = MeanFieldGuide(
            poutine.block(model, hide=list(encoders)),
            init_loc_fn=init_loc_fn or (model.init_loc_fn if isinstance(model, HasInitialValues) else None),
            init_scale=init_scale,
            create_plates=self.create_plates,
        )

    def _check_prototype(self, part_trace: Trace) -> None:
        """Called by the mean-field part when it traces the model."""

    def _make_parameters(self, *args, **kwargs) -> None:
        latents = dict(self.prototype_trace.iter_stochastic_nodes())
        self._check_sites(latents, args, kwargs)
        self.mean_field._setup_prototype(*args, **kwargs)
        self.locs, self.scales = PyroModule(), PyroModule()
        self._with_latents: dict[str, bool] = {}  # or one number for each point
        self._shared: dict[str, int] = {}  # leading dimensions of the data that have one process together
        if not self._encoded:
            return
        self._position = position_of_data(args)
        y = args[self._position]
        if after := [arg for arg in args[self._position + 1 :] if torch.is_tensor(arg)]:
            self._check_unobserved(after, args, kwargs)
        for name, encoded in self._encoded.items():
            prior = _gaussian_prior(name, latents[name]["fn"])
            shape = prior.batch_shape + prior.event_shape
            _check_layout(name, shape, y)
            num_dims = len(shape)
            self._with_latents[name], self._shared[name] = num_dims >= y.dim(), max(y.dim() - 1 - num_dims, 0)
            if not encoded:
                self._add_parameters(name, latents[name], prior)

    def _check_sites(self, latents: Mapping[str, Any], args: tuple, kwargs: dict) -> None:
        """Raise for a site that is not there, or a free site in a mini-batch of points."""
        for name in self._encoded:
            if name not in latents:
                raise ValueError(f"expected the name of a latent site, one of {sorted(latents)}, got {name!r}")
        if not (isinstance(self.model, SubsamplesPoints) and self.model.shows_some_points(*args, **kwargs)):
            return
        for name, site in latents.items():
            if not self._encoded.get(name) and site["scale"] != 1.0:
                raise ValueError(
                    f"expected an encoder for site {name!r}, or all points at every step, got a mini-batch of points of one "
                    "series: free sites belong to points; pass encoders={" + repr(name) + ": <encoder>}"
                )

    def _add_parameters(self, name: str, site: Any, prior: Any) -> None:
        """Sites of all data, also where a plate shows some of them."""
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
        latents = [name for name, _ in self.prototype_trace.iter_stochastic_nodes()]
        drawn = StopAfter(latents)
        with Replace(lambda name, prior: self._posterior(name, prior, args)), HideObserved(), suppress(AllDrawn):
            drawn(self.model)(*args, **kwargs)
        return {name: drawn.values[name] for name in latents}

    def _posterior(self, name: str, prior: Any, args: tuple) -> Any:
        """Distribution of a site in the guide."""
        if name not in self._encoded:
            posterior, transform = self.mean_field._posterior(name, args), self.mean_field.coordinates[name].transform
            return posterior if transform is None else dist.TransformedDistribution(posterior, transform)
        base = _gaussian_prior(name, prior)
        loc, scale, has_data = self._sites(name, base, args)
        precision = torch.where(has_data, scale.square().reciprocal(), 0.0)
        if isinstance(base, torch.distributions.Normal):
            # N(m, s²) N(μ, v): natural parameters add up.
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
        """Raise if the model observes a tensor that comes after what is taken for the data, where indices are."""
        with seeded(0), torch.no_grad(), poutine.block():
            trace = poutine.trace(self.model).get_trace(*args, **kwargs)
        values = [trace.nodes[name]["value"] for name in trace.observation_nodes]
        for arg in after:
            if any(value is arg for value in values):
                raise TypeError(
                    f"expected data of a floating-point dtype, got {arg.dtype} of shape {list(arg.shape)}, which is observed; "
                    "use y.to(torch.get_default_dtype())[:, None], or give what no encoder is to see before the data"
                )

    def _data(self, args: tuple) -> Tensor:
        """The data among the arguments of the model, which are where they were at the first call."""
        position = position_of_data(args)
        if self._position not in (None, position):
            raise ValueError(
                f"expected data as argument {self._position} of the model, as at the first call, got the last floating-point "
                f"tensor as argument {position}; pass the data in the same place, NaN where there are none to condition on"
            )
        return args[position]

    def _sites(self, name: str, prior: Any, args: tuple) -> tuple[Tensor, Tensor, Tensor]:
        """Loc and scale of the sites, in the layout of the prior, and which of them have data."""
        y = self._data(args)
        # [..., points, latent dimensions] as encoders have it, or the other way round as processes do
        by_point = isinstance(prior, torch.distributions.Normal)
        shape = prior.batch_shape + prior.event_shape

        def align(x: Tensor) -> Tensor:
            return _align(x if by_point else x.mT, shape, name, self._with_latents[name])

        has_data = (~torch.isnan(y)).any(-1, keepdim=True)
        has_data = has_data.flatten(0, shared - 1).any(0) if (shared := self._shared[name]) else has_data
        if not self._encoded[name]:
            self._check_order_of_rows()
            loc, scale = attrgetter(name)(self.locs), attrgetter(name)(self.scales)
            if loc.shape != shape[-loc.dim() :]:
                raise ValueError(
                    f"expected all points that the free sites of {name!r} belong to, {list(loc.shape)}, got {list(shape)}; "
                    "give the site an encoder for other data and for mini-batches of points"
                )
            return loc, scale, align(has_data)
        loc, scale = self._encoding(name, y)
        return align(loc), align(scale), align(has_data)

    def encoder_of(self, site: str) -> nn.Module | None:
        """Return the encoder of a site; None if the site has parameters of its own.

        :param site: name of the site.
        """
        return attrgetter(site)(self.encoders) if self._encoded.get(site) else None

    def _encoding(self, name: str, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loc and scale of the sites as the encoder returns them."""
        encoding = attrgetter(name)(self.encoders)(y)
        if not isinstance(encoding, tuple | list) or len(encoding) != 2:
            raise TypeError(
                f"expected loc and scale from the encoder of {name!r}, got {type(encoding).__name__}; an IndexNet returns both"
            )
        loc, scale = encoding
        return loc, scale

    def __getstate__(self):
        # The prototype holds priors, and they parameters, of the model.
        return super().__getstate__() | {"prototype_trace": None}

    @torch.no_grad()
    def median(self, *args, **kwargs) -> dict[str, Tensor]:
        """Posterior medians by site.

        :param args: arguments of the model.
        """
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: list[float] | Tensor, *args, **kwargs) -> dict[str, Tensor]:
        """Marginal posterior quantiles by site, along a new first dimension; those of f at the medians of all other sites.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model.
        :raises ValueError: before the first call of the guide.
        """
        if self.prototype_trace is None:
            raise ValueError("the guide has no parameters before its first call: fit it, or call guide(*args) once")
        result = self.mean_field.quantiles(quantiles, *args, **kwargs)
        others = self.mean_field.median(*args, **kwargs)

        def at_median(name: str, prior: Any) -> Any:
            keep = self._keeps_spread(prior)
            if name in others and not keep:
                return dist.Delta(others[name], event_dim=prior.event_dim)
            posterior = self._posterior(name, prior, args)
            q = torch.as_tensor(quantiles, dtype=posterior.mean.dtype, device=posterior.mean.device)
            normal = torch.distributions.Normal(posterior.mean, posterior.variance.sqrt())
            result[name] = normal.icdf(q.reshape(-1, *(1,) * normal.mean.dim()))
            return posterior if keep else dist.Delta(posterior.mean, event_dim=prior.event_dim)

        # The model marginalises sites that keep their spread, so that their draws do not matter.
        with seeded(0), poutine.block(), MarginalizeOwnGaussians(), Replace(at_median):
            self.model(*args, **kwargs)
        return result

    def _keeps_spread(self, prior: Any) -> bool:
        """Whether quantiles of other sites marginalise the site with this prior, instead of fixing it at its median."""
        return False


def _gaussian_prior(name: str, prior: Any) -> Any:
    """The prior over one latent dimension."""
    prior = without_independent(prior)
    if not isinstance(prior, GaussianProcess | MultivariateNormal | torch.distributions.Normal):
        raise ValueError(
            f"expected a GaussianProcess, MultivariateNormal or Normal prior at site {name!r}, got {type(prior).__name__}; "
            "leave the site out of encoders to give it a mean-field Gaussian"
        )
    return prior


def _check_layout(name: str, shape: torch.Size, y: Tensor) -> None:
    """Raise if a process of this shape does not go with the data."""
    if y.dim() < 2:
        raise ValueError(f"expected data [..., points, outputs], got {list(y.shape)}; a single output needs [:, None]")
    if len(shape) == y.dim() - 1 and shape[:-1] != y.shape[:-2] and shape[:-1].numel() > 1:
        raise ValueError(
            f"expected site {name!r} to be one process of all series, [points], or processes of each, [series, latent "
            f"dimensions, points], for data of shape {list(y.shape)}, got {list(shape)}; "
            "give each process that the series share a site of its own"
        )


def _align(x: Tensor, shape: torch.Size, name: str, with_latents: bool) -> Tensor:
    """An encoding in the layout of the site: with dimensions of size 1 where the site's plates have them."""
    event = 2 if with_latents else 1
    laid_out = x if with_latents else x.flatten(-2)
    lead, result = list(laid_out.shape[:-event]), list(laid_out.shape[-event:])
    for size in reversed(shape[: len(shape) - event]):
        result.insert(0, lead.pop() if lead and lead[-1] == size else 1)
    if lead or len(result) != len(shape) or any(size not in (1, whole) for size, whole in zip(result, shape, strict=True)):
        raise ValueError(
            f"expected an encoding that lines up with site {name!r} of shape {list(shape)} [..., latent dimensions, points], "
            f"got {list(x.shape)}; encoders return loc and scale [..., points, latent dimensions]"
        )
    return laid_out.reshape(result)
