"""Guides that multiply the prior of inducing values by sites from an encoder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro import poutine
from torch import Tensor, nn

from pyro_lvgp._compile.recording import assume
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_inputs, check_values
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.distributions.sparse_gaussian_process import InducingValues, SparseProcess
from pyro_lvgp.guides._handlers import Replace
from pyro_lvgp.guides.structured import StructuredGPGuide
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians, marginalizes_gaussians
from pyro_lvgp.infer.protocols import HasConditionalSite, HasInducingPoints, HasProcessSite
from pyro_lvgp.networks import NeighbourNet, OffsetNet
from pyro_lvgp.ops import sparse_sites
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["Memory", "SparseStructuredGPGuide"]


class _PointSites(NamedTuple):
    """Sites on linear functions of the whitened inducing values, with a dimension for the plate of the points.

    :param G: the functions, in columns.
    :param precision: of the sites.
    :param information: of the sites.
    """

    G: Float[Tensor, "*#batch M R"]
    precision: Float[Tensor, "*#batch R"]
    information: Float[Tensor, "*#batch R"]


class Memory(NamedTuple):
    """Natural parameters of the data that a guide was conditioned on.

    :param inducing_points: where the sites lie.
    :param precision: H of the whitened inducing values, summed over those data.
    :param information: h of them.
    """

    inducing_points: Tensor
    precision: Float[Tensor, "*batch Q M M"]
    information: Float[Tensor, "*batch Q M"]


class SparseStructuredGPGuide(StructuredGPGuide):
    r"""Guide that multiplies the prior of inducing values by Gaussian sites from an encoder.

    .. math::

        q(f, u) = p(f \mid u) \, q(u), \qquad q(u) \propto p(u) \prod_n l_n(u)

    - An :class:`~pyro_lvgp.networks.OffsetNet` gives sites :math:`N(u_{mk}; \mu, v)` on the T inducing points nearest to
      each datum ("nearest"): the mean of q(f) is :math:`k_{fu} (K_{uu} + \Sigma)^{-1} \mu` and its covariance
      :math:`k_{ff} - k_{fu} (K_{uu} + \Sigma)^{-1} k_{uf}`, with the natural parameters of the diagonal Σ summed over data.
    - A :class:`~pyro_lvgp.networks.NeighbourNet` gives sites :math:`N(f_{nk}; \mu_m, v_m)` for each of the T nearest points m,
      and the kernel takes each of them to its inducing value ("neighbours"):
      :math:`\int N(f_{nk}; \mu_m, v_m) \, p(f_{nk} \mid u_{mk}) \, df_{nk} = N(a u_{mk}; \mu_m, v_m + c)`, with
      :math:`a = k_{nm} / k_{mm}` and :math:`c = k_{nn} - k_{nm}^2 / k_{mm}`.
    - Any other encoder, such as an :class:`~pyro_lvgp.networks.IndexNet`, gives sites :math:`N(f_{nk}; \mu, v)` where the data
      are, and they are projected on u through its conditional ("projected"):
      :math:`q(u) \propto p(u) \prod_n N(k_{nu} K_{uu}^{-1} u; \mu_n, v_n)`.
    - With ``None``, q(u) is a Gaussian of its own for each series ("free"), which knows no new data.

    In a mini-batch of points of one series natural parameters are scaled by N/B.  All q(u) but the last then change with the
    batch, and the bound is biased: upward, since each batch is scored by a posterior that saw it.  With ``held_out`` of the
    model it is an unbiased estimate of the bound of a q(u) that saw a part.  It is exact with mini-batches of series, and with
    a free q(u).

    :meth:`condition` takes in data for good, which makes it a filter for streams.

    :param model: a Pyro model with a site of :class:`~pyro_lvgp.distributions.InducingValues`, such as ``SparseGPVAE``.
    :param encoders: by site, ``{"u": OffsetNet(...), "w": IndexNet(...)}``; with None, or left out, a site has a Gaussian of
        its own.
    :param given: sites that keep the model's prior given u; ``("f",)`` for our model.
    :param init_loc_fn: initial values of the mean-field sites, as for :class:`~pyro_lvgp.guides.MeanFieldGuide`.
    :param init_scale: initial scale of a free q(u), and of mean-field Gaussians.
    :param create_plates: as for Pyro's autoguides, for the mean-field sites.
    :raises ValueError: for a site that is not there, or an encoding of the wrong shape.

    :class:`~pyro_lvgp.infer.MeanFieldELBO` with ``local_plate="points"`` marginalises u: each f_n is drawn from its marginal.

    Source: eqs. 3.41 to 3.47 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders";
    Hensman et al. (2013), "Gaussian processes for big data", for the free form.

    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.models import SparseGPVAE
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> model = SparseGPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 4), torch.linspace(0.0, 1.0, 5)[:, None])
    >>> encoder = OffsetNet(IndexNet(4, 8), 8, input_dim=1, latent_dim=2, num_nearest=3)
    >>> guide = SparseStructuredGPGuide(model, encoders={"u": encoder})
    >>> t, y = torch.linspace(0.0, 1.0, 100)[:, None], torch.randn(100, 4)
    >>> guide(t, y)["u"].shape
    torch.Size([2, 5])
    >>> memory = guide.condition(t, y)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        encoders: Mapping[str, nn.Module | None] | None = None,
        given: Sequence[str] | None = None,
        init_loc_fn: Callable[[dict], Tensor] | None = None,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
    ):
        if given is None:
            if not isinstance(model, HasConditionalSite):
                raise ValueError(
                    f"expected given=(<name of the sites given u>,), got none for {type(model).__name__}; a model without "
                    "inducing points takes a StructuredGPGuide"
                )
            given = (model.conditional_site,)
        self._given = frozenset(given)
        super().__init__(
            model,
            encoders={
                **{name: encoder for name, encoder in (encoders or {}).items() if encoder is not None},
                **dict.fromkeys(given),
            },
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            create_plates=create_plates,
        )
        self.memory: Memory | None = None

    def _add_parameters(self, name: str, site: Any, prior: Any) -> None:
        if name not in self._given:
            super()._add_parameters(name, site, prior)

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        with MarginalizeOwnGaussians() if marginalizes_gaussians() else nullcontext():
            return super().forward(*args, **kwargs)

    def _posterior(self, name: str, prior: Any, args: tuple) -> Any:
        if name in self._given:
            return prior
        process = _process_of(prior)
        if process is None or name not in self._encoded:
            return super()._posterior(name, prior, args)
        point_sites = self._point_sites(name, process, args)
        if self.memory is not None:
            self._check_order_of_rows()
            self._check_memory()
        sites = self._with_memory(point_sites)
        loc, scale_tril = sparse_sites.posterior(
            sites, lambda: self._with_memory(_PointSites(*(part.double() for part in point_sites)))
        )
        return dist.MultivariateNormal(loc, scale_tril=scale_tril).expand(prior.batch_shape)

    def _point_sites(self, name: str, process: SparseProcess, args: tuple) -> _PointSites:
        """Sites of the data among the arguments, on the inducing values."""
        encoder, y = attrgetter(name)(self.encoders), self._data(args)
        if isinstance(encoder, OffsetNet | NeighbourNet):
            return _nearest(process, encoder, y, name)
        return _projected(process, self._encoding(name, y), y, name)

    def _with_memory(self, point_sites: _PointSites) -> Sites:
        """Sites of the data and of the memory together, [*series, Q, M]."""
        sites = _aggregate(point_sites)
        return sites if self.memory is None else _product(Sites(self.memory.precision, self.memory.information), sites)

    @torch.no_grad()
    def condition(self, *args, inducing_points: Float[Tensor, "*Z M P"] | None = None) -> Memory:
        """Take in data for good, without training: every later posterior is given them too.

        What earlier data said is carried to new inducing points first; if the old are among them, nothing is lost but by
        rounding, which is coarse in float32 where sites are sharp and inducing points dense.  From then on give the guide data
        that it does not remember, or rows of NaN where it is to predict, and train neither kernel nor inducing points.

        :param args: arguments of the model: new data; with ``idx`` points count as a mini-batch of all there are.
        :param inducing_points: where the model's inducing points are to be from now on: the old ones and more, fewer, or
            others.
        :returns: what is remembered, also in ``guide.memory``; save it, and :meth:`restore` it.
        :raises ValueError: if q(u) is free, the guide was never called, the model has several processes or keeps its inducing
            points elsewhere than in ``inducing_points``, or data or inducing points do not fit; nothing is changed then.
        """
        y = self._data(args)
        if isinstance(self.model, HasProcessSite):  # whose inputs are the first argument
            check_inputs(args[0], y)
        check_values(y.reshape(-1, y.shape[-1]), rows=False, columns=False)
        self._check_memory()
        name, process = self._process(args)
        if inducing_points is None:
            return self._remember(name, process, process, args)
        before = self.model.inducing_points.detach()
        self._move(inducing_points)
        try:
            return self._remember(name, process, self._process(args)[1], args)
        except Exception:
            self._move(before)
            raise

    def _remember(self, name: str, old: SparseProcess, process: SparseProcess, args: tuple) -> Memory:
        """Carry the memory from the old inducing values to those of a process, and add what the data say of these."""
        with eval_mode(self):
            sites = _aggregate(self._point_sites(name, process, args))
        if self.memory is not None:
            known = Sites(self.memory.precision, self.memory.information)
            if process is not old:
                # Sharp sites times what rounding in single precision leaves of I − CᵀC would move the posterior.
                wide = Sites(known.precision.double().unsqueeze(-4), known.information.double().unsqueeze(-3))
                carried = sparse_sites.transfer(wide, process.double().whitened_covariance(old.double()))
                known = _by_series(Sites(*(part.to(process.L) for part in carried)))
            sites = _product(known, sites)
        self.memory = Memory(self.model.inducing_points.detach().clone(), *sites)
        return self.memory

    def _check_memory(self) -> None:
        """Raise if the model's inducing points are not those of the memory."""
        if self.memory is None:
            return
        with poutine.block():
            now, then = self.model.inducing_points, self.memory.inducing_points
        if now.shape != then.shape or not assume((now == then).all()):
            raise ValueError(
                "expected the model's inducing points where the guide remembers data, got others; go back by "
                "guide.restore(guide.memory), hold them by requires_grad_(False), and move them by "
                "condition(..., inducing_points=...) alone"
            )

    def restore(self, memory: Memory | None) -> None:
        """Remember what :meth:`condition` returned, with the inducing points of then; or nothing.

        :param memory: what was remembered under the same kernel, or None.
        """
        if memory is not None:
            self._move(memory.inducing_points)
            memory = Memory(*(part.to(self.model.inducing_points) for part in memory))
        self.memory = memory

    def _apply(self, fn, recurse=True):
        """Move the memory with the parameters; ``to()``, ``double()`` and the like call this."""
        super()._apply(fn, recurse)
        if self.memory is not None:
            self.memory = Memory(*map(fn, self.memory))
        return self

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the memory, for ``state_dict()``."""
        return {} if self.memory is None else self.memory._asdict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the memory, and with it the model's inducing points.

        :param state: what :meth:`get_extra_state` returned.
        """
        self.restore(Memory(**state) if state else None)

    def _move(self, inducing_points: Tensor) -> None:
        old = self.model.inducing_points
        if inducing_points.dim() != old.dim() or inducing_points.shape[-1] != old.shape[-1] or not inducing_points.numel():
            raise ValueError(
                f"expected inducing points laid out as the model's {list(old.shape)}, got {list(inducing_points.shape)}; a "
                "single column needs [:, None]"
            )
        if not torch.isfinite(inducing_points).all():
            raise ValueError("expected finite inducing points, got NaN or infinity")
        self.model.place_inducing_points(inducing_points)

    def _process(self, args: tuple) -> tuple[str, SparseProcess]:
        """The site of inducing values that has an encoder, and its process where mean-field sites are at their medians."""
        medians = self.mean_field.median(*args)
        found: dict[str, SparseProcess] = {}

        def at_median(name: str, prior: Any) -> Any:
            if name in medians:
                return dist.Delta(medians[name], event_dim=prior.event_dim)
            if (process := _process_of(prior)) is not None:
                self._check_order_of_rows()
                found[name] = process
            return prior

        with seeded(0), poutine.block(), Replace(at_median):
            self.model(*args)
        if not found:
            raise ValueError(
                "expected an encoder for the inducing values, got a free q(u), which takes in no new data; pass one"
            )
        if len(found) > 1 or not isinstance(self.model, HasInducingPoints):
            raise ValueError(
                "expected a model with one site of inducing values, whose inducing points are its parameter inducing_points, "
                f"and a method place_inducing_points, got {sorted(found)} in {type(self.model).__name__}; stack the processes "
                "in one site, and see pyro_lvgp.infer.protocols.HasInducingPoints"
            )
        return next(iter(found.items()))

    def _keeps_spread(self, prior: Any) -> bool:
        return _process_of(prior) is not None


def _process_of(prior: Any) -> SparseProcess | None:
    """The process of which a prior is the inducing values, if it is."""
    prior = without_independent(prior)
    return prior.process if isinstance(prior, InducingValues) else None


def _projected(process: SparseProcess, encoding: tuple[Tensor, Tensor], y: Tensor, name: str) -> _PointSites:
    """Sites on f where the data are, projected on the inducing values."""
    loc, scale = (part.mT.unsqueeze(-3) for part in encoding)
    _check(name, process, loc, -2)
    return _PointSites(process.A, *_natural(loc, scale.square(), _weight(process, y)))


def _nearest(process: SparseProcess, encoder: OffsetNet | NeighbourNet, y: Tensor, name: str) -> _PointSites:
    """Sites on the inducing values nearest to each datum, or on f and taken there one by one, summed over data."""
    index = sparse_sites.nearest(process.similarity, min(encoder.num_nearest, process.num_inducing))
    loc, scale = encoder(y[..., None, None, :, :], process.offsets(index))
    _check(name, process, loc, -1)
    loc, variance = _by_process(loc), _by_process(scale).square()
    gain, left = process.given_single_value(index) if isinstance(encoder, NeighbourNet) else (variance.new_ones(()), 0.0)
    precision, information = _natural(loc, variance + left, _weight(process, y)[..., None])
    natural = gain.square() * precision, gain * information
    return _PointSites(process.L.mT, *(sparse_sites.sum_at(index, part, process.num_inducing) for part in natural))


def _weight(process: SparseProcess, y: Tensor) -> Tensor:
    """How many data each point stands for, [*series, 1, 1, N]: none where nothing is observed."""
    return ((~torch.isnan(y)).any(-1).to(y) * process.weight)[..., None, None, :]


def _natural(loc: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and information of sites, zero where a point stands for nothing."""
    precision = torch.where(weight > 0.0, weight / variance, 0.0)
    return precision, precision * loc


def _by_process(x: Tensor) -> Tensor:
    """Encodings [*, q, N, T, Q] of offsets to the points of each process, or q = 1 of shared points, as [*, Q, N, T]."""
    if x.shape[-4] == 1:
        return x.transpose(-4, -1).squeeze(-1)
    return x.diagonal(dim1=-4, dim2=-1).movedim(-1, -3)


def _check(name: str, process: SparseProcess, loc: Tensor, dim: int) -> None:
    if loc.shape[dim] != process.num_latents:
        raise ValueError(
            f"expected sites of {process.num_latents} processes for {name!r}, got an encoding of {loc.shape[dim]}; encoders "
            "return loc and scale [..., latent dimensions]"
        )


def _product(known: Sites, new: Sites) -> Sites:
    """Natural parameters add up; what is known of one series serves all."""
    if known.information.shape[:-2] not in ((), new.information.shape[:-2]):
        raise ValueError(
            f"expected the {len(known.information)} series that the guide remembers, got {list(new.information.shape[:-2])}; "
            "give it all of them, with rows of NaN where nothing is new"
        )
    return Sites(known.precision + new.precision, known.information + new.information)


def _aggregate(point_sites: _PointSites) -> Sites:
    """One factor of all sites, [*series, Q, M]."""
    return _by_series(sparse_sites.aggregate(*point_sites))


def _by_series(sites: Sites) -> Sites:
    """Without the dimension that stands for the plate of the points, [*series, Q, M]."""
    return Sites(sites.precision.squeeze(-4), sites.information.squeeze(-3))
