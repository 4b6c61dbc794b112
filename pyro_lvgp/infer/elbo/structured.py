"""Bound for Gaussian-process posteriors with Gaussian sites, with four estimators."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes, position_of_data
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.infer.elbo._terms import (
    Sites,
    check_in_guide,
    check_reparameterised,
    equals,
    log_ratio,
    share_masks,
    trace_guide,
)
from pyro_lvgp.infer.elbo.base import DifferentiableELBO
from pyro_lvgp.infer.elbo.handlers import EvaluateBound, MarginalizeGaussians
from pyro_lvgp.networks.corruption import Corruption
from pyro_lvgp.ops import gaussian_sites

__all__ = ["StructuredELBO", "structured"]

Value = Literal["semi-analytic", "doubly-stochastic"]
GradientEstimator = Literal["path", "score"]
_NUM_COMPARED_POINTS = 10


class StructuredELBO(DifferentiableELBO):
    r"""Bound under a :class:`~pyro_lvgp.guides.StructuredGPGuide`, computed from the marginals of q(f).

    With Gaussian sites l(f) and :math:`\log Z = \log \int p(f)\, l(f)\, df`, which has a closed form,

    .. math::

        E_{q(f)}\big[\log p(y \mid f)\big] - KL(q(f) \| p(f))
        = E_{q(f)}\Big[\log \frac{p(y \mid f)}{l(f)}\Big] + \log Z .

    ``value="semi-analytic"`` is the left side, with draws of f in the likelihood only.  ``"doubly-stochastic"`` is the right
    side, with draws in both logarithms, whose noise nearly cancels if the sites approximate the likelihood well.

    ``gradient_estimator="path"`` differentiates through the draw :math:`f_n = \hat m_n + \hat\Sigma_{nn}^{1/2} \epsilon`.
    ``"score"`` uses :math:`\nabla \log q(f_n)` for f, and path gradients for all other sites.  It multiplies this by the
    likelihood of point n alone if the rightmost plate has the name "points" and contains all points, otherwise by that of all
    points, which has more noise.  The four estimators have the same mean, and their gradients too.  Other sites of the model
    have their analytic KL divergence where there is one.

    Data must be independent given f, each observed entry given the f_n of its point, and the prior of no process may depend on
    another process.  Mini-batches of series are unbiased.  In a mini-batch of points of one series the normaliser Z is that of
    these points, and the bound is biased (eq. 3.25); the bias is small if lengthscales are short.

    :param value: ``"semi-analytic"`` or ``"doubly-stochastic"``.
    :param gradient_estimator: ``"path"`` or ``"score"``.
    :param num_particles: number of draws of all sites to average over.
    :param rescale: maximise a bound whose likelihood is divided by the observed fraction of the data.  The fraction is that of
        the mini-batch, and rows that pad a series count as missing, so that mini-batches of series are biased.
    :param corruption: function of the data that returns the corrupted data for the guide, to maximise eq. 5.6 (see
        :mod:`pyro_lvgp.networks.corruption`); the likelihood is that of all observed entries.
    :param vectorize_particles: draw particles along a dimension left of every plate; False draws them one by one.
    :param max_plate_nesting: as for Pyro's bounds; found by running model and guide once if omitted.
    :raises ValueError: for an unknown estimator, no particles, a guide site that cannot be reparameterised, a process whose
        prior depends on another, or whose scales in model and guide differ, or ``rescale`` or ``corruption`` without data.
    :raises TypeError: if ``corruption`` is no function.

    ``rescale`` and ``corruption`` change ``differentiable_loss`` and ``loss_and_grads``; ``loss`` is always minus the bound.

    Source: eqs. 3.18 to 3.25 and 5.6 of the GP-VAE thesis; the gradient of the doubly stochastic value takes
    ``∇ log Z = E_q[∇ log p(f) + ∇ log l(f)]`` in closed form.

    >>> from pyro_lvgp.guides import StructuredGPGuide
    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.models import GPVAE
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 4))
    >>> guide = StructuredGPGuide(model, encoders={"f": IndexNet(4, 2)})
    >>> t, y = torch.linspace(0.0, 1.0, 10)[:, None], torch.randn(10, 4)
    >>> StructuredELBO(max_plate_nesting=1)(model, guide)(t, y).backward()
    """

    @checks_types
    def __init__(
        self,
        *,
        value: Value = "semi-analytic",
        gradient_estimator: GradientEstimator = "path",
        num_particles: int = 1,
        rescale: bool = False,
        corruption: Corruption | None = None,
        vectorize_particles: bool = True,
        max_plate_nesting: int | float = math.inf,
    ):
        if value not in get_args(Value) or gradient_estimator not in get_args(GradientEstimator):
            raise ValueError(
                f"expected value in {get_args(Value)} and gradient_estimator in {get_args(GradientEstimator)}, got "
                f"{value!r} and {gradient_estimator!r}"
            )
        if not (corruption is None or callable(corruption)):
            raise TypeError(
                f"expected corruption to be a function of the data, got {corruption!r}; see pyro_lvgp.networks.corruption"
            )
        check_sizes(num_particles=num_particles)
        super().__init__(
            num_particles=num_particles, vectorize_particles=vectorize_particles, max_plate_nesting=max_plate_nesting
        )
        self.value, self.gradient_estimator, self.rescale, self.corruption = value, gradient_estimator, rescale, corruption
        self._checked_processes: set[frozenset[str]] = set()

    @pyro_lock
    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, without gradients, ``rescale`` or ``corruption``."""
        with torch.no_grad():
            loss = torch_item(self._loss(model, guide, 1.0, args, kwargs))
        self._limit.check(loss, model, guide, args, kwargs)
        return loss

    @property
    def is_bound(self) -> bool:
        return not self.rescale

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute minus an estimate of the bound with ``rescale`` and ``corruption``, to differentiate."""
        if not self.rescale and self.corruption is None:
            return self._loss(model, guide, 1.0, args, kwargs)
        data = position_of_data(args)
        y = args[data]
        corrupted = y if self.corruption is None else self.corruption(y)

        def corrupted_guide(*args, **kwargs):
            return guide(*args[:data], corrupted, *args[data + 1 :], **kwargs)

        weight = y.numel() / (~torch.isnan(y)).sum().clamp_min(1) if self.rescale else 1.0
        return self._loss(model, corrupted_guide, weight, args, kwargs)

    def _loss(self, model: Any, guide: Any, weight: float | Tensor, args: tuple, kwargs: dict) -> Tensor:
        traces = self._get_traces(model, guide, args, kwargs)
        bounds = [self._bound(model_trace, guide_trace, weight) for model_trace, guide_trace in traces]
        return -torch.stack(bounds).sum() / self.num_particles

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        draw = _DrawMarginals(detach=self.gradient_estimator == "score")
        with EvaluateBound(marginalize=True):
            guide_trace = trace_guide(draw(guide), args, kwargs)
            processes = frozenset(_processes(guide_trace))
            if len(processes) > 1 and processes not in self._checked_processes:
                with seeded(0), torch.enable_grad(), poutine.block(), EvaluateBound(marginalize=True):
                    _CheckIndependence()(guide)(*args, **kwargs)
                self._checked_processes.add(processes)
        marginalized = MarginalizeGaussians(guide_trace)(model)
        model_trace = poutine.trace(poutine.replay(marginalized, guide_trace)).get_trace(*args, **kwargs)
        share_masks(model_trace, guide_trace)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        return prune_subsample_sites(model_trace), prune_subsample_sites(guide_trace)

    def _bound(self, model_trace: Trace, guide_trace: Trace, weight: float | Tensor) -> Tensor:
        """Compute the sum of the bound over the vectorised particles."""
        model_sites, guide_sites = _sample_sites(model_trace), _sample_sites(guide_trace)
        check_reparameterised(guide_sites)
        check_in_guide(model_sites, guide_sites)
        processes = _processes(guide_trace)
        observed: dict[str, Any] = {}
        latent: dict[str, Any] = {}
        for name, site in model_sites.items():
            if name not in processes:
                (observed if site["is_observed"] else latent)[name] = site
        bound = log_ratio(latent, {name: site for name, site in guide_sites.items() if name not in processes})
        likelihoods = [
            (site, weight * scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]))
            for site in observed.values()
        ]
        priors = {
            name: (site, scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]))
            for name, site in latent.items()
            if self.gradient_estimator == "score" or is_validation_enabled()
        }
        if is_validation_enabled():
            for site, log_prob in (*likelihoods, *priors.values()):
                check_site_shape({**site, "log_prob": log_prob}, sys.maxsize)  # the plate of particles too
        bound = bound + sum(log_prob.sum() for _, log_prob in likelihoods)
        order = list(model_trace.nodes)
        for name, process in processes.items():
            if is_validation_enabled():
                _check_scales(name, model_trace, guide_trace)
                _check_prior(name, model_trace, guide_trace)
            # Sites that come after a process may depend on it.
            later = [term for other, term in priors.items() if order.index(other) > order.index(name)]
            bound = bound + self._process(process, [*likelihoods, *later])
        return bound

    def _process(self, site: Mapping[str, Any], later: list[tuple[Mapping[str, Any], Tensor]]) -> Tensor:
        """Compute the terms of the bound that belong to one process.

        :param site: site of the process in the guide.
        :param later: sites whose log densities may depend on the process, each with its log density.
        """
        q, f = structured(site["fn"]), site["value"]
        assert q is not None
        posterior, event_dim = q.posterior, site["fn"].event_dim - 1
        if self.value == "semi-analytic":
            term = -gaussian_sites.kl_divergence(posterior).expand(q.batch_shape)
            log_sites = torch.zeros_like(f)
        else:
            # E[∂ log l / ∂ sites] cancels a part of ∂ log Z; `expected` has the value zero and this gradient.
            fixed = posterior._replace(W=posterior.W.detach(), c=posterior.c.detach())
            log_sites = gaussian_sites.log_sites(fixed, f - q.prior.mean)
            centred, variance = (posterior.mean - q.prior.mean).detach(), posterior.variance.detach()
            expected = _without_value(gaussian_sites.expected_log_sites(posterior, centred, variance).sum(-1))
            term = (gaussian_sites.log_normaliser(posterior) - expected).expand(q.batch_shape) - log_sites.sum(-1)
        total = scale_and_mask(sum_rightmost(term, event_dim), site["scale"], site["mask"]).sum()
        if self.gradient_estimator == "score":
            log_q = torch.distributions.Normal(q.mean, q.variance.sqrt()).log_prob(f)
            log_q, log_l = (_sum_latents(x, event_dim) for x in (log_q, log_sites))
            of_points = (x[..., None] if torch.is_tensor(x) and x.dim() else x for x in (site["scale"], site["mask"]))
            reward = sum((_by_point(*term, site) for term in later), -scale_and_mask(log_l, *of_points))
            total = total + (reward.detach() * _without_value(log_q)).sum()
        return total


class _DrawMarginals(Messenger):
    """Draw each f_n from its marginal, independently of the others."""

    def __init__(self, detach: bool):
        super().__init__()
        self._detach = detach

    def _pyro_sample(self, msg):
        q = structured(msg["fn"])
        if q is not None and msg["value"] is None:
            draw = q.rsample_marginals()
            msg["value"] = draw.detach() if self._detach else draw


class _CheckIndependence(Messenger):
    """Raise if the prior of a process depends on another process, of which the KL divergence would need joint draws."""

    def __init__(self):
        super().__init__()
        self._means: dict[str, Tensor] = {}

    def _pyro_sample(self, msg):
        q = structured(msg["fn"])
        if q is None:
            return
        parts = [x for x in _parts(q.prior) if x.requires_grad]
        if parts and self._means:
            total = torch.stack([x.sum() for x in parts]).sum()
            gradients = torch.autograd.grad(total, list(self._means.values()), allow_unused=True, retain_graph=True)
            for name, gradient in zip(self._means, gradients, strict=True):
                if gradient is not None:
                    raise ValueError(
                        f"expected processes with priors of their own, got {msg['name']!r}, whose prior depends on {name!r}; "
                        "take Trace_ELBO, which draws them jointly"
                    )
        msg["value"] = self._means[msg["name"]] = q.mean.detach().requires_grad_()


def _check_scales(name: str, model_trace: Trace, guide_trace: Trace) -> None:
    """Raise unless a process has the same scale in model and guide, because its KL divergence has one scale."""
    scales = [trace.nodes[name]["scale"] for trace in (model_trace, guide_trace)]
    if equals(*scales):
        return
    if not torch.equal(*torch.broadcast_tensors(*(torch.as_tensor(scale).cpu() for scale in scales))):
        raise ValueError(
            f"expected one scale of {name!r} in model and guide, got {scales[0]} and {scales[1]}: wrap the guide in "
            "poutine.scale too"
        )


def _check_prior(name: str, model_trace: Trace, guide_trace: Trace) -> None:
    """Raise unless the posterior of a process was made of the model's prior, from which the KL divergence is computed."""
    own: Any = structured(guide_trace.nodes[name]["fn"])
    prior = without_independent(model_trace.nodes[name]["fn"])
    if type(prior) is type(own.prior) and not all(
        torch.equal(*torch.broadcast_tensors(x, z))
        for x, z in zip(_first_moments(prior), _first_moments(own.prior), strict=True)
    ):
        raise ValueError(
            f"expected the posterior of {name!r} to be made of the model's prior, got one of another; make the guide of this "
            "model"
        )


@torch.no_grad()
def _first_moments(prior: Any) -> tuple[Tensor, Tensor]:
    """Return mean of a prior at its first points, and their covariance or its Cholesky factor."""
    if isinstance(prior, GaussianProcess):
        return prior.mean[..., :_NUM_COMPARED_POINTS], prior.at(prior.X[..., :_NUM_COMPARED_POINTS, :]).covariance_matrix
    return prior.mean[..., :_NUM_COMPARED_POINTS], prior.scale_tril[..., :_NUM_COMPARED_POINTS, :_NUM_COMPARED_POINTS]


def _sample_sites(trace: Trace) -> Sites:
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}


def _processes(guide_trace: Trace) -> Sites:
    """Return the sites of Gaussian processes, by name."""
    sites = guide_trace.nodes.items()
    return {name: site for name, site in sites if site["type"] == "sample" and structured(site["fn"]) is not None}


def _parts(prior: Any) -> list[Tensor]:
    """Return the tensors that define a prior."""
    if isinstance(prior, GaussianProcess):
        return [leaf for leaf in tree_leaves((prior.X, prior.params)) if isinstance(leaf, Tensor)]
    return [prior.loc, prior.scale_tril]


def _without_value(x: Tensor) -> Tensor:
    """Return zero with the gradient of x."""
    return x - x.detach()


def _sum_latents(x: Tensor, event_dim: int) -> Tensor:
    """Sum over the dimensions of the event but the last, which runs over the points."""
    return x.sum(tuple(range(-1 - event_dim, -1))) if event_dim else x


def _by_point(later: Mapping[str, Any], log_prob: Tensor, process: Mapping[str, Any]) -> Tensor:
    """Reshape a log density to the layout [..., points] of a process.

    In a plate "points" of all points it is point by point, otherwise summed over dimensions that the process does not have.
    """
    num_points = process["fn"].event_shape[-1]
    if any((frame.name, frame.dim, frame.size) == ("points", -1, num_points) for frame in later["cond_indep_stack"]):
        return log_prob.unsqueeze(-2)
    batch = process["fn"].batch_shape
    for dim in range(-log_prob.dim(), 0):
        if dim < -len(batch) or batch[dim] == 1:
            log_prob = log_prob.sum(dim, keepdim=True)
    return log_prob.unsqueeze(-1)


def structured(fn: Any) -> StructuredPosterior | None:
    """Return the :class:`StructuredPosterior` inside ``to_event``; None for any other distribution."""
    fn = without_independent(fn)
    return fn if isinstance(fn, StructuredPosterior) else None
