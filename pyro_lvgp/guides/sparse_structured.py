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

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_inputs, check_values
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.distributions.sparse_gaussian_process import InducingValues, SparseProcess, inducing_posterior
from pyro_lvgp.guides._handlers import ReplacePriors
from pyro_lvgp.guides.structured import StructuredGPGuide
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians, marginalizes_gaussians
from pyro_lvgp.infer.protocols import HasConditionalSite, HasInducingPoints, HasProcessSite
from pyro_lvgp.networks import NeighbourNet, OffsetNet
from pyro_lvgp.ops import sparse_sites
from pyro_lvgp.ops.site_updates import NaturalSites
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["Memory", "SparseStructuredGPGuide"]


class _PointSites(NamedTuple):
    """Gaussian sites on linear functions of the whitened inducing values, with a dimension for the plate of the points.

    :param G: coefficients of the linear functions, one column for each.
    :param precision: precision of each site.
    :param information: precision times mean of each site.
    """

    G: Float[Tensor, "*#batch M R"]
    precision: Float[Tensor, "*#batch R"]
    information: Float[Tensor, "*#batch R"]


class Memory(NamedTuple):
    """Natural parameters of the data that a guide was conditioned on.

    :param inducing_points: inducing points that the natural parameters belong to.
    :param precision: sum over the data of the precision matrices of their sites on the whitened inducing values.
    :param information: sum over the data of precision times mean of these sites.
    """

    inducing_points: Tensor
    precision: Float[Tensor, "*batch Q M M"]
    information: Float[Tensor, "*batch Q M"]


class SparseStructuredGPGuide(StructuredGPGuide):
    r"""Guide that multiplies the prior of inducing values by Gaussian sites from an encoder.

    .. math::

        q(f, u) = p(f \mid u) \, q(u), \qquad q(u) \propto p(u) \prod_n l_n(u)

    - "Nearest": an :class:`~pyro_lvgp.networks.OffsetNet` gives sites :math:`N(u_{mk}; \mu, v)` on the T inducing points
      nearest to each datum.  The mean of q(f) is :math:`k_{fu} (K_{uu} + \Sigma)^{-1} \mu` and its covariance
      :math:`k_{ff} - k_{fu} (K_{uu} + \Sigma)^{-1} k_{uf}`, with the natural parameters of the diagonal Σ summed over data.
    - "Neighbours": a :class:`~pyro_lvgp.networks.NeighbourNet` gives sites :math:`N(f_{nk}; \mu_m, v_m)` for each of the T
      nearest points m, and the kernel turns each of them into a site on its inducing value:
      :math:`\int N(f_{nk}; \mu_m, v_m) \, p(f_{nk} \mid u_{mk}) \, df_{nk} = N(a u_{mk}; \mu_m, v_m + c)`, with
      :math:`a = k_{nm} / k_{mm}` and :math:`c = k_{nn} - k_{nm}^2 / k_{mm}`.
    - "Projected": any other encoder, such as an :class:`~pyro_lvgp.networks.IndexNet`, gives sites
      :math:`N(f_{nk}; \mu, v)` at the data, which are projected on u by the conditional mean of f given u:
      :math:`q(u) \propto p(u) \prod_n N(k_{nu} K_{uu}^{-1} u; \mu_n, v_n)`.
    - "Free": without an encoder, q(u) is a Gaussian with parameters of its own for each series, which do not depend on data.

    In a mini-batch of B of the N points of one series natural parameters are scaled by N/B.  Every q(u) but a free one then
    changes with the batch, and the bound is biased upwards, because each batch is scored by a posterior conditioned on it.
    With the model's ``held_out`` the bound is an unbiased estimate of that of a q(u) conditioned on a part of the batch.  The
    bound is unbiased with mini-batches of series, and with a free q(u).

    :meth:`condition` adds data to a memory on which all later posteriors are conditioned, for streams of data.

    :param model: a Pyro model with a site of :class:`~pyro_lvgp.distributions.InducingValues`, such as ``SparseGPVAE``.
    :param encoders: encoders by site, ``{"u": OffsetNet(...), "w": IndexNet(...)}``; a site without one, or with None, has a
        free Gaussian.
    :param given: names of the sites that have the model's prior given u; by default ``(model.conditional_site,)``, which is
        ``("f",)`` for a ``SparseGPVAE``.
    :param init_loc_fn: initial values of the mean-field sites, as for :class:`~pyro_lvgp.guides.MeanFieldGuide`.
    :param init_scale: initial scale of a free q(u), and of mean-field Gaussians.
    :param create_plates: as for Pyro's autoguides, for the mean-field sites.
    :raises ValueError: for an unknown site, no ``given`` for a model without a ``conditional_site``, or an encoding of the
        wrong shape.

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
        if ignored := [name for name, encoder in (encoders or {}).items() if encoder is not None and name in self._given]:
            raise ValueError(
                f"expected encoders of sites that have a posterior, got one of {ignored}, drawn given the inducing values; "
                "give the encoder to the site of the inducing values, as in encoders={'u': ...}"
            )
        super().__init__(
            model,
            encoders={
                **{name: encoder for name, encoder in (encoders or {}).items() if encoder is not None},
                **dict.fromkeys(given),
            },
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            create_plates=create_plates,
            num_eval_site_updates=0,
        )
        self.memory: Memory | None = None

    def _add_parameters(self, name: str, site: Any, prior: Any) -> None:
        if name not in self._given:
            super()._add_parameters(name, site, prior)

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        with MarginalizeOwnGaussians() if marginalizes_gaussians() else nullcontext():
            return super().forward(*args, **kwargs)

    def _posterior(self, name: str, prior: Any, args: tuple, updated: Mapping[str, NaturalSites] | None = None) -> Any:
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
        loc, scale_tril = inducing_posterior(
            sites, lambda: self._with_memory(_PointSites(*(part.double() for part in point_sites)))
        )
        return dist.MultivariateNormal(loc, scale_tril=scale_tril).expand(prior.batch_shape)

    def _point_sites(self, name: str, process: SparseProcess, args: tuple) -> _PointSites:
        """Compute the sites of the data on the inducing values."""
        encoder, y = attrgetter(name)(self.encoders), self._data(args)
        if isinstance(encoder, OffsetNet | NeighbourNet):
            return _nearest(process, encoder, y, name)
        return _projected(process, self._encode(name, y), y, name)

    def _with_memory(self, point_sites: _PointSites) -> Sites:
        """Return the product of the sites of the data and of the memory, [*series, Q, M]."""
        sites = _aggregate(point_sites)
        return sites if self.memory is None else _product(Sites(self.memory.precision, self.memory.information), sites)

    @torch.no_grad()
    @pyro_lock
    def condition(self, *args, inducing_points: Float[Tensor, "*Z M P"] | None = None) -> Memory:
        """Add data to the memory, on which every later posterior is conditioned, without training.

        With new inducing points the memory is transferred to these first.  The transfer is exact up to rounding if the old
        inducing points are among the new ones; in float32 rounding errors are large where site precisions are high and
        inducing points dense.  Afterwards call the guide with data that are not in the memory, or with rows of NaN to predict,
        and train neither the kernel nor the inducing points.

        :param args: arguments of the model with the new data; points with ``idx`` count as a mini-batch of all points.
        :param inducing_points: new inducing points of the model, in any number; None keeps the old ones.
        :returns: the memory, which ``guide.memory`` is too; :meth:`restore` takes it.
        :raises ValueError: if q(u) is free, the guide was never called, the model has several processes or is no
            :class:`~pyro_lvgp.infer.protocols.HasInducingPoints`, or data or inducing points have another shape than the
            model's; the memory then is that before the call.
        """
        y = self._data(args)
        if isinstance(self.model, HasProcessSite):  # its first argument are the inputs
            check_inputs(args[0], y)
        check_values(y.reshape(-1, y.shape[-1]), rows=False, columns=False)
        self._check_memory()
        name, process = self._process(args)
        if inducing_points is None:
            return self._update_memory(name, process, process, args)
        old_points = self.model.inducing_points.detach()
        self._move(inducing_points)
        try:
            return self._update_memory(name, process, self._process(args)[1], args)
        except Exception:
            self._move(old_points)
            raise

    def _update_memory(self, name: str, old: SparseProcess, process: SparseProcess, args: tuple) -> Memory:
        """Transfer the memory from the old inducing values to those of a process, and multiply it by the sites of the data."""
        with eval_mode(self):
            sites = _aggregate(self._point_sites(name, process, args))
        if self.memory is not None:
            memory = Sites(self.memory.precision, self.memory.information)
            if process is not old:
                # In float32 the rounding errors of I − CᵀC times high precisions would change the posterior.
                in_double = Sites(memory.precision.double().unsqueeze(-4), memory.information.double().unsqueeze(-3))
                transferred = sparse_sites.transfer(in_double, process.double().whitened_covariance(old.double()))
                memory = _by_series(Sites(*(part.to(process.L) for part in transferred)))
            sites = _product(memory, sites)
        self.memory = Memory(self.model.inducing_points.detach().clone(), *sites)
        return self.memory

    def _check_memory(self) -> None:
        """Raise if the model's inducing points are not those of the memory."""
        if self.memory is None:
            return
        with poutine.block():
            current, saved = self.model.inducing_points, self.memory.inducing_points
        if current.shape != saved.shape or not holds((current == saved).all()):
            raise ValueError(
                "expected the inducing points of the guide's memory in the model, got others; restore them by "
                "guide.restore(guide.memory), freeze them by requires_grad_(False), and change them only by "
                "condition(..., inducing_points=...)"
            )

    def restore(self, memory: Memory | None) -> None:
        """Restore a memory and its inducing points, or delete the memory.

        :param memory: returned by :meth:`condition` under the same kernel parameters; None deletes the memory.
        """
        if memory is not None:
            self._move(memory.inducing_points)
            memory = Memory(*(part.to(self.model.inducing_points) for part in memory))
        self.memory = memory

    def _apply(self, fn, recurse=True):
        """Convert the memory with the parameters; ``to()``, ``double()`` and other methods of modules call this."""
        super()._apply(fn, recurse)
        if self.memory is not None:
            self.memory = Memory(*map(fn, self.memory))
        return self

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the memory, for ``state_dict()``."""
        return {} if self.memory is None else self.memory._asdict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the memory, and with it the model's inducing points.

        :param state: returned by :meth:`get_extra_state`.
        """
        self.restore(Memory(**state) if state else None)

    def _move(self, inducing_points: Tensor) -> None:
        """Check new inducing points, and replace those of the model."""
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
        """Return the name of the encoded site of inducing values, and its process at the medians of mean-field sites."""
        medians = self.mean_field.median(*args)
        found: dict[str, SparseProcess] = {}

        def at_median(name: str, prior: Any) -> Any:
            if name in medians:
                return dist.Delta(medians[name], event_dim=prior.event_dim)
            if (process := _process_of(prior)) is not None:
                self._check_order_of_rows()
                found[name] = process
            return prior

        with seeded(0), poutine.block(), ReplacePriors(at_median):
            self.model(*args)
        if not found:
            raise ValueError(
                "expected an encoder for the inducing values, got a free q(u), which does not depend on data; pass "
                "encoders={<name of the inducing values>: encoder}"
            )
        if len(found) > 1 or not isinstance(self.model, HasInducingPoints):
            raise ValueError(
                "expected a model with one site of inducing values, whose inducing points are its parameter inducing_points, "
                f"and a method place_inducing_points, got {sorted(found)} in {type(self.model).__name__}; stack the processes "
                "in one site, and see pyro_lvgp.infer.protocols.HasInducingPoints"
            )
        return next(iter(found.items()))

    def _is_marginalized(self, prior: Any) -> bool:
        return _process_of(prior) is not None


def _process_of(prior: Any) -> SparseProcess | None:
    """Return the process of a prior over inducing values; None for any other prior."""
    prior = without_independent(prior)
    return prior.process if isinstance(prior, InducingValues) else None


def _projected(process: SparseProcess, encoding: tuple[Tensor, Tensor], y: Tensor, name: str) -> _PointSites:
    """Project sites on f at the data on the inducing values."""
    loc, scale = (part.mT.unsqueeze(-3) for part in encoding)
    _check(name, process, loc, -2)
    return _PointSites(process.A, *_natural(loc, scale.square(), _weight(process, y)))


def _nearest(process: SparseProcess, encoder: OffsetNet | NeighbourNet, y: Tensor, name: str) -> _PointSites:
    """Sum over data sites on the inducing values nearest to each datum; a ``NeighbourNet`` gives them by sites on f."""
    index = sparse_sites.nearest(process.similarity, min(encoder.num_nearest, process.num_inducing))
    loc, scale = encoder(y[..., None, None, :, :], process.offsets(index))
    _check(name, process, loc, -1)
    loc, variance = _by_process(loc), _by_process(scale).square()
    gain, conditional_variance = variance.new_ones(()), variance.new_zeros(())
    if isinstance(encoder, NeighbourNet):
        gain, conditional_variance = process.given_single_value(index)
    precision, information = _natural(loc, variance + conditional_variance, _weight(process, y)[..., None])
    natural = gain.square() * precision, gain * information
    return _PointSites(process.L.mT, *(sparse_sites.sum_at(index, part, process.num_inducing) for part in natural))


def _weight(process: SparseProcess, y: Tensor) -> Tensor:
    """Return the weight of each point, [*series, 1, 1, N]: N/B in a mini-batch, and zero without observed entries."""
    return ((~torch.isnan(y)).any(-1).to(y) * process.weight)[..., None, None, :]


def _natural(loc: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute precision and information of sites; both are zero where the weight is."""
    precision = torch.where(weight > 0.0, weight / variance, 0.0)
    return precision, precision * loc


def _by_process(x: Tensor) -> Tensor:
    """Convert encodings [*, q, N, T, Q] of offsets, q = Q or q = 1 if processes share their points, to [*, Q, N, T]."""
    if x.shape[-4] == 1:
        return x.transpose(-4, -1).squeeze(-1)
    return x.diagonal(dim1=-4, dim2=-1).movedim(-1, -3)


def _check(name: str, process: SparseProcess, loc: Tensor, dim: int) -> None:
    """Raise unless the dimension of an encoding has the size of the number of processes."""
    if loc.shape[dim] != process.num_latents:
        raise ValueError(
            f"expected sites of {process.num_latents} processes for {name!r}, got an encoding of {loc.shape[dim]}; encoders "
            "return loc and scale [..., latent dimensions]"
        )


def _product(memory: Sites, new: Sites) -> Sites:
    """Multiply sites by adding natural parameters; a memory of one series broadcasts over all."""
    if memory.information.shape[:-2] not in ((), new.information.shape[:-2]):
        raise ValueError(
            f"expected the {len(memory.information)} series of the guide's memory, got {list(new.information.shape[:-2])}; "
            "pass all of them, with rows of NaN for series without new data"
        )
    return Sites(memory.precision + new.precision, memory.information + new.information)


def _aggregate(point_sites: _PointSites) -> Sites:
    """Return the product of the sites of all points, [*series, Q, M]."""
    return _by_series(sparse_sites.aggregate(*point_sites))


def _by_series(sites: Sites) -> Sites:
    """Remove the dimension of the plate of the points, to [*series, Q, M]."""
    return Sites(sites.precision.squeeze(-4), sites.information.squeeze(-3))
