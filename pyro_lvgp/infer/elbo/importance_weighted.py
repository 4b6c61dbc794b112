"""Importance-weighted bound with weights per datum."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pyro.distributions import Delta, Unit
from pyro.distributions.util import detach, scale_and_mask
from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.distributions.path_delta import PathDelta
from pyro_lvgp.infer.elbo._terms import Sites, log_ratio
from pyro_lvgp.infer.elbo.local_plate import SAMPLES, LocalELBO

__all__ = ["ImportanceWeightedELBO"]


class ImportanceWeightedELBO(LocalELBO):
    r"""Importance-weighted bound with a weight for each datum of one plate, valid with subsampling and global sites.

    .. math::

        E_{g \sim q}\Big[ \tfrac{N}{B} \sum_{n \in \text{batch}} E \log \tfrac{1}{S} \sum_{s=1}^S
        \frac{p(y_n, x_{ns} \mid g)}{q(x_{ns} \mid g)} \Big] - KL(q(g) \,\|\, p(g)).

    The globals g are all sites outside the plate.  They are drawn once for all S draws of the local sites, and their KL
    divergence is analytic where there is a closed form.  All terms of a datum are inside the logarithm, and the subsampling
    factor is outside.  (``pyro.infer.RenyiELBO`` weighs all data jointly and has the factor inside, which is not a bound.)

    :param local_plate: name of the plate over data.
    :param num_samples: number S of draws of the local sites; 1 is the ordinary bound.
    :param gradient_estimator: ``"standard"``, or ``"dreg"`` for the doubly reparameterised gradient of the local guide's
        parameters, whose signal does not vanish as S grows; not for annealed sites, whose density has no parameters apart
        from its draws.
    :param marginalize: marginalise Gaussian globals in closed form where the model can
        (:func:`~pyro_lvgp.infer.sample_moments`), inside the logarithm.  That bound is a little looser, and its gradient has
        less noise; False draws the globals, as in the formula.
    :param num_particles: number of draws of the globals to average over.
    :param max_plate_nesting: as for Pyro's bounds; found by running model and guide once if omitted.
    :raises ValueError: if the plate is missing or a loop, a plate inside it is subsampled, the guide lacks a latent site of
        the model, a guide site cannot be reparameterised, the guide draws all data jointly, as ``AutoMultivariateNormal``
        does, the sites of a datum have different weights, or ``gradient_estimator="dreg"`` meets local guide sites that are
        annealed or depend on each other.

    Weights of data, by ``poutine.scale`` around model and guide or inside the plate, multiply the logarithm of each datum.

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(loc, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> loss = ImportanceWeightedELBO("data", num_samples=8)(model, AutoNormal(model))
    >>> loss(torch.zeros(5)).shape
    torch.Size([])

    References: Burda et al. (2016), "Importance weighted autoencoders"; Tucker et al. (2019), "Doubly reparameterized
    gradient estimators"; Salimbeni et al. (2019), eq. 5 of the annealed-GPLVM paper with the sum over outputs inside.
    """

    @checks_types
    def __init__(
        self,
        local_plate: str = "data",
        num_samples: int = 10,
        *,
        gradient_estimator: str = "standard",
        marginalize: bool = True,
        num_particles: int = 1,
        max_plate_nesting: int | float = math.inf,
    ):
        if gradient_estimator not in ("standard", "dreg"):
            raise ValueError(f'expected gradient_estimator "standard" or "dreg", got {gradient_estimator!r}')
        super().__init__(
            local_plate,
            num_samples,
            marginalize=marginalize,
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
        )
        self.gradient_estimator = gradient_estimator

    @pyro_lock
    def log_weights(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute log w_sn = log p(y_n, x_ns | g) − log q(x_ns | g) at one draw of the globals, ``[S, *plates]``."""
        model_sites, guide_sites = self._sample_sites(model, guide, args, kwargs)
        local_guide, global_guide = self._split(guide_sites)
        self._check_draws(local_guide, global_guide)
        log_w, _, dims = self._weights(self._split(model_sites)[0], local_guide)
        return log_w.reshape(log_w.shape[:1] + tuple(log_w.shape[dim] for dim in dims))

    def particle_bound(self, model_sites: Sites, guide_sites: Sites) -> Tensor:
        dreg = self.gradient_estimator == "dreg" and torch.is_grad_enabled()
        local_model, global_model = self._split(model_sites)
        local_guide, global_guide = self._split(guide_sites)
        self._check_draws(local_guide, global_guide)
        globals_ = log_ratio(global_model, global_guide)
        if self.num_samples == 1 and not dreg:  # the ordinary bound, which is linear in the terms, whatever their scales
            self._check_local_plate(local_model)
            self._plates_of_weights([*local_model.values(), *local_guide.values()])
            return log_ratio(local_model, local_guide) + globals_
        log_w, scale, _ = self._weights(local_model, local_guide, path_only=dreg)
        bound = (scale * (torch.logsumexp(log_w, 0) - math.log(self.num_samples))).sum() + globals_
        if not dreg:
            return bound
        # With constant w̃ = w / Σw, Σ w̃ log w has the gradient of the model; that of the draws needs another factor w̃.
        weights = torch.softmax(log_w.detach(), 0)
        for draw in _independent_draws(local_guide):
            draw.register_hook(partial(torch.mul, weights.reshape(weights.shape + (1,) * (draw.dim() - weights.dim()))))
        surrogate = (scale * (weights * log_w).sum(0)).sum() + globals_
        return surrogate + (bound - surrogate).detach()

    def _check_draws(self, local_guide: Sites, global_guide: Sites) -> None:
        """Raise if the local sites have one draw, made outside the plate, instead of S."""
        outside = [name for name, site in global_guide.items() if site["infer"].get("is_auxiliary")]
        is_copy = bool(local_guide) and all(type(_base(site["fn"])) is Delta for site in local_guide.values())
        if outside and is_copy and self.num_samples > 1:
            raise ValueError(
                f"expected a guide that draws the sites of plate {self.local_plate!r} inside it, datum by datum, got one that "
                f"draws {outside} outside of it: take a guide such as AutoNormal or MeanFieldGuide, or weigh all data jointly"
            )

    def _weights(
        self, model_sites: Sites, guide_sites: Sites, *, path_only: bool = False
    ) -> tuple[Tensor, float | Tensor, list[int]]:
        """Compute log w [S, *plates]; return it with the scale of each datum and the dimensions of the plates.

        Log w has size one at all other plates, which are summed over.

        :param path_only: differentiate the guide's densities through the draws only, not their parameters.
        """
        self._check_local_plate(model_sites)
        frames = self._plates_of_weights([*model_sites.values(), *guide_sites.values()])
        dims = sorted(frame.dim for frame in frames)
        scale = self._shared_scale({**model_sites, **{f"{name} of the guide": s for name, s in guide_sites.items()}}, dims)
        total = torch.zeros(())
        for site in model_sites.values():
            total = total + self._log_prob_of_weights(site, site["fn"], dims)
        for site in guide_sites.values():
            # The density of a Delta is a function of other draws.
            fixed = path_only and not isinstance(_base(site["fn"]), Delta)
            total = total - self._log_prob_of_weights(site, detach(site["fn"]) if fixed else site["fn"], dims)
        return total, scale, dims

    def _check_local_plate(self, sites: Sites) -> None:
        """Raise unless there is a vectorised local plate."""
        if not sites:
            raise ValueError(
                f"expected sites in a plate named {self.local_plate!r}, got none; pass local_plate=<the plate over data>"
            )
        frames = (frame for site in sites.values() for frame in site["cond_indep_stack"])
        if any(frame.name == self.local_plate and not frame.vectorized for frame in frames):
            raise ValueError(
                f"expected the data of plate {self.local_plate!r} side by side, each with its weight, got a loop over them; "
                "write `with pyro.plate(...)` for `for ... in pyro.plate(...)`"
            )

    def _plates_of_weights(self, sites: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the frames of the plates that contain all sites, whose rows have a weight each.

        :raises ValueError: if another plate is subsampled.
        """
        stacks = [{f.name: f for f in site["cond_indep_stack"] if f.vectorized and f.name != SAMPLES} for site in sites]
        shared = {name: frame for name, frame in stacks[0].items() if all(name in stack for stack in stacks)}
        for name, frame in {name: frame for stack in stacks for name, frame in stack.items()}.items():
            if name not in shared and frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"plate {name!r} inside {self.local_plate!r} is subsampled ({frame.size} of {frame.full_size}): a weight "
                    "needs all terms of its datum; subsample only the local plate"
                )
        return list(shared.values())

    def _shared_scale(self, sites: Sites, dims: Sequence[int]) -> float | Tensor:
        """Return the scale of each datum: the factor of subsampling times the weight, which all sites must share.

        :raises ValueError: for different scales of two sites, or of two terms of one datum.
        """
        scales = {name: site["scale"] for name, site in sites.items()}
        (first, scale), *others = scales.items()
        if torch.is_tensor(scale) and any(size > 1 and dim not in dims for dim, size in _sizes(scale)):
            raise ValueError(
                f"expected one weight for each datum of plate {self.local_plate!r}, got a scale of {first!r} of shape "
                f"{list(scale.shape)}, which differs within a datum; weigh whole data by poutine.scale"
            )
        for name, other in others:
            if not _are_equal(scale, other):
                raise ValueError(
                    f"expected one scale for all sites in plate {self.local_plate!r}, since a weight multiplies the logarithm "
                    f"of a datum, got other scales at {first!r} and {name!r}; put poutine.scale around all of its sites, "
                    "in model and guide"
                )
        return scale

    def _log_prob_of_weights(self, site: Mapping[str, Any], fn: Any, dims: Sequence[int]) -> Tensor:
        """Compute the log density of a site without its scale, summed over plates other than those of the weights.

        :param fn: distribution of the site.
        :param dims: dimensions of the plates of the weights.
        """
        log_prob = scale_and_mask(fn.log_prob(site["value"]), 1.0, site["mask"])
        log_prob = log_prob.reshape((1,) * (1 + int(self.max_plate_nesting) - log_prob.dim()) + log_prob.shape)
        inner = [dim for dim in range(1 - log_prob.dim(), 0) if dim not in dims]
        return log_prob.sum(inner, keepdim=True) if inner else log_prob


_base = partial(without_independent, masks=True)


def _sizes(x: Tensor) -> list[tuple[int, int]]:
    """Return pairs of a negative dimension and its size."""
    return [(dim, x.shape[dim]) for dim in range(-x.dim(), 0)]


def _are_equal(scale: float | Tensor, other: float | Tensor) -> bool:
    """Return whether two scales are equal up to rounding."""
    if not torch.is_tensor(scale) and not torch.is_tensor(other):
        return math.isclose(scale, other, rel_tol=1e-6)
    scale, other = (x if torch.is_tensor(x) else torch.tensor(x) for x in (scale, other))
    return scale is other or holds(torch.isclose(scale, other.to(scale), rtol=1e-6, atol=0.0).all())


def _independent_draws(sites: Sites) -> list[Tensor]:
    """Return the random draws of guide sites; raise if they are annealed or depend on each other."""
    if annealed := [name for name, site in sites.items() if isinstance(_base(site["fn"]), PathDelta)]:
        raise ValueError(
            f'gradient_estimator="dreg" is not defined for the chains of {annealed}; use gradient_estimator="standard"'
        )
    draws = {
        name: site["value"]
        for name, site in sites.items()
        if site["value"].requires_grad and not isinstance(_base(site["fn"]), Delta | Unit)
    }
    names = list(draws)
    for i, name in enumerate(names):
        for earlier in names[:i]:
            (path,) = torch.autograd.grad(draws[name].sum(), draws[earlier], retain_graph=True, allow_unused=True)
            if path is not None:
                raise ValueError(
                    f'gradient_estimator="dreg" needs local guide sites drawn independently, but {name!r} depends on '
                    f'{earlier!r}; use gradient_estimator="standard"'
                )
    return list(draws.values())
