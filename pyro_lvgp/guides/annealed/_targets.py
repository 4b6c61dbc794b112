"""Log joint of a model and its score in whitened coordinates, by tracing the model or by its own ``log_joint``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_lvgp._utils.seeding import forked
from pyro_lvgp.guides.annealed import _reverse
from pyro_lvgp.guides.annealed._whitened import Bases, Whitened
from pyro_lvgp.guides.annealed.transitions import Coordinates, State, Transition, check_finite
from pyro_lvgp.infer._row_weights import IgnoreRowWeights, RefuseRowWeights
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians
from pyro_lvgp.infer.protocols import HasLogJoint, HasScoreTensors


@runtime_checkable
class Target(Protocol):
    r"""Density :math:`\log p(y, z)` of a chain in whitened coordinates.

    ``differentiable`` tells whether to differentiate through the score.
    """

    @property
    def differentiable(self) -> bool: ...

    def score(self, z: Coordinates) -> Coordinates:
        """Compute ∇ log p."""

    def log_joint(self, z: Coordinates) -> Tensor:
        """Compute log p, summed over draws and data, without gradients."""


@runtime_checkable
class TargetOfEntries(Protocol):
    """Density of several independent chains at once."""

    def log_joint_of_entries(self, z: Coordinates, dims: Sequence[int]) -> Tensor:
        """Compute log p of each entry of some batch dimensions, summed over the others, without gradients.

        :param z: coordinates.
        :param dims: batch dimensions, the leftmost one of z first.
        """


@dataclass(frozen=True)
class PureTarget:
    """Target by the model's own ``log_joint`` and ``score``, in operations on tensors alone that can be compiled.

    :param model: the model.
    :param sites: whitened coordinates of the annealed sites.
    :param bases: loc and scale of the base of each annealed site.
    :param statistics: result of the model's ``statistics``.
    :param differentiable: keep the graph, to differentiate through the score.
    """

    model: HasLogJoint
    sites: Whitened
    bases: Bases
    statistics: Any
    differentiable: bool

    def score(self, z: Coordinates) -> Coordinates:
        values, _ = self.sites.values(z, self.bases)
        scores = self.model.score(values, self.statistics)
        pairs = zip(self.sites.sites, self.bases, strict=True)
        white = (site.pull_back(scores[name], scale) for (name, site), (_, scale) in pairs)
        return tuple(white) if self.differentiable else tuple(score.detach() for score in white)

    def log_joint_and_score(self, z: Coordinates) -> tuple[Tensor, Coordinates]:
        """Compute log p, summed over draws and data, without gradients, and ∇ log p."""
        return self.log_joint(z), self.score(z)

    def score_tensors(self) -> Any:
        """Return the score of z as a tuple of tensors with derivatives of its own; None if it has none."""
        is_plain = self.sites.preconditioner is None and len(self.sites.sites) == 1
        if not is_plain or not isinstance(self.model, HasScoreTensors):
            return None
        ((_, site),) = self.sites.sites
        if site.transform is not None or site.covariance == "full":
            return None
        tensors = self.model.score_tensors(self.statistics)
        return None if tensors is None else tensors.whitened(*self.bases[0])

    @torch.no_grad()
    def log_joint(self, z: Coordinates) -> Tensor:
        values, log_dets = self.sites.values(z, self.bases)
        return self.model.log_joint(values, self.statistics).sum() + sum(x.sum() for x in log_dets.values())

    @torch.no_grad()
    def log_joint_of_entries(self, z: Coordinates, dims: Sequence[int]) -> Tensor:
        values, log_dets = self.sites.values(z, self.bases)
        terms = (self.model.log_joint(values, self.statistics), *log_dets.values())
        return sum((_sum_except(x, dims) for x in terms), torch.zeros(()))


def has_log_joint_of(model: Any, sites: Sequence[str]) -> bool:
    """Return whether a model has a log joint over exactly these sites, and its ``forward`` is that of the log joint."""
    if not isinstance(model, HasLogJoint) or model.local_sites != set(sites):
        return False
    cls: Any = type(model)
    return cls.forward is cls.log_joint_forward


def pure_transition(
    transition: Transition,
    model: HasLogJoint,
    sites: Whitened,
    shared: tuple[Bases, Any, Tensor, bool],
    state: State,
    schedule: tuple[Tensor, Coordinates],
    noise: Coordinates,
) -> State:
    """Take one transition to a :class:`PureTarget`, as a step of :class:`~pyro_lvgp.infer._compiled_loop.CompiledLoop`."""
    bases, statistics, momentum_persistence, differentiable = shared
    target = PureTarget(model, sites, bases, statistics, differentiable)
    return transition(target.score, state, noise, *schedule, momentum_persistence)


def pure_transition_with_reverse(
    transition: Any,
    model: HasLogJoint,
    sites: Whitened,
    shared: tuple[Bases, Any, bool],
    state: State,
    schedule: _reverse.Schedule,
    noise: Coordinates,
) -> State:
    """Take one transition with a learned reverse kernel to a :class:`PureTarget`, as :func:`pure_transition` does."""
    target = PureTarget(model, sites, *shared)
    return _reverse.step(transition, target.score, state, schedule, noise)


def read_statistics(model: HasLogJoint, drawn: Trace, marginalize: bool, args: tuple, kwargs: dict) -> Any:
    """Compute the statistics of the model at the drawn sites, or at their moments if the bound marginalises them."""
    statistics: Callable = MarginalizeGaussians(drawn)(model.statistics) if marginalize else model.statistics
    with _hidden_sites():
        return poutine.replay(statistics, drawn)(*args, **kwargs)


def replayable(drawn: Trace) -> Trace:
    """Copy the drawn sites for replay, which skips observed sites: mark conditioned ones as not observed."""
    trace = Trace()
    for name, site in drawn.nodes.items():
        if site["type"] == "sample":
            trace.add_node(name, **{**site, "is_observed": False})
    return trace


@dataclass(frozen=True)
class TracedTarget:
    """Target by any Pyro model, with one trace of the model at each evaluation.

    :param model: the model, or a surrogate.
    :param sites: whitened coordinates of the annealed sites.
    :param bases: loc and scale of the base of each annealed site.
    :param drawn: trace of the guide's sites that are not annealed, and of subsamples.
    :param marginalize: whether the bound marginalises Gaussian sites.
    :param local_plate: name of the plate of local sites; None if all sites are annealed jointly.
    :param differentiable: keep the graph, to differentiate through the score.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    """

    model: Callable
    sites: Whitened
    bases: Bases
    drawn: Trace
    marginalize: bool
    local_plate: str | None
    differentiable: bool
    args: tuple
    kwargs: dict

    def score(self, z: Coordinates) -> Coordinates:
        return self.log_joint_and_score(z)[1]

    def log_joint_and_score(self, z: Coordinates) -> tuple[Tensor, Coordinates]:
        """Compute log p, summed over draws and data, without gradients, and ∇ log p."""
        with torch.enable_grad(), _hidden_sites():
            z = tuple(x if self.differentiable and x.requires_grad else x.detach().requires_grad_() for x in z)
            value = self._log_joint(z)
            score: Any = (None,) * len(z)
            if value.requires_grad:
                score = torch.autograd.grad(value, z, create_graph=self.differentiable, allow_unused=True)
            if absent := [name for (name, _), part in zip(self.sites.sites, score, strict=True) if part is None]:
                raise ValueError(
                    f"expected a log density that depends on every annealed site, got one that does not depend on {absent}, "
                    "whose priors the model masks; leave them out of the model, or name the other sites by sites=[...]"
                )
            return value.detach(), score

    @torch.no_grad()
    def log_joint(self, z: Coordinates) -> Tensor:
        with _hidden_sites():
            return self._log_joint(z)

    @torch.no_grad()
    def log_joint_of_entries(self, z: Coordinates, dims: Sequence[int]) -> Tensor:
        with _hidden_sites():
            return sum((_sum_except(x, dims) for x in self._terms(z)), torch.zeros(()))

    def sites_at(self, z: Coordinates) -> list[dict[str, Any]]:
        """Return the model's sample sites at state z of the chain."""
        with torch.no_grad(), _hidden_sites():
            return list(self._trace(z)[0].values())

    def check(self) -> None:
        """Raise if chains or their weights would be wrong.

        The density may be random, not depend on a site, or not be that of separate local chains.
        """
        z = tuple(torch.zeros_like(loc) for loc, _ in self.bases)
        with forked():
            once, again = self.log_joint(z), self.log_joint(z)
        if not torch.allclose(once, again, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ValueError(
                f"expected a log density that is a function of the latent sites, got {once:g} and {again:g} at the "
                "same values: the model draws sites that poutine.block hides, as for a part of an AutoGuideList, or draws "
                "random numbers itself; pass the whole model, and the names of the sites to anneal by sites=[...]; sum out "
                "discrete sites in the model"
            )
        # A preconditioner mixes the sites, of which each has a gradient then.
        replace(self, sites=replace(self.sites, preconditioner=None)).log_joint_and_score(z)
        if self.local_plate is not None:
            self._check_plate(z)

    def _check_plate(self, z: Coordinates) -> None:
        """Raise if a site outside the local plate depends on a site inside: the scores of the data omit such terms."""
        with torch.enable_grad(), _hidden_sites():
            z = tuple(x.requires_grad_() for x in z)
            sites, _ = self._trace(z)
            for name, site in sites.items():
                if site_is_subsample(site) or self.local_plate in (frame.name for frame in site["cond_indep_stack"]):
                    continue
                log_p = site["fn"].log_prob(site["value"]).sum()
                if log_p.requires_grad and any(
                    gradient is not None for gradient in torch.autograd.grad(log_p, z, retain_graph=True, allow_unused=True)
                ):
                    raise ValueError(
                        f"expected all sites that depend on the annealed ones in plate {self.local_plate!r}, got site "
                        f"{name!r} outside of it; put the site inside, or leave out local_plate to anneal all data jointly"
                    )

    def _log_joint(self, z: Coordinates) -> Tensor:
        return sum((x.sum() for x in self._terms(z)), torch.zeros(()))

    def _terms(self, z: Coordinates) -> list[Tensor]:
        """Return the terms of log p, over their batch dimensions."""
        try:
            sites, log_dets = self._trace(z)
            return [*(self._log_prob(name, site) for name, site in sites.items()), *log_dets.values()]
        except ValueError:  # such as one for invalid parameters of a distribution, after divergence
            check_finite(z)
            raise

    def _trace(self, z: Coordinates) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the model's sample sites at state z of the chain, and the log determinants of the constraints.

        The target of the chain of a row is the posterior of that row, whatever the weight of the row in the bound.
        """
        values, log_dets = self.sites.values(z, self.bases)
        weights: Messenger = RefuseRowWeights() if self.local_plate is None else IgnoreRowWeights()
        model = weights(poutine.condition(self.model, values))
        model = MarginalizeGaussians(self.drawn)(model) if self.marginalize else model
        trace = poutine.trace(poutine.replay(model, self.drawn)).get_trace(*self.args, **self.kwargs)
        return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}, log_dets

    def _log_prob(self, name: str, site: Any) -> Tensor:
        """Return the log density of a site, without the scale of a subsampled local plate: each datum has its own chain."""
        if site_is_subsample(site):
            return torch.zeros(())
        if not (site["is_observed"] or name in self.drawn):
            raise ValueError(
                f"expected every latent site to be in the guide, got {name!r}, which is neither annealed nor drawn by the "
                "global guide; chains need the data at every call, for predictions too: Predictive(model, "
                "guide.sample_posterior(num_samples, *args)) uses draws given the data; sum out discrete sites in the model"
            )
        frames = {frame.name: frame for frame in site["cond_indep_stack"]}
        scale = site["scale"]
        if self.local_plate in frames:
            frame = frames[self.local_plate]
            scale = scale * frame.size / (frame.full_size or frame.size)
        elif self.local_plate is not None:
            return torch.zeros(())  # constant in the states of local chains
        for frame in frames.values():
            if frame.name != self.local_plate and frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"expected all rows at annealed sites, got some while plate {frame.name!r}, which their score sums over, "
                    "is subsampled: weights do not account for the noise of such a score; anneal only sites inside that plate "
                    "(local_plate=<its name>), pass a surrogate_model that does not depend on the mini-batch, or use all data"
                )
        return scale_and_mask(site["fn"].log_prob(site["value"]), scale, site["mask"])


def _sum_except(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum over all dimensions but some negative ones, of which the first is the leftmost, with a size of 1 for each."""
    x = x.reshape((1,) * (-dims[0] - x.dim()) + x.shape)
    others = [dim for dim in range(-x.dim(), 0) if dim not in dims]
    return x.sum(others, keepdim=True) if others else x


def _hidden_sites() -> Messenger:
    """Return a handler that hides the sites of the model from handlers of the guide, but not the parameters.

    Messages of type "inspect" are those of ``poutine.get_mask``: a mask of ``Predictive`` is none of the chain's.
    """
    return poutine.block(hide_types=["sample", "observe", "inspect"])
