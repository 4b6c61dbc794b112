"""Mean-field Gaussian guide."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import biject_to
from pyro.distributions.util import eye_like
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.nn import PyroModule, PyroParam
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import get_plates
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.validation import check_init_scale
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.guides._coordinates import Covariance, SiteCoordinates
from pyro_lvgp.guides._model_guide import ModelGuide, plates_of
from pyro_lvgp.guides._sampled import direction
from pyro_lvgp.infer.protocols import HasInitialValues

__all__ = ["MeanFieldGuide"]


class MeanFieldGuide(ModelGuide):
    r"""Mean-field Gaussian guide that emits plain distributions.

    .. math::

        q(z) = \prod_s \prod_{n} N(z_{sn};\, m_{sn}, S_{sn})

    over sites s and the rows n of their plates.  A site on the real line has a ``Normal`` posterior or, with a full
    covariance, a ``MultivariateNormal``, so that ``TraceMeanField_ELBO`` uses the analytic KL.  A constrained site has such a
    Gaussian transformed by ``biject_to(support)``.  The guide takes any Pyro model with continuous latents.

    :param model: a Pyro model.
    :param covariance: ``"diagonal"`` or ``"full"`` by site, over the event of the site.  By default it is the one that the
        model's site requests by ``infer={"covariance": ...}`` (``u`` of our models: full), else full for a
        ``MultivariateNormal`` prior, and diagonal for any other.
    :param encoders: modules by site, to amortise sites: each maps the model's first argument, a batch of data, to
        the loc [B, Q] and the scale [B, Q] (or, with a full covariance, the scale_tril [B, Q, Q]) of that batch; None gives a
        site parameters of its own.  Modules are turned into ``PyroModule`` in place.
    :param init_loc_fn: initial values, as for Pyro's autoguides; by default the model's own ``init_loc_fn`` if it has one,
        else the prior's median.
    :param init_scale: initial standard deviation in unconstrained space.
    :param create_plates: as for Pyro's autoguides: function of the model's arguments that returns the plates that the model
        subsamples by an explicit index; by default the model's ``create_plates`` if it has one.
    :raises ValueError: for an unknown site or covariance; at the first call, for a plate that is subsampled by an explicit
        index and that ``create_plates`` does not return, or an initial value of another shape or outside the support.

    >>> from pyro.infer import SVI, TraceMeanField_ELBO
    >>> from pyro.optim import Adam
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)
    >>> guide = MeanFieldGuide(model, covariance={"loc": "full"})
    >>> loss = SVI(model, guide, Adam({"lr": 0.01}), TraceMeanField_ELBO()).step(torch.ones(5, 2))
    >>> guide.median()["loc"].shape
    torch.Size([2])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        covariance: Mapping[str, Covariance] | None = None,
        encoders: Mapping[str, nn.Module | None] | None = None,
        init_loc_fn: Callable[[dict], Tensor] | None = None,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
    ):
        check_init_scale(init_scale)
        for site, kind in (covariance or {}).items():
            if kind not in ("diagonal", "full"):
                raise ValueError(f'expected covariance["{site}"] to be "diagonal" or "full", got {kind!r}')
        if init_loc_fn is None:
            init_loc_fn = model.init_loc_fn if isinstance(model, HasInitialValues) else init_to_median
        super().__init__(model, encoders=encoders, create_plates=create_plates or plates_of(model))
        self._explicit_subsamples = _ExplicitSubsamples()
        self._initial = _FullInitialValues(init_loc_fn)
        self._requested = dict(covariance or {})
        self.init_scale = init_scale

    def _trace_prototype(self, *args, **kwargs) -> None:
        model = self._model
        # Pyro traces the model of the guide, and hides it from handlers outside.
        self._model = (InitMessenger(self._initial)(self._explicit_subsamples(self.model)),)
        try:
            super()._trace_prototype(*args, **kwargs)
        finally:
            self._model = model

    def _make_parameters(self, *args, **kwargs) -> None:
        sites = dict(self.prototype_trace.iter_stochastic_nodes())
        self._check_sites(sites)
        self.locs, self.scales = PyroModule(), PyroModule()
        self.coordinates: dict[str, SiteCoordinates] = {}
        self._event_shapes: dict[str, torch.Size] = {}
        for name, site in sites.items():
            with helpful_support_errors(site):
                transform = biject_to(site["fn"].support)
                value = self._initial.of_all_rows(name, site)
                loc = transform.inv(value).detach().clone(memory_format=torch.contiguous_format)
            if not torch.isfinite(loc).all():
                raise ValueError(
                    f"expected an initial value of site {name!r} inside its support, got one that is infinite or NaN in "
                    "unconstrained space; use another init_loc_fn, such as init_to_median"
                )
            event_dim = site["fn"].event_dim + loc.dim() - value.dim()
            transform = None if _is_real(site["fn"].support) else transform
            self.coordinates[name] = SiteCoordinates(transform, event_dim, self._covariance_of(name, site, event_dim))
            self._event_shapes[name] = loc.shape[loc.dim() - event_dim :]
            if name not in self._encoded:
                self._add_parameters(name, loc, event_dim)

    def _check_sites(self, sites: Mapping[str, Any]) -> None:
        for name in (*self._requested, *self._encoded):
            if name not in sites:
                raise ValueError(f"expected the name of a latent site, one of {sorted(sites)}, got {name!r}")
        create_plates = self.create_plates if self.master is None else self.master().create_plates
        for name, site in sites.items():
            if isinstance(without_independent(site["fn"], masks=True), dist.Delta):
                raise ValueError(
                    f"expected latent sites with a density, got a Delta at {name!r}, whose value is known; write "
                    f"pyro.deterministic({name!r}, value) in the model"
                )
        for frame in self._prototype_frames.values():
            explicit = frame.full_size not in (None, frame.size) and frame.name in self._explicit_subsamples.names
            if explicit and create_plates is None:
                raise ValueError(
                    f"expected create_plates for plate {frame.name!r}, which the model subsamples by an explicit index "
                    f"({frame.size} of {frame.full_size}), got none; pass create_plates=lambda *args: "
                    f"pyro.plate({frame.name!r}, {frame.full_size}, subsample=<the index among args>)"
                )

    def _covariance_of(self, name: str, site: Mapping[str, Any], event_dim: int) -> Covariance:
        default = "full" if isinstance(site["fn"], torch.distributions.MultivariateNormal) else "diagonal"
        kind = self._requested.get(name, site["infer"].get("covariance", default))
        if kind == "full" and event_dim != 1:
            raise ValueError(
                f"expected a vector-valued site for a full covariance, got {name!r} with {event_dim} event dims; use "
                '"diagonal", or .to_event(1) in the model'
            )
        return kind

    def _add_parameters(self, name: str, loc: Tensor, event_dim: int) -> None:
        # PyroParam optimises the logarithms of scales, which range over orders of magnitude.
        deep_setattr(self.locs, name, PyroParam(loc, constraints.real, event_dim))
        if self.coordinates[name].covariance == "full":
            scale = self.init_scale * eye_like(loc, loc.shape[-1]).expand(*loc.shape, loc.shape[-1]).contiguous()
            parameter = PyroParam(scale, constraints.lower_cholesky, event_dim + 1)
        else:
            parameter = PyroParam(torch.full_like(loc, self.init_scale), constraints.positive, event_dim)
        deep_setattr(self.scales, name, parameter)

    def loc_and_scale(self, name: str, args: tuple) -> tuple[Tensor, Tensor]:
        """Return loc and scale of a site in unconstrained space.

        In the context of a plate these are the parameters of the rows of its subsample, otherwise those of all rows.

        :param name: name of a latent site.
        :param args: arguments of the model, for encoders.
        :raises ValueError: for an encoded site without data, an encoding of another shape than the site, or an active plate
            that has all rows in another order than the parameters.
        :raises TypeError: if the encoder of the site does not return a pair.
        """
        if name in self._encoded:
            if not args:
                raise ValueError(f"expected the arguments of the model for the encoder of {name!r}, got none; pass the data")
            return self._encode_rows(name, args[0])
        self._check_order_of_rows()
        try:
            return attrgetter(name)(self.locs), attrgetter(name)(self.scales)
        except ValueError as error:
            raise ValueError(
                f"{error}: expected the data of the first call, which the parameters of {name!r} are for, got others; give "
                "the site an encoder for other data"
            ) from error

    def loc_and_stddev(self, name: str, args: tuple) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviations of a site in unconstrained space, as :meth:`loc_and_scale`.

        :param name: name of a latent site.
        :param args: arguments of the model, for encoders.
        """
        base = self._posterior(name, args)
        return base.mean, base.stddev

    def stored_posterior(self, site: str) -> torch.distributions.Distribution | None:
        """Return the posterior of a site, of all rows; None if the site has an encoder, or before the first call.

        :param site: name of a latent site.
        """
        if self.prototype_trace is None or site in self._encoded:
            return None
        return self._constrained(site, ())

    @torch.no_grad()
    def set_loc_and_stddev(self, name: str, loc: Tensor, stddev: Tensor) -> None:
        """Give a site that has parameters of its own a diagonal Gaussian in unconstrained space.

        :param name: name of a latent site that has no encoder.
        :param loc: mean, of all rows.
        :param stddev: standard deviations, of all rows; under a full covariance, those of uncorrelated coordinates.
        """
        is_full = self.coordinates[name].covariance == "full"
        deep_setattr(self.locs, name, loc)
        deep_setattr(self.scales, name, torch.diag_embed(stddev) if is_full else stddev)

    @torch.no_grad()
    def multiply_scale(self, name: str, factor: Tensor) -> None:
        """Multiply the scale of a site that has parameters of its own, row by row of a full covariance's factor.

        :param name: name of a latent site that has no encoder.
        :param factor: positive, of the shape of the loc; or of a mini-batch of it, whose median over rows then is the factor.
        """
        loc, scale = attrgetter(name)(self.locs), attrgetter(name)(self.scales)
        if factor.shape != loc.shape:
            factor = factor.reshape(-1, *self._event_shapes[name]).median(0).values
        deep_setattr(self.scales, name, scale * (factor[..., None] if scale.dim() > loc.dim() else factor))

    def _encode_rows(self, name: str, y: Any) -> tuple[Tensor, Tensor]:
        """Compute loc and scale of an encoded site; raise unless they fit its shape and the rows of its plates."""
        loc, scale = self._encode(name, y)
        loc_shape = self._event_shapes[name]
        scale_shape = loc_shape * 2 if self.coordinates[name].covariance == "full" else loc_shape
        batch_dim, scale_batch_dim = loc.dim() - len(loc_shape), scale.dim() - len(scale_shape)
        fits = loc.shape[batch_dim:] == loc_shape and scale.shape[scale_batch_dim:] == scale_shape
        if not fits or scale_batch_dim > batch_dim:
            raise ValueError(
                f"expected loc {list(loc_shape)} and scale {list(scale_shape)} for each row from the encoder of {name!r}, got "
                f"{list(loc.shape)} and {list(scale.shape)}; give it the latent_dim and the covariance of the site"
            )
        self._check_rows(name, loc.shape[:batch_dim])
        return loc, scale

    def _check_rows(self, name: str, batch_shape: torch.Size) -> None:
        """Raise if an encoding has another number of rows than the plates of its site."""
        for frame in get_plates():
            if frame.dim is None or -frame.dim > len(batch_shape):
                continue
            if (rows := batch_shape[frame.dim]) not in (1, frame.size):
                raise ValueError(
                    f"expected {frame.size} rows in plate {frame.name!r} from the encoder of {name!r}, got {rows}; "
                    f"for data of other sizes pass create_plates=lambda *args: pyro.plate({frame.name!r}, <number of rows>)"
                )

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        self._create_plates(*args, **kwargs)
        return self.sample_sites([name for name, _ in self.prototype_trace.iter_stochastic_nodes()], args)

    def sample_globals(self, *args, local_plate: str, **kwargs) -> dict[str, Tensor]:
        """Draw the sites outside a plate over data, without running the encoders of sites inside the plate.

        :param args: arguments of the model.
        :param local_plate: name of the plate.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        with self._pyro_context:
            self._create_plates(*args, **kwargs)
            sites = self.prototype_trace.iter_stochastic_nodes()
            return self.sample_sites([name for name, site in sites if not _is_in(local_plate, site)], args)

    def sample_sites(self, names: Iterable[str], args: tuple) -> dict[str, Tensor]:
        """Draw the named sites, in plates that were created before.

        :param names: names of latent sites.
        :param args: arguments of the model, for encoders.
        """
        values = {}
        for name in names:
            with self.in_plates(name):
                values[name] = pyro.sample(name, self._constrained(name, args))
        return values

    @contextmanager
    def in_plates(self, name: str) -> Iterator[None]:
        """Enter the plates of a site.

        :param name: name of a latent site.
        """
        with ExitStack() as stack:
            for frame in self.prototype_trace.nodes[name]["cond_indep_stack"]:
                stack.enter_context(self.plates[frame.name])
            yield

    def _posterior(self, name: str, args: tuple) -> Any:
        """Return the posterior of a site in unconstrained space."""
        return self.coordinates[name].base(*self.loc_and_scale(name, args))

    def _constrained(self, name: str, args: tuple) -> Any:
        """Return the posterior of a site in its support."""
        posterior, transform = self._posterior(name, args), self.coordinates[name].transform
        return posterior if transform is None else dist.TransformedDistribution(posterior, transform)

    @torch.no_grad()
    @pyro_lock
    def quantiles(self, quantiles: list[float] | Tensor, *args, **kwargs) -> dict[str, Tensor]:
        """Compute marginal posterior quantiles by site, along a new first dimension.

        Where the support constrains coordinates jointly, as a simplex does, the results are the images of the unconstrained
        quantiles.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model, which encoders need.
        :raises ValueError: before the first call of the guide.
        """
        self._check_is_called()
        result = {}
        for name, _ in self.prototype_trace.iter_stochastic_nodes():
            base = self._posterior(name, args)
            q = torch.as_tensor(quantiles, dtype=base.mean.dtype, device=base.mean.device)
            transform = self.coordinates[name].transform
            sign = 1 if transform is None else direction(transform)
            normal = torch.distributions.Normal(sign * base.mean, base.stddev)
            values = sign * normal.icdf(q.reshape(-1, *(1,) * base.mean.dim()))
            result[name] = values if transform is None else transform(values)
        return result


class _ExplicitSubsamples(Messenger):
    """Record the names of the plates that the model subsamples by an explicit index."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg):
        if site_is_subsample(msg) and msg["value"] is not None:
            self.names.add(msg["name"])


class _FullInitialValues:
    """Initial values of all rows; a model that runs on a mini-batch gets those of the first rows."""

    def __init__(self, init_loc_fn: Callable[[dict], Tensor]):
        self._init_loc_fn = init_loc_fn
        self._values: dict[str, Tensor] = {}

    def __call__(self, site: dict) -> Tensor:
        value = self._values[site["name"]] = self._expanded(self._init_loc_fn(site).detach(), site)
        for frame, dim in _subsampled(site):
            value = value.narrow(dim, 0, frame.size)
        return value

    def _expanded(self, value: Tensor, site: dict) -> Tensor:
        """Expand a value to the shape of its site, or to that shape with all rows of a subsampled plate."""
        shape, full_shape = list(site["fn"].shape()), list(site["fn"].shape())
        for frame, dim in _subsampled(site):
            full_shape[dim] = frame.full_size
            if value.shape[dim:][:1] == (frame.full_size,):
                shape[dim] = frame.full_size
        try:
            return value.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"expected an initial value of site {site['name']!r} of shape {full_shape}, got {list(value.shape)}; correct "
                "init_loc_fn"
            ) from error

    def of_all_rows(self, name: str, site: dict) -> Tensor:
        """Return the initial value of a site, with all rows of subsampled plates."""
        # Sites that a reparameteriser makes have no initial value of their own; the replaced site determines their values.
        value = self._values.get(name, site["value"])
        for frame, dim in _subsampled(site):
            value = periodic_repeat(value, frame.full_size, dim)
        return value


def _is_in(plate: str, site: dict) -> bool:
    return any(frame.name == plate for frame in site["cond_indep_stack"])


def _subsampled(site: dict) -> list[tuple[Any, int]]:
    """Return the subsampled plates of a site, each with its dimension in the values of the site."""
    frames = site["cond_indep_stack"]
    return [(f, f.dim - site["fn"].event_dim) for f in frames if f.full_size not in (None, f.size)]


def _is_real(support: constraints.Constraint) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real
