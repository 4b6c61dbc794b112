"""Annealed importance sampling with Langevin transitions, as a guide."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoCallable, AutoGuide
from pyro.infer.autoguide.utils import deep_setattr
from pyro.infer.util import is_validation_enabled
from pyro.nn import PyroModule, PyroParam
from pyro.ops.provenance import detach_provenance
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyro_lvgp._utils.inference_mode import outside_inference_mode
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.distributions.path_delta import PathDelta
from pyro_lvgp.guides._handlers import ShareSubsamples
from pyro_lvgp.guides._model_guide import ModelOfGuide
from pyro_lvgp.guides._sampled import SampledGuide
from pyro_lvgp.guides.annealed import schedules, transitions
from pyro_lvgp.guides.annealed._chain import AnnealedChain, ChainEnds, curvatures
from pyro_lvgp.guides.annealed._checks import (
    check_base_guide,
    check_chain,
    check_learned_reverse,
    check_resampling,
    checked_value,
)
from pyro_lvgp.guides.annealed._first_base import first_base
from pyro_lvgp.guides.annealed._joint_density import JointDensity
from pyro_lvgp.guides.annealed._resampling import ChainResampling
from pyro_lvgp.guides.annealed._reverse import NUM_COEFFICIENTS
from pyro_lvgp.guides.annealed._targets import (
    PureTarget,
    Target,
    TracedTarget,
    has_log_joint_of,
    pure_transition,
    pure_transition_with_reverse,
    read_statistics,
    replayable,
)
from pyro_lvgp.guides.annealed._whitened import Bases, Preconditioner, Whitened, zeros_with_gradient
from pyro_lvgp.guides.annealed.schedules import AnnealingSchedule
from pyro_lvgp.guides.annealed.transitions import Coordinates, DivergedChainError, Dynamics, Transition
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.infer._compiled_loop import CompiledLoop
from pyro_lvgp.infer.elbo._resampling import requested_resampling
from pyro_lvgp.infer.elbo.handlers import marginalizes_gaussians
from pyro_lvgp.infer.protocols import HasInitialValues, HasLocalPlate, HasLogJoint

__all__ = ["AutoAnnealedLangevin"]


class AutoAnnealedLangevin(SampledGuide):
    r"""Guide that anneals a Gaussian base towards the posterior by K Langevin transitions.

    .. math::

        h_0 \sim q_0, \qquad h_k \sim t_k(h_k \mid h_{k-1}), \qquad
        \log w = \log p(y, h_K) - \log q_0(h_0) + \sum_{k=1}^K \log \frac{r_k(h_{k-1} \mid h_k)}{t_k(h_k \mid h_{k-1})}

    along the bridges :math:`\log q_k = (1 - \beta_k) \log q_0 + \beta_k \log p(y, \cdot)`, with :math:`E[w] = p(y)`, so that
    :math:`E[\log w]` is a lower bound, which becomes tighter with K.  The guide takes any Pyro model with continuous latents.

    Sites in ``local_plate`` have a chain and a weight for each datum, and scores without the factor N/B of a mini-batch.
    Sites that are not annealed are drawn once for chain and bound; a bound that marginalises them
    (:class:`~pyro_lvgp.infer.MeanFieldELBO`) marginalises them in the chain too.  Chains run in the whitened coordinates of
    the base, in which step sizes have no units; a step size for each latent dimension is a diagonal preconditioner.  K
    transitions need K + 1 scores.

    Each annealed site is sampled from a ``Delta`` at :math:`h_K` whose log density is that of the path, so that
    ``Trace_ELBO``, ``Predictive``, ``Importance`` and :class:`~pyro_lvgp.infer.ImportanceWeightedELBO` need no changes.
    :class:`~pyro_lvgp.infer.SequentialMonteCarloELBO` resamples the chains of each datum between transitions.

    :param model: a Pyro model.  A model with a ``score`` (:class:`~pyro_lvgp.infer.protocols.HasLogJoint`), such as
        :class:`~pyro_lvgp.models.BayesianGPLVM`, computes its own scores; any other model is traced.
    :param local_plate: name of the plate over data, whose sites are annealed.  By default the model's own ``local_plate`` if
        it has one, else None: all sites are annealed jointly.
    :param sites: names of the sites to anneal; by default all sites of ``local_plate``, or all sites without a local plate.
    :param num_steps: number K of transitions.
    :param dynamics: ``"underdamped"`` Langevin, with a momentum, ``"overdamped"``, or an instance of a subclass of
        :class:`Transition`.
    :param annealing_schedule: β_1 … β_K: ``"learned"``, ``"linear"``, ``"sigmoid"``, or the power p of ``(k / K)^p``.
    :param step_size: initial step size η, in units of the base's standard deviation.  The gradient of a transition is scaled
        by η² / 2, or by η if overdamped.  By default the first call chooses it: of 0.4 / 2^j, the one with the largest bound.
    :param learn_step_size: learn a step size for each transition and latent dimension; False fixes them.
    :param max_step_size: upper bound of learned step sizes; unadjusted Langevin diverges above 2 / λ_max.
    :param momentum_persistence: initial share γ of the momentum that a transition preserves, which is learned.
    :param learn_reverse: learn a Gaussian kernel of each reverse transition, whose mean is affine in position, drift and
        momentum, entry by entry, and a γ of each transition.  The first bound is that without it.  It needs no further
        scores, and its steps take more operations: they do not use the hand-derived gradient of the whole chain.
    :param differentiate_score: differentiate through the scores; False is cheaper, and its gradient biased.
    :param base_guide: a :class:`MeanFieldGuide` of the model, whose Gaussians the chains start from: diagonal, with full
        covariances, or amortised.  It becomes a part of this guide, which creates its plates.  By default
        ``MeanFieldGuide(model)``, which the first call moves to the Gaussian with the largest bound that it finds by a
        deterministic optimiser (Pathfinder, then mean-field variational inference with fixed draws).  If all sites are
        annealed, the base then is that guide's in coordinates w with :math:`h = m + L w`: ``origin`` m and ``factor`` L are
        constant, and are those of a Gaussian with correlations, if there are at most 500 coordinates and its bound is larger.
        If the first call has a mini-batch, or the model has initial values of its own, the location remains, and the scales
        become at most those of the curvature, :math:`(-\partial^2 \log p / \partial h_i^2)^{-1/2}`.
    :param base_weight: weight λ of the gradient of the base's own bound, :math:`E_{q_0}[\log p(y, h_0) - \log q_0(h_0)]`,
        which is added to the gradient of the parameters of the base.  A chain that moves to the posterior from anywhere leaves
        its base little gradient to learn from.  The value of the bound does not change.  0 is the gradient of the annealed
        bound alone.
    :param global_guide: guide of the sites that are not annealed; by default the base guide draws these.
    :param surrogate_model: a model of the same sites, for the scores of the chain; the bound remains that of ``model``.
    :param compile: compile one transition and its gradient, for models with ``log_joint``.  The time to compile does not grow
        with ``num_steps``.  ``fit(compile=True)`` compiles the whole step of a fit instead: its steps are the fastest, for any
        model, but the time to compile grows with ``num_steps``; use both together to shorten that time.
    :param create_plates: as for Pyro's autoguides; by default the base guide's.
    :raises ValueError: for arguments out of range, unknown sites, a base guide that was called before, sites outside plates
        annealed under subsampling, sites outside the local plate that depend on those inside, ``compile`` without
        ``log_joint``, or ``learn_reverse`` with another transition than the two Langevin transitions; at a call with Pyro's
        validation on, if a chain diverges.
    :raises TypeError: for a ``num_steps`` that is no integer, or a base guide that is no :class:`MeanFieldGuide`.

    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.optim import Adam
    >>> def model(y, idx=None):
    ...     with pyro.plate("data", 100, subsample=idx):
    ...         x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    ...         pyro.sample("y", dist.Poisson(x.exp()).to_event(1), obs=y)
    >>> plates = lambda y, idx=None: pyro.plate("data", 100, subsample=idx)
    >>> guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=4, create_plates=plates)
    >>> loss = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(torch.ones(10, 2), torch.arange(10))

    References: eqs. 13 to 18 of the annealed-GPLVM paper, with the sign of eq. 15; Geffner and Domke (2021), "MCMC
    variational inference via uncorrected Hamiltonian annealing", and (2023), "Langevin diffusion variational inference";
    Zhang, Carpenter, Gelman and Vehtari (2022), "Pathfinder: parallel
    quasi-Newton variational inference"; Giordano, Ingram and Broderick (2024), "Black box variational inference with a
    deterministic objective"; NumPyro's ``AutoDAIS`` and ``AutoSemiDAIS``.
    """

    increments: Any
    beta: Tensor
    origin: Any
    factor: Any

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        local_plate: str | None = None,
        sites: Sequence[str] | None = None,
        num_steps: int = 8,
        dynamics: Dynamics | Transition = "underdamped",
        annealing_schedule: AnnealingSchedule = "learned",
        step_size: float | None = None,
        learn_step_size: bool = True,
        max_step_size: float = 1.0,
        momentum_persistence: float = 0.8,
        learn_reverse: bool = False,
        differentiate_score: bool = True,
        base_guide: MeanFieldGuide | None = None,
        base_weight: float = 1.0,
        global_guide: Callable[..., Any] | None = None,
        surrogate_model: Callable[..., Any] | None = None,
        compile: bool = False,
        create_plates: Callable[..., Any] | None = None,
    ):
        first_step_size = min(_FIRST_STEP_SIZE, 0.5 * max_step_size) if step_size is None else step_size
        check_chain(num_steps, first_step_size, max_step_size, momentum_persistence, base_weight)
        schedules.fixed_schedule(annealing_schedule, num_steps)
        if isinstance(sites, str):
            raise ValueError(f"expected a list of sites, got {sites!r}; write [{sites!r}]")
        check_base_guide(base_guide)
        self_made, base_guide = base_guide is None, base_guide or MeanFieldGuide(model, create_plates=create_plates)
        create_plates = create_plates or base_guide.create_plates
        super().__init__(model, create_plates=create_plates)
        self.num_steps, self.differentiate_score, self._learn_reverse = num_steps, differentiate_score, learn_reverse
        self.transition = transitions.as_transition(dynamics)
        check_learned_reverse(learn_reverse, self.transition)
        self.local_plate: str | None = local_plate or (model.local_plate if isinstance(model, HasLocalPlate) else None)
        self._requested_sites, self._requested_plate = sites, local_plate
        self.annealed: tuple[str, ...] = ()
        self._annealing_schedule = annealing_schedule
        self._step_size, self._learn_step_size, self._max_step_size = first_step_size, learn_step_size, max_step_size
        self._momentum_persistence, self.base_weight = momentum_persistence, base_weight
        self._adapts_base, self._adapts_step_size = self_made, step_size is None
        self._surrogate = ModelOfGuide((surrogate_model,))
        self._is_target_checked = False
        self._compile = compile
        self._compiled: CompiledLoop | None = None
        if compile and not (isinstance(model, HasLogJoint) and surrogate_model is None):
            raise ValueError(
                f"compile=True needs a model with log_joint, got {type(model).__name__}"
                f"{'' if surrogate_model is None else ' with a surrogate_model'}; pass compile=False to trace the model"
            )
        # This guide creates the plates of all its parts.
        base_guide.create_plates = None
        self.base_guide = base_guide
        if global_guide is not None and not isinstance(global_guide, AutoGuide):
            global_guide = AutoCallable(model, global_guide)
        if isinstance(global_guide, AutoGuide):
            global_guide.create_plates = None
        self.global_guide = global_guide

    def _trace_prototype(self, *args, **kwargs) -> None:
        # The base runs the model at its initial values; draws from vague priors may be where the model fails.
        self.base_guide._setup_prototype(*args, **kwargs)
        self.prototype_trace, self._prototype_frames = self.base_guide.prototype_trace, self.base_guide._prototype_frames
        if self.master is not None:
            self.master()._check_prototype(self.prototype_trace)

    def _make_parameters(self, *args, **kwargs) -> None:
        names = self._choose_sites()
        self._others = tuple(name for name in self.base_guide.coordinates if name not in names)
        frames = self._prototype_frames.values()
        has_all_rows = all(frame.full_size in (None, frame.size) for frame in frames)
        keeps_location = isinstance(self.model, HasInitialValues) or self.global_guide is not None
        self._moves_base = self._adapts_base and has_all_rows and not keeps_location
        self._has_pure_score = self._surrogate[0] is None and has_log_joint_of(self.model, names)
        if self._compile and not self._has_pure_score:
            raise ValueError(f"compile=True anneals the sites of the model's log_joint, got {sorted(names)}; leave out sites=")
        self._add_parameters(names, args)
        self.annealed = tuple(names)

    def _choose_sites(self) -> Sequence[str]:
        """Return the names of the sites to anneal; set ``local_plate`` to None if some are outside the model's own plate."""
        latents = dict(self.prototype_trace.iter_stochastic_nodes())
        plate = self.local_plate
        inside = [name for name, site in latents.items() if plate in (frame.name for frame in site["cond_indep_stack"])]
        names = self._requested_sites
        if names is None:
            names = inside if plate is not None else list(latents)
        if not names or not set(names) <= set(latents):
            raise ValueError(
                f"expected latent sites to anneal, among {sorted(latents)}, got {sorted(names)} for plate {plate!r}; pass "
                "local_plate=<the plate over data> or sites=[...]"
            )
        if plate is not None and not set(names) <= set(inside):
            if self._requested_plate is not None:
                raise ValueError(
                    f"expected sites in plate {plate!r}, got {sorted(names)}; leave local_plate out to anneal sites inside "
                    "and outside of a plate jointly"
                )
            self.local_plate = None
        return names

    @property
    def _num_candidates(self) -> int:
        # One weight over the chains of many data would choose by a few of them.
        return _NUM_CANDIDATES if self.local_plate is None else 1

    @property
    def _whitened(self) -> Whitened:
        sites = tuple((name, self.base_guide.coordinates[name]) for name in self.annealed)
        if not self._is_preconditioned:
            return Whitened(sites)
        return Whitened(sites, Preconditioner(self.origin.detach(), self.factor.detach()))

    def encoder_of(self, site: str) -> nn.Module | None:
        """Return the encoder of a site in the base guide; None if the site has parameters of its own.

        :param site: name of the site.
        """
        return self.base_guide.encoder_of(site)

    def stored_posterior(self, site: str) -> torch.distributions.Distribution | None:
        """Return the posterior of a site in the base guide, of all rows; None if the base guide does not store it.

        :param site: name of the site.
        """
        return None if self._is_preconditioned else self.base_guide.stored_posterior(site)

    def _add_parameters(self, names: Sequence[str], args: tuple) -> None:
        self.step_sizes = PyroModule()
        if self._learn_reverse:
            self.reverse_kernels = PyroModule()
        num_coordinates = 0
        for name in names:
            site, loc = self.base_guide.coordinates[name], self.base_guide.loc_and_scale(name, args)[0].detach()
            num_coordinates += loc.numel()
            step_size = loc.new_full((self.num_steps, *loc.shape[loc.dim() - site.event_dim :]), self._step_size)
            learned = PyroParam(step_size, constraints.interval(0.0, self._max_step_size))
            deep_setattr(self.step_sizes, name, learned if self._learn_step_size else nn.Buffer(step_size))
            if self._learn_reverse:
                zeros = step_size.new_zeros((self.num_steps, NUM_COEFFICIENTS, *step_size.shape[1:]))
                deep_setattr(self.reverse_kernels, name, PyroParam(zeros))
        is_joint = self.local_plate is None and not self._others
        self._is_preconditioned = self._moves_base and is_joint and not self._has_pure_score
        if self._is_preconditioned:
            # Parameters, although they are not learned, so that they are stored where the others are.
            self.origin = PyroParam(loc.new_zeros(num_coordinates))
            if num_coordinates <= _MAX_CORRELATED:
                self.factor = PyroParam(torch.eye(num_coordinates).to(loc), constraints.lower_cholesky)
            else:
                self.factor = PyroParam(loc.new_ones(num_coordinates), constraints.positive)
        beta = schedules.fixed_schedule(self._annealing_schedule, self.num_steps)
        if beta is None:
            self.increments = PyroParam(loc.new_ones(self.num_steps), constraints.positive)
        else:
            self.register_buffer("beta", beta.to(loc))
        if self.transition.has_momentum:
            shape = (self.num_steps,) if self._learn_reverse else ()
            self.momentum_persistence = PyroParam(loc.new_full(shape, self._momentum_persistence), constraints.unit_interval)

    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        return self._sample_path(None, self.num_steps, args, kwargs)

    def sample_globals(self, *args, local_plate: str, **kwargs) -> dict[str, Tensor]:
        """Draw the sites outside a plate over data without running chains; all sites, if they are annealed jointly.

        :param args: arguments of the model.
        :param local_plate: name of the plate.
        """
        if not self.annealed:
            self._setup_prototype(*args, **kwargs)
        if self.local_plate != local_plate:
            return self(*args, **kwargs)
        with self._pyro_context:
            self._create_plates(*args, **kwargs)
            self.base_guide._create_plates(*args, **kwargs)
            return self._sample_others(args, kwargs)

    def reverse(self, latents: Mapping[str, Tensor]) -> Callable[..., dict[str, Tensor]]:
        """Return a guide whose chains run in reverse, from given values of the annealed sites to the base.

        If they are exact posterior draws, the weights of the result have ``E[1 / w] = 1 / p(y)``
        (see :func:`~pyro_lvgp.diagnostics.bound_sandwich`).

        :param latents: values of the annealed sites; with a mini-batch, those of its rows.
        :raises ValueError: when called, if a value is not of the shape of its site.
        """

        def guide(*args, **kwargs) -> dict[str, Tensor]:
            with self._pyro_context:
                return self._sample_path(latents, self.num_steps, args, kwargs)

        return guide

    def without_transitions(self, *args, **kwargs) -> dict[str, Tensor]:
        """Sample all sites as the guide does, but the annealed ones from their base, where the chains start.

        :param args: arguments of the model.
        """
        with self._pyro_context:
            return self._sample_path(None, 0, args, kwargs)

    def _sample_path(self, end: Mapping[str, Tensor] | None, num_steps: int, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        """Sample all sites; chains start at the base, or, if ``end`` is given, run in reverse from there."""
        if torch.jit.is_tracing():
            raise ValueError(
                "expected a bound that runs the guide, got one that torch.jit traces, such as JitTrace_ELBO, which cannot "
                "record the gradients that scores are; use CompiledELBO(Trace_ELBO()), or fit(compile=True)"
            )
        # Scores need gradients even if Pyro or the user has disabled them.
        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            args, kwargs = tree_map(outside_inference_mode, (args, kwargs))
            if not self.annealed:
                self._setup_prototype(*args, **kwargs)
            if self._adapts_base or self._adapts_step_size:
                self._adapt(args, kwargs)
            values, drawn = self._draw_others(args, kwargs)
            noise, bases = self._sample_base(args)
            inputs = (drawn, args, kwargs)
            whitened, start = self._whitened, noise
            if end is not None:
                sites = zip(whitened.sites, bases, noise, strict=True)
                given = [
                    checked_value(name, site.unconstrain(end[name]), loc).expand_as(z) for (name, site), (loc, _), z in sites
                ]
                start = whitened.to_white(tuple(given), bases)
            ends = self._run_finite(start, bases, end is not None, num_steps, *inputs)
            base_z, last_z = (start, ends.z) if end is None else (ends.z, start)
            sign = 1.0 if end is None else -1.0
            own: Any = (0.0,) * len(bases)
            if end is None and self.base_weight and torch.is_grad_enabled():
                own = zeros_with_gradient(whitened, bases, start, ends.first_score)
            last_h, log_dets = whitened.from_white(last_z, bases), whitened.log_dets(bases)
            for i, (name, site) in enumerate(whitened.sites):
                value, log_det = site.constrain(last_h[i])
                path = -0.5 * (base_z[i].square() + _LOG_2PI) - sign * ends.log_ratio[i] - self.base_weight * own[i]
                log_q = sum_rightmost(path, site.event_dim) - log_dets[i] - log_det
                with self.base_guide.in_plates(name):
                    event_dim = self.prototype_trace.nodes[name]["fn"].event_dim
                    values[name] = pyro.sample(name, PathDelta(value, log_q, event_dim))
        return values

    @torch.no_grad()
    def _adapt(self, args: tuple, kwargs: dict) -> None:
        """Fit the initial base and the initial step sizes to the target, unless the parameters were loaded."""
        if self._has_initial_values():
            # Draws of a base that moves afterwards are none of the guide's.
            with seeded(0), poutine.block(hide_types=["sample"]):
                if self._adapts_base:
                    self._adapt_base(args, kwargs)
                if self._adapts_step_size:
                    self._adapt_step_size(args, kwargs)
        self._adapts_base = self._adapts_step_size = False

    def _has_initial_values(self) -> bool:
        """Return whether the step sizes, and the scales of a base that is to be adapted, are those of a new guide."""
        initial = [(self.step_sizes, self._step_size)]
        if self._adapts_base:
            initial.append((self.base_guide.scales, self.base_guide.init_scale))
        parameters = [(attrgetter(name)(module), value) for module, value in initial for name in self.annealed]
        return all(torch.allclose(x[x != 0.0], x.new_tensor(value), rtol=1e-4) for x, value in parameters)

    def _adapt_base(self, args: tuple, kwargs: dict) -> None:
        """Move the base to the Gaussian with the largest bound; if it is to keep its location, adapt its scales only."""
        _, drawn = self._draw_others(args, kwargs)
        noise, bases = self._sample_base(args)
        target = self._make_target(bases, drawn, args, kwargs)
        if self._moves_base:
            self._move_base(args, kwargs)
            return
        for name, c, (loc, _) in zip(self.annealed, curvatures(partial(map, target.score), noise), bases, strict=True):
            c = c.reshape(-1, *loc.shape).mean(0).nan_to_num(1.0)
            self.base_guide.multiply_scale(name, c.clamp_min(1.0).rsqrt())

    def _adapt_step_size(self, args: tuple, kwargs: dict) -> None:
        """Multiply the step sizes by the factor with the largest bound."""
        _, drawn = self._draw_others(args, kwargs)
        noise, bases = self._sample_base(args)
        chain = self._make_chain(bases, drawn, args, kwargs)
        white = [(torch.zeros_like(z), torch.ones_like(z)) for z in noise]
        event_dims = [site.event_dim for _, site in self._whitened.sites]
        sites = [site for site in self.prototype_trace.nodes.values() if site["type"] == "sample"]
        target: Any = chain.target
        density = JointDensity.of_target(target, white, event_dims, sites)
        self._multiply_step_sizes(chain.best_scale(noise, density))

    def _move_base(self, args: tuple, kwargs: dict) -> None:
        """Give all sites of the base a Gaussian with a large bound."""
        names, is_correlated = (*self.annealed, *self._others), self._is_preconditioned and self.factor.dim() == 2
        found = first_base(self.base_guide, self.model, names, args, kwargs, correlated=is_correlated)
        if self._is_preconditioned:
            self.origin = torch.cat([loc.reshape(-1) for loc in found.loc])
            self.factor = found.factor.diag() if self.factor.dim() > found.factor.dim() else found.factor
            gaussians = [(torch.zeros_like(loc), torch.ones_like(loc)) for loc in found.loc]
        else:
            stddevs = found.factor.split([loc.numel() for loc in found.loc])
            gaussians = [(loc, stddev.reshape(loc.shape)) for loc, stddev in zip(found.loc, stddevs, strict=True)]
        for name, gaussian in zip(names, gaussians, strict=True):
            self.base_guide.set_loc_and_stddev(name, *gaussian)

    @torch.no_grad()
    def _multiply_step_sizes(self, factor: float) -> None:
        for name in self.annealed:
            deep_setattr(self.step_sizes, name, factor * attrgetter(name)(self.step_sizes))

    def _run_finite(
        self, z: Coordinates, bases: Bases, is_reverse: bool, num_steps: int, drawn: Trace, args: tuple, kwargs: dict
    ) -> ChainEnds:
        """Run the chains from z; while some diverge, halve the step sizes, with a warning, and run all again."""
        for _ in range(_MAX_HALVINGS):
            chain = self._make_chain(bases, drawn, args, kwargs).shortened(num_steps)
            if not is_reverse and num_steps:
                chain = replace(chain, resampling=self._requested_resampling())
            try:
                ends = (chain.reversed() if is_reverse else chain).run(z)
                if is_validation_enabled():
                    transitions.check_finite((*ends.z, *ends.log_ratio))
                return ends
            except DivergedChainError as error:
                diverged = error
            self._multiply_step_sizes(0.5)
            warnings.warn(_HALVED, RuntimeWarning, stacklevel=2)
        raise diverged

    def _requested_resampling(self) -> ChainResampling | None:
        """Return the resampling that a bound requests of this guide; None if chains are to be independent."""
        request = requested_resampling()
        if request is None:
            return None
        dims = check_resampling(request, self.num_steps, self.local_plate, self.annealed, self.prototype_trace)
        return ChainResampling(request.threshold, (request.dim, *dims), [site.event_dim for _, site in self._whitened.sites])

    def _draw_others(self, args: tuple, kwargs: dict) -> tuple[dict[str, Tensor], Trace]:
        """Draw plates and the sites that are not annealed; return their values, and their trace for replay."""
        with poutine.trace() as drawn:
            self._create_plates(*args, **kwargs)
            self.base_guide._create_plates(*args, **kwargs)
            values = self._sample_others(args, kwargs)
        if self._has_pure_score:
            self._check_drawn(drawn.trace)
        return values, replayable(drawn.trace)

    def _sample_others(self, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        """Draw the sites that are not annealed."""
        if self.global_guide is None:
            return self.base_guide.sample_sites(self._others, args)
        with poutine.trace() as drawn, ShareSubsamples(self.plates):
            self.global_guide(*args, **kwargs)
        sites: Any = drawn.trace.nodes
        return {name: sites[name]["value"] for name, _ in self.prototype_trace.iter_stochastic_nodes() if name in sites}

    def _check_drawn(self, drawn: Trace) -> None:
        """Raise if a latent site would be drawn from its prior."""
        latents = {name for name, _ in self.prototype_trace.iter_stochastic_nodes()}
        if missing := sorted(latents - set(self.annealed) - drawn.nodes.keys()):
            raise ValueError(
                f"expected every latent site to be in the guide, got {missing}, neither annealed nor drawn by the global "
                "guide; add them to the global guide"
            )

    def _sample_base(self, args: tuple) -> tuple[Coordinates, Bases]:
        """Draw standard normal starts of the chains of each annealed site, and return them with loc and scale of its base."""
        noise, bases = [], self._read_bases(args)
        for name, (loc, _) in zip(self.annealed, bases, strict=True):
            with self.base_guide.in_plates(name):
                prior = dist.Normal(torch.zeros_like(loc), 1.0).to_event(self.base_guide.coordinates[name].event_dim)
                # Hide the draw from traces and provenance: the Delta has its density.
                untraced: Any = {"is_auxiliary": True, "_do_not_trace": True}
                noise.append(detach_provenance(pyro.sample(f"_pyro_lvgp_start_of_{name}", prior, infer=untraced)))
        if len(num_draws := {z.numel() // max(loc.numel(), 1) for z, (loc, _) in zip(noise, bases, strict=True)}) > 1:
            raise ValueError(
                f"expected as many draws of each annealed site, got {sorted(num_draws)}: the bound draws the sites of its "
                "plate several times and others once, but a joint chain has one weight for all; take num_samples=1 or "
                "Trace_ELBO, or anneal only the sites of that plate by local_plate"
            )
        return tuple(noise), bases

    def _read_bases(self, args: tuple) -> Bases:
        """Return loc and scale of the base of each annealed site."""
        bases = []
        for name in self.annealed:
            with self.base_guide.in_plates(name):
                bases.append(self.base_guide.loc_and_scale(name, args))
        return tuple(bases)

    def _make_chain(self, bases: Bases, drawn: Trace, args: tuple, kwargs: dict) -> AnnealedChain:
        """Return the chain from the bases to the target."""
        if self._compile and self._compiled is None:
            step: Callable = pure_transition_with_reverse if self._learn_reverse else pure_transition
            self._compiled = CompiledLoop(partial(step, self.transition, self.model, self._whitened))
        beta = self.beta if self._annealing_schedule != "learned" else schedules.increasing_schedule(self.increments)
        unused = beta.new_zeros(self.num_steps) if self._learn_reverse else torch.zeros(())
        momentum_persistence: Any = self.momentum_persistence if self.transition.has_momentum else unused
        return AnnealedChain(
            self._make_target(bases, drawn, args, kwargs),
            self.transition,
            beta,
            [attrgetter(name)(self.step_sizes) for name in self.annealed],
            momentum_persistence,
            self._compiled,
            [attrgetter(name)(self.reverse_kernels) for name in self.annealed] if self._learn_reverse else None,
        )

    def _make_target(self, bases: Bases, drawn: Trace, args: tuple, kwargs: dict) -> Target:
        """Return the target of the chains; check once what the weights of chains of a traced model presuppose."""
        differentiable = self.differentiate_score and torch.is_grad_enabled()
        if self._has_pure_score:
            statistics = read_statistics(self.model, drawn, marginalizes_gaussians(), args, kwargs)
            return PureTarget(self.model, self._whitened, bases, statistics, differentiable)
        model, plate, marginalize = self._surrogate[0] or self.model, self.local_plate, marginalizes_gaussians()
        target = TracedTarget(model, self._whitened, bases, drawn, marginalize, plate, differentiable, args, kwargs)
        if not self._is_target_checked:
            target.check()
            self._is_target_checked = True
        return target

    def __getstate__(self):
        return super().__getstate__() | {"_compiled": None}


_LOG_2PI = math.log(2.0 * math.pi)
_FIRST_STEP_SIZE = 0.4
_MAX_HALVINGS = 20
_NUM_CANDIDATES = 4
_MAX_CORRELATED = 500  # coordinates of a base with correlations
_HALVED = (
    "a chain diverged, and all step sizes of the annealed guide were halved: the target is much narrower than the base, or "
    "has no finite score there; start from a base_guide closer to the posterior if this goes on"
)
