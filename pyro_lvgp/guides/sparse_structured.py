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
from pyro_lvgp.guides._inducing_sites import (
    PointSites,
    aggregate,
    by_series,
    nearest,
    product,
    projected,
    weight_of_points,
)
from pyro_lvgp.guides._site_factors import Factor, InducingFactor, expand_to
from pyro_lvgp.guides.structured import StructuredGPGuide
from pyro_lvgp.infer.elbo.handlers import MarginalizeOwnGaussians, marginalizes_gaussians
from pyro_lvgp.infer.protocols import HasConditionalSite, HasInducingPoints, HasProcessSite
from pyro_lvgp.networks import NeighbourNet, OffsetNet
from pyro_lvgp.ops import sparse_sites
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["Memory", "SparseStructuredGPGuide"]


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

    With ``num_eval_site_updates`` the sites of an encoder are the start of natural-gradient steps of size ρ on the bound of
    each series in evaluation mode, in which ``predict``, ``impute``, ``forecast`` and :meth:`condition` run, as for a
    :class:`StructuredGPGuide`.  The sites of all data together are a Gaussian factor of the whitened inducing values v
    with precision H and information h.  With the conditional means :math:`A^T v` of f, the means m and variances v of
    q(f), and :math:`L = E_q[\log p(y \mid f)]`,

    .. math::

        H \leftarrow (1 - \rho) H + \rho A C A^T, \qquad h \leftarrow (1 - \rho) h + \rho A (g + C m), \qquad
        g = \frac{\partial L}{\partial m}, \qquad C = 2 \Big|\frac{\partial L}{\partial v}\Big|

    One update is exact for one process, a linear decoder and Gaussian noise: q(u) is then the optimum of Titsias (2009).

    :meth:`condition` adds data to a memory on which all later posteriors are conditioned, for streams of data.

    :param model: a Pyro model with a site of :class:`~pyro_lvgp.distributions.InducingValues`, such as ``SparseGPVAE``.
    :param encoders: encoders by site, ``{"u": OffsetNet(...), "w": IndexNet(...)}``; a site without one, or with None, has a
        free Gaussian.
    :param given: names of the sites that have the model's prior given u; by default ``(model.conditional_site,)``, which is
        ``("f",)`` for a ``SparseGPVAE``.
    :param init_loc_fn: initial values of the mean-field sites, as for :class:`~pyro_lvgp.guides.MeanFieldGuide`.
    :param init_scale: initial scale of a free q(u), and of mean-field Gaussians.
    :param create_plates: as for Pyro's autoguides, for the mean-field sites.
    :param num_site_updates: number of updates of the sites of encoders in training mode, through which gradients flow.
    :param num_eval_site_updates: their number in evaluation mode; 0 takes the sites of the encoder, those of training.
        There are no updates for a free q(u), for a model that is no :class:`~pyro_lvgp.infer.protocols.HasPointLikelihood` and
        :class:`~pyro_lvgp.infer.protocols.HasConditionalSite`, with other latents of points that are not in ``encoders``, or
        with other latents of points in a mini-batch of the points of one series.
    :param site_step_size: largest step size ρ of an update.
    :raises ValueError: for an unknown site, no ``given`` for a model without a ``conditional_site``, an encoding of the
        wrong shape, a negative number of updates, a step size that is not above 0 and at most 1, or ``num_site_updates`` where
        there are no updates.
    :raises TypeError: for ``num_site_updates`` with a model that is no ``HasPointLikelihood`` or without an encoder.

    :class:`~pyro_lvgp.infer.MeanFieldELBO` with ``local_plate="points"`` marginalises u: each f_n is drawn from its marginal.

    Source: eqs. 3.41 to 3.47 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders";
    Hensman et al. (2013), "Gaussian processes for big data", for the free form; Khan and Lin (2017), "Conjugate-computation
    variational inference", and Adam et al. (2021), "Dual parameterization of sparse variational Gaussian processes", for the
    updates.

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
        num_site_updates: int = 0,
        num_eval_site_updates: int = 0,
        site_step_size: float = 1.0,
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
            num_site_updates=num_site_updates,
            num_eval_site_updates=num_eval_site_updates,
            site_step_size=site_step_size,
        )
        self.memory: Memory | None = None

    def _add_parameters(self, name: str, site: Any, prior: Any) -> None:
        if name not in self._given:
            super()._add_parameters(name, site, prior)

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        with MarginalizeOwnGaussians() if marginalizes_gaussians() else nullcontext():
            return super().forward(*args, **kwargs)

    def _can_update_sites(self, latents: Mapping[str, Any]) -> bool:
        model = self.model
        is_encoded = isinstance(model, HasConditionalSite) and model.gp_site in self._encoded
        if is_encoded and self._given == {model.conditional_site}:
            return super()._can_update_sites(latents)
        if self.num_site_updates:
            raise ValueError(
                f"expected an encoder of the inducing values and given=(conditional_site,) for num_site_updates="
                f"{self.num_site_updates}, got given={sorted(self._given)} and encoders of {sorted(self._encoded)}; take "
                "num_site_updates=0"
            )
        return False

    def _weight_of_points(self, priors: Mapping[str, Any]) -> float | Tensor:
        return self._process_of_model(priors).weight

    def _factors(self, priors: Mapping[str, Any], args: tuple, plates: Mapping[int, int]) -> dict[str, Factor]:
        u, f = self.model.gp_site, self.model.conditional_site
        process, y = self._process_of_model(priors), self._data(args)
        others = {name: prior for name, prior in priors.items() if name not in (u, f)}
        if others and not (isinstance(process.weight, float) and process.weight == 1.0):
            if self.training:
                raise ValueError(
                    f"expected all points of a series for num_site_updates={self.num_site_updates}, got a mini-batch of them "
                    f"and latents of points at {sorted(others)}; take num_site_updates=0"
                )
            return {}
        sites, batch = aggregate(self._point_sites(u, process, args)), expand_to(priors[u], plates).batch_shape
        precision, information = (
            part.expand(batch + part.shape[-num_dims:]) for part, num_dims in zip(sites, (2, 1), strict=True)
        )
        has_data = (weight_of_points(process, y) > 0.0).squeeze((-3, -2))
        return {
            f: InducingFactor(process, Sites(precision, information), self._memory_sites(), has_data),
            **{name: self._point_factor(name, expand_to(prior, plates), args) for name, prior in others.items()},
        }

    def _process_of_model(self, priors: Mapping[str, Any]) -> SparseProcess:
        """Return the process of the prior of the inducing values."""
        process = _process_of(priors[self.model.gp_site])
        assert process is not None
        return process

    def _posterior(self, name: str, prior: Any, args: tuple, updated: Mapping[str, Any] | None = None) -> Any:
        if name in self._given:
            return prior
        process = _process_of(prior)
        if process is None or name not in self._encoded:
            return super()._posterior(name, prior, args, updated)
        memory = self._memory_sites()
        if updated:
            sites = product(memory, updated[self.model.conditional_site])
            loc, scale_tril = (part.to(process.L) for part in inducing_posterior(sites))
        else:
            point_sites = self._point_sites(name, process, args)
            loc, scale_tril = inducing_posterior(
                product(memory, aggregate(point_sites)),
                lambda: product(memory, aggregate(PointSites(*(part.double() for part in point_sites)))),
            )
        return dist.MultivariateNormal(loc, scale_tril=scale_tril).expand(prior.batch_shape)

    def _memory_sites(self) -> Sites | None:
        """Return the sites of the memory, None without one; raise if they are not those of the model's inducing points."""
        if self.memory is None:
            return None
        self._check_order_of_rows()
        self._check_memory()
        return Sites(self.memory.precision, self.memory.information)

    def _point_sites(self, name: str, process: SparseProcess, args: tuple) -> PointSites:
        """Compute the sites of the data on the inducing values."""
        encoder, y = attrgetter(name)(self.encoders), self._data(args)
        if isinstance(encoder, OffsetNet | NeighbourNet):
            return nearest(process, encoder, y, name)
        return projected(process, self._encode(name, y), y, name)

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
        memory, points = self.memory, self.model.inducing_points.detach()
        try:
            if inducing_points is not None:
                self._move(inducing_points)
                old, process = process, self._process(args)[1]
                self._transfer_memory(old, process)
            sites = product(self._memory_sites(), self._sites_of_data(name, process, args))
        except Exception:
            self.memory = memory
            if inducing_points is not None:
                self._move(points)
            raise
        self.memory = Memory(self.model.inducing_points.detach().clone(), *(part.to(process.L) for part in sites))
        return self.memory

    def _transfer_memory(self, old: SparseProcess, process: SparseProcess) -> None:
        """Transfer the memory from the inducing values of one process to those of another."""
        if self.memory is None:
            return
        # In float32 the rounding errors of I − CᵀC times high precisions would change the posterior.
        in_double = Sites(self.memory.precision.double().unsqueeze(-4), self.memory.information.double().unsqueeze(-3))
        transferred = sparse_sites.transfer(in_double, process.double().whitened_covariance(old.double()))
        sites = by_series(Sites(*(part.to(process.L) for part in transferred)))
        self.memory = Memory(self.model.inducing_points.detach().clone(), *sites)

    def _sites_of_data(self, name: str, process: SparseProcess, args: tuple) -> Sites:
        """Compute the sites of data on the inducing values, at the medians of mean-field sites."""
        with eval_mode(self), seeded(0), poutine.block():
            updated, _ = self._update_sites(self._at_medians(args), args, {})
            return updated[self.model.conditional_site] if updated else aggregate(self._point_sites(name, process, args))

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
        at_medians = self._at_medians(args)
        found: dict[str, SparseProcess] = {}

        def at_median(name: str, prior: Any) -> Any:
            posterior = at_medians(name, prior)
            if posterior is prior and (process := _process_of(prior)) is not None:
                self._check_order_of_rows()
                found[name] = process
            return posterior

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

    def _at_medians(self, args: tuple) -> Callable[[str, Any], Any]:
        """Return a map from sites and their priors to points at the medians of mean-field sites, and to priors of others."""
        medians = self.mean_field.median(*args)

        def at_median(name: str, prior: Any) -> Any:
            return dist.Delta(medians[name], event_dim=prior.event_dim) if name in medians else prior

        return at_median

    def _is_marginalized(self, prior: Any) -> bool:
        return _process_of(prior) is not None


def _process_of(prior: Any) -> SparseProcess | None:
    """Return the process of a prior over inducing values; None for any other prior."""
    prior = without_independent(prior)
    return prior.process if isinstance(prior, InducingValues) else None
